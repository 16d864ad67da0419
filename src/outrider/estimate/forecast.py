"""Speed-up that is expected before a drafter has run: as its folder states it, or from sizes alone.

`forecast` takes seconds from a device sheet and acceptance from the drafter's KIND. A pass over R
rows of b sequences with S tokens each moves the weights and the keys and values of all contexts,
and does two operations a parameter for each row, in whole row tiles:

    T = overhead + || bytes / bandwidth, tile ceil(R / tile) 2 P / FLOPs ||_p  +  KV + attention

(the roofline model: Williams, Waterman, Patterson 2009). The p-norm turns smoothly from one limit
to the other. Keys and values, b S kv bytes once a pass, and attention, 4 H operations for each row
and token of context, are added. All weights count as read.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Self, cast

from outrider.core.config import MOST_K
from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.plugins import DrafterKind
from outrider.core.spec import ModelSpec
from outrider.estimate.acceptance import expected_tokens, measured_speed_up

# Value of a folder's drafts as stated in it: acceptance and cost, measured once by its maker.
#
# Times are in plain passes of the target; a machine scales them but keeps their order. With E(K)
# from the probabilities of acceptance,
#
#     S(K) = E(K) / (d + (K - 1) e + 1 + K r)
#
# where d is the time of a first draft, e that of each draft after it, and r that of one more row in
# the verifying pass.
# Key in config.json.
KEY = "outrider_worth"


@dataclass(frozen=True, slots=True)
class StatedWorth:
    """Stated acceptance and times. `kept` entry j is the probability that a round accepts more than
    j drafts; `first`, `later` and `row` are d, e and r."""

    kept: tuple[float, ...]
    first: float
    later: float
    row: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self | None:
        """The value of `KEY` in config.json; None if it does not have this form: a file may hold
        anything, and a missing estimate costs less than a wrong one."""
        stated, times = values.get("kept"), [values.get(name) for name in ("first", "later", "row")]
        if not isinstance(stated, list):
            return None
        kept = cast("list[object]", stated)
        if not 1 <= len(kept) <= MOST_K:
            return None
        chances = [_number(one) for one in kept]
        first, later, row = (_number(one) for one in times)
        if first is None or later is None or row is None:
            return None
        found = [one for one in chances if one is not None and one <= 1]
        # Longer prefixes are never accepted more often.
        if len(found) < len(kept) or found != sorted(found, reverse=True):
            return None
        return cls(tuple(found), first, later, row)

    def values(self) -> dict[str, object]:
        """The value for config.json."""
        return asdict(self)

    def speed_up(self, k: int) -> float:
        """S over plain decoding, for chains of `k` drafts, up to the length of `kept`."""
        return measured_speed_up(
            1 + math.fsum(self.kept[:k]),
            plain=1.0,
            draft=self.first + (k - 1) * self.later,
            verify=1 + k * self.row,
        )

    @property
    def best_k(self) -> int:
        """The k with the largest speed-up, at least 1; of equals the shortest."""
        return max(range(1, len(self.kept) + 1), key=self.speed_up)

    @property
    def pays(self) -> bool:
        return self.speed_up(self.best_k) > 1


def _number(value: object) -> float | None:
    """A finite number from 0 up as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None


# Device sheets: peak bandwidth, FLOPs and power of machines, for forecasts without the machine.
#
# Peaks are those of the makers' data sheets, without sparsity. `bandwidth_share` and `flops_share`
# are the shares that programs reach: 0.9 and 0.8 for recent cards with good kernels (an H200 then
# meets both limits at 183 rows of bfloat16). `row_tile` is the number of rows of a matrix unit,
# `overhead` the seconds of a pass that nothing else explains.
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
    power: Power | None = None

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


@cache
def sheets() -> Mapping[str, DeviceSheet]:
    """Return the sheets of devices.json by name; the file has rated watts instead of the power."""
    found: dict[str, DeviceSheet] = {}
    text = files("outrider.estimate").joinpath("devices.json").read_text("utf-8")
    for name, sheet in json.loads(text).items():
        watts, flops = sheet.pop("watts"), sheet["flops"]["bfloat16"]
        sheet.pop("note", None)
        free = 0.75 * watts
        power = Power(0.25 * watts, 0.5 * free / sheet["bandwidth"], free / flops)
        found[name] = DeviceSheet(name=name, power=power, **sheet)
    return found


def sheet_like(device: str, gpu: str | None) -> DeviceSheet:
    """Return the sheet that is nearest to the device of this machine."""
    if device == "cpu":
        return sheets()["cpu-2core"]
    name = (gpu or "").lower().replace(" ", "")
    known = (sheet for key, sheet in sheets().items() if key in name)
    return next(known, sheets()["m2-max" if device == "mps" else "a100"])


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
    share = spec.expert_parameters / spec.num_multiplied
    return Mixture(spec.num_experts, spec.num_active_experts, share)


@dataclass(frozen=True, slots=True)
class PassWork:
    """Bytes and operations of a model's passes."""

    spec: ModelSpec

    def weight_bytes(self, num_rows: float) -> float:
        mixture = mixture_of(self.spec)
        share = 1.0 if mixture is None else mixture.read_share(num_rows)
        return self.spec.read_bytes * share

    @property
    def row_flops(self) -> float:
        mixture = mixture_of(self.spec)
        share = 1.0 if mixture is None else mixture.active_share
        return 2.0 * self.spec.num_multiplied * share

    @property
    def read_flops(self) -> float:
        """Operations of a row and a token of its context: a product with key and with value."""
        spec = self.spec
        return 4.0 * spec.num_heads * sum(one.head_dim for one in spec.layer_keys)


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


def rows_seconds(work: PassWork, sheet: DeviceSheet, num_rows: float) -> float:
    """Return the seconds of a pass without context."""
    tiled = -(-num_rows // sheet.row_tile) * sheet.row_tile
    moving = reading_seconds(work, sheet, num_rows)
    counting = tiled * row_seconds(work, sheet)
    # The larger is taken out, or powers overflow.
    high, low = max(moving, counting), min(moving, counting)
    norm = high * (1 + (low / high) ** sheet.p_norm) ** (1 / sheet.p_norm)
    return sheet.overhead + norm


# What is assumed of a drafter until it has run.
#
# A step is assumed to read so many bytes and to take the same share of a target's pass as these
# bytes are of the target's weights, with a quarter more and a fixed time for calling it. Acceptance
# is a prior, as weak as a few counted drafts.
PRIOR_DRAFTS = 8
# Median relative deviation of times that were not measured, and the factor from it to a standard
# deviation, for a normal distribution.
SCATTER, TO_DEVIATION = 0.1, 1.4826
# A step of a small model takes more time than its bytes do, and a call takes a time of its own.
_SLOWER, _CALL_SECONDS = 1.25, 5e-5
# Bytes a weight of a copy in 4 bits, including the scales of its groups; and the share of layers
# that a copy with fewer layers runs.
_COPY_BYTES, _LAYERS_RUN = 0.64, 0.75
_NUM_DRAWS, _OUTSIDE = 400, 0.025


def step_bytes(kind: DrafterKind, target: ModelSpec, num_bytes: int) -> int:
    """Return the bytes that a step of a drafter reads; `num_bytes` are those of the weights of its
    draft model or heads."""
    if kind.source == "copy" and kind.fewer_bits:
        return int(target.num_multiplied * _COPY_BYTES)
    if kind.source == "copy":
        return int(target.weight_bytes * _LAYERS_RUN)
    if kind.source == "heads":
        return num_bytes + target.vocab_size * target.hidden_size * target.bytes_per_weight
    return num_bytes


def step_seconds(num_bytes: int, target: ModelSpec, pass_seconds: float) -> float:
    """Return the seconds of a step that reads `num_bytes`, for a target's pass of so many."""
    share = num_bytes / max(target.weight_bytes, 1)
    return _CALL_SECONDS + _SLOWER * share * pass_seconds


def assumed_counts(kind: DrafterKind) -> tuple[int, int]:
    """Return the number of rounds with PRIOR_DRAFTS drafts, 0 if each round has one, and the number
    of drafts whose first token was accepted."""
    rounds = 0 if kind.drafted == 1 else round(PRIOR_DRAFTS / kind.drafted)
    return rounds, round(PRIOR_DRAFTS * kind.accepted)


class Forecast(NamedTuple):
    """Speed-up over plain decoding of one text, and the bounds of its 95 % interval."""

    speed_up: float
    low: float
    high: float


def forecast(
    target: ModelSpec,
    kind: DrafterKind,
    k: int,
    sheet: DeviceSheet,
    *,
    num_bytes: int,
    context: float,
) -> Forecast:
    """Return the forecast for one long text at a mean of `context` tokens, with drafts of up to `k`
    tokens by a drafter whose draft model or heads have `num_bytes`. Raises ConfigError for a dtype
    that the sheet does not have.

    Every token is found with probability o and accepted with a, given that all before it were. With
    h = o a a round emits E tokens, and the drafts that are found have n tokens on the mean:

        E = 1 + h + ... + h^K,    n = 1 + o + ... + o^(K - 1)
        S = E T(1) / ((1 - o) T(1) + o (T(1 + n) + T_draft(n)))

    The interval has two parts: o and a are uncertain (draws of their Beta posteriors), and times
    scatter, normal on a log scale.
    """
    work = PassWork(target)
    reading, attending = context_seconds(work, sheet)

    def seconds(num_rows: float) -> float:
        read = context * (reading + num_rows * attending)
        return rows_seconds(work, sheet, num_rows) + read

    rounds, accepted = assumed_counts(kind)
    refused, silent = PRIOR_DRAFTS - accepted, max(rounds - PRIOR_DRAFTS, 0)
    chance = random.Random(0)

    def tokens_drawn() -> float:
        found = chance.betavariate(0.5 + PRIOR_DRAFTS, 0.5 + silent) if rounds else 1.0
        return expected_tokens(found * chance.betavariate(0.5 + accepted, 0.5 + refused), k)

    found = (0.5 + PRIOR_DRAFTS) / (1 + rounds) if rounds else 1.0
    tokens = expected_tokens(found * (0.5 + accepted) / (1 + PRIOR_DRAFTS), k)
    num_drafted = expected_tokens(found, k - 1)
    read = step_bytes(kind, target, num_bytes)
    step = step_seconds(read, target, rows_seconds(work, sheet, 1))
    plain = seconds(1)
    speed_up = measured_speed_up(
        tokens,
        plain=plain,
        draft=found * step * (num_drafted if read and not kind.at_once else 1),
        verify=(1 - found) * plain + found * seconds(1 + num_drafted),
    )
    deviation = TO_DEVIATION * SCATTER
    drawn = sorted(
        tokens_drawn() / tokens * math.exp(deviation * chance.gauss(0, 1))
        for _ in range(_NUM_DRAWS)
    )
    low, high = (drawn[round(share * (_NUM_DRAWS - 1))] for share in (_OUTSIDE, 1 - _OUTSIDE))
    return Forecast(speed_up, speed_up * low, speed_up * high)
