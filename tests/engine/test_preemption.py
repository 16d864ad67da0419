"""Memory that ends before its time: the youngest wait again, and every text is what it would be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import check_pre_emption
from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.lanes import SCHEDULES
from doubles.rig import Rig
from doubles.tiny_attention import TinyAttentionLM
from outrider.sched.jobs import LaneSizes


def rig_over(num_slots: int, name: str, chunk: int, reserve: float) -> Rig:
    return Rig(
        TinyAttentionLM(vocab_size=VOCAB, page_size=2, num_slots=num_slots),
        random_trees(VOCAB),
        k=3,
        batch_size=6,
        page_size=2,
        spare=4,
        reserve=reserve,
        schedule=SCHEDULES[name](LaneSizes(chunk)),
        is_watched=True,
    )


@pytest.mark.sample(3)
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
    check_pre_emption(rig_over(num_slots, name, chunk, reserve), sizes)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_for_two_of_three_requests_pre_empts(name: str) -> None:
    rig = rig_over(36, name, 8, 0.0)
    check_pre_emption(rig, [(4, 14)] * 3)
    assert rig.counts.preempted > 0
