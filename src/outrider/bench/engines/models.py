"""What theory says of two engines, from times and counts of the same run.

PDV against PD. Two lanes on one device share its bandwidth. A round must read the target once and
the draft model once a drafted token, however that is arranged; so no arrangement of the same passes
is faster than one that does nothing else, and

    gain <= 1 / eta,    eta = (passes x T_read(target) + draft steps x T_read(draft)) / seconds,

where T_read is a bare read of the weights on this machine (kernels/bandwidth.py) and all else is
the synchronous run's. Keys and values are left out, so eta is a little low and the bound a little
high.

SSD against SD. `estimate/theory.py` has S, the tokens in a time of T_verify; the synchronous engine
has S_SD = E / (1 + T_SD). The prediction is S / S_SD: lanes with resources of their own. What the
measurement lacks of it is what two lanes cost each other on one machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.bench.engines.cells import Cell
from outrider.bench.engines.samples import Sample
from outrider.estimate.theory import AheadTimes

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class BareReads:
    """Seconds of one bare read of each model's weights; 0 without a draft model."""

    target_seconds: float
    draft_seconds: float


@dataclass(frozen=True, slots=True)
class LaneBound:
    """`gain` is what no other arrangement of the same passes can exceed."""

    level: int
    engine: str
    eta: float
    gain: float


@dataclass(frozen=True, slots=True)
class AheadPrediction:
    """`ratio` is the predicted throughput of ssd over single, from `times`, where a round waits for
    its slowest row; `ratio_apart` where hits go ahead without the others of their batch."""

    level: int
    times: AheadTimes
    sync_draft: float
    sync_tokens: float
    ratio: float
    ratio_apart: float


def lane_bounds(
    samples: Sequence[Sample], reads: BareReads, *, engine: str = "single"
) -> list[LaneBound]:
    """By level, from the median repeat of `engine`, which does one thing after the other."""
    shares: dict[int, list[float]] = {}
    for sample in samples:
        numbers = sample.numbers
        if sample.engine != engine or not sample.ok or numbers is None or not numbers.num_passes:
            continue
        least = numbers.num_passes * reads.target_seconds
        least += numbers.num_draft_steps * reads.draft_seconds
        shares.setdefault(sample.level, []).append(least / numbers.seconds)
    found: list[LaneBound] = []
    for level, values in sorted(shares.items()):
        eta = statistics.median(values)
        found.append(LaneBound(level, engine, round(eta, _DIGITS), round(1 / eta, _DIGITS)))
    return found


def ahead_predictions(found: Sequence[Cell]) -> list[AheadPrediction]:
    """For every level at which `single` and `ssd` told all that is needed."""
    by_place = {(cell.level, cell.engine): cell for cell in found}
    predicted: list[AheadPrediction] = []
    for level in sorted({cell.level for cell in found}):
        sync, ahead = by_place.get((level, "single")), by_place.get((level, "ssd"))
        if sync is not None and ahead is not None:
            prediction = _predict(sync, ahead)
            if prediction is not None:
                predicted.append(prediction)
    return predicted


def _predict(sync: Cell, ahead: Cell) -> AheadPrediction | None:
    """None if a time or a count is missing."""
    p, verify, draft = ahead.p_hit, sync.verify_ms, sync.draft_ms
    tokens, ratio_ahead = sync.tokens_per_round, ahead.ahead_over_verify
    if p is None or not verify or draft is None or tokens is None or ratio_ahead is None:
        return None
    sync_draft = draft / verify
    times = AheadTimes(
        p_hit=p,
        tokens_hit=ahead.hit_tokens_per_round or tokens,
        tokens_miss=ahead.miss_tokens_per_round or tokens,
        ahead=ratio_ahead,
        fallback=sync_draft,
        batch=max(ahead.mean_batch or 1.0, 1.0),
    )
    scale = (1 + sync_draft) / tokens
    return AheadPrediction(
        level=ahead.level,
        times=times,
        sync_draft=round(sync_draft, _DIGITS),
        sync_tokens=tokens,
        ratio=round(times.speed * scale, _DIGITS),
        ratio_apart=round(replace(times, batch=1.0).speed * scale, _DIGITS),
    )
