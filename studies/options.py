"""Flags of the programs of this folder, read by cyclopts as those of `outrider` are.

A flag is named by its default: False is a switch, a tuple has the choices of which the first is the
default, a list takes several words, and a number or a word its own type. `Flag` says more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast, get_origin

from cyclopts import App, Parameter

REQUIRED = inspect.Parameter.empty


class Options(SimpleNamespace):
    """Values of flags by their names, which have `_` for `-`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """`kind` is an annotation; without a `default` the flag is required. A word has no name on the
    command line; one with a default stands for any number of words."""

    kind: Any
    default: Any = REQUIRED
    text: str = ""
    is_word: bool = False


def flag_of(default: Any) -> Flag:
    """The flag that a default stands for; None is that of a word which may be missing."""
    if isinstance(default, Flag):
        return default
    if isinstance(default, tuple):
        choices = cast("tuple[str, ...]", default)
        return Flag(kind=one_of(choices), default=choices[0])
    if isinstance(default, list):
        return Flag(kind=list[str], default=cast("list[str]", default))
    return Flag(kind=str | None if default is None else type(default), default=default)


def one_of(choices: Sequence[str]) -> Any:
    """The kind of a flag with these values."""
    return cast("Any", Literal)[tuple(choices)]


def read(
    name: str, about: str | None, flags: Mapping[str, Any], words: Sequence[str] | None = None
) -> Options:
    """Values of `flags` in `words`, by default those of this process. Exits with 0 after --help and
    with 2 where a word is none of a flag."""
    signature = inspect.Signature(
        sorted((_parameter(n, flag_of(one)) for n, one in flags.items()), key=lambda p: p.kind)
    )

    def given(*args: object, **named: object) -> Options:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        return Options(**bound.arguments)

    given.__annotations__ = {item.name: item.annotation for item in signature.parameters.values()}
    vars(given)["__signature__"] = signature
    app = App(
        name=name,
        help=about or "",
        help_format="plaintext",
        version_flags=(),
        result_action="return_value",
    )
    app.default(given)
    found: Options | None = app(sys.argv[1:] if words is None else list(words))
    if found is None:
        sys.exit(0)
    return found


def _parameter(name: str, flag: Flag) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    if flag.is_word:
        is_one = flag.default is REQUIRED
        kind = inspect.Parameter.POSITIONAL_ONLY if is_one else inspect.Parameter.VAR_POSITIONAL
    several = not flag.is_word and get_origin(flag.kind) is list
    described = Parameter(help=flag.text, negative=(), consume_multiple=several or None)
    default = REQUIRED if flag.is_word else flag.default
    return inspect.Parameter(
        name, kind, default=default, annotation=Annotated[flag.kind, described]
    )
