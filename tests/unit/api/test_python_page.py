"""The examples of README and of pages that show Python run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles.warm_python import warm

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
EXAMPLES = {
    f"{page} {number}": code
    for page in ("README.md", "docs/get-started.md", "docs/python.md", "docs/features.md")
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
    )
}


# Imports that warn fail here too: the interpreter that all begin as forks of has the flag.
FLAGS = ("-W", "error")


@pytest.fixture(scope="module", autouse=True)
def warm_python() -> Iterator[None]:
    with warm(*FLAGS):
        yield


@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_an_example_runs(tmp_path: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, *FLAGS, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print" not in code
