"""From words to a call of a verb: settings resolved, options typed, everything checked.

cyclopts splits the words; it is told every flag by a signature made from the table of verbs.
Values travel as text and the registry reads them, so that a flag, a variable and a file key fail
with the same words.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast

from cyclopts import App, Parameter

from outrider.cli.page import CONFIG_TEXT
from outrider.cli.verb import Argument, Verb, setting_flags
from outrider.cli.verbs import VERBS
from outrider.core import settings
from outrider.core.env import outrider_variables
from outrider.core.errors import ConfigError, ContractError
from outrider.core.fields import Meta, check_value
from outrider.core.settings import Given, Resolved, Setting

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

O_co = TypeVar("O_co", bound="DataclassInstance", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[O_co]):
    """What a verb is called with; `arguments` are its words without a flag, in order."""

    resolved: Resolved
    options: O_co
    arguments: tuple[str, ...] = ()

    @property
    def argument(self) -> str | None:
        """The first of them, None if none was given."""
        return self.arguments[0] if self.arguments else None


def run_verb(verb: Verb, words: Sequence[str]) -> int:
    """Parse `words`, then import and run the verb. Raises CycloptsError and OutriderError."""
    parser = App(
        name=verb.name,
        result_action="return_value",
        help_flags=(),
        version_flags=(),
        suppress_keyboard_interrupt=False,
    )
    parser.default(_parser(verb))
    code: object = parser(list(words), exit_on_error=False, print_error=False)
    if not isinstance(code, int):
        raise ContractError("a verb gives its exit status")
    return code


def completion_app() -> App:
    """All verbs at once, for completion scripts."""
    app = App(name="outrider", version_flags=["--version"])
    for verb in VERBS:
        group = App(name=verb.name, alias=verb.alias, help=verb.text)
        if not verb.parts:
            group.default(_parser(verb))
        for part in verb.parts:
            group.command(_parser(part), name=part.name, help=part.text)
        app.command(group)
    return app


def _parser(verb: Verb) -> Callable[..., int]:
    """A function whose signature is the verb's flags."""

    def command(*arguments: str, **given: object) -> int:
        module, _, function = verb.target.partition(":")
        target = getattr(import_module(module), function)
        return cast("int", target(_call(verb, arguments, given)))

    parameters = [
        *(_positional(item) for item in verb.arguments),
        *(_flag(item, [item.flag]) for item in verb.own_options()),
        *(_flag(item, setting_flags(item)) for item in verb.offered_settings()),
        *([_config_flag()] if verb.settings else []),
    ]
    command.__name__ = verb.name
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _call(
    verb: Verb, arguments: tuple[str, ...], given: Mapping[str, object]
) -> Call[DataclassInstance]:
    for item, word in zip(verb.arguments, arguments, strict=False):
        check_value(item.name, word, Meta("", choices=item.choices))
    own = {item.name: item for item in verb.own_options()}
    options = {
        name: settings.typed(own[name], Given(value, own[name].flag))
        for name, value in given.items()
        if name in own
    }
    return Call(_resolve(verb, given), verb.options(**options), arguments)


def _resolve(verb: Verb, given: Mapping[str, object]) -> Resolved:
    """Command line over environment over file over default; defaults for a verb without settings,
    so that a mistake in a file does not stop what never reads it."""
    if not verb.settings:
        return settings.resolve()
    offered = {item.name for item in verb.offered_settings()}
    config = given.get("config")
    return settings.resolve(
        settings.command_line({name: given[name] for name in given if name in offered}),
        settings.environment(outrider_variables()),
        _default_file() if config is None else settings.file(Path(str(config))),
    )


def _default_file() -> settings.Layer:
    """A file that nobody named never decides without a word."""
    layer = settings.default_file(Path())
    if layer:
        print(f"settings from ./{settings.DEFAULT_FILE}", file=sys.stderr)
    return layer


def _positional(item: Argument) -> inspect.Parameter:
    described = Parameter(name=item.name, help=item.text)
    name = f"word_{item.name.lower()}"
    if item.many:
        hint = Annotated[str, described]
        return inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL, annotation=hint)
    hint = Annotated[str | None, described]
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=hint)


def _flag(item: Setting, names: Sequence[str]) -> inspect.Parameter:
    described = Parameter(name=names[0], negative=names[1:], help=item.meta.help)
    hints: dict[type, Any] = {bool: bool, tuple: list[str]}
    return _keyword(item.name, Annotated[hints.get(item.kind, str), described])


def _config_flag() -> inspect.Parameter:
    return _keyword("config", Annotated[str, Parameter(name="--config", help=CONFIG_TEXT)])


def _keyword(name: str, hint: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=hint)


def needed(call: Call[DataclassInstance], name: str, *, position: int = 0) -> str:
    """The argument at `position` of a verb that cannot do without it. Raises ConfigError."""
    if position >= len(call.arguments):
        raise ConfigError(f"{name} is missing.", hint="the same command with --help")
    return call.arguments[position]
