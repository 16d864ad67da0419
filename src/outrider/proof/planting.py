"""Plant a one-line bug in shipped code, in this process, and take it out again.

The module's source is compiled twice, as it is and with one exact piece of text replaced; nothing
is executed. Each function whose code came out different gets the new code object in place, so all
who imported it, by whatever name, run the bug. The old code objects are put back whatever happens;
Ctrl-C waits until they are. Nothing else may run in the process meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from outrider.core.interrupts import deferred


class CannotPlantError(Exception):
    """The source that runs cannot be read here, or is not the one that the bug was written for."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug: `old`, found once in the source of `module`, becomes `new`, on as many lines."""

    name: str
    module: str
    old: str
    new: str


@contextmanager
def planted(mutant: Mutant) -> Generator[None]:
    """Run the block with the bug in. Raises CannotPlantError, with nothing changed."""
    changes = _changes(mutant)
    with deferred():
        try:
            for function, _, mutated in changes:
                function.__code__ = mutated
            yield
        finally:
            for function, shipped, _ in changes:
                function.__code__ = shipped


def _changes(mutant: Mutant) -> list[tuple[FunctionType, CodeType, CodeType]]:
    """(function, its code, its code with the bug) for each function that the bug is in."""
    module = import_module(mutant.module)
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise CannotPlantError(f"the source of {mutant.module} is not available") from error
    if source.count(mutant.old) != 1 or mutant.old.count("\n") != mutant.new.count("\n"):
        raise CannotPlantError(f"{mutant.module} is not the source that this bug was written for")
    shipped = _code_by_name(source, module)
    mutated = _code_by_name(source.replace(mutant.old, mutant.new), module)
    live = functions(module)
    changes = [
        (live[name], code, mutated[name])
        for name, code in shipped.items()
        if name in live and mutated.get(name) != code
    ]
    if not changes or any(function.__code__ != code for function, code, _ in changes):
        raise CannotPlantError(f"{mutant.module} as it runs is not the source on disk")
    return [(function, function.__code__, new) for function, _, new in changes]


def _code_by_name(source: str, module: ModuleType) -> dict[str, CodeType]:
    """The code of every function and method that `source` defines, by qualified name."""
    whole = compile(source, str(module.__file__), "exec", dont_inherit=True)
    return {code.co_qualname: code for code in _nested(whole)}


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and "<locals>" not in constant.co_qualname:
            yield constant
            yield from _nested(constant)


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """All functions and methods that `module` defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for value in vars(module).values():
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = _function(member)
            if function is not None and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found


def _function(member: Any) -> FunctionType | None:
    if isinstance(member, property):
        return _function(member.fget)
    if isinstance(member, staticmethod | classmethod):
        return _function(cast(Any, member).__func__)
    return member if isinstance(member, FunctionType) else None
