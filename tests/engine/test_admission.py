"""Requests start as memory and places allow, end early on demand, and leave nothing behind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import (
    PROMPT,
    Kind,
    check_admission,
    check_cancelling,
    check_tight_arena,
    greedy,
    plain,
    run_down,
)
from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.rig import Request, Rig
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.errors import CapacityError
from outrider.drafters.ngram import NgramDrafter
from outrider.sched.admission import Knee


@examples(25)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=8),
    num_slots=st.integers(28, 60),
    batch_size=st.integers(1, 4),
    chunk=st.integers(1, 8),
)
def test_admission_never_over_commits(
    sizes: list[tuple[int, int]], num_slots: int, batch_size: int, chunk: int
) -> None:
    """Whatever is let in finishes: no round of trees ever meets a full arena."""
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=4, num_slots=num_slots)
    rig = Rig(target, random_trees(VOCAB), k=3, batch_size=batch_size, chunk=chunk, spare=4)
    check_tight_arena(sizes, rig)


def test_admission_in_arenas_of_many_sizes() -> None:
    check_admission()


def test_a_request_that_could_never_fit_is_refused_at_once() -> None:
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB, num_slots=32), spare=4)
    engine = rig.engine()
    engine.submit(rig.live(0, Request((1,) * 8, greedy(20))))
    with pytest.raises(CapacityError, match="8 tokens with up to 21 more") as caught:
        engine.submit(rig.live(1, Request((1,) * 8, greedy(21))))
    assert caught.value.hint
    run_down(engine)


def test_requests_start_in_the_order_they_came() -> None:
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB, num_slots=40), batch_size=3, spare=4, k=0)
    engine = rig.engine()
    for seq_id, budget in enumerate((20, 8, 1)):
        engine.submit(rig.live(seq_id, Request(PROMPT, greedy(budget))))
    engine.step()
    # The second does not fit beside the first, and the third does not overtake it.
    assert {trace.seq_id for trace in rig.traces} == {0}
    run_down(engine)
    firsts = [next(t.pass_index for t in rig.traces if t.seq_id == i) for i in range(3)]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("kind", [ToyHybrid, TinyAttentionLM])
def test_cancelling_at_any_moment_frees_memory_and_disturbs_nobody(kind: Kind) -> None:
    check_cancelling(kind)


def test_requests_may_come_at_any_time() -> None:
    """New requests join a running batch, and reuse what finished ones left in free pages."""
    rng = random.Random(4)
    target = TinyAttentionLM(vocab_size=VOCAB)
    rig = Rig(target, NgramDrafter(max_n=2, min_n=1), batch_size=3, chunk=4)
    engine = rig.engine()
    waiting = [(seq_id, ((1, 2, 3, 0) * 5)[: rng.randint(1, 20)]) for seq_id in range(12)]
    asked = dict(waiting)
    seqs = {seq_id: rig.live(seq_id, Request(prompt, greedy(6))) for seq_id, prompt in waiting}
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.submit(seqs[waiting.pop()[0]])
        engine.step()
        target.state.check()
    for seq_id, prompt in asked.items():
        assert tuple(seqs[seq_id].tokens[len(prompt) :]) == plain(TinyAttentionLM, prompt, 6)
    read = sum(trace.num_prompt_tokens for trace in rig.traces)
    assert read < sum(len(prompt) - 1 for prompt in asked.values())


def test_fewer_start_under_a_limit_that_is_learnt_and_one_waits() -> None:
    """The limit grows only while requests wait, so the engine takes one more than may run."""
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB, num_slots=400), batch_size=8, spare=4, k=0)
    engine = rig.engine()
    engine.residents.batch_limit = Knee(highest=2)
    taken = 0
    while engine.has_free_slot:
        engine.submit(rig.live(taken, Request(PROMPT, greedy(20))))
        engine.step()
        taken += 1
    assert (taken, len(engine.residents.live), engine.residents.counts.live) == (3, 2, 2)
    run_down(engine)
    assert engine.residents.counts.live == 0
