"""The one gate between the program and a terminal.

Names of tensors, paths, errors of templates, answers of other servers and texts of models are not
ours, and a terminal obeys what is in them: a new title, a cleared screen, the clipboard. So stdout
and stderr are a `Gate` while a command runs, and whatever is printed, logged or traced to them
loses its control characters. One character is judged at a time, so it does not matter how a
sequence is cut into pieces. Colours and bars of ours are written behind the gate, by `paint`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, TextIO, cast

# C0 but for tabs and ends of lines, DEL, C1, and what turns the order of letters around.
_OBEYED = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {code: "\ufffd" for code in _OBEYED if chr(code) not in "\n\t"}
_IN_LINE = _VISIBLE | dict.fromkeys(map(ord, "\n\t"), "�")


def visible(text: str) -> str:
    """`text` with a replacement character for each one that a terminal obeys."""
    return text.translate(_VISIBLE)


def in_line(text: str) -> str:
    """The same without ends of lines and tabs, for a cell of a table."""
    return text.translate(_IN_LINE)


class Gate:
    """A text stream in front of another; what is not about writing is the other's."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        self.behind.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def gated(stream: TextIO) -> TextIO:
    """`stream` behind a gate, once."""
    return stream if isinstance(stream, Gate) else cast("TextIO", Gate(stream))


def behind(stream: TextIO) -> TextIO:
    """Where colours of ours are written, and text that is not for a terminal."""
    return stream.behind if isinstance(stream, Gate) else stream


@contextmanager
def gate() -> Generator[None]:
    """stdout and stderr are behind gates within."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(gated, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
