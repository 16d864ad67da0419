"""AR, SD and SSD in the real engine, on models that are costs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from cost_study.engines import Bed, CostEngine, CostRun, Text, rooms
from cost_study.pair import CostPair, Make, pair_shape

from outrider.estimate.acceptance import expected_tokens
from outrider.plugins.lanes.ahead.fan_out import MissCurve
from outrider_lab.models.gemm import NonGemmCosts
from outrider_lab.planner.rounds import estimated_beta

TEXT = Text(prompt_tokens=8, max_tokens=60)
AR = CostEngine(study="batch", method="ar")
SD = CostEngine(study="batch", method="sd", k=4, alpha=0.7)
SSD = CostEngine(study="batch", method="ssd", k=4, alpha=0.7, fan_out=4)
EVERYBODY = (
    AR,
    SD,
    replace(SD, k=2),
    *(replace(one, batch=3) for one in (AR, SD, SSD)),
)


@cache
def pair() -> CostPair:
    make = Make(costs=NonGemmCosts(), device="cpu", threads=1)
    shape = pair_shape("32x64x2x2x1x16/16x32x1x1x1x16")
    return make.pair(shape, *rooms(EVERYBODY, TEXT))


def bed(misses: MissCurve | None = None) -> Bed:
    """A clock that goes on by itself, so that nothing is divided by 0."""
    ticks: Iterator[int] = iter(range(1_000_000_000))
    return Bed(
        pair=pair(),
        text=TEXT,
        seed=1,
        misses=misses or MissCurve(0.4, 1.0),
        threads=1,
        clock=lambda: 1e-4 * next(ticks),
    )


def common(one: CostRun, other: CostRun) -> bool:
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(one.texts, other.texts, strict=True))


def test_every_engine_writes_the_text_of_plain_decoding() -> None:
    """Whatever the batch, K and what was foreseen; and each frees the memory it took."""
    free = pair().target.state.num_free_tokens, pair().draft.state.num_free_tokens
    plain = bed().run(replace(AR, batch=3))
    assert all(len(text) >= TEXT.max_tokens for text in plain.texts)
    for one in (SD, SSD, replace(SSD, p_hit=0.5), replace(SD, k=2)):
        taken = bed().run(replace(one, batch=3))
        assert common(plain, taken)
        assert taken.numbers.num_tokens >= 3 * TEXT.max_tokens
    alone = bed().run(AR)
    assert common(CostRun(plain.numbers, plain.texts[:1]), alone)
    assert (pair().target.state.num_free_tokens, pair().draft.state.num_free_tokens) == free


def test_without_hits_drafting_ahead_is_drafting_in_turns() -> None:
    """Round by round: the same drafts, and as many of them kept (S3.22)."""
    turns, ahead = bed().run(SD), bed().run(replace(SSD, p_hit=0.0))
    for name in ("num_tokens", "num_rounds", "num_drafted", "num_accepted", "num_refused"):
        assert getattr(ahead.numbers, name) == getattr(turns.numbers, name)
    assert ahead.texts == turns.texts
    assert (ahead.numbers.num_hits, turns.numbers.num_looks) == (0, 0)
    assert ahead.numbers.num_looks == ahead.numbers.num_rounds


@pytest.mark.sample(2)
@pytest.mark.parametrize("p_hit", [0.0, 0.4, 1.0])
def test_hits_are_forced_at_their_share(p_hit: float) -> None:
    numbers = bed().run(replace(SSD, batch=3, p_hit=p_hit)).numbers
    num = numbers.num_looks
    assert num > 40
    assert abs(numbers.num_hits - num * p_hit) <= 4 * (num * p_hit * (1 - p_hit)) ** 0.5


def test_a_forced_hit_takes_no_draft_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model runs as often as it does where all is foreseen, and no more."""
    steps = {"count": 0}
    plain_step = type(pair().draft).step

    def step(model: object, *given: object) -> object:
        steps["count"] += model is pair().draft
        return plain_step(model, *given)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(type(pair().draft), "step", step)
    counts: list[int] = []
    for p_hit in (0.0, 1.0):
        steps["count"] = 0
        numbers = bed().run(replace(SSD, p_hit=p_hit)).numbers
        counts.append(steps["count"])
    # A round drafts ahead with a trunk and K passes; each miss takes K more.
    assert counts[0] > counts[1] + 3 * numbers.num_rounds


def test_tokens_a_round_are_those_of_the_rate() -> None:
    numbers = bed().run(replace(SD, batch=3)).numbers
    wanted = expected_tokens(0.7, 4)
    deviation = 1.5 / numbers.num_rounds**0.5
    assert abs(numbers.num_tokens / numbers.num_rounds - wanted) < 4 * deviation
    beta = estimated_beta(numbers.num_accepted, numbers.num_refused)
    assert beta is not None
    assert abs(beta - 0.7) < 0.15
    assert numbers.num_tokens == numbers.num_accepted + numbers.num_rounds


def test_what_a_wider_fan_out_foresees_is_found() -> None:
    """Real hits: with a distribution of misses that nothing escapes, every verdict is found."""
    easy = bed(MissCurve(1e-9, 1.0)).run(SSD).numbers
    hard = bed(MissCurve(1.0, 0.05)).run(replace(SSD, fan_out=1)).numbers
    assert easy.num_hits / easy.num_looks > hard.num_hits / hard.num_looks
    assert easy.num_ahead is not None
