"""A command line run in this process: what it is called with, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.cli.call import Call
from outrider.cli.options import Options


@dataclass(frozen=True, slots=True)
class Finished:
    """The exit code and everything that was printed."""

    code: int
    out: str
    err: str


class Command(Protocol):
    """Runs `outrider` with these words; `stdin` is what it may read."""

    def __call__(self, *words: str, stdin: str = "") -> Finished: ...


class NothingRuns:
    """Stands for the module of any verb: settings are typed and checked, and that is all."""

    def __getattr__(self, name: str) -> Callable[[Call[Options]], int]:
        def verb(asked: Call[Options]) -> int:
            asked.resolved.program()
            asked.resolved.engine()
            asked.resolved.sampling()
            return 0

        return verb


def nothing(_: str) -> NothingRuns:
    return NothingRuns()
