"""Memory that ends before its time: the youngest wait again, and every text is what it would be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import greedy, plain
from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.lanes import SCHEDULES
from doubles.rig import Request, Rig, live
from doubles.tiny_attention import TinyAttentionLM
from outrider.engine.drafting import DrafterHandle
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes, LaneRunner
from outrider.engine.requests import RequestTable
from outrider.sched.jobs import LaneSizes, Limits
from outrider.sched.ledger import Ledger

SPARE = 4
PAGE_SIZE = 2


def engine_over(target: TinyAttentionLM, name: str, chunk: int, reserve: float) -> Engine:
    rig = Rig(target, random_trees(VOCAB), k=3)
    schedule = SCHEDULES[name](LaneSizes(chunk))
    runner = LaneRunner(rig.stages(), rig.stages())
    limits = Limits(
        6, target.state.num_free_tokens, page_size=PAGE_SIZE, spare=SPARE, reserve=reserve
    )
    return Engine(
        residents=RequestTable(target, DrafterHandle(rig.drafter), Ledger(), limits),
        executor=InlineLanes(dict.fromkeys(schedule.lanes, runner)),
        schedule=schedule,
    )


def run_all(engine: Engine, target: TinyAttentionLM, sizes: list[tuple[int, int]]) -> None:
    """Requests of (prompt, budget) tokens; pages are counted after every step."""
    prompts = [((1, 2, 0) * 5)[start % 3 :][:length] for start, (length, _) in enumerate(sizes)]
    seqs = [
        live(seq_id, Request(prompt, greedy(budget)))
        for seq_id, (prompt, (_, budget)) in enumerate(zip(prompts, sizes, strict=True))
    ]
    free = target.state.num_free_tokens
    for seq in seqs:
        engine.submit(seq)
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
        target.state.check()
    for seq, prompt, (_, budget) in zip(seqs, prompts, sizes, strict=True):
        assert seq.error is None
        assert tuple(seq.tokens[len(prompt) :]) == plain(TinyAttentionLM, prompt, budget)
    assert target.state.num_free_tokens == free
    assert engine.residents.counts.preempted == sum(seq.num_preempted for seq in seqs)


@pytest.mark.parametrize("name", SCHEDULES)
@examples(15)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=8),
    num_slots=st.integers(26, 60),
    chunk=st.integers(1, 8),
    reserve=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_text_is_what_it_would_be(
    name: str, sizes: list[tuple[int, int]], num_slots: int, chunk: int, reserve: float
) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=PAGE_SIZE, num_slots=num_slots)
    engine = engine_over(target, name, chunk, reserve)
    run_all(engine, target, sizes)
    assert reserve < 1 or engine.residents.counts.preempted == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_for_two_of_three_requests_pre_empts(name: str) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=PAGE_SIZE, num_slots=36)
    engine = engine_over(target, name, 8, 0.0)
    run_all(engine, target, [(4, 14), (4, 14), (4, 14)])
    assert engine.residents.counts.preempted > 0
