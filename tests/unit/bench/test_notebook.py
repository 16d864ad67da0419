"""The notebook in examples/ runs from its first cell to its last, and holds no output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.drawing import why_not

pytestmark = pytest.mark.wide

NOTEBOOK = Path(__file__).parents[3] / "examples" / "analysis.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_committed_without_what_it_printed() -> None:
    assert all(cell["outputs"] == [] for cell in code_cells())
    assert all(cell["execution_count"] is None for cell in code_cells())


@pytest.mark.skipif(why_not() is not None, reason="matplotlib is not installed")
def test_all_cells_run(tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    unseen = "import matplotlib\n\nmatplotlib.use('agg')"
    parts = [unseen, *("".join(cell["source"]) for cell in code_cells())]
    script.write_text("\n".join(parts), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=NOTEBOOK.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens a round" in done.stdout
    assert "median error" in done.stdout
