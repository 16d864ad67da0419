"""The ways of `scripts/test --as`: told where one looks, with assertions that hold in each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checks.trees import check_shape
from outrider.core.tree import Shape

ROOT = Path(__file__).resolve().parents[2]


def listed(*words: str) -> list[str]:
    """What `scripts/test` names when it is asked for a way that there is not."""
    script = ROOT / "scripts" / "test"
    done = subprocess.run([script, "--as", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    return done.stderr.rpartition("one of: ")[2].split()


def test_every_way_is_listed_and_told() -> None:
    ways = listed()
    assert len(ways) >= 7
    assert listed("no-such-way") == ways
    page = (ROOT / "CONTRIBUTING.md").read_text()
    told = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert told == ways


def test_a_helper_s_assertion_is_alive() -> None:
    """Also under `python -O`, where those of the program are not."""
    with pytest.raises(AssertionError):
        check_shape(lambda chances, size: Shape((), (), ()))


@pytest.mark.wide
@pytest.mark.slow
def test_helpers_are_alive_without_assertions() -> None:
    own = f"{Path(__file__)}::test_a_helper_s_assertion_is_alive"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", own]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONOPTIMIZE": "1"},  # noqa: TID251 - a child's
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
