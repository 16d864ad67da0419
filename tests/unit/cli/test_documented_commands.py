"""Every command that the documentation shows can be pasted: its verbs, flags and values exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from checks.documents import PAGES
from doubles.command_line import Command, nothing
from outrider.cli import call

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[3]
# Commands to paste stand within fences, each on a line of its own.
_FENCE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"^(?:[^#\n]*\| )?(outrider .*)$", re.MULTILINE)


def documented() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(ROOT).as_posix()
        for block in _FENCE.findall(text):
            yield from ((name, line) for line in _LINE.findall(block.replace("\\\n", " ")))


COMMANDS = sorted(set(documented()))
# Of the package that docs/extending.md installs: test_outside_package.py runs them with it.
OUTSIDE = {"bigram", "lookalike", "halves"}


def test_there_are_commands_to_look_at() -> None:
    assert {"README.md", "docs/drafters.md", "docs/train.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=str)
def test_a_documented_command_is_one(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, page: str, line: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(call, "import_module", nothing)
    # What the shell does with the output is not ours.
    words = list(takewhile(lambda word: word != ">", shlex.split(line, comments=True)[1:]))
    if not OUTSIDE.isdisjoint(words):
        pytest.skip("of a package that is not installed here")
    shown = outrider(*words)
    assert shown.code == 0, f"{page}: {line}\n{shown.err}"
