"""The table of drafters: every line can be built, listed and told from the others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest

from outrider.core.config import DRAFTERS, EngineConfig
from outrider.core.drafter_kinds import AUTO, KINDS, MODEL, OFF, WITHOUT_DRAFT, DrafterKind


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_builder_is_there(kind: DrafterKind) -> None:
    module, _, function = kind.builder.partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_line_fits_together(kind: DrafterKind) -> None:
    assert set(kind.must_have) <= set(kind.reads)
    assert set(kind.settings) <= {item.name for item in fields(EngineConfig)}
    assert (kind.format is not None) == (kind.source == "heads")
    assert bool(kind.needs_words) == (kind.folder is not None)
    assert not kind.without_draft or kind.without_draft in KINDS


def test_the_choices_are_the_table() -> None:
    assert (AUTO, *KINDS) == DRAFTERS
    assert {OFF, MODEL, WITHOUT_DRAFT} <= set(KINDS)


def test_heads_are_known_by_one_kind() -> None:
    formats = [kind.format for kind in KINDS.values() if kind.format is not None]
    types = [name for form in formats for name in form.model_types]
    assert len(types) == len(set(types))


def test_the_table_imports_no_tensors_and_no_drafter() -> None:
    script = (
        "import sys, outrider.core.config\n"
        "assert 'torch' not in sys.modules\n"
        "assert not any(name.startswith('outrider.drafters') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 0
