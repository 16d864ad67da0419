"""The table of architectures in docs/models.md says what their tiny checkpoints do."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import ContractError
from outrider.models.families import DECODER_FAMILIES

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]


def script() -> Any:
    spec = spec_from_file_location("families_script", ROOT / "scripts" / "families.py")
    if spec is None or spec.loader is None:
        raise ContractError("there is no scripts/families.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
TABLE = (
    (ROOT / "docs" / "models.md").read_text().partition(SCRIPT.BEGIN)[2].partition(SCRIPT.END)[0]
)


# Native ones are in sentences, one for each thing that is lost.
SENTENCES = [" ".join(part.split()) for part in TABLE.split("\n\n") if part.startswith("*Native*")]


@pytest.mark.parametrize("one", SCRIPT.ARCHITECTURES, ids=lambda one: one[1])
def test_a_row_says_what_its_checkpoint_does(one: tuple[str, str, Any]) -> None:
    row = SCRIPT.row_of(*one)
    if row.runs != "native":
        assert str(row) in TABLE.splitlines(), "run scripts/families"
        return
    (sentence,) = [text for text in SENTENCES if f" {row.names} (`{row.model_type}`)" in text]
    names, _, lost = sentence.removesuffix(".").partition("`); ")
    assert names
    assert lost == row.lost, "run scripts/families"


def test_the_most_used_ones_are_in_it() -> None:
    others = dict(re.findall(r"^\| [^|]+ \| `(\w+)` \| (transformers|refused) \|", TABLE, re.M))
    native = [name for text in SENTENCES for name in re.findall(r"\(`(\w+)`\)", text)]
    assert len(native) + len(others) == len(SCRIPT.ARCHITECTURES) >= 40
    assert others.keys() & set(DECODER_FAMILIES) == set()
    assert len(native) >= 35
