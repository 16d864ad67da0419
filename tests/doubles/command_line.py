"""A command line run in this process: what it is called with, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pytest
from cyclopts import App

from outrider.cli import call
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


@contextmanager
def remembered_parsers() -> Generator[None]:
    """A block in which cyclopts reads the signature of each verb once, which takes most of the time
    of a call: later calls parse with copies of its arguments, which hold no word yet."""
    assemble: Any = App.assemble_argument_collection
    known: dict[Hashable, Any] = {}

    def assembled(app: App, **how: Any) -> Any:
        key = app.default_command, *sorted(how.items())
        if key not in known:
            known[key] = assemble(app, **how)
        own = copy(known[key])
        own[:] = map(_unread, own)
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "_function", cache(vars(call)["_function"]))
        patch.setattr(App, "assemble_argument_collection", assembled)
        yield


def _unread(argument: Any) -> Any:
    own = copy(argument)
    own.tokens = []
    return own
