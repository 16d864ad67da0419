"""Which keys a prompt's end chooses, and an arena whose sequences have fewer rows than tokens.

Shapes:  L = layers, G = KV heads, M = rows that are left, D = head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.effort import examples
from doubles.tiny_attention import TinyAttentionLM
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pool import POOLED, Keep, kept_keys
from outrider.core.clock import host_ints
from outrider.core.errors import CapacityError, ConfigError, ContractError
from outrider.core.protocols import DraftNeeds, StepRow

NEEDS = DraftNeeds()


def slow_votes(q: Tensor, k: Tensor, head: int, shared: int, scale: float) -> list[float]:
    """Token by token, of one key head."""
    num_window, num_tokens = q.shape[0], k.shape[1]
    votes = [0.0] * num_tokens
    for row in range(num_window):
        for query in range(head * shared, (head + 1) * shared):
            seen = num_tokens - num_window + row + 1
            scores = [float(q[row, query].double() @ k[head, t].double()) for t in range(seen)]
            weights = [math.exp(score * scale) for score in scores]
            for t, weight in enumerate(weights):
                votes[t] += weight / sum(weights) / shared
    return votes


def slow_choice(votes: Sequence[float], keep: Keep) -> list[int]:
    before = len(votes) - keep.window
    reach = POOLED // 2
    pooled = [
        sum(votes[max(t - reach, 0) : min(t + reach + 1, before)]) / POOLED for t in range(before)
    ]
    best = sorted(range(before), key=lambda t: (-pooled[t], t))[: keep.budget - keep.window]
    return [*sorted(best), *range(before, len(votes))]


@examples(20)
@given(
    seed=st.integers(0, 1000),
    num_tokens=st.integers(9, 24),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 2), (6, 2)]),
    keep=st.sampled_from([Keep(8, 3), Keep(6, 1), Keep(5, 4), Keep(8, 7)]),
)
def test_keys_are_chosen_as_written_down(
    seed: int, num_tokens: int, heads: tuple[int, int], keep: Keep
) -> None:
    rng = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    q_WHD = torch.randn(keep.window, num_heads, 4, generator=rng)
    k_GTD = torch.randn(num_kv_heads, num_tokens, 4, generator=rng)
    kept_GM = kept_keys(q_WHD, k_GTD, keep, 0.5)
    assert kept_GM.shape == (num_kv_heads, keep.budget)
    for head, kept_M in enumerate(kept_GM):
        votes = slow_votes(q_WHD, k_GTD, head, num_heads // num_kv_heads, 0.5)
        assert host_ints(kept_M) == slow_choice(votes, keep)


def test_of_equal_keys_the_first_are_kept() -> None:
    kept_GM = kept_keys(torch.zeros(2, 1, 4), torch.ones(1, 40, 4), Keep(5, 2), 1.0)
    # Those at the edge have fewer neighbours to share with.
    assert host_ints(kept_GM[0]) == [2, 3, 4, 38, 39]


def test_a_window_must_leave_something_to_choose() -> None:
    for budget, window in ((16, 16), (8, 16), (4, 0)):
        with pytest.raises(ConfigError, match="kv_window"):
            Keep(budget, window)


def read(model: TinyAttentionLM, seq_id: int, tokens: Sequence[int]) -> PagedKV:
    unread = tokens[model.state.open(seq_id, tokens) :]
    if unread:
        model.step([StepRow.chain(seq_id, unread)], NEEDS)
        model.state.commit({seq_id: range(len(unread))})
    return model.state


def some_rows(store: PagedKV, seq_id: int, kept: Sequence[int]) -> Tensor:
    return store.read(seq_id)[:, :, :, list(kept)]


def test_rows_go_on_behind_those_that_are_left_at_the_positions_of_the_text() -> None:
    model = TinyAttentionLM(page_size=2)
    store = read(model, 0, [1, 2, 3, 4, 5, 6, 7])
    rows_L2GMD = some_rows(store, 0, [0, 4, 6])
    store.replace(0, rows_L2GMD)
    assert (store.length(0), store.num_dropped(0)) == (7, 4)
    assert torch.equal(store.read(0), rows_L2GMD)
    plan = store.plan([StepRow(0, (8, 9, 8), (-1, 0, 0))])
    assert host_ints(plan.positions_N) == [7, 8, 8]
    assert host_ints(plan.visible_N) == [4, 5, 4]
    slots = host_ints(plan.slots_N)
    pages = store.pages(0)
    assert slots == [pages[1] * 2 + 1, pages[2] * 2, pages[2] * 2 + 1]
    assert plan.extra_slots_E is not None
    assert host_ints(plan.extra_slots_E) == [slots[2]]
    assert store.commit({0: (0, 2)}) == 1
    assert (store.length(0), store.num_dropped(0)) == (9, 4)
    assert store.read(0).shape[3] == 5
    store.check()


def test_memory_is_given_back_and_the_prompt_is_still_found_whole() -> None:
    model = TinyAttentionLM(page_size=2, num_slots=40)
    free = model.state.num_free_tokens
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    store = read(model, 0, text)
    before = store.read(0).clone()
    store.replace(0, some_rows(store, 0, [0, 7, 6]))
    assert store.num_free_tokens == free - 4
    store.check()
    # Another one shares the prompt's own pages, not what is left of them.
    assert store.open(1, text) == 8
    assert torch.equal(store.read(1), before)
    # What the shortened one writes is found by nobody.
    store.reserve({0: 4})
    store.note_chain(0, (9, 1, 2, 3))
    store.commit({0: range(4)})
    assert store.open(2, [*text, 9, 1, 2, 3]) == 8
    for seq_id in (0, 1, 2):
        store.close(seq_id)
    assert store.num_free_tokens == free
    store.check()


def test_shared_pages_stay_as_they_are_for_others() -> None:
    model = TinyAttentionLM(page_size=2, num_slots=24)
    text = [1, 2, 3, 4, 5, 6]
    read(model, 0, text)
    store = read(model, 1, text)
    before = store.read(0).clone()
    store.replace(1, some_rows(store, 1, [5, 0, 1]))
    assert torch.equal(store.read(0), before)
    store.fork(1, 2)
    assert torch.equal(store.read(2), store.read(1))
    assert (store.length(2), store.num_dropped(2)) == (6, 3)
    store.check()
    with pytest.raises(ContractError, match="gone"):
        store.fork(1, 3, 4)


def test_what_there_is_no_room_for_changes_nothing() -> None:
    model = TinyAttentionLM(page_size=2, num_slots=6)
    text = [1, 2, 3, 4, 5, 6]
    read(model, 0, text)
    store = read(model, 1, text)
    rows_L2GMD = some_rows(store, 1, [5, 0, 1])
    with pytest.raises(CapacityError):
        store.replace(1, rows_L2GMD)
    assert (store.num_dropped(1), store.read(1).shape[3]) == (0, 6)
    store.check()
    # Alone, its own pages are room enough.
    store.close(0)
    store.replace(1, rows_L2GMD)
    assert torch.equal(store.read(1), rows_L2GMD)
    store.check()
