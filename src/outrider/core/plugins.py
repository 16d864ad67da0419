"""Plugins of other packages: drafters, acceptance rules and controllers, found by entry points.

A package lists each in the group `outrider.drafters`, `outrider.rules` or `outrider.controllers`,
with the location of its description: a `DrafterKind` (drafter_kinds.py), a `RuleKind` or a
`ControllerKind`. The metadata of installed packages is read when a name is used that is not built
in, or when all are listed, and a package is imported when its name is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from outrider.core.errors import (
    CallbackError,
    ConfigError,
    OutriderError,
    did_you_mean,
    foreign,
    words_of,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger(__name__)


class Described(Protocol):
    """A description of a plugin. `builder` names the function that makes it ("module:function")."""

    @property
    def name(self) -> str: ...
    @property
    def builder(self) -> str: ...


Kind = TypeVar("Kind", bound=Described)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKind:
    """An acceptance rule as --sampler names it; `builder` takes a `Sampling` (sampling.py). A rule
    that is `exact` claims the target's own distribution, which `outrider verify` tests."""

    name: str
    builder: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerKind:
    """A controller as --controller names it; `builder` takes the largest `Budget` (budget.py)."""

    name: str
    builder: str


@cache
def installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of all packages, by name; several if packages use the same name."""
    from importlib.metadata import entry_points

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def construct(builder: str, *given: object) -> Any:
    """The result of calling the function that `builder` names with `given`."""
    module, _, function = builder.partition(":")
    return getattr(import_module(module), function)(*given)


@dataclass(frozen=True, slots=True)
class Plugins(Generic[Kind]):
    """Plugins of one `noun`, such as drafter. They cannot have a name that is `built_in`."""

    noun: str
    kind: type[Kind]
    built_in: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """Names of all plugins. Raises ConfigError for a name that is built in or used twice."""
        for name in self._installed:
            self._check_name(name)
        return tuple(self._installed)

    def load(self, name: str) -> Kind:
        """The description of a plugin. Raises ConfigError if there is none, or it is broken."""
        if name not in self._installed:
            known = (*self.built_in, *self._installed)
            raise ConfigError(f"unknown {self.noun} {name!r}.", hint=did_you_mean(name, known))
        self._check_name(name)
        entry = self._installed[name][0]
        kind = self._of_package(name, entry.load)
        if not isinstance(kind, self.kind) or kind.name != name:
            raise self._broken(name, f"{entry.value} is no {self.kind.__name__} of that name")
        return kind

    def package(self, name: str) -> str:
        """The package of a plugin, and its version."""
        return _package(self._installed[name][0])

    def every(self) -> list[Kind]:
        """Every plugin that loads. A broken one is left out, with a warning."""
        found: list[Kind] = []
        for name in self._installed:
            try:
                found.append(self.load(name))
            except ConfigError as error:
                _log.warning("%s %s", error, error.hint)
        return found

    def build(self, kind: Kind, *given: object) -> Any:
        """The result of its builder for `given`. Raises ConfigError if the package's code fails."""
        if kind.name in self.built_in:
            return construct(kind.builder, *given)
        return self._of_package(kind.name, lambda: construct(kind.builder, *given))

    def _of_package(self, name: str, made: Callable[[], Made]) -> Made:
        try:
            with foreign():
                return made()
        except CallbackError as error:
            raise self._broken(name, str(error)) from error
        except OutriderError:
            raise
        except Exception as error:
            raise self._broken(name, f"{type(error).__name__}: {words_of(error)}") from error

    def _broken(self, name: str, why: str) -> ConfigError:
        return ConfigError(
            f"{self.noun} {name!r} of package {self.package(name)} cannot be used: {why}.",
            hint=f"pip install --upgrade {_project(self._installed[name][0])}, or ask its author",
        )

    def _check_name(self, name: str) -> None:
        entries = self._installed[name]
        if name not in self.built_in and len(entries) == 1:
            return
        other = "built in" if name in self.built_in else f"that of {_package(entries[0])}"
        raise ConfigError(
            f"package {_package(entries[-1])} names a {self.noun} {name!r}, and that name is "
            f"{other}.",
            hint=f"pip uninstall {_project(entries[-1])}, or have it renamed there",
        )

    @property
    def _installed(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        return installed(f"outrider.{self.noun}s")


def _project(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else entry.dist.name


def _package(entry: EntryPoint) -> str:
    return f"{_project(entry)} {entry.dist.version}" if entry.dist else "unknown"
