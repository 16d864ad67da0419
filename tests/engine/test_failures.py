"""A job that fails costs nobody anything if it was passing, and one request if it was not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from checks.engine import Kind
from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.engine.drafting import DrafterHandle
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes, LaneResult, LaneRunner, LaneTask
from outrider.engine.requests import RequestTable
from outrider.engine.round import LiveSequence
from outrider.plugins.lanes.schedules import PrefillDecode
from outrider.sched.jobs import Ledger, Limits
from outrider.verify.exact import MatchRule, TokenRule


class FaultError(Exception):
    """What the doubles below raise."""


def rows_of(args: Sequence[Any]) -> Sequence[Any]:
    """What a call of a seam is about, a method of a class or of an object."""
    return args[1] if isinstance(args[0], TokenRule) else args[0]


@dataclass(slots=True)
class FailingAt:
    """A call that raises, before or after its work, at those `turns` in which several sequences
    take part."""

    turns: Sequence[int]
    before: bool
    count: count[int] = field(default_factory=count)
    num_raised: int = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            failing = len(rows_of(args)) > 1 and next(self.count) in self.turns
            self.num_raised += failing
            if failing and self.before:
                raise FaultError
            result = call(*args)
            if failing:
                raise FaultError
            return result

        return called


REQUESTS = [
    Request((1, 2, 3, 1, 2), SamplingParams(max_tokens=9)),
    Request((4, 0) * 6, SamplingParams(max_tokens=7, temperature=0.9, seed=3)),
    Request((2,), SamplingParams(max_tokens=8, temperature=1.4, seed=1)),
]


def submitted(rig: Rig, engine: Engine) -> list[LiveSequence]:
    seqs = [rig.live(seq_id, request) for seq_id, request in enumerate(REQUESTS)]
    for seq in seqs:
        engine.submit(seq)
    return seqs


def finish(engine: Engine) -> None:
    for _ in range(500):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def written(seqs: Sequence[LiveSequence]) -> list[list[int]]:
    return [seq.tokens[seq.prompt_length :] for seq in seqs]


# Any two of model, part and moment meet. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("part", ["target", "draft model", "drafter", "rule"])
@pytest.mark.parametrize("kind", [ToyHybrid, TinyAttentionLM])
def test_a_passing_fault_changes_nothing(
    kind: Kind, part: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of the job are tried one by one, and each text is as it would have been."""
    wanted = Rig(
        kind(vocab_size=VOCAB), model_drafter(kind(vocab_size=VOCAB, seed=5), 3), k=3, chunk=4
    ).run(REQUESTS)
    target, draft_model = kind(vocab_size=VOCAB), kind(vocab_size=VOCAB, seed=5)
    free = target.state.num_free_tokens
    rig = Rig(target, model_drafter(draft_model, 3), TokenRule(), k=3, chunk=4)
    failing = FailingAt((0, 2, 3, 5), before)
    place: dict[str, tuple[object, str]] = {
        "target": (target, "step"),
        "draft model": (draft_model, "step"),
        "drafter": (rig.drafter, "propose"),
        "rule": (TokenRule, "__call__"),
    }
    owner, name = place[part]
    monkeypatch.setattr(owner, name, failing.wrap(getattr(owner, name)))
    engine = rig.engine()
    seqs = submitted(rig, engine)
    finish(engine)
    assert failing.num_raised >= 3
    assert written(seqs) == wanted
    assert [(seq.error, seq.no_drafts) for seq in seqs] == [(None, "")] * 3
    assert target.state.num_free_tokens == draft_model.state.num_free_tokens == free
    assert engine.residents.counts.completed == 3


def test_a_failed_tree_leaves_nothing_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB)
    rig = Rig(target, random_trees(VOCAB), MatchRule(), k=2)
    wanted = Rig(TinyAttentionLM(vocab_size=VOCAB), random_trees(VOCAB), MatchRule(), k=2)
    failing = FailingAt((1, 3), before=False)
    monkeypatch.setattr(target, "step", failing.wrap(target.step))
    engine = rig.engine()
    seqs = submitted(rig, engine)
    while engine.has_work:
        engine.step()
        assert not any(map(target.state.num_staged, engine.residents.live))
    assert failing.num_raised == 2
    assert written(seqs) == wanted.run(REQUESTS)
    target.state.check()


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_who_fails_alone_is_given_up_and_nobody_else(
    culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), k=0).run(REQUESTS)
    target = ToyHybrid(vocab_size=VOCAB)
    step = target.step

    def failing(rows: Any, needs: Any) -> Any:
        if any(row.seq_id == culprit and target.state.length(culprit) > 3 for row in rows):
            raise FaultError
        return step(rows, needs)

    monkeypatch.setattr(target, "step", failing)
    rig = Rig(target, k=0)
    engine = rig.engine()
    seqs = submitted(rig, engine)
    free = target.state.num_free_tokens
    finish(engine)
    for index, seq in enumerate(seqs):
        assert (type(seq.error) is FaultError) == (index == culprit)
        assert (seq.finish is None) == (index == culprit)
        got = seq.tokens[seq.prompt_length :]
        assert got == wanted[index][: len(got) if index == culprit else None]
    assert target.state.num_free_tokens == free
    counts = engine.residents.counts
    assert (counts.failed, counts.completed) == (1, 2)


def test_of_those_that_are_tried_alone_any_may_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), k=0).run(REQUESTS)
    for cancelled in range(3):
        target = ToyHybrid(vocab_size=VOCAB)
        failing = FailingAt((1,), before=True)
        monkeypatch.setattr(target, "step", failing.wrap(target.step))
        rig = Rig(target, k=0)
        engine = rig.engine()
        seqs = submitted(rig, engine)
        while not failing.num_raised:
            engine.step()
        engine.cancel(cancelled)
        finish(engine)
        for index, got in enumerate(written(seqs)):
            assert got == wanted[index][: len(got) if index == cancelled else None]
        assert target.state.num_free_tokens == 256


class Slow(InlineLanes):
    """Ends one task at a time, the newest first, so that others are still under way meanwhile."""

    def __init__(self, runners: Mapping[str, LaneRunner]) -> None:
        super().__init__(runners)
        self.tasks: deque[tuple[str, LaneTask]] = deque()

    @property
    def busy(self) -> Mapping[str, float]:
        return dict.fromkeys((lane for lane, _ in self.tasks), 0.0)

    def start(self, lane: str, task: LaneTask) -> None:
        self.tasks.append((lane, task))

    def wait(self, seconds: float | None = None) -> list[LaneResult]:
        super().start(*self.tasks.pop())
        return super().wait(seconds)


def slow_engine(rig: Rig) -> Engine:
    """Lanes for decoding and for prompts, over `Slow`."""
    runner, target = LaneRunner(rig.stages(), rig.stages()), rig.target
    limits = Limits(4, target.state.num_free_tokens)
    residents = RequestTable(target, DrafterHandle(rig.drafter), Ledger(), limits)
    return Engine(
        residents=residents,
        executor=Slow({"decode": runner, "prefill": runner}),
        schedule=PrefillDecode(4),
    )


def test_a_request_may_be_cancelled_whose_job_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be tried again of it is not, and the others are."""
    target = ToyHybrid(vocab_size=VOCAB)
    rig = Rig(target, k=0)
    engine = slow_engine(rig)
    short, long = Request((2,), REQUESTS[0].params), Request((1,) * 9, REQUESTS[0].params)
    seqs = [rig.live(seq_id, request) for seq_id, request in enumerate((short, short, long))]
    for seq in seqs:
        engine.submit(seq)
    engine.step()
    assert list(engine.executor.busy) == ["decode"]
    failing = FailingAt((0,), before=True)
    monkeypatch.setattr(target, "step", failing.wrap(target.step))
    engine.cancel(1)
    assert failing.num_raised == 1
    finish(engine)
    assert [seq.finish for seq in seqs] == ["length", None, "length"]
    assert not any(seq.error for seq in seqs)
    assert target.state.num_free_tokens == 256


def test_a_request_may_be_cancelled_whose_job_then_finds_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that nobody cancels would wait for memory, and then begin anew."""
    target = ToyHybrid(vocab_size=VOCAB)
    rig = Rig(target, k=0)
    engine = slow_engine(rig)
    short, long = Request((2,), REQUESTS[0].params), Request((1,) * 9, REQUESTS[0].params)
    seqs = [rig.live(seq_id, request) for seq_id, request in enumerate((short, long))]
    for seq in seqs:
        engine.submit(seq)
    engine.step()
    assert list(engine.executor.busy) == ["decode"]

    def failing(*_: object) -> None:
        raise CapacityError("no memory", hint="none")

    with monkeypatch.context() as patch:
        patch.setattr(target, "step", failing)
        engine.cancel(0)
    assert seqs[0].num_preempted == 1
    assert not engine.residents.waiting
    finish(engine)
    assert [seq.finish for seq in seqs] == [None, "length"]
    assert engine.residents.counts.cancelled == 1
    assert target.state.num_free_tokens == 256
