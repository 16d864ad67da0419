"""A filter between the program and the terminal, which removes control characters.

Names of tensors, paths, errors of templates, answers of other servers and texts of models are
untrusted, and a terminal obeys control sequences in them: they may set its title, clear the screen
or write to the clipboard. While a command runs, stdout and stderr are therefore a `Gate`, and all
text that is printed, logged or traced loses its control characters. The gate judges one character
at a time, so a sequence cannot pass in pieces. The program's own colours and bars are written
behind the gate, by `paint`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, TextIO, cast

# C0 except tabs and line ends, DEL, C1, and the characters that reverse the direction of text.
_OBEYED = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {code: "\ufffd" for code in _OBEYED if chr(code) not in "\n\t"}
_IN_LINE = _VISIBLE | dict.fromkeys(map(ord, "\n\t"), "�")


def visible(text: str) -> str:
    """Replace each control character that a terminal obeys by U+FFFD."""
    return text.translate(_VISIBLE)


def in_line(text: str) -> str:
    """Replace line ends and tabs too, for a cell of a table."""
    return text.translate(_IN_LINE)


class Gate:
    """A text stream that filters writes to another stream; other methods are that stream's."""

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
    """Return a gate for `stream`, or `stream` itself if it is a gate."""
    return stream if isinstance(stream, Gate) else cast("TextIO", Gate(stream))


def behind(stream: TextIO) -> TextIO:
    """Return the stream behind a gate, for our own colours and text for no terminal."""
    return stream.behind if isinstance(stream, Gate) else stream


@contextmanager
def gate() -> Generator[None]:
    """Put stdout and stderr behind gates inside the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(gated, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
