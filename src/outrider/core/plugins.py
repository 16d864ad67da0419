"""Plugins: drafters, acceptance rules and controllers, found by the name of their group.

To add a drafter, put one module into `outrider/drafters`, with its class, the function that builds
it and its description KIND. Nothing else needs its name, which is that of the module. A drafter's
module imports no PyTorch before `build` is called, since servers and the command line read KIND.
Drafters in a folder of `outrider/plugins` (`heads/drafters`) and those for study, in
`outrider_lab/drafters`, are found in the same way.

Other packages list theirs as entry points of the group `outrider.drafters`, `outrider.rules` or
`outrider.controllers`, with the location of a description: a `DrafterKind`, a `RuleKind` or a
`ControllerKind`. The metadata of installed packages is read when a name is used that is not built
in, or when all are listed, and a package is imported when its name is used.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from outrider.core.errors import (
    CallbackError,
    ConfigError,
    ContractError,
    OutriderError,
    did_you_mean,
    foreign,
    words_of,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = logging.getLogger(__name__)
# Each folder of this package may have a package `drafters`, and modules of tables such as
# `families`, which import no PyTorch.
_PLUGINS = "outrider.plugins"


Kind = TypeVar("Kind", bound="DrafterKind | RuleKind | ControllerKind")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKind:
    """An acceptance rule as --sampler names it; `build` takes a `Sampling` (sampling.py). A rule
    that is `exact` claims the target's own distribution, which `outrider verify` tests."""

    name: str
    build: Callable[[Any], Any]
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerKind:
    """A controller as --controller names it; `build` takes the largest `Budget` (draft.py)."""

    name: str
    build: Callable[[Any], Any]


@cache
def install_command(extra: str) -> str:
    """The command that installs what `extra` of this package asks for, from the package's own
    metadata: it works too where no index has Outrider itself."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("outrider") or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in a checkout"

    def wanted(extra: str) -> Iterator[str]:
        for line in lines:
            if re.search(rf"""extra == ["']{extra}["']""", line):
                name = line.partition(";")[0].strip()
                own = re.fullmatch(r"outrider\[(.+)\]", name)
                yield from chain.from_iterable(map(wanted, own[1].split(","))) if own else (name,)

    return f"pip install {shlex.join(wanted(extra))}"


@cache
def installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of all packages, by name; several if packages use the same name."""
    from importlib.metadata import entry_points

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


@cache
def roots() -> tuple[str, ...]:
    """Packages that may have plugins: the lab if it is installed, the program's folders of plugins,
    and the program."""
    folders = iter_modules(import_module(_PLUGINS).__path__)
    own = [f"{_PLUGINS}.{one.name}" for one in folders if one.ispkg]
    return (*(["outrider_lab"] if find_spec("outrider_lab") else ()), *own, "outrider")


@cache
def modules_of(noun: str) -> Mapping[str, str]:
    """Modules of plugins of this `noun` by the plugin's name, sorted. Packages are listed, and no
    module is imported. A name has `-` where that of the module has `_`."""
    found = {
        one.name.replace("_", "-"): f"{package}.{one.name}"
        for package in (f"{root}.{noun}s" for root in roots())
        if find_spec(package)
        for one in iter_modules(import_module(package).__path__)
        if not one.ispkg
    }
    return dict(sorted(found.items()))


def plugin_modules(name: str) -> list[Any]:
    """The modules called `name` in the folders of plugins, in the order of folders."""
    found = [f"{root}.{name}" for root in roots() if root.startswith(f"{_PLUGINS}.")]
    return [import_module(module) for module in found if find_spec(module)]


@dataclass(frozen=True, slots=True)
class Plugins(Mapping[str, Kind]):
    """Plugins of one `noun`, such as drafter. As a mapping it has the descriptions in the modules
    of the program and of the lab: the KIND of each, by name, which is imported when it is read.
    Names of `first` come first, then others in their order; those of other packages differ from
    both."""

    noun: str
    kind: type[Kind]
    first: tuple[str, ...]
    _added: dict[str, Kind] = field(default_factory=dict[str, Kind])

    def __getitem__(self, name: str) -> Kind:
        """Description of `name`. Raises ContractError for a module without a KIND of its name."""
        module = import_module(modules_of(self.noun)[name])
        kind = getattr(module, "KIND", None)
        if not isinstance(kind, self.kind) or kind.name != name:
            raise ContractError(f"{module.__name__}.KIND is no {self.kind.__name__} {name!r}")
        return kind

    def __contains__(self, name: object) -> bool:
        return name in modules_of(self.noun)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.built_in if name in self)

    def __len__(self) -> int:
        return len(modules_of(self.noun))

    @property
    def built_in(self) -> tuple[str, ...]:
        """Names of `first`, then those of other modules of ours."""
        return tuple(dict.fromkeys((*self.first, *modules_of(self.noun))))

    def names(self) -> tuple[str, ...]:
        """Names of all plugins. Raises ConfigError for a name that is built in or used twice."""
        for name in self._installed:
            self._check_name(name)
        return (*self._installed, *self._added)

    def load(self, name: str) -> Kind:
        """The description of a plugin. Raises ConfigError if there is none, or it is broken."""
        if name in self._added:
            return self._added[name]
        if name not in self._installed:
            known = (*self.built_in, *self._installed)
            raise ConfigError(f"unknown {self.noun} {name!r}.", hint=did_you_mean(name, known))
        self._check_name(name)
        entry = self._installed[name][0]
        kind = self._of_package(name, entry.load)
        if not isinstance(kind, self.kind) or kind.name != name:
            raise self._broken(name, f"{entry.value} is no {self.kind.__name__} of that name")
        return kind

    def add(self, kind: Kind) -> None:
        """Add a plugin for this process; it replaces one of the same name that was added."""
        self._added[kind.name] = kind

    def package(self, name: str) -> str:
        """The package of a plugin, and its version."""
        entries = self._installed.get(name, ())
        return _package(entries[0]) if entries else "a function of this process"

    def every(self) -> list[Kind]:
        """Every plugin that loads. A broken one is left out, with a warning."""
        found = [*self._added.values()]
        for name in self._installed:
            try:
                found.append(self.load(name))
            except ConfigError as error:
                _log.warning("%s %s", error, error.hint)
        return found

    def build(self, kind: Kind, *given: object) -> Any:
        """The result of its `build` for `given`. Raises ConfigError if a package's code fails."""
        if kind.name in self.built_in or kind.name in self._added:
            return kind.build(*given)
        return self._of_package(kind.name, lambda: kind.build(*given))

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
    def _group(self) -> str:
        return f"outrider.{self.noun}s"

    @property
    def _installed(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        return installed(self._group)


def _project(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else entry.dist.name


def _package(entry: EntryPoint) -> str:
    return f"{_project(entry)} {entry.dist.version}" if entry.dist else "unknown"


# The source of drafts: the text and tables alone, a draft model, heads of the drafter's own kind, a
# copy of the target, or anything that --draft names.
Source = Literal["text", "model", "heads", "copy", "draft"]
# Inputs of a drafter in addition to the text: the texts of a corpus, the request's prediction, a
# translator between two vocabularies, the states of the target's last layer.
Reads = Literal["corpus", "prediction", "translator", "last layer"]

AUTO = "auto"
OFF = "none"
# The source that --draft names unless it names heads, and the drafter that reads it.
MODEL = "model"
# The meaning of auto where no model or heads were found; and its meaning where a model or heads
# were found without being named: these then draft together with look-ups.
WITHOUT_DRAFT, WITH_FOUND = "suffix", "portfolio"
# The drafter of all look-ups, and those of its members that a request may choose.
LOOKUP, LOOKUPS = "lookup", ("suffix", "ngram", "prediction")
# Look-ups that depend on the request's own text alone.
OWN_TEXT = "ngram"
# The copy of the target that auto may make.
COPY = "quantised-self"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFormat:
    """Marks of a folder of heads: one of the `model_types` or `keys` of its config.json, or a
    `name` within its architectures; `tensors` identify a checkpoint whose config says nothing else.
    `window_key` names the length of the texts that the heads were trained on, `layers_key` the
    number of layers of heads that have several. Heads with `three_layers` may read three layers of
    the target, and those that `spread` as many as they have layers themselves. Heads without an
    `arena` store no keys and values. A format that `extends` another one has its marks as well, and
    then the keys `also` suffice."""

    model_types: tuple[str, ...]
    keys: tuple[str, ...] = ()
    name: str = ""
    tensors: tuple[str, ...] = ()
    window_key: str = ""
    layers_key: str = ""
    three_layers: bool = False
    spread: bool = False
    arena: bool = True
    extends: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterKind:
    """A drafter as --drafter names it; `build` makes it from a BuildContext.

    A drafter that `branches` can draft trees. It cannot draft without `must_have`, a part of
    `reads`. `settings` are engine settings that affect only the drafters that list them. A drafter
    that `drafts_ahead` can draft before a verdict. `needs_words` is the source in words,
    `not_in_process` a part that cannot live in a process of its own. `without_draft` is the drafter
    that stands in where --draft names nothing; with `in_target` the target's own files may hold its
    heads. A copy of the target has `fewer_bits`, or fewer layers. A drafter that `scores` gives the
    acceptance probability of each of its tokens. With `keeps_apart` no draft depends on the texts
    of other requests.

    Until it has run, a share `accepted` of first tokens is assumed to be accepted, later ones
    alike, and a share `drafted` of rounds to have a draft: round numbers. One step of a drafter
    that drafts `at_once` has all tokens. `advice` says when to try one that needs no file.
    """

    name: str
    build: Callable[[Any], Any]
    source: Source = "text"
    branches: bool = False
    reads: tuple[Reads, ...] = ()
    must_have: tuple[Reads, ...] = ()
    settings: tuple[str, ...] = ()
    drafts: bool = True
    drafts_ahead: bool = False
    needs_words: str = ""
    not_in_process: str = ""
    without_draft: str = ""
    in_target: bool = False
    fewer_bits: bool = False
    scores: bool = False
    keeps_apart: bool = False
    accepted: float = 0.5
    drafted: float = 1.0
    at_once: bool = False
    advice: str = ""
    format: HeadFormat | None = None

    @property
    def folder(self) -> str | None:
        """Content of a folder for this drafter: a model, or heads of its kind."""
        return {"model": MODEL, "heads": self.name}.get(self.source)

    @property
    def looks_up(self) -> bool:
        """True if it needs no model, so that any engine can use it for a request."""
        return self.source == "text" and "last layer" not in self.reads

    @property
    def reads_draft(self) -> bool:
        """True if --draft names its source."""
        return self.source in ("model", "heads", "draft")

    @property
    def has_process(self) -> bool:
        """True if it may live in a process of its own."""
        return "drafter_home" in self.settings


_FIRST = (AUTO, OFF, MODEL, WITHOUT_DRAFT, OWN_TEXT, WITH_FOUND, COPY)
KINDS = Plugins("drafter", DrafterKind, _FIRST)
# Sources of drafters of other packages; formats of heads and copies are known by name.
_OUTSIDE_SOURCES = ("text", "model")


def drafter_named(name: str) -> DrafterKind:
    """The drafter called `name`. Raises ConfigError for an unknown name, or a broken package."""
    if name in KINDS:
        return KINDS[name]
    kind = KINDS.load(name)
    if kind.source not in _OUTSIDE_SOURCES:
        raise ConfigError(
            f"drafter {name!r} says that its source is {kind.source!r}, which no package can add.",
            hint=f"its description may say {' or '.join(_OUTSIDE_SOURCES)}",
        )
    return kind


def every_drafter() -> list[DrafterKind]:
    """Every drafter: built-in ones, then those of other packages."""
    return [*KINDS.values(), *KINDS.every()]
