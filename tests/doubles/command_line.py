"""A command line run in this process: what it is called with, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Finished:
    """The exit code and everything that was printed."""

    code: int
    out: str
    err: str


class Command(Protocol):
    """Runs `outrider` with these words; `stdin` is what it may read."""

    def __call__(self, *words: str, stdin: str = "") -> Finished: ...
