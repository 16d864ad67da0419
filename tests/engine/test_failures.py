"""A job that fails leaves every sequence where it was: tried again, the text is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.verify.match import MatchRule
from outrider.verify.token import TokenRule


class FaultError(Exception):
    """What the doubles below raise."""


@dataclass(slots=True)
class FailingAt:
    """A call that raises at the turns it is told to, before or after it did its work."""

    turns: Sequence[int]
    before: bool
    count: count[int] = field(default_factory=count)

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            failing = next(self.count) in self.turns
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


def finish(engine: Engine) -> int:
    """Run to the end, trying again after every fault; how many there were."""
    num_faults = 0
    for _ in range(500):
        if not engine.has_work:
            return num_faults
        try:
            engine.step()
        except FaultError:
            num_faults += 1
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("part", ["target", "draft model", "drafter", "rule"])
@pytest.mark.parametrize("kind", [ToyHybrid, TinyAttentionLM])
def test_a_failed_job_can_be_tried_again(
    kind: Kind, part: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Rig(
        kind(vocab_size=VOCAB), model_drafter(kind(vocab_size=VOCAB, seed=5), 3), k=3, chunk=4
    ).run(REQUESTS)
    target, draft_model = kind(vocab_size=VOCAB), kind(vocab_size=VOCAB, seed=5)
    free = target.state.num_free_tokens
    rig = Rig(target, model_drafter(draft_model, 3), TokenRule(), k=3, chunk=4)
    failing = FailingAt((0, 3, 4, 8), before)
    place: dict[str, tuple[object, str]] = {
        "target": (target, "step"),
        "draft model": (draft_model, "step"),
        "drafter": (rig.drafter, "propose"),
        "rule": (TokenRule, "__call__"),
    }
    owner, name = place[part]
    monkeypatch.setattr(owner, name, failing.wrap(getattr(owner, name)))
    engine = rig.engine()
    seqs = [rig.live(seq_id, request) for seq_id, request in enumerate(REQUESTS)]
    for seq in seqs:
        engine.submit(seq)
    assert finish(engine) == 4
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == wanted
    assert target.state.num_free_tokens == draft_model.state.num_free_tokens == free


def test_a_failed_tree_leaves_nothing_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB)
    rig = Rig(target, random_trees(VOCAB), MatchRule(), k=2)
    wanted = Rig(TinyAttentionLM(vocab_size=VOCAB), random_trees(VOCAB), MatchRule(), k=2)
    monkeypatch.setattr(target, "step", FailingAt((2, 5), before=False).wrap(target.step))
    engine = rig.engine()
    seqs = [rig.live(seq_id, request) for seq_id, request in enumerate(REQUESTS)]
    for seq in seqs:
        engine.submit(seq)
    while engine.has_work:
        try:
            engine.step()
        except FaultError:
            live = [seq.seq_id for seq in seqs if seq.finish is None]
            assert not any(map(target.state.num_staged, live))
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == wanted.run(REQUESTS)
    target.state.check()


def test_after_a_fault_one_request_may_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on as if nothing had happened."""
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), k=0).run(REQUESTS)
    target = ToyHybrid(vocab_size=VOCAB)
    monkeypatch.setattr(target, "step", FailingAt((3,), before=True).wrap(target.step))
    rig = Rig(target, k=0)
    engine = rig.engine()
    seqs = [rig.live(seq_id, request) for seq_id, request in enumerate(REQUESTS)]
    for seq in seqs:
        engine.submit(seq)
    for _ in range(3):
        engine.step()
    with pytest.raises(FaultError):
        engine.step()
    engine.cancel(1)
    assert finish(engine) == 0
    assert [seqs[i].tokens[seqs[i].prompt_length :] for i in (0, 2)] == [wanted[0], wanted[2]]
