"""Descriptions of drafters: each can be listed, and told from the others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from outrider import drafters
from outrider.core.config import DRAFTERS, EngineConfig
from outrider.core.plugins import (
    AUTO,
    COPY,
    KINDS,
    MODEL,
    OFF,
    OWN_TEXT,
    WITH_FOUND,
    WITHOUT_DRAFT,
    DrafterKind,
)
from outrider.plugins.gemma4 import drafters as drafters_of_gemma4
from outrider.plugins.heads import drafters as drafters_of_heads
from outrider_lab import drafters as drafters_for_study


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_description_fits_together(kind: DrafterKind) -> None:
    assert set(kind.must_have) <= set(kind.reads)
    assert set(kind.settings) <= {item.name for item in fields(EngineConfig)}
    assert (kind.format is not None) == (kind.source == "heads")
    assert bool(kind.needs_words) == (kind.folder is not None)
    assert not kind.without_draft or kind.without_draft in KINDS


def test_the_choices_are_the_modules_and_known_names_come_first() -> None:
    packages = (drafters, drafters_of_gemma4, drafters_of_heads, drafters_for_study)
    folders = [Path(str(package.__file__)).parent for package in packages]
    files = [path for one in folders for path in one.glob("*.py") if path.stem[0] != "_"]
    assert {path.stem.replace("_", "-") for path in files} == set(KINDS)
    assert (AUTO, *KINDS) == DRAFTERS
    known = (OFF, MODEL, WITHOUT_DRAFT, OWN_TEXT, WITH_FOUND, COPY)
    assert DRAFTERS[1:] == (*known, *sorted(set(KINDS) - set(known)))
    assert len(KINDS) == len(files)


def test_heads_are_known_by_one_kind() -> None:
    formats = [kind.format for kind in KINDS.values() if kind.format is not None]
    types = [name for form in formats for name in form.model_types]
    assert len(types) == len(set(types))


def test_a_drafter_is_imported_when_it_is_read_and_none_imports_tensors() -> None:
    script = (
        "import sys, outrider.core.config\n"
        "from outrider.core.plugins import KINDS\n"
        "def met(): return {name for name in sys.modules if '.drafters.' in name}\n"
        "assert 'eagle-lite' in KINDS and len(KINDS) > 10 and not met()\n"
        "assert KINDS['recycling'].branches\n"
        "assert 'outrider_lab.drafters.recycling' in met()\n"
        "assert 'outrider.plugins.heads.drafters.eagle' not in met()\n"
        "assert [kind.name for kind in KINDS.values()] == list(KINDS)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=240)
    assert done.returncode == 0


def test_a_name_without_a_module_is_unknown() -> None:
    for name in (AUTO, "common", "eagle_lite", "nets.eagle"):
        assert name not in KINDS
        with pytest.raises(KeyError):
            _ = KINDS[name]
