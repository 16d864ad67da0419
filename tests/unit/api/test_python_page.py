"""The examples of README and of pages that show Python run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
EXAMPLES = {
    f"{page} {number}": code
    for page in ("README.md", "docs/get-started.md", "docs/python.md", "docs/features.md")
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
    )
}


@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_an_example_runs(tmp_path: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print" not in code
