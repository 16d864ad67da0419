"""Calibrations with round numbers, and counts of drafts that were kept with a known rate."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.estimate.calibration import Calibration, DrafterCosts, PassCosts, PlaceCount
from outrider.estimate.cost import Curve


def counts(rates: Sequence[float], num_rounds: int = 10_000) -> tuple[PlaceCount, ...]:
    """As if so many drafts had been kept just as often as `rates` say."""
    found: list[PlaceCount] = []
    for rate in rates:
        kept = round(num_rounds * rate)
        found.append(PlaceCount(num_rounds, kept))
        num_rounds = kept
    return tuple(found)


def costs(
    step: float,
    rates: Sequence[float] = (),
    *,
    name: str = "model",
    each: float = 0.0,
    num_rounds: int = 10_000,
) -> DrafterCosts:
    """`step` seconds a token, and `each` more for every sequence beyond the first."""
    draft = tuple(
        (b, Curve(((1.0, step + each * (b - 1)), (64.0, 64 * (step + each * (b - 1))))))
        for b in (1, 512)
    )
    return DrafterCosts(name, draft, places=counts(rates, num_rounds))


def flat(*drafters: DrafterCosts, target: float = 1.0, scatter: float = 0.0) -> Calibration:
    """Each pass takes `target` seconds whatever it holds."""
    passes = PassCosts(Curve(((1.0, target),)))
    return Calibration("paper", "paper-target", passes, drafters, scatter=scatter)


def sloped(*drafters: DrafterCosts, per_row: float, most: int = 4096) -> Calibration:
    """A pass takes 1 second and `per_row` for every row beyond the first."""
    rows = Curve(((1.0, 1.0), (float(most), 1 + per_row * (most - 1))))
    return Calibration("paper", "paper-target", PassCosts(rows), drafters)
