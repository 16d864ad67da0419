"""What a verb is: words that the parser, the help and the completion need, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.cli.options import NoOptions
from outrider.core.settings import SETTINGS, Setting, describe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A word that a verb may take without a flag; the last one of a verb may be `many` words."""

    name: str
    text: str
    choices: tuple[str, ...] = ()
    many: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """`target` ("module:function") takes a `Call`; a verb with `parts` is only their common name.

    `settings` are the groups of settings whose flags it takes, save those that it decides itself
    (`without`); `options` is a dataclass of its own.
    `example` is a line that a user can paste.
    """

    name: str
    text: str
    example: str
    target: str = ""
    alias: str | None = None
    arguments: tuple[Argument, ...] = ()
    options: type[DataclassInstance] = NoOptions
    settings: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    parts: tuple[Verb, ...] = ()

    def own_options(self) -> list[Setting]:
        return list(describe(self.options, group="").values())

    def offered_settings(self) -> list[Setting]:
        return [
            item
            for item in SETTINGS.values()
            if item.group in self.settings and item.name not in self.without
        ]

    def flags(self) -> list[str]:
        """Every flag it takes."""
        own = [item.flag for item in self.own_options()]
        offered = [name for item in self.offered_settings() for name in setting_flags(item)]
        return [*own, *offered, *(["--config"] if self.settings else []), "--help"]


def setting_flags(item: Setting) -> list[str]:
    """A switch among the settings may be on by default, so it has a flag for either side."""
    return [item.flag, f"--no-{item.flag[2:]}"] if item.kind is bool else [item.flag]
