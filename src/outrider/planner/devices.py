"""Device sheets: peak bandwidth, FLOPs and power of machines, for planning without the machine.

Peaks are those of the makers' data sheets, without sparsity. `bandwidth_share` and `flops_share`
are the shares that programs reach: 0.9 and 0.8 for recent cards with good kernels (an H200 then
meets both limits at 183 rows of bfloat16). `row_tile` is the number of rows of a matrix unit,
`overhead` the seconds of a pass that nothing else explains. A user's own sheet is a JSON or YAML
file with the same names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.files import FileKind, read_json
from outrider.core.settings import read_settings

DTYPES = ("float32", "bfloat16", "int8")
_FILE_KINDS = (".json", ".yaml", ".yml")
_SHOW = "see an example: docs/algorithms/planner.md"


@dataclass(frozen=True, slots=True)
class Power:
    """Static watts, joules per byte moved and joules per FLOP.

    No data sheet gives the energy of a byte or an operation. A quarter of the rated watts is
    assumed to flow at all times; of the rest memory at full speed takes half and arithmetic at full
    rate all. So joules compare decoding variants on one machine; they are not measurements.
    """

    static_watts: float
    byte_joules: float
    flop_joules: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """A device's peak bandwidth, in bytes a second, and peak `flops`, in operations a second by
    dtype. `p_norm` says how sharply a pass turns from one limit to the other."""

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory_bytes: int
    row_tile: int = 16
    bandwidth_share: float = 0.9
    flops_share: float = 0.8
    overhead: float = 0.0
    p_norm: float = 6.0
    power: Power | None = field(default=None)

    @property
    def is_cpu(self) -> bool:
        """True for the name of a CPU. Only CPUs compute on the blocks of GGUF files directly."""
        return self.name.startswith("cpu")

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth that programs reach."""
        return self.bandwidth * self.bandwidth_share

    def flops_per_second(self, dtype: str) -> float:
        """Return the rate that programs reach. Raises ConfigError for an unlisted dtype."""
        if dtype not in self.flops:
            raise ConfigError(
                f"the sheet of {self.name} has no rate of {dtype}.",
                hint=did_you_mean(dtype, self.flops),
            )
        return self.flops[dtype] * self.flops_share


def _sheets() -> Iterator[DeviceSheet]:
    """Yield the sheets of devices.json, which have rated watts instead of the power."""
    found = json.loads(files("outrider.planner").joinpath("devices.json").read_text("utf-8"))
    for name, sheet in found.items():
        watts, flops = sheet.pop("watts"), sheet["flops"]["bfloat16"]
        sheet.pop("note", None)
        free = 0.75 * watts
        power = Power(0.25 * watts, 0.5 * free / sheet["bandwidth"], free / flops)
        yield DeviceSheet(name=name, power=power, **sheet)


SHEETS: Mapping[str, DeviceSheet] = {sheet.name: sheet for sheet in _sheets()}


def device_sheet(name: str) -> DeviceSheet:
    """Return a sheet by name or from a file. Raises ConfigError if unknown or damaged."""
    path = Path(name)
    if path.suffix.lower() in _FILE_KINDS:
        return _checked(_read(path), path)
    if name.lower() not in SHEETS:
        raise ConfigError(
            f"no device sheet is called {name!r}.",
            hint=f"{did_you_mean(name, SHEETS)} Or name a JSON or YAML file with a sheet of yours.",
        )
    return SHEETS[name.lower()]


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix.lower() != ".json":
            return read_settings(path)
        record = read_json(path, FileKind.SHEET)
    except OSError as error:
        raise ConfigError(f"cannot read the device sheet {path}: {error}.", hint=_SHOW) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no device sheet: {error}.", hint=_SHOW) from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is no device sheet: it has no names with values.", hint=_SHOW)
    return cast("dict[str, Any]", record)


def _checked(record: Mapping[str, Any], path: Path) -> DeviceSheet:
    given = {"name": path.stem, **record}
    _no_strangers(given, {one.name for one in fields(DeviceSheet)}, path)
    missing = [name for name in ("bandwidth", "flops", "memory_bytes") if name not in given]
    if missing:
        raise ConfigError(f"the device sheet {path} lacks {', '.join(missing)}.", hint=_SHOW)
    name, flops, power = given.pop("name"), given.pop("flops"), given.pop("power", None)
    rates = _numbers(_table(flops, "flops", set(DTYPES), path), path)
    numbers: dict[str, Any] = _numbers(given, path)
    for key in ("bandwidth_share", "flops_share"):
        if numbers.get(key, 0) > 1:
            raise ConfigError(f"{key} of the device sheet {path} is above 1.", hint=_SHOW)
    for key in numbers.keys() & {"memory_bytes", "row_tile"}:
        numbers[key] = max(1, int(numbers[key]))
    found = None
    if power is not None:
        names = {one.name for one in fields(Power)}
        asked = dict.fromkeys(names) | _table(power, "power", names, path)
        found = Power(**_numbers(asked, path, prefix="power."))
    return DeviceSheet(name=str(name), flops=rates, power=found, **numbers)


def _table(value: Any, key: str, known: set[str], path: Path) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{key} of the device sheet {path} has no values by name.", hint=_SHOW)
    found = cast("dict[str, Any]", value)
    _no_strangers(found, known, path)
    return found


def _no_strangers(record: Mapping[str, Any], known: set[str], path: Path) -> None:
    for name in record:
        if name not in known:
            raise ConfigError(
                f"the device sheet {path} has the unknown field {name!r}.",
                hint=did_you_mean(str(name), known),
            )


def _numbers(record: Mapping[str, Any], path: Path, *, prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record: each above 0, or from 0 up for those that may be 0."""
    found: dict[str, float] = {}
    for key, value in record.items():
        number = value
        with suppress(ValueError):
            # YAML takes 1e12 for a word, because it has no point.
            number = float(value) if isinstance(value, str) else value
        good = isinstance(number, int | float) and not isinstance(number, bool)
        may_be_0 = bool(prefix) or key == "overhead"
        if not (good and math.isfinite(number) and (number > 0 or (may_be_0 and number == 0))):
            wanted = "from 0 up" if may_be_0 else "above 0"
            raise ConfigError(
                f"{prefix}{key} of the device sheet {path} is {number!r}; it must be a number "
                f"{wanted}.",
                hint=_SHOW,
            )
        found[key] = float(number)
    return found
