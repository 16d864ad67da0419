"""Calibrations that no machine has: round numbers, so that times can be told by heart."""

from __future__ import annotations

from outrider.estimate.calibration import Calibration, DrafterCosts, PassCosts
from outrider.estimate.cost import Curve

DEEPEST = 64.0


def drafter(step: float, *, name: str = "model") -> DrafterCosts:
    """`step` seconds a token, whoever drafts beside."""
    return DrafterCosts(name, ((1, Curve(((1.0, step), (DEEPEST, DEEPEST * step)))),))


def calibration(target: float, step: float) -> Calibration:
    """Each pass takes `target` seconds whatever it holds, each draft token `step`."""
    return Calibration("paper", "target", PassCosts(Curve(((1.0, target),))), (drafter(step),))
