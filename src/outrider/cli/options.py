"""Definition of a verb, with only the data that the parser, the help and the completion need.

A verb is a class of options. Options are fields of the same kind as settings, with flags and help.
They are specific to one run, so they have no environment variable and no file key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from outrider.core.fields import setting
from outrider.core.settings import DEFAULT_FILE, SETTINGS, Setting, describe

# All groups of settings.
ALL = ("program", "engine", "sampling")
# Settings that a run with many texts decides itself, or does not need.
DECIDED = ("profile", "n", "logprobs", "top_logprobs", "round_events")
HELP_FLAGS = ("--help", "--help-all")
ASKS = ("-h", *HELP_FLAGS)
# The parser treats a lone - as an option without a name; this is its name.
STDIN_FLAG = "--stdin"
# Further flags of a setting or of an option.
ALIASES = {"target": ("--model", "-m", "-hf", "--hf-repo"), "prompt": ("-p",)}
CONFIG_TEXT = f"Read settings from this TOML or YAML file, not ./{DEFAULT_FILE}."
SET_TEXT = "Give any setting by its key, as in --set k=4; may be repeated."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a verb. The class of a verb becomes a dataclass only when it is first used: help
    lists all verbs, and making all dataclasses would take too long. `reader` may be the name of an
    option for a file, and the function, "module:function", that returns options and settings of
    the file: flags and the environment override them, and they override `outrider.toml`."""

    verb: ClassVar[Verb]
    reader: ClassVar[tuple[str, str]] = ("", "")

    def __new__(cls, **_: object) -> Self:
        complete(cls)
        return object.__new__(cls)


@dataclass(frozen=True, slots=True)
class Argument:
    """A word that a verb takes without a flag, the last one perhaps `many`. It may replace the flag
    of a `setting`. An `optional` one needs words for all others."""

    name: str
    text: str
    choices: tuple[str, ...] = ()
    many: bool = False
    setting: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb. `target` ("module:function") takes a `Call`; a verb with `parts` only groups them.

    `settings` are the groups of settings whose flags it takes, except those that it decides itself
    (`without`); `stated` are defaults of its own, in words. `options` are its own options.
    `example` is a line that a user can paste. The front page lists it under `group`; verbs without
    a group are old or seldom used ones.
    """

    name: str
    text: str
    example: str
    target: str = ""
    alias: str | None = None
    group: str = ""
    arguments: tuple[Argument, ...] = ()
    options: type[Options] = Options
    settings: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    stated: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    parts: tuple[Verb, ...] = ()

    def named(self, words: Sequence[str], *, without: str = "") -> dict[str, str]:
        """Return `words` by the names of their arguments; none is for the argument `without`."""
        arguments = [item for item in self.arguments if item.name != without]
        if len(words) < len(arguments):
            arguments = [item for item in arguments if not item.optional]
        return {item.name: word for item, word in zip(arguments, words, strict=False)}

    def own_options(self) -> list[Setting]:
        complete(self.options)
        return list(describe(self.options, group="").values())

    def offered_settings(self) -> list[Setting]:
        return [
            item
            for item in SETTINGS.values()
            if item.group in self.settings and item.name not in self.without
        ]

    def flags(self) -> list[str]:
        """Return every flag of the verb."""
        own = [name for item in self.own_options() for name in setting_flags(item)]
        offered = [name for item in self.offered_settings() for name in setting_flags(item)]
        return [*own, *offered, *(["--config", "--set"] if self.settings else []), *HELP_FLAGS]


AnyOptions = TypeVar("AnyOptions", bound=Options)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def shared(options: type[AnyOptions]) -> type[AnyOptions]:
    """Declare options that several verbs have. `complete` makes the class a dataclass."""
    return options


@shared
class JsonOption(Options):
    """Options of verbs whose output programs may read."""

    json: bool = setting(False, "Print JSON, for programs to read.")


@shared
class OutputOption(JsonOption):
    """Options of verbs that may also write their JSON to a file."""

    output: str | None = setting(None, "Also write the JSON object to this file.")


@shared
class StructureOption(Options):
    """Options of verbs that write text: its required structure, by at most one of these."""

    schema: str | None = setting(
        None, "Write JSON of the JSON schema in this file; or the schema itself."
    )
    json_object: bool = setting(False, "Write a JSON object.")
    regex: str | None = setting(None, "Write a text that this regular expression matches.")
    choice: tuple[str, ...] = setting((), "Write one of these texts; may be repeated.")
    grammar: str | None = setting(
        None, "Write a text of the grammar in this file, Lark or GBNF; or the grammar itself."
    )


@shared
class ReplicasOption(Options):
    """Options of verbs that can run several engines of one model."""

    replicas: int = setting(
        1,
        "Number of engines of the model, each a process with its GPU or its share of the cores.",
        minimum=1,
        maximum=64,
    )
    devices: str = setting(
        "", "Comma-separated devices with an engine on each, such as cuda:0,cuda:1 or cpu."
    )


# All verbs by their paths, such as "bench k".
KNOWN: dict[str, Verb] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def verb(
    paths: str, target: str, *arguments: Argument, **more: Any
) -> Callable[[type[AnyOptions]], type[AnyOptions]]:
    """Register a class of options as a verb. `paths` are the comma-separated words that call it.
    `target` is "module:function" of this package, or with the full name of a module elsewhere. The
    class's docstring is the verb's text and, after an empty line, an example."""
    names = paths.split(", ")

    def made(options: type[AnyOptions]) -> type[AnyOptions]:
        text, _, example = (options.__doc__ or "").partition("\n\n")
        options.verb = Verb(
            name=names[0].rpartition(" ")[2],
            text=" ".join(text.split()),
            example=" ".join(example.split()),
            target=target if "." in target else f"outrider.cli.{target}",
            arguments=arguments,
            options=options,
            **more,
        )
        KNOWN.update(dict.fromkeys(names, options.verb))
        return options

    return made


def complete(options: type[Options]) -> None:
    """Make the class of a verb and its base classes dataclasses, if they are not yet."""
    for kind in reversed(options.__mro__):
        if issubclass(kind, Options) and "__dataclass_params__" not in vars(kind):
            dataclass(frozen=True, kw_only=True, repr=False, eq=False)(kind)


def setting_flags(item: Setting) -> list[str]:
    """Return the flags of an option or setting; boolean settings can be switched off too."""
    if item.kind is bool and item.group:
        return [item.flag, f"--no-{item.flag[2:]}"]
    return [item.flag, *ALIASES.get(item.name, ())]
