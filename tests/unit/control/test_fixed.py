"""The fixed controller gives what it was given; fixed lengths are for texts that need them."""

from __future__ import annotations

import pytest

from doubles.rig import Request, Rig, live
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget, Choice
from outrider.core.params import SamplingParams
from outrider.engine.round import FixedLengths


def test_the_same_budget_whatever_it_observes() -> None:
    controller = FixedController(Budget(3))
    rig = Rig(ToyHybrid())
    rig.outputs([[1, 2]], SamplingParams(max_tokens=3))
    for trace in rig.traces:
        controller.observe(trace)
    assert controller.budgets([0, 1, 9]) == [Budget(3)] * 3


@pytest.mark.parametrize(
    ("rule", "own", "temperature", "is_free"),
    [
        ("block", None, 0.0, True),
        ("block", None, 0.8, False),
        ("token", "coupled", 0.8, True),
        ("match", None, 0.8, True),
        ("match", "block", 0.8, False),
        ("typical", None, 0.0, False),
    ],
)
def test_lengths_are_fixed_where_a_text_depends_on_them(
    rule: str, own: str | None, temperature: float, is_free: bool
) -> None:
    fixed = FixedLengths(Budget(4), rule)
    params = SamplingParams(max_tokens=3, temperature=temperature, sampler=own)
    seq = live(0, Request([1, 2], params))
    assert fixed.of(seq, Budget(1)) == Budget(1 if is_free else 4)
    # Dead drafts are left out whoever chooses: that follows from the request's own counts.
    resting = Budget(0, choice=Choice("rest"))
    assert fixed.of(seq, resting) == resting
