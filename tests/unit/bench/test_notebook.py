"""The notebooks in examples/ run from their first cell to their last, and hold no output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doubles.warm_python import warm
from outrider_lab.bench.drawing import why_not

pytestmark = pytest.mark.wide

EXAMPLES = Path(__file__).parents[3] / "examples"
# What each notebook says when it runs; figures of the second are those of docs/theory.md.
SAID = {
    "analysis": ("tokens a round", "median error"),
    "theory": (
        "best K 6: S = 2.470",
        "best K 5: S = 2.951",
        "(equal)",
        "16 rows: chain E 2.500, tree E 3.349 of depth 6",
        "loses from 198 sequences on",
    ),
}


def code_cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_every_notebook_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_it_is_committed_without_what_it_printed(name: str) -> None:
    assert all(cell["outputs"] == [] for cell in code_cells(name))
    assert all(cell["execution_count"] is None for cell in code_cells(name))


@pytest.mark.skipif(why_not() is not None, reason="altair is not installed")
def test_all_cells_run(tmp_path: Path) -> None:
    """Each notebook in a namespace of its own; one process imports what they draw with."""
    script = tmp_path / "cells.py"
    parts: list[str] = []
    for name in SAID:
        code = "\n".join("".join(cell["source"]) for cell in code_cells(name))
        parts.append(f"print({name!r} + ':')\nexec({code!r}, {{'__name__': '__main__'}})")
    script.write_text("\n".join(parts), "utf-8")
    with warm():
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=EXAMPLES,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    _, *shown = re.split(f"^(?:{'|'.join(SAID)}):$", done.stdout, flags=re.MULTILINE)
    for words, text in zip(SAID.values(), shown, strict=True):
        assert [said for said in words if said not in text] == []
