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


@pytest.mark.parametrize("one", SCRIPT.ARCHITECTURES, ids=lambda one: one[1])
def test_a_row_says_what_its_checkpoint_does(one: tuple[str, str, Any]) -> None:
    assert str(SCRIPT.row_of(*one)) in TABLE.splitlines(), "run scripts/families"


def test_the_most_used_ones_are_in_it() -> None:
    rows = dict(
        re.findall(r"^\| [^|]+ \| `(\w+)` \| (native|transformers|refused) \|", TABLE, re.M)
    )
    assert len(rows) == len(SCRIPT.ARCHITECTURES) >= 25
    assert all(rows[name] == "native" for name in rows if name in DECODER_FAMILIES)
    assert sum(runs != "refused" for runs in rows.values()) >= 14
