"""Parsing of a command line into the call of a verb, with resolved settings and checked options.

cyclopts splits the words and writes completion scripts; it gets every flag from the table of verbs.
Values are passed as text and parsed by the registry of settings, so that a flag, a variable and a
file key fail with the same message.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import UnusedCliTokensError

from outrider.cli.options import (
    CONFIG_TEXT,
    SET_TEXT,
    STDIN_FLAG,
    Argument,
    JsonOption,
    Options,
    OutputOption,
    Verb,
    setting_flags,
)
from outrider.cli.output import answer, check_writable, json_line, say, screen_table
from outrider.cli.verbs import VERBS
from outrider.core import settings
from outrider.core.env import other_variables, outrider_variables
from outrider.core.errors import ConfigError, ContractError, hint_for, nearest
from outrider.core.fields import LIMITS, Meta, check_value
from outrider.core.settings import Given, Resolved, Setting

O_co = TypeVar("O_co", bound=Options, covariant=True)
_TYPES: dict[type, Any] = {bool: bool, tuple: list[str]}
# Seconds of imports until they are named: from a cold disk they take a minute.
_SILENCE = 3.0


@dataclass(frozen=True, slots=True)
class Call(Generic[O_co]):
    """The call of a verb. `arguments` are its words without a flag, in order; `named` are the same
    by the arguments' names. `given` are the names of the options on the command line. `began` is
    the time before the verb's module was imported."""

    resolved: Resolved
    options: O_co
    arguments: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    began: float = field(default_factory=perf_counter)

    @property
    def argument(self) -> str | None:
        """The first argument, None without arguments."""
        return self.arguments[0] if self.arguments else None


def run_verb(verb: Verb, path: Sequence[str], words: Sequence[str]) -> int:
    """Parse `words`, then import and run the verb. Raises OutriderError."""
    try:
        code: object = _app(verb)(list(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _explained(error, verb, path, words) from None
    if not isinstance(code, int):
        raise ContractError("a verb returns its exit status")
    return code


def completion_app() -> App:
    """Return an app with all verbs, for completion scripts."""
    app = App(name="outrider", version_flags=["--version"])
    for verb in VERBS:
        group = _app(verb)
        for part in verb.parts:
            group.command(_app(part))
        app.command(group)
    return app


def _app(verb: Verb) -> App:
    app = App(
        name=verb.name,
        alias=verb.alias,
        help=verb.text,
        result_action="return_value",
        help_flags=(),
        version_flags=(),
        suppress_keyboard_interrupt=False,
    )
    if not verb.parts:
        app.default(_function(verb))
    return app


def _named(target: str) -> Any:
    """Return the function of a "module:function", whose module is imported now."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def _function(verb: Verb) -> Callable[..., int]:
    """Return a function whose signature has the verb's words and flags."""

    def command(*words: str, **given: object) -> int:
        call = call_of(verb, words, given)
        waits = Timer(_SILENCE, say, ["starting: its modules are imported, PyTorch among them"])
        waits.daemon = True
        waits.start()
        try:
            run = _named(verb.target)
        finally:
            waits.cancel()
        return cast("int", run(call))

    parameters = [
        *map(_positional, verb.arguments),
        *(_keyword(item, setting_flags(item)) for item in verb.own_options()),
        *(_keyword(item, setting_flags(item)) for item in verb.offered_settings()),
        *(_extra(name, *described) for name, described in _EXTRAS.items() if verb.settings),
    ]
    command.__name__ = verb.name
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


# Flags of every verb with settings.
_EXTRAS: dict[str, tuple[Any, str]] = {"config": (str, CONFIG_TEXT), "set": (list[str], SET_TEXT)}


def _positional(item: Argument) -> inspect.Parameter:
    name = f"word_{item.name.lower()}"
    described = Parameter(name=item.name, help=item.text)
    if item.many:
        hint = Annotated[str, described]
        return inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL, annotation=hint)
    hint = Annotated[str | None, described]
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=hint)


def _keyword(item: Setting, flags: Sequence[str]) -> inspect.Parameter:
    negative = [flag for flag in flags if flag.startswith("--no-") and item.kind is bool]
    names = [flag for flag in flags if flag not in negative]
    described = Parameter(name=names, negative=negative, help=item.meta.help)
    return _extra(item.name, _TYPES.get(item.kind, str), described)


def _extra(name: str, kind: Any, described: Parameter | str) -> inspect.Parameter:
    if isinstance(described, str):
        described = Parameter(name=f"--{name}", negative=(), help=described)
    hint = Annotated[kind, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def call_of(verb: Verb, words: tuple[str, ...], given: Mapping[str, object]) -> Call[Options]:
    """Return the call; `given` has values by option and setting. Raises ConfigError."""
    has_prompt = any(given.get(name) is not None for name in ("prompt", "prompts"))
    named = verb.named(words, without="PROMPT" if has_prompt else "")
    for item in verb.arguments:
        check_value(item.name, named.get(item.name), Meta("", choices=item.choices))
    own = {item.name: item for item in verb.own_options()}
    typed = {name: Given(value, own[name].flag) for name, value in given.items() if name in own}
    option, reader = verb.options.reader
    file = given.get(option)
    filled: settings.Layer = {} if file is None else _named(reader)(verb, Path(str(file)))
    stated = {name: item for name, item in filled.items() if name in own} | typed
    options = verb.options(**{n: settings.typed(own[n], item) for n, item in stated.items()})
    if isinstance(options, OutputOption) and options.output is not None:
        check_writable(Path(options.output))
    layer = {name: item for name, item in filled.items() if name not in own}
    return Call(_resolve(verb, named, given, layer), options, words, frozenset(typed), named)


def _resolve(
    verb: Verb, named: Mapping[str, str], given: Mapping[str, object], layer: settings.Layer
) -> Resolved:
    """Resolve the settings: command line over environment over files over defaults. A verb without
    settings gets the defaults, so that a mistake in a file cannot stop it."""
    if not verb.settings:
        return settings.resolve()
    offered = {item.name for item in verb.offered_settings()}
    chosen = {name: given[name] for name in given if name in offered}
    for item in verb.arguments:
        if item.setting and (word := named.get(item.name)) is not None:
            _add(chosen, item.setting, word, problem=f"two models: {word!r} and")
    for pair in cast("list[str]", given.get("set", ())):
        name, equals, value = pair.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in offered:
            raise _no_setting(pair, name if equals else "", sorted(offered))
        _add(chosen, name, value, problem=f"--set {pair} and")
    config = given.get("config")
    return settings.resolve(
        settings.command_line(chosen),
        settings.environment(outrider_variables()),
        layer,
        _default_file() if config is None else settings.file(Path(str(config))),
    )


def _add(chosen: dict[str, object], name: str, value: str, *, problem: str) -> None:
    """Add a value that replaces a flag. Raises ConfigError if the flag is given as well."""
    if name in chosen:
        flag = settings.SETTINGS[name].flag
        hint = "drop one; with a flag for the model, give the prompt as --prompt"
        raise ConfigError(f"{problem} {flag} {chosen[name]!r}.", hint=hint)
    chosen[name] = value


def _no_setting(pair: str, name: str, known: Sequence[str]) -> ConfigError:
    if not name:
        return ConfigError(f"--set {pair}: no value.", hint="--set key=value, as in --set k=4")
    every = "`outrider config` lists every setting"
    hint = hint_for(name) or nearest(name, known, every)
    return ConfigError(f"--set {pair}: no setting {name!r} here.", hint=hint)


def _default_file() -> settings.Layer:
    """Return the settings of ./outrider.toml, with a note on stderr: the user did not name the
    file, so its effect must be visible."""
    layer = settings.default_file(Path())
    if layer:
        print(f"settings from ./{settings.DEFAULT_FILE}", file=sys.stderr)
    return layer


def _explained(
    error: CycloptsError, verb: Verb, path: Sequence[str], words: Sequence[str]
) -> ConfigError:
    """Return the error in our words, an unknown flag first: its value may confuse the parser."""
    page = f"`outrider {' '.join(path)} --help-all` lists the options"
    known = verb.flags()
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.split("=", 1)[0]
        if flag == STDIN_FLAG and flag not in known:
            return ConfigError("a lone - has no meaning here.", hint=page)
        theirs = hint_for(flag)
        if flag not in known and (flag.startswith("--") or theirs):
            others = [other.name for other in VERBS if flag in other.flags()]
            elsewhere = f"`outrider {others[0]}` has it; {page}" if others else None
            hint = theirs or elsewhere or nearest(flag, known, page)
            return ConfigError(f"unknown option {flag!r}.", hint=hint)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return ConfigError(f"{error.unused_tokens[0]!r}: one word too many.", hint=page)
    error.verbose = False
    return ConfigError(str(error), hint=page)


def needed(call: Call[Options], name: str, *, position: int = 0) -> str:
    """Return the required argument at `position`. Raises ConfigError if it is missing."""
    if position >= len(call.arguments):
        verb = call.options.verb
        text = next(item.text for item in verb.arguments if item.name == name)
        why = f"{name} is missing: {text[0].lower()}{text[1:]}"
        raise ConfigError(why, hint=verb.example)
    return call.arguments[position]


def config(call: Call[JsonOption]) -> int:
    """`outrider config`: every setting, its value, and the source of the value."""
    chosen = call.resolved.chosen.values()
    record = {c.setting.name: {"value": c.value, "origin": c.origin} for c in chosen}
    rows = [
        (c.setting.name, json_line(c.value), c.origin, c.setting.flag, c.setting.variable)
        for c in chosen
    ]
    lines = [
        screen_table(rows, header=("setting", "value", "origin", "flag", "variable")),
        "\nOther variables:",
        screen_table([(v.name, v.reader, v.meaning) for v in other_variables()]),
        "\nLimits of a request:",
        screen_table([(name, f"{limit.most:,}", limit.what) for name, limit in LIMITS.items()]),
    ]
    answer(call.options, record, "\n".join(lines))
    return 0


def completion(call: Call[Options]) -> int:
    """`outrider completion`: a script that completes verbs and options in a shell."""
    shell = cast("Literal['bash', 'zsh', 'fish']", needed(call, "SHELL"))
    # `shell` is only the name of a shell; none is started.
    script = completion_app().generate_completion(prog_name="outrider", shell=shell)
    print(script)
    return 0
