"""Roofline model of a pass: seconds from a model's sizes and a device sheet, without a measurement.

A pass over R rows of b sequences with S tokens each moves the weights and the keys and values of
all contexts, and does two operations a parameter for each row, in whole row tiles:

    T = overhead + || bytes / bandwidth, tile ceil(R / tile) 2 P / FLOPs ||_p  +  KV + attention

(Williams, Waterman, Patterson 2009). The p-norm turns smoothly from one limit to the other. Keys
and values, b S kv bytes once a pass, and attention, 4 H operations for each row and token of
context, are added, since `PassCosts` keeps them apart. All weights count as read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.core.spec import ModelSpec
from outrider.estimate.calibration import Calibration, DrafterCosts, PassCosts
from outrider.estimate.cost import Curve
from outrider.estimate.theory import RoundStats
from outrider.planner.devices import DeviceSheet, Power
from outrider.planner.rounds import DecodeLoad

# Rows of a pass and sequences of a draft for which seconds are computed; between them lines.
_MOST_ROWS = 4096
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DEEPEST = 64
# Sheets are not measurements, and intervals of plans made of them should show it.
_SUPPOSED_SCATTER = 0.1


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: a row uses `num_active` of `num_experts` in each layer; all experts
    together have `expert_share` of the model's parameters.

    For R rows that choose k of N experts each, a pass reads the experts that any row chose:

        W_dense + W_experts (1 - (1 - k / N)^R)

    so verifying more rows reads more weights, and speculation gains less than with a dense model.
    """

    num_experts: int
    num_active: int
    expert_share: float

    def read_share(self, num_rows: float) -> float:
        """Return the share of all weights that a pass over so many rows reads."""
        chosen = 1 - (1 - self.num_active / self.num_experts) ** num_rows
        return 1 - self.expert_share + self.expert_share * chosen

    @property
    def active_share(self) -> float:
        """The share of all parameters that one row is multiplied with."""
        return 1 - self.expert_share * (1 - self.num_active / self.num_experts)


def mixture_of(spec: ModelSpec) -> Mixture | None:
    """Return the model's mixture; None for a dense model."""
    if not spec.num_experts:
        return None
    share = spec.expert_parameters / spec.num_parameters
    return Mixture(spec.num_experts, spec.num_active_experts, share)


@dataclass(frozen=True, slots=True)
class PassWork:
    """Bytes and operations of a model's passes."""

    spec: ModelSpec

    def weight_bytes(self, num_rows: float) -> float:
        mixture = mixture_of(self.spec)
        share = 1.0 if mixture is None else mixture.read_share(num_rows)
        return self.spec.weight_bytes * share

    @property
    def row_flops(self) -> float:
        mixture = mixture_of(self.spec)
        share = 1.0 if mixture is None else mixture.active_share
        return 2.0 * self.spec.num_parameters * share

    @property
    def read_flops(self) -> float:
        """Operations of a row and a token of its context: a product with key and with value."""
        spec = self.spec
        layers = spec.num_layers if spec.num_kv_layers is None else spec.num_kv_layers
        return 4.0 * layers * spec.num_heads * spec.head_dim


def compute_dtype(spec: ModelSpec) -> str:
    """Return the dtype in which its matrices are multiplied: int4 is widened first."""
    if spec.quantise == "int8":
        return "int8"
    return "float32" if spec.bytes_per_weight == 4 and spec.quantise == "none" else "bfloat16"


def reading_seconds(work: PassWork, sheet: DeviceSheet, num_rows: float) -> float:
    """Return the seconds of reading the weights that so many rows need."""
    return work.weight_bytes(num_rows) / sheet.bytes_per_second


def row_seconds(work: PassWork, sheet: DeviceSheet) -> float:
    """Return the seconds of multiplying one row with the weights."""
    return work.row_flops / sheet.flops_per_second(compute_dtype(work.spec))


def context_seconds(work: PassWork, sheet: DeviceSheet) -> tuple[float, float]:
    """Return the seconds of a token of context: reading its key and value, once a pass, and
    attending to it, once a row."""
    attending = work.read_flops / sheet.flops_per_second(compute_dtype(work.spec))
    return work.spec.kv_bytes_per_token / sheet.bytes_per_second, attending


def rows_seconds(work: PassWork, sheet: DeviceSheet, num_rows: int) -> float:
    """Return the seconds of a pass without context."""
    tiled = -(-num_rows // sheet.row_tile) * sheet.row_tile
    moving = reading_seconds(work, sheet, num_rows)
    counting = tiled * row_seconds(work, sheet)
    # The larger is taken out, or powers overflow.
    high, low = max(moving, counting), min(moving, counting)
    norm = high * (1 + (low / high) ** sheet.p_norm) ** (1 / sheet.p_norm)
    return sheet.overhead + norm


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
        scatter=_SUPPOSED_SCATTER,
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
