"""Markdown on a terminal, while it is written: styles of runs, for texts that arrive in pieces.

Headings and `**strong**` words are bold, list marks become bullets, a fence becomes a thin line
with the language, and code between backticks is in italics. A mark is held until the letters that
decide what it is; all else is passed on at once. Within fences nothing is changed. Tables, links
and single asterisks are left as they are, since a text may mean them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from rich.style import Style

_BOLD, _TITLE, _CODE = Style(bold=True), Style(bold=True, underline=True), Style(italic=True)
_QUIET = Style(dim=True)
_RULE = "───"
# Beginnings of lines that may still become a mark, and the marks.
_OPEN = re.compile(r" *(#{1,6}|[-*+]|`{1,2}|```[^\n]*)?")
_CLOSING = re.compile(r" *(`{1,2}|```[^\n]*)?")
_HEADING, _BULLET = re.compile(r" {0,3}#{1,6} "), re.compile(r"( *)[-*+] ")
_FENCE = re.compile(r" *```([^`\n]*)\n")

Run: TypeAlias = tuple[str, Style]


class Markdown:
    """The styles of one text."""

    def __init__(self) -> None:
        self._held: list[Run] = []
        self._begins_line, self._in_fence = True, False
        self._is_title = self._is_bold = self._is_code = False
        self._before = "\n"

    def runs(self, text: str, style: Style) -> Iterator[Run]:
        """Runs to write for the next piece of the text, whose letters have this `style`."""
        for letter in text:
            self._held.append((letter, style))
            yield from self._begun() if self._begins_line else self._inline()

    def end(self) -> Iterator[Run]:
        """Runs of the letters that were held at the end of the text."""
        held, self._held = self._held, []
        yield from held

    def _begun(self) -> Iterator[Run]:
        """Read the beginning of a line, once it shows what the line is."""
        start = "".join(letter for letter, _ in self._held)
        style = self._held[-1][1]
        if fence := _FENCE.fullmatch(start):
            self._held, self._in_fence = [], not self._in_fence
            yield f"{_RULE} {fence[1].strip()}".rstrip() + "\n", _QUIET
        elif self._in_fence:
            # Code is passed on but for what may become the closing fence.
            if not _CLOSING.fullmatch(start):
                self._begins_line = start.endswith("\n")
                yield from self.end()
        elif _HEADING.fullmatch(start):
            self._held, self._begins_line, self._is_title = [], False, True
        elif bullet := _BULLET.fullmatch(start):
            self._held, self._begins_line = [], False
            yield f"{bullet[1]}• ", style
        elif not _OPEN.fullmatch(start):
            held, self._held, self._begins_line = self._held, [], False
            for one in held:
                self._held.append(one)
                yield from self._inline()

    def _inline(self) -> Iterator[Run]:
        """Read one more letter within a line. Two asterisks are held until the next letter."""
        letters = "".join(letter for letter, _ in self._held)
        letter, style = self._held[-1]
        if letter == "\n":
            yield from self._styled(self.end())
            self._is_title = self._is_bold = self._is_code = False
            self._begins_line, self._before = True, "\n"
        elif self._in_fence:
            yield from self.end()
        elif self._is_code or not letters.startswith("*"):
            yield from self._styled(self.end())
            self._is_code ^= letter == "`"
            self._before = letter
        elif self._is_bold and letters == "**" and not self._before.isspace():
            self._held, self._is_bold = [], False
        elif letters not in ("*", "**"):
            opens = letters[:2] == "**" and not letter.isspace() and not self._before.isalnum()
            if opens and letter != "*":
                self._held, self._is_bold = [(letter, style)], True
                yield from self._inline()
            else:
                yield from self._styled(self.end())
                self._before = letter

    def _styled(self, runs: Iterator[Run]) -> Iterator[Run]:
        found = {_TITLE: self._is_title, _BOLD: self._is_bold, _CODE: self._is_code}
        extra = sum((style for style, applies in found.items() if applies), Style.null())
        return ((letter, style + extra) for letter, style in runs)
