"""The examples of README and of pages that show Python run as they stand."""

from __future__ import annotations

import json
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


# One interpreter runs them one after another, each as a program of its own. Imports that warn fail.
PROGRAM = """
import contextlib, io, json, sys, traceback

for name, code in json.load(sys.stdin).items():
    out, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([name, out.getvalue(), error]), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What each printed, and how it failed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        input=json.dumps(EXAMPLES),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path_factory.mktemp("examples"),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (out, error) for name, out, error in found}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(ran: dict[str, tuple[str, str]], name: str) -> None:
    out, error = ran[name]
    assert not error, error
    assert out or "print" not in EXAMPLES[name]
