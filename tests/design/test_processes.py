"""`pytest --processes N` says of each test what pytest alone says, also when a process dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checks.processes import shares

TESTS = Path(__file__).resolve().parents[1]
FIRST = """
import os
import pytest

@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    yield tmp_path_factory.mktemp("loaded")
    print("the module is torn down")
    assert not os.environ.get("BROKEN")

@pytest.mark.parametrize("number", range(40))
def test_right(loaded, number):
    assert loaded.is_dir()

def test_wrong():
    print("written before")
    assert 1 == 2

@pytest.mark.skipif(True, reason="not here")
def test_left_out(): pass
"""
SECOND = """
import os

def test_before(): pass

def test_that_dies():
    os._exit(7)

def test_after(tmp_path): pass
"""


def run(folder: Path, *words: str, **more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), **more},  # noqa: TID251 - a child's
        capture_output=True,
        text=True,
        check=False,
        # A process that waits for ever is to fail here; a machine with much else to do is not.
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_all_outcomes_are_reported_and_a_process_that_dies_fails_one_test(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["checks.processes"]\n')
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    code, said = run(tmp_path, "--processes", "2", BROKEN="1")
    assert code == 1, said
    assert "the process of the test ended with status 7" in said
    assert "written before" in said
    assert "assert 1 == 2" in said
    # Each process that had tests of the module has torn its fixture down.
    torn = len(re.findall(r"^ERROR test_first.py", said, re.MULTILINE))
    assert torn in (1, 2)
    word = "error" if torn == 1 else "errors"
    assert f" 2 failed, 42 passed, 1 skipped, {torn} {word} in " in said
    for name in ("test_after", "test_before", *(f"test_right[{number}]" for number in range(40))):
        assert len(re.findall(rf"^PASSED test_\w+.py::{re.escape(name)}$", said, re.MULTILINE)) == 1
    code, said = run(tmp_path, "--processes", "2", "-x")
    assert code == 1
    assert "1 failed" in said


def test_neighbours_of_one_file_stay_together_and_become_fewer() -> None:
    files = [name for name in "abcd" for _ in range(100)]
    found = list(shares(files, 2))
    assert [number for share in found for number in share] == list(range(400))
    assert all(len({files[number] for number in share}) == 1 for share in found)
    assert len(found[0]) == 400 // 8 // 2
    assert [len(share) for share in found[-16:]] == [1] * 16
    assert list(shares([], 3)) == []
