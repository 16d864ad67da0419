"""One registry of settings, derived from the fields of the configuration dataclasses.

A setting is written once, as a field with its help, bounds and choices. From that follow its flag
(`--max-tokens`), its variable (`OUTRIDER_MAX_TOKENS`), its key in `outrider.toml` or a YAML run
file (`max_tokens`) and its row in the settings page. Layers are given strongest first: command
line, environment, file; a setting that no layer names has its default. Each value has its origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from outrider.core.config import EngineConfig
from outrider.core.env import PREFIX
from outrider.core.errors import ConfigError, hint_for, nearest, reason_of
from outrider.core.fields import (
    KINDS,
    WHOLE,
    Meta,
    Value,
    check_fields,
    check_mapping,
    check_value,
    default_of,
    meta_of,
    setting,
    shown,
)
from outrider.core.files import FileKind, read_text
from outrider.core.params import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_CHARS = 256 << 10
# Options that are lists nest deepest: a mapping, of lists, in the file's own mapping.
_MAX_LEVELS = 4
_MAX_EVENTS = 20_000
# tomllib takes quadratic time in the parts of a dotted key.
_MAX_DOTS, _BETWEEN_KEYS = 256, re.compile(r"[\n,=\[\]{}]")
_MAX_REASON = 300
_NOTHING = ("", "~", "null", "Null", "NULL")


def read_settings(path: Path) -> dict[str, object]:
    """Values of the file `path`, by key. Raises ConfigError if it cannot be read or understood.

    A file from a stranger must not exhaust the machine, so all is read within bounds. YAML must be
    a mapping of few levels: anchors, aliases, tags and further documents are refused, and a scalar
    without quotes stays the text that was written. So `no`, `1:30` and `010` never become a
    boolean, a duration or an octal number.
    """
    readers = {".toml": _from_toml, ".yaml": _from_yaml, ".yml": _from_yaml}
    if path.suffix not in readers:
        raise ConfigError(
            f"{path}: a settings file ends in .toml, .yaml or .yml.",
            hint="rename it; `outrider config` lists every setting",
        )
    text = _text(path)
    try:
        return readers[path.suffix](text)
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:  # noqa: BLE001 - parsers raise their own errors for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
    raise ConfigError(
        f"{path}: {reason[:_MAX_REASON]}", hint="a settings file has `setting: value` lines"
    ) from None


def _text(path: Path) -> str:
    try:
        text = read_text(path, FileKind.SETTINGS)
    except OSError as error:
        raise ConfigError(f"{path}: {reason_of(error)}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from None
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"{path} has more than {_MAX_CHARS} characters, too many for settings.")
    return text


def _from_toml(text: str) -> dict[str, object]:
    import tomllib

    if any(part.count(".") > _MAX_DOTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(f"a key has more than {_MAX_DOTS} parts")
    return tomllib.loads(text)


def _from_yaml(text: str) -> dict[str, object]:
    import yaml

    loader: Any = yaml.SafeLoader(text)
    events = _bounded(iter(loader.get_event, None))
    next(events)
    first = next(events)
    if isinstance(first, yaml.StreamEndEvent):
        return {}
    value = _node(next(events), events, 1)
    next(events)
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise ValueError("it holds several documents instead of one")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("expected `setting: value` lines")
    return cast("dict[str, object]", value)


def _bounded(events: Iterator[Any]) -> Iterator[Any]:
    for number, event in enumerate(events):
        if number > _MAX_EVENTS:
            raise ValueError(f"it has more than {_MAX_EVENTS} entries")
        yield event


def _node(event: Any, events: Iterator[Any], level: int) -> object:
    """The value that begins with `event`; its parts are taken from `events`."""
    import yaml

    where = f"line {event.start_mark.line + 1}"
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise ValueError(f"{where}: anchors and aliases are not read; write the value out")
    if event.tag is not None:
        raise ValueError(f"{where}: tags are not read; leave {event.tag[:40]!r} out")
    if isinstance(event, yaml.ScalarEvent):
        plain = event.style is None
        return None if plain and event.value in _NOTHING else event.value
    if level > _MAX_LEVELS:
        raise ValueError(f"{where}: nested too deeply")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[object] = []
        while not isinstance(one := next(events), yaml.SequenceEndEvent):
            items.append(_node(one, events, level + 1))
        return items
    entries: dict[str, object] = {}
    while not isinstance(one := next(events), yaml.MappingEndEvent):
        key = _node(one, events, level + 1)
        if not isinstance(key, str) or key in entries:
            at = f"line {one.start_mark.line + 1}"
            raise ValueError(f"{at}: a key that is no text, or is there twice")
        entries[key] = _node(next(events), events, level + 1)
    return entries


Group = TypeVar("Group", bound="DataclassInstance")

DEFAULT = "default"
DEFAULT_FILE = "outrider.toml"
COLORS = ("auto", "always", "never")
LOG_LEVELS = ("error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")
# Characters of an unknown name that are compared with known ones.
_MOST_COMPARED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramConfig:
    """Settings of the command line other than those of the engine and of sampling."""

    target: str = setting(
        "outrider/embedded",
        "Model that writes the text: a folder, a GGUF file or a hub id, or the embedded one.",
        harmless=("outrider/embedded",),
    )
    draft: str = setting(
        "auto",
        "Model or heads that draft, several of different kinds with commas between them; "
        "quantised-self and mtp among several are the target's own. auto is its known partner; "
        "none turns this off.",
        harmless=("auto", "none"),
    )
    color: str = setting(
        "auto", "Colour tokens by origin; auto does so on a terminal.", choices=COLORS
    )
    log_level: str = setting("warning", "Least severe events to log.", choices=LOG_LEVELS)
    log_format: str = setting(
        "text", "Format of logged events; json is one object a line.", choices=LOG_FORMATS
    )
    debug: bool = setting(False, "Show the traceback of an error.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing a user may decide; `kind` is the Python type of its value."""

    name: str
    kind: type
    default: Value | None
    meta: Meta
    group: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        """The word that stands for a value in help."""
        return "FILE" if self.name == "output" else self.name.rsplit("_", 1)[-1].upper()

    @property
    def accepts(self) -> str:
        """The form of a value, for help and documents."""
        if self.meta.choices:
            return " | ".join(self.meta.choices)
        low, high = self.meta.minimum, self.meta.maximum
        bounds = "" if low is None and high is None else f" {_bound(low)}..{_bound(high)}"
        noun = KINDS[self.kind].noun.removeprefix("an ").removeprefix("a ")
        return f"{noun}{bounds}{_limits(self.meta)}"


@dataclass(frozen=True, slots=True)
class Given:
    """A value as a layer gives it, still text or untyped, and its origin."""

    value: object
    origin: str


Layer: TypeAlias = Mapping[str, Given]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The value of the strongest layer, and its origin (`DEFAULT` if no layer has one)."""

    setting: Setting
    value: Value | None
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A value for every setting."""

    chosen: Mapping[str, Chosen]

    def engine(self) -> EngineConfig:
        return self._build(EngineConfig)

    def sampling(self) -> SamplingParams:
        return self._build(SamplingParams)

    def repeatable_sampling(self) -> SamplingParams:
        """Sampling parameters with seed 0 unless one was chosen: studies and proofs repeat."""
        return self.sampling().seeded(0)

    def program(self) -> ProgramConfig:
        return self._build(ProgramConfig)

    def decided(self) -> dict[str, Value | None]:
        """The settings without their default origin, for a run's record."""
        return {name: item.value for name, item in self.chosen.items() if item.origin != DEFAULT}

    def _build(self, group: type[Group]) -> Group:
        own = (one for one in self.chosen.values() if GROUPS[one.setting.group] is group)
        return group(**{one.setting.name: one.value for one in own})


def resolve(*layers: Layer) -> Resolved:
    """Merge layers, the strongest first. Raises ConfigError, naming the origin, for a bad value.

    Values that a stronger layer overrides are checked as well: a mistake in a file is found
    when it is made, not when the flag that hid it goes away.
    """
    chosen = {name: Chosen(item, item.default, origin=DEFAULT) for name, item in SETTINGS.items()}
    for layer in reversed(layers):
        for name, given in layer.items():
            item = SETTINGS[name]
            chosen[name] = Chosen(item, typed(item, given), given.origin)
    return Resolved(chosen)


def typed(item: Setting, given: Given) -> Value:
    """`given` as the setting's type, within its bounds."""
    try:
        value = KINDS[item.kind].read(given.value)
    except (ValueError, OverflowError, RecursionError):
        expected = KINDS[item.kind].noun
        usual = "" if item.default in (None, "", ()) else f"{item.default!s}, or "
        raise ConfigError(
            f"{given.origin} must be {expected}, got {shown(given.value)}.",
            hint=f"{usual}leave it out",
        ) from None
    if item.kind is Mapping:
        check_mapping(given.origin, value, item.meta)
    else:
        check_value(given.origin, value, item.meta)
    return value


def command_line(values: Mapping[str, object]) -> Layer:
    """The layer of the argument parser's values, by setting name."""
    return {name: Given(value, SETTINGS[name].flag) for name, value in values.items()}


def environment(variables: Mapping[str, str]) -> Layer:
    """The layer of OUTRIDER_ variables. Raises ConfigError if one names no setting."""
    by_variable = {item.variable: item.name for item in SETTINGS.values()}
    _refuse_unknown(variables, by_variable, "unknown variable")
    return {by_variable[name]: Given(value, name) for name, value in variables.items()}


def file(path: Path) -> Layer:
    """The layer of a TOML or YAML file. Raises ConfigError if it cannot be read or understood."""
    data = read_settings(path)
    _refuse_unknown(data, SETTINGS, f"{path}: unknown key")
    return {name: Given(value, f"{path}:{name}") for name, value in data.items()}


def default_file(folder: Path) -> Layer:
    """The layer of `outrider.toml` in `folder`, if it is there. Another user may have written it,
    so ConfigError is raised for settings that only a file named by the user may have."""
    path = folder / DEFAULT_FILE
    if not path.is_file():
        return {}
    layer = file(Path(DEFAULT_FILE) if folder == Path() else path)
    for name, given in layer.items():
        item = SETTINGS[name]
        harmless = item.meta.harmless
        if harmless is not None and typed(item, given) not in harmless:
            raise ConfigError(
                f"{given.origin} = {shown(given.value)} counts only in a file that you name: it "
                "chooses models, files, processes or a lossy rule.",
                hint=f"--config {path} if you wrote that, {item.flag} on the command line, or take "
                "the line out",
            )
    return layer


def _refuse_unknown(names: Iterable[str], known: Iterable[str], problem: str) -> None:
    known_names = list(known)
    for name in names:
        if name not in known_names:
            every = "`outrider config` lists every setting."
            hint = hint_for(name) or nearest(name[:_MOST_COMPARED], known_names, every)
            raise ConfigError(f"{problem} {shown(name)}.", hint=hint)


def _bound(value: float | None) -> str:
    names: dict[float, str] = {WHOLE: "2^31-1", 2**63 - 1: "2^63-1"}
    return "" if value is None else names.get(value) or f"{value:g}"


def _limits(meta: Meta) -> str:
    """Limits of the number and length of entries, as in ", 16 at most, of 256 bytes"."""
    count = f", {meta.count.most} at most" if meta.count else ""
    return count + (f", of {meta.each.most} bytes" if meta.each else "")


GROUPS: Mapping[str, type[DataclassInstance]] = {
    "program": ProgramConfig,
    "engine": EngineConfig,
    "sampling": SamplingParams,
}


def describe(config: type[DataclassInstance], *, group: str) -> dict[str, Setting]:
    """The fields of a dataclass as settings; a field that may be None has no other default."""
    hints, found = get_type_hints(config), dict[str, Setting]()
    for item in fields(config):
        if meta_of(item).per_request:
            continue
        hint = hints[item.name]
        if NoneType in get_args(hint):
            hint = next(kind for kind in get_args(hint) if kind is not NoneType)
        meta = meta_of(item)
        kind = meta.kind or get_origin(hint) or hint
        found[item.name] = Setting(item.name, kind, default_of(item), meta, group=group)
    return found


def _registry() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for group, config in GROUPS.items():
        described = describe(config, group=group)
        if found.keys() & described.keys():
            raise TypeError(f"settings of {group} have the names of others")
        found |= described
    return found


SETTINGS: Mapping[str, Setting] = _registry()
