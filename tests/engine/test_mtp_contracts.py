"""The scripted contracts of folded MTP decoding, on the shipped engine and chain.

They were written for a loop whose step starts from saved logits: it takes its certain token from
them, drafts, verifies W tokens from position P on, and saves the logits behind the last one that
it keeps. In our words:

    certain token            the pending token, which our round before has emitted already
    batch_verify(W, P)       a target pass with W rows of logits where P tokens are kept
    restore, truncate(L)     the commit of a shorter path, after which L tokens are kept
    forward, sequential      a round with an empty draft: W = 1
    mtp_forward(t, p, h)     the block reads t at position p with the state h of the token before
    refresh with trunk h     the next proposal reads accepted tokens again, with the target's states
    max_tokens n             n + 1 here: what their saved logits hold at the end is emitted

A first round reads the prompt and emits the first pending token; every other one is a step of
theirs. The doubles check lengths and states at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from doubles.counting import CyclingController
from doubles.rig import Request, Rig, first_maximum
from doubles.scripted_heads import Reading, ScriptedBlock, ScriptedTarget, TargetPass
from outrider.core.params import SamplingParams
from outrider.core.protocols import Controller
from outrider.drafters.common.growth import DraftSampler
from outrider.engine.round import LiveSequence
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter

PROMPT = tuple(range(10, 20))
P = len(PROMPT)
TEXT = (*PROMPT, *range(20, 48))


def never(position: int) -> bool:
    del position
    return False


def always(position: int) -> bool:
    del position
    return True


@dataclass(slots=True)
class Run:
    """One request, alone, with drafts of `k` tokens that are wrong where `errs` says so."""

    k: int = 3
    num_tokens: int = 12
    errs: Callable[[int], bool] = never
    text: tuple[int, ...] = TEXT
    stop: int | None = None
    controller: Controller | None = None
    window: int = 1000
    block: ScriptedBlock = field(init=False)
    target: ScriptedTarget = field(init=False)
    rig: Rig = field(init=False)

    def __post_init__(self) -> None:
        self.block = ScriptedBlock(self.text, self.errs)
        self.target = ScriptedTarget(self.text, self.block)
        limits = HeadLimits(chunk=4, reach=self.k + 1, window=self.window)
        sampler = DraftSampler(first_maximum, "the block")
        drafter = HiddenDrafter("mtp", (self.block,), sampler, limits)
        self.rig = Rig(self.target, drafter, k=self.k, controller=self.controller)

    def go(self) -> LiveSequence:
        stops = frozenset[int]() if self.stop is None else frozenset({self.stop})
        params = SamplingParams(max_tokens=self.num_tokens + 1)
        seq = self.rig.alone(Request(PROMPT, params, stop_ids=stops))
        if self.stop is None:
            assert tuple(seq.tokens) == self.text[: P + self.num_tokens + 1]
        return seq

    @property
    def widths(self) -> list[int]:
        """W of every pass after the prompt's."""
        return [one.num_rows for one in self.target.passes[1:]]

    @property
    def lengths(self) -> list[int]:
        return [one.length for one in self.target.passes[1:]]

    @property
    def drafted(self) -> list[Reading]:
        """What the block read with a state of its own."""
        return [one for each in self.block.passes for one in each if one.whose == "block"]


@dataclass(frozen=True, slots=True)
class Case:
    """What a run of `num_tokens` of theirs must do, pass by pass."""

    name: str
    run: Callable[[], Run]
    widths: list[int]
    lengths: list[int]


CASES = (
    # Twelve tokens, every draft right: three passes of four rows, and nothing is rolled back.
    Case("all accepted", Run, [4, 4, 4], [10, 14, 18]),
    # Eight tokens, every draft wrong: seven verifications, each rolled back to P + 1; what remains
    # bounds the last ones. Our ninth token, which their saved logits hold, is a pass of one row.
    Case(
        "all rejected",
        lambda: Run(num_tokens=8, errs=always),
        [4, 4, 4, 4, 4, 3, 2, 1],
        list(range(10, 18)),
    ),
    # The draft for position 13 is wrong: 13 tokens are kept.
    Case(
        "one rejected",
        lambda: Run(k=5, num_tokens=9, errs=lambda position: position == 13),
        [6, 6],
        [10, 13],
    ),
    # What remains bounds the draft: six tokens by drafts of three.
    Case("remaining", lambda: Run(num_tokens=6), [4, 2], [10, 14]),
    # One draft a round.
    Case("one draft", lambda: Run(k=1, num_tokens=6), [2, 2, 2], [10, 12, 14]),
    # A memory that verifies two rows at most is given no more.
    Case(
        "width of two",
        lambda: Run(num_tokens=6, controller=CyclingController((1,))),
        [2, 2, 2],
        [10, 12, 14],
    ),
    # Drafting is switched off after the second step: one token at a time from the next one on.
    Case(
        "switched off",
        lambda: Run(k=2, num_tokens=9, controller=CyclingController((0, 2, 2, 0, 0, 0, 0, 0))),
        [3, 3, 1, 1, 1],
        [10, 13, 16, 17, 18],
    ),
    # The block has 15 positions: what it reads at the last one is drafted from, then no more is.
    Case("window", lambda: Run(num_tokens=8, window=15), [4, 2, 1, 1], [10, 14, 16, 17]),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_passes_are_those_of_the_script(case: Case) -> None:
    run = case.run()
    run.go()
    assert run.target.passes[0] == TargetPass(0, 1)
    assert run.widths == case.widths
    assert run.lengths == case.lengths
    run.rig.end()


def test_the_first_draft_has_the_targets_state_and_later_ones_the_blocks() -> None:
    run = Run(num_tokens=4)
    run.go()
    # A first proposal reads the prompt as well, in parts of `chunk` and `reach` tokens.
    read = [one for each in run.block.passes[:3] for one in each]
    assert [one.position for one in read] == list(range(P + 1))
    assert [one.whose for one in read] == ["zero", *["target"] * P]
    assert run.block.passes[3:] == [
        (Reading(11, TEXT[11], "block"),),
        (Reading(12, TEXT[12], "block"),),
    ]
    # The third draft is not read: nothing is drafted behind it.
    assert run.target.passes[-1] == TargetPass(P, 4)


def test_accepted_drafts_are_read_again_with_the_targets_states() -> None:
    run = Run(num_tokens=8)
    run.go()
    again = run.block.passes[5]
    assert again == tuple(Reading(place, TEXT[place], "target") for place in range(11, 15))


def test_a_rejected_draft_is_never_read_as_text() -> None:
    run = Run(num_tokens=12, errs=lambda position: position % 5 == 2)
    run.go()
    wrong = {one.position for one in run.drafted if one.token != TEXT[one.position]}
    assert wrong
    for each in run.block.passes:
        assert all(one.token == TEXT[one.position] for one in each if one.whose != "block")


def test_a_stop_among_accepted_drafts_ends_all_memories_there() -> None:
    """The script 3, 4, 5, stop: three tokens are told, and every memory ends at 13."""
    text = (*PROMPT, 3, 4, 5, 6, 7, 8, 9)
    run = Run(text=text, stop=6)
    seq = run.go()
    assert seq.tokens[P:] == [3, 4, 5, 6]
    assert seq.finish == "stop"
    assert run.target.state.length(0) == 13
    assert run.target.state.num_staged(0) == run.block.state.num_staged(0) == 0
    # The block lags by what it would read at the next proposal: drafts are not kept.
    assert run.block.state.length(0) == P + 1
    assert run.widths == [4]


def test_every_step_is_one_target_pass() -> None:
    run = Run(num_tokens=20, errs=lambda position: position % 3 == 0)
    seq = run.go()
    assert len(run.target.passes) == seq.num_rounds == len(run.rig.traces)


def test_the_block_catches_up_after_rounds_that_drafted_nothing() -> None:
    run = Run(k=2, num_tokens=14, controller=CyclingController((0, 2, 0, 0, 0, 2, 0)))
    run.go()
    text = [one for each in run.block.passes for one in each if one.whose != "block"]
    assert {one.position for one in text} >= set(range(P + 7))
    assert all(one.token == TEXT[one.position] for one in text)
