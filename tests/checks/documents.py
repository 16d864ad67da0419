"""Pages of the documentation, read so that tests can compute their numbers again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Document:
    """One page's text."""

    text: str

    @classmethod
    def named(cls, name: str) -> Document:
        return cls((DOCS / name).read_text(encoding="utf-8"))

    @cached_property
    def prose(self) -> str:
        """Without line breaks: lines are wrapped anywhere."""
        return " ".join(self.text.split())

    def between(self, start: str, end: str) -> Document:
        """From the heading `start` to the heading `end`."""
        return Document(self.text[self.text.index(start) : self.text.index(end)])

    def rows_under(self, header: str) -> list[list[str]]:
        """The cells of the table whose header line begins so."""
        lines = self.text[self.text.index(header) :].splitlines()[2:]
        table = lines[: next((i for i, line in enumerate(lines) if not line), len(lines))]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]

    @property
    def numbers(self) -> set[str]:
        """Numbers in prose that say something: with a point, or of two digits and more."""
        text = "\n".join(line for line in self.text.splitlines() if not line.startswith(("|", "#")))
        return set(re.findall(r"(?<![\w.])\d+\.\d+|(?<![\w.])\d\d+", text))
