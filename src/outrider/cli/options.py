"""What a verb is: words that the parser, the help and the completion need, and no more.

A verb is a class of options, which are fields of the same kind as settings and have flags and help
alike; since they are of one run, they have no variable and no file key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from outrider.core.fields import setting
from outrider.core.settings import DEFAULT_FILE, SETTINGS, Setting, describe

# All groups of settings.
ALL = ("program", "engine", "sampling")
# Settings that a run with many texts decides for all of them, or has no use for.
DECIDED = ("profile", "n", "logprobs", "top_logprobs", "round_events")
HELP_FLAGS = ("--help", "--help-all")
ASKS = ("-h", *HELP_FLAGS)
# A lone - means it.
STDIN_FLAG = "--stdin"
# Other words for the flag of a setting or of an option.
ALIASES = {"target": ("--model", "-m"), "prompt": ("-p",)}
CONFIG_TEXT = f"Read settings from this TOML or YAML file, not ./{DEFAULT_FILE}."
SET_TEXT = "Give any setting by its key, as in --set k=4; may be repeated."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a verb may be told. The class of a verb becomes a dataclass when it is first used: help
    names all verbs, and would wait for each of them."""

    verb: ClassVar[Verb]

    def __new__(cls, **_: object) -> Self:
        complete(cls)
        return object.__new__(cls)


@dataclass(frozen=True, slots=True)
class Argument:
    """A word that a verb may take without a flag; the last one of a verb may be `many` words. It
    may stand for the flag of a `setting`. An `optional` one is there where all others are."""

    name: str
    text: str
    choices: tuple[str, ...] = ()
    many: bool = False
    setting: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """`target` ("module:function") takes a `Call`; a verb with `parts` is only their common name.

    `settings` are the groups of settings whose flags it takes, save those that it decides itself
    (`without`); `options` is a dataclass of its own. `example` is a line that a user can paste.
    The front page lists it under `group`; without one it is an older or a seldom asked verb.
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
    parts: tuple[Verb, ...] = ()

    def named(self, words: Sequence[str], *, without: str = "") -> dict[str, str]:
        """`words` by the names of the arguments that they are, if none is for `without`."""
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
        """Every flag it takes."""
        own = [name for item in self.own_options() for name in setting_flags(item)]
        offered = [name for item in self.offered_settings() for name in setting_flags(item)]
        return [*own, *offered, *(["--config", "--set"] if self.settings else []), *HELP_FLAGS]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOption(Options):
    """Of every verb that a program may want to read."""

    json: bool = setting(False, "Print JSON, for programs to read.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOption(JsonOption):
    """Of verbs whose JSON may go to a file as well."""

    output: str | None = setting(None, "Also write the JSON object to this file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingOption(JsonOption):
    """Of verbs that count on prompts what is kept of drafts."""

    prompts: str | None = setting(
        None,
        "Your prompts, whose acceptance counts: question.jsonl, or a text file with one a line.",
    )
    domains: str = setting(
        "code,maths",
        "Shipped prompts instead, between commas: code, maths, conversation, summarization, echo, "
        "adversarial.",
    )
    fresh: bool = setting(False, "Measure anew what was measured before on this machine.")


# Without slots, for a class has but one base with some.
@dataclass(frozen=True, kw_only=True)
class StructureOption(Options):
    """Of verbs that write text: what the whole text must be, at most one of these."""

    schema: str | None = setting(
        None, "Write JSON of the JSON schema in this file; or the schema itself."
    )
    json_object: bool = setting(False, "Write a JSON object.")
    regex: str | None = setting(None, "Write a text that this regular expression matches.")
    choice: tuple[str, ...] = setting((), "Write one of these texts; may be repeated.")
    grammar: str | None = setting(
        None, "Write a text of the grammar in this file, Lark or GBNF; or the grammar itself."
    )


@dataclass(frozen=True, kw_only=True)
class ReplicasOption(Options):
    """Of verbs that several engines of one model may answer."""

    replicas: int = setting(
        1,
        "Run so many engines of the model, each a process with its GPU or its share of the cores.",
        minimum=1,
        maximum=64,
    )
    devices: str = setting(
        "", "Run an engine on each of these, between commas, as cuda:0,cuda:1 or cpu."
    )


AnyOptions = TypeVar("AnyOptions", bound=Options)
# By the words that call them.
KNOWN: dict[str, Verb] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def verb(
    paths: str, target: str, *arguments: Argument, **more: Any
) -> Callable[[type[AnyOptions]], type[AnyOptions]]:
    """Make a class of options the verb that `paths` between commas call and `target` runs:
    "module:function" of this package, or with the module's whole name of the lab. The docstring is
    the verb's text and, after an empty line, an example."""
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
    """Make the class of a verb and those that it inherits from dataclasses, if they are not yet."""
    for kind in reversed(options.__mro__):
        if "verb" in vars(kind) and "__dataclass_params__" not in vars(kind):
            dataclass(frozen=True, kw_only=True, repr=False, eq=False)(kind)


def setting_flags(item: Setting) -> list[str]:
    """A switch among the settings may be on by default, so it has a flag for either side."""
    if item.kind is bool and item.group:
        return [item.flag, f"--no-{item.flag[2:]}"]
    return [item.flag, *ALIASES.get(item.name, ())]
