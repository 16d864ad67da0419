"""Device sheets of users, and what a sheet implies: calibrations, limits of a device, energy.

The seconds of a pass are those of the roofline model in `estimate/forecast.py`, which has the
shipped sheets too. A user's own sheet is a JSON or YAML file with the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.files import FileKind, read_json
from outrider.core.settings import read_settings
from outrider.core.spec import ModelSpec
from outrider.estimate.cost import Curve
from outrider.estimate.forecast import (
    SCATTER,
    DeviceSheet,
    Mixture,
    PassWork,
    Power,
    context_seconds,
    mixture_of,
    row_seconds,
    rows_seconds,
    sheets,
)
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PassCosts, RoundStats
from outrider_lab.planner.rounds import DecodeLoad

DTYPES = ("float32", "bfloat16", "int8")
_FILE_KINDS = (".json", ".yaml", ".yml")
_SHOW = "see an example: docs/algorithms/planner.md"


def device_sheet(name: str) -> DeviceSheet:
    """Return a sheet by name or from a file. Raises ConfigError if unknown or damaged."""
    path = Path(name)
    if path.suffix.lower() in _FILE_KINDS:
        return _checked(_read(path), path)
    shipped = sheets()
    if name.lower() not in shipped:
        raise ConfigError(
            f"no device sheet is called {name!r}.",
            hint=f"{did_you_mean(name, shipped)} Or name a JSON or YAML file with your sheet.",
        )
    return shipped[name.lower()]


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


# Rows of a pass and sequences of a draft for which seconds are computed; between them lines.
_MOST_ROWS = 4096
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DEEPEST = 64


def pass_seconds(work: PassWork, sheet: DeviceSheet, load: DecodeLoad, rows_each: int) -> float:
    """Return the seconds of a pass over `rows_each` rows of every sequence."""
    num_rows = load.batch * rows_each
    reading, attending = context_seconds(work, sheet)
    context = load.context * (load.batch * reading + num_rows * attending)
    return rows_seconds(work, sheet, num_rows) + context


def ridge_rows(work: PassWork, sheet: DeviceSheet) -> float:
    """Return R*, up to which a pass waits for memory; for a mixture with all experts read, as so
    many rows read them.

    R* = FLOPs x bytes a weight / (2 bandwidth): below it verifying is nearly free.
    """
    return work.spec.weight_bytes / sheet.bytes_per_second / row_seconds(work, sheet)


def critical_context(spec: ModelSpec, batch: int) -> float:
    """Return S*, in tokens a sequence; infinite for a model without keys and values.

    S* = W / (b kv): beyond it a drafter that reads little of the keys and values gains at any batch
    (MagicDec, Chen et al. 2024, arXiv 2408.11049).
    """
    kept = batch * spec.kv_bytes_per_token
    return spec.weight_bytes / kept if kept else math.inf


def calibrate(
    target: ModelSpec,
    draft: ModelSpec | None,
    sheet: DeviceSheet,
    *,
    draft_sheet: DeviceSheet | None = None,
) -> Calibration:
    """Return the calibration that measuring both models on that device would give if it performed
    as its sheet says; the draft model on `draft_sheet` if it has a device of its own. Acceptance
    counts are empty. Raises ConfigError if a sheet lacks the model's dtype."""
    drafters = () if draft is None else (model_costs(draft, draft_sheet or sheet),)
    apart = "" if draft_sheet is None else f", drafting on {draft_sheet.name}"
    return Calibration(
        machine=sheet.name + apart,
        target_name=target.name,
        target=pass_costs(PassWork(target), sheet),
        drafters=drafters,
        scatter=SCATTER,
        memory_bytes=target.weight_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token,
        provenance={"sheet": sheet.name, "measured": False},
    )


def pass_costs(work: PassWork, sheet: DeviceSheet) -> PassCosts:
    points = [(float(rows), rows_seconds(work, sheet, rows)) for rows in _row_counts(sheet)]
    reading, attending = context_seconds(work, sheet)
    return PassCosts(_growing(points), per_context=reading, per_read=attending)


def model_costs(draft: ModelSpec, sheet: DeviceSheet) -> DrafterCosts:
    """Return the costs of a draft model: a pass a token, over a row of each sequence."""
    work = PassWork(draft)
    curves: list[tuple[int, Curve]] = []
    for batch in _BATCHES:
        once = rows_seconds(work, sheet, batch)
        curves.append((batch, Curve(((1.0, once), (float(_DEEPEST), _DEEPEST * once)))))
    return DrafterCosts(
        "model",
        tuple(curves),
        per_context=sum(context_seconds(work, sheet)),
        memory_bytes=draft.weight_bytes,
        kv_bytes_per_token=draft.kv_bytes_per_token,
    )


def _row_counts(sheet: DeviceSheet) -> list[int]:
    """Return small counts, and both sides of edges of tiles, with growing distances."""
    counts = set(range(1, min(17, _MOST_ROWS)))
    edge = sheet.row_tile
    while edge < _MOST_ROWS:
        counts |= {edge, edge + 1}
        edge += sheet.row_tile * max(1, edge // (8 * sheet.row_tile))
    return sorted({*counts, _MOST_ROWS})


def _growing(points: Sequence[tuple[float, float]]) -> Curve:
    """Return a curve that never falls: rounding may let a sum fall by a bit."""
    most, grown = 0.0, list[tuple[float, float]]()
    for rows, seconds in points:
        most = max(most, seconds)
        grown.append((rows, most))
    return Curve(tuple(grown))


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of a plan's devices. `draft` is the draft model, None for a drafter without one;
    `draft_power` that of a device of its own, which idles while nothing is drafted."""

    power: Power
    target: PassWork
    draft: PassWork | None = None
    draft_power: Power | None = None


@dataclass(frozen=True, slots=True)
class Joules:
    """Joules of a round: static power during its time, bytes moved, and arithmetic."""

    static: float
    moving: float
    counting: float

    @property
    def total(self) -> float:
        return self.static + self.moving + self.counting


def round_joules(
    energy: Energy, load: DecodeLoad, stats: RoundStats, seconds: float, *, depth: int
) -> Joules:
    """Return the joules of rounds of `seconds` with drafts `depth` deep; 0 for plain ones.

        J = (static watts x T_round + byte joules x bytes + FLOP joules x FLOPs) / tokens

    For one sequence bytes dominate, and speculation reads weights once for E tokens: joules fall
    nearly as seconds do. Refused tokens cost arithmetic as well, and a drafter its own bytes, so
    the best K by joules is at most the best by time, unless arithmetic bounds the pass.
    """
    drafted = stats.drafting * stats.num_drafted if depth else 0.0
    moved, counted = _pass(energy.target, load, load.batch * (1 + drafted))
    power = energy.power
    static = power.static_watts * seconds
    moving, counting = power.byte_joules * moved, power.flop_joules * counted
    if energy.draft is not None and drafted:
        steps = stats.drafting * depth
        once, each = _pass(energy.draft, load, load.batch)
        drafts_with = energy.draft_power or power
        moving += drafts_with.byte_joules * steps * once
        counting += drafts_with.flop_joules * steps * each
        if energy.draft_power is not None:
            static += energy.draft_power.static_watts * seconds
    return Joules(static, moving, counting)


def joules_a_token(
    energy: Energy, load: DecodeLoad, stats: RoundStats, seconds: float, *, depth: int
) -> float:
    """Return the joules of a token in rounds like those of `round_joules`."""
    spent = round_joules(energy, load, stats, seconds, depth=depth)
    return spent.total / (load.batch * stats.tokens)


def _pass(work: PassWork, load: DecodeLoad, rows: float) -> tuple[float, float]:
    """Return the bytes and operations of a pass."""
    kept = load.batch * load.context * work.spec.kv_bytes_per_token
    counted = rows * (work.row_flops + load.context * work.read_flops)
    return work.weight_bytes(rows) + kept, counted


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device for a model. Up to `ridge_rows` a pass waits for memory. From
    `critical_context` tokens of each text on its keys and values weigh more than the weights, None
    for a model without keys and values. `mixture` is that of a model with experts."""

    ridge_rows: float
    critical_context: float | None
    mixture: Mixture | None

    def sentences(self, batch: int, rows_each: int) -> Iterator[str]:
        """Yield sentences on rounds that verify `rows_each` rows of each of `batch` texts."""
        rows = batch * rows_each
        yield (
            f"Up to {self.ridge_rows:.0f} rows a pass waits for memory, from there on for "
            f"arithmetic; passes of this plan have {rows}."
        )
        if self.critical_context is not None:
            yield (
                f"Keys and values weigh more than the weights from {self.critical_context:,.0f} "
                f"tokens of context on in a batch of {batch}."
            )
        if self.mixture is not None:
            plain, verified = (self.mixture.read_share(num) for num in (batch, rows))
            yield (
                f"A row uses {self.mixture.num_active} of {self.mixture.num_experts} experts, so a "
                f"pass of {rows} rows reads {verified / plain:.2f} times the weights of one of "
                f"{batch}."
            )


def limits_of(spec: ModelSpec, sheet: DeviceSheet, batch: int) -> DeviceLimits:
    """Return the limits for a batch of so many texts."""
    context = critical_context(spec, batch)
    return DeviceLimits(
        ridge_rows(PassWork(spec), sheet),
        context if math.isfinite(context) else None,
        mixture_of(spec),
    )
