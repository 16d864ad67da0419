"""Plant a one-line bug in shipped code, in this process, and take it out again.

The module's source is read, one exact piece of text is replaced, and the result is compiled aside.
Then every function whose code came out different gets the new code object in place, so all who
imported it, by whatever name, run the mutant. Nothing else changes: no module is reloaded, and
classes keep their identity.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import pytest

from outrider_lab.proof.mutants import functions


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, which must occur exactly once in `module`, becomes `new`; `caught_by` must fail."""

    name: str
    module: str
    old: str
    new: str
    caught_by: Callable[[], None]


@contextmanager
def planted(mutant: Mutant) -> Generator[int]:
    """Runs the block with the bug in; gives the number of functions that changed."""
    module = import_module(mutant.module)
    source = inspect.getsource(module)
    assert source.count(mutant.old) == 1, f"{mutant.old!r} must occur once in {mutant.module}"
    assert mutant.old.count("\n") == mutant.new.count("\n")
    mutated = ModuleType(mutant.module)
    code = compile(source.replace(mutant.old, mutant.new), f"<mutant of {mutant.module}>", "exec")
    exec(code, mutated.__dict__)  # noqa: S102 - our own source, with one line changed
    theirs = functions(mutated)
    changed = [
        (function, theirs[name].__code__)
        for name, function in functions(module).items()
        if function.__code__ != theirs[name].__code__
    ]
    with pytest.MonkeyPatch.context() as monkey:
        for function, new_code in changed:
            monkey.setattr(function, "__code__", new_code)
        yield len(changed)
