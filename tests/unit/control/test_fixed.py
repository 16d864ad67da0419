"""The fixed controller gives what it was given."""

from __future__ import annotations

from doubles.rig import Rig
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.budget import Budget
from outrider.core.params import SamplingParams


def test_the_same_budget_whatever_it_observes() -> None:
    controller = FixedController(Budget(3))
    rig = Rig(ToyHybrid())
    rig.outputs([[1, 2]], SamplingParams(max_tokens=3))
    for trace in rig.traces:
        controller.observe(trace)
    assert controller.budgets([0, 1, 9]) == [Budget(3)] * 3
