"""Rounds of one native call leave drafts of another temperature to the stages, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from doubles.rig import exchange_round, round_of
from outrider import LLM, EngineConfig, SamplingParams
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget
from outrider.engine.native_round import NativeRound
from outrider.engine.stages import Stages
from outrider.kernels.native.rounds import Decided, NativeRounds, RoundRow

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("native_library")]

PROMPT = "def fibonacci(n):\n"
DRAWN = SamplingParams(max_tokens=24, temperature=0.7, seed=5)
GREEDY = SamplingParams(max_tokens=12)


@dataclass
class _Counted:
    """`calls` of the native round, which it passes on."""

    inner: NativeRounds
    calls: list[int] = field(default_factory=list[int])

    def __call__(self, rows: Sequence[RoundRow]) -> Decided | None:
        self.calls.append(len(rows))
        return self.inner(rows)

    def fits(self, rows: Sequence[RoundRow]) -> bool:
        return self.inner.fits(rows)


def told(
    budget: Budget, params: SamplingParams, *, fused: bool
) -> tuple[tuple[int, ...], list[tuple[int, int]], int]:
    """Tokens, (drafted, accepted) of the rounds, and the number of native calls."""
    llm = LLM(config=EngineConfig(k=3, fused_round=fused, profile=True))
    engine = llm._engine  # pyright: ignore[reportPrivateUsage]
    made, calls = round_of(engine), list[int]()
    controller = FixedController(budget)
    if isinstance(made, NativeRound):
        counted = _Counted(made.call, calls)
        stages = replace(made.stages, controller=controller)
        exchange_round(engine, replace(made, stages=stages, call=counted))  # pyright: ignore[reportArgumentType]
    else:
        assert isinstance(made, Stages)
        exchange_round(engine, replace(made, controller=controller))
    (result,) = llm.generate([PROMPT], params)
    rounds = [(one.num_drafted, one.num_accepted) for one in result.rounds]
    return tuple(result.token_ids), rounds, len(calls)


def test_drafts_of_another_temperature_go_by_stages() -> None:
    tokens, rounds, num_calls = told(Budget(3, 1.5), DRAWN, fused=True)
    assert num_calls == 0
    assert (tokens, rounds) == told(Budget(3, 1.5), DRAWN, fused=False)[:2]
    assert (tokens, rounds) != told(Budget(3), DRAWN, fused=True)[:2]


def test_greedy_drafts_stay_in_one_call() -> None:
    tokens, rounds, num_calls = told(Budget(3, 1.5), GREEDY, fused=True)
    assert num_calls == len(rounds)
    assert (tokens, rounds) == told(Budget(3), GREEDY, fused=False)[:2]
