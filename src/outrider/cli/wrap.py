"""Wrapping of sentences, tables and commands to a width. Help uses it, so it imports nothing that
takes time."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import chain, zip_longest

# Minimum width of a column that wraps, enough for some words.
_LEAST_WIDTH = 18


def wrapped_table(cells: Sequence[Sequence[str]], limit: int) -> str | None:
    """Return the table with its widest columns wrapped; None if it is still too wide."""
    widths, needed = column_widths(cells), column_widths(cells, words=True)
    needed = [
        max(need, min(_LEAST_WIDTH, width)) for need, width in zip(needed, widths, strict=True)
    ]
    excess = sum(widths) + 2 * (len(widths) - 1) - limit
    while excess > 0:
        column = max(range(len(widths)), key=lambda i: widths[i] if widths[i] > needed[i] else 0)
        if widths[column] <= needed[column]:
            return None
        others = [width for i, width in enumerate(widths) if i != column and width > needed[i]]
        least = max(
            [needed[column], widths[column] - excess, *(w for w in others if w < widths[column])]
        )
        excess -= widths[column] - least
        widths[column] = least
    lines: list[str] = []
    for row in cells:
        columns = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def column_widths(cells: Sequence[Sequence[str]], *, words: bool = False) -> list[int]:
    """Return the width of each column's widest cell, or of its longest word."""
    return [
        max(max(map(len, cell.split()), default=0) if words else len(cell) for cell in column)
        for column in zip(*cells, strict=True)
    ]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def wrapped(page: str, limit: int) -> str:
    """Wrap longer lines at words, or within a word that is too long. A command is continued after a
    backslash, so that it can be pasted."""
    return "\n".join(_fitted(line, limit) for line in page.split("\n"))


def _fitted(line: str, limit: int) -> str:
    if len(line) <= limit:
        return line
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    is_command = text.startswith(_COMMANDS)
    words = (_COMMAND_WORDS if is_command else _WORDS).findall(text)
    hanging = indent + ("    " if is_command else "  " if indent else "")
    lines, width = [indent], limit - 2 * is_command
    for word in chain.from_iterable(_pieces(word, width - len(hanging)) for word in words):
        between = " " if lines[-1].strip() else ""
        if between and len(lines[-1]) + 1 + len(word) > width:
            lines.append(hanging)
            between = ""
        lines[-1] += between + word
    return (" \\\n" if is_command else "\n").join(lines)


# Words of a sentence, in which commands are not split; and of a command, which may quote blanks.
_WORDS = re.compile(r"(?:`[^`]*`|[^ \t])+")
_COMMAND_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^ \t])+""")
_COMMANDS = ("outrider ", "echo ")


def _pieces(word: str, limit: int) -> list[str]:
    """Split a word that is too long for a line, such as a path."""
    return [word[start : start + limit] for start in range(0, len(word), max(limit, 1))]
