"""The verbs of the command line: one module each, imported only when the verb runs.

Everything that help, parsing and completion need to know is in this table, so `--help` of any verb
costs little more than a bare Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.cli.options import ChatOptions, GenerateOptions, JsonOption, NoOptions
from outrider.core.settings import SETTINGS, Setting, describe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ALL_SETTINGS = ("program", "engine", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """The one word that a verb may take without a flag."""

    name: str
    text: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """`target` ("module:function") takes a `Call`; a verb with `parts` is only their common name.

    `settings` are the groups of settings whose flags it takes, `options` a dataclass of its own.
    `example` is a line that a user can paste.
    """

    name: str
    text: str
    example: str
    target: str = ""
    alias: str | None = None
    argument: Argument | None = None
    options: type[DataclassInstance] = NoOptions
    settings: tuple[str, ...] = ()
    parts: tuple[Verb, ...] = ()

    def own_options(self) -> list[Setting]:
        return list(describe(self.options, group="").values())

    def offered_settings(self) -> list[Setting]:
        return [item for item in SETTINGS.values() if item.group in self.settings]

    def flags(self) -> list[str]:
        """Every flag it takes."""
        own = [item.flag for item in self.own_options()]
        offered = [name for item in self.offered_settings() for name in setting_flags(item)]
        return [*own, *offered, *(["--config"] if self.settings else []), "--help"]


def setting_flags(item: Setting) -> list[str]:
    """A switch among the settings may be on by default, so it has a flag for either side."""
    return [item.flag, f"--no-{item.flag[2:]}"] if item.kind is bool else [item.flag]


VERBS = (
    Verb(
        name="generate",
        target="outrider.cli.generate:generate",
        text="Complete a prompt, coloured by where each token came from.",
        example='outrider generate "def quicksort(items):" --max-tokens 64',
        argument=Argument(name="PROMPT", text="Text to go on from."),
        options=GenerateOptions,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="chat",
        alias="run",
        target="outrider.cli.chat:chat",
        text="Talk to a model, with history and commands such as /stats.",
        example='echo "What is 3 plus 4?" | outrider chat --max-tokens 32',
        options=ChatOptions,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="models",
        text="List the models on this machine, or inspect one.",
        example="outrider models list",
        parts=(
            Verb(
                name="list",
                target="outrider.cli.models:list_models",
                text="List the embedded models and those in the local hub cache.",
                example="outrider models list --json",
                options=JsonOption,
            ),
            Verb(
                name="inspect",
                target="outrider.cli.models:inspect_model",
                text="Print a model's sizes from its config.json, without loading weights.",
                example="outrider models inspect outrider/embedded",
                argument=Argument(name="MODEL", text="A name from the list, a folder or a hub id."),
                options=JsonOption,
            ),
        ),
    ),
    Verb(
        name="pairs",
        target="outrider.cli.pairs:pairs",
        text="List known pairs of target and draft.",
        example="outrider pairs",
        options=JsonOption,
    ),
    Verb(
        name="doctor",
        target="outrider.cli.doctor:doctor",
        text="Say what this machine has, which kernels run, and what fits.",
        example="outrider doctor",
        options=JsonOption,
        settings=("program", "engine"),
    ),
    Verb(
        name="config",
        target="outrider.cli.config:config",
        text="Show every setting, its value, and where the value comes from.",
        example="outrider config --k 6",
        options=JsonOption,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="completion",
        target="outrider.cli.completion:completion",
        text="Print a completion script for bash, zsh or fish.",
        example="outrider completion bash",
        argument=Argument(name="SHELL", text="The shell.", choices=("bash", "zsh", "fish")),
    ),
)


def names(verbs: Sequence[Verb]) -> list[str]:
    """Every word that calls one of `verbs`."""
    return [name for verb in verbs for name in (verb.name, verb.alias) if name]


def find(verbs: Sequence[Verb], word: str) -> Verb | None:
    return next((verb for verb in verbs if word in (verb.name, verb.alias)), None)
