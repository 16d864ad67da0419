"""Fair shares among keys: who starts next, and what nobody can save up."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.api.request import AsyncRequest
from outrider.core.errors import ConfigError, ContractError
from outrider.core.params import SamplingParams
from outrider.sched.admission import FairQueue


def drained(queue: FairQueue[tuple[str, int]], cost: int = 10) -> list[str]:
    """The keys in the order in which they start, each of `cost` tokens that end at once."""
    found: list[str] = []
    while queue:
        key, _ = queue.pop()
        queue.charge(key, cost)
        queue.ended(key)
        found.append(key)
    return found


def filled(numbers: dict[str, int], **weights: float) -> FairQueue[tuple[str, int]]:
    queue = FairQueue[tuple[str, int]]()
    for key, number in numbers.items():
        for i in range(number):
            queue.add((key, i), key, weight=weights.get(key, 1.0))
    return queue


def test_items_of_one_key_start_as_they_came() -> None:
    queue = FairQueue[int]()
    for number in range(5):
        queue.add(number, "")
    assert [queue.pop() for _ in range(5)] == list(range(5))
    with pytest.raises(ContractError):
        queue.pop()


def test_keys_take_turns_however_many_one_asks() -> None:
    assert "".join(drained(filled({"a": 6, "b": 3}))) == "ababab" + "aaa"


def test_shares_follow_weights() -> None:
    first = Counter(drained(filled({"a": 60, "b": 60}, b=3.0))[:40])
    assert first == {"a": 10, "b": 30}


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e-7, 1e7, float("inf"), float("nan")])
def test_what_is_no_weight_is_refused_and_nothing_waits(weight: float) -> None:
    queue = FairQueue[int]()
    with pytest.raises(ContractError, match="weight"):
        queue.add(1, "a", weight=weight)
    assert (len(queue), queue.next_key) == (0, None)
    with pytest.raises(ConfigError, match="1 is the default"):
        AsyncRequest(cast("Any", None), [1], SamplingParams(), weight=weight)


def test_who_writes_more_waits_longer() -> None:
    queue = filled({"a": 10, "b": 10})
    order: list[str] = []
    while len(order) < 8:
        key, _ = queue.pop()
        queue.charge(key, 30 if key == "a" else 10)
        queue.ended(key)
        order.append(key)
    assert Counter(order) == {"a": 2, "b": 6}


def test_idleness_saves_nothing_up_and_work_alone_costs_nothing() -> None:
    queue = filled({"a": 1})
    drained(queue, 1_000_000)
    # Nobody came meanwhile, so that is forgotten.
    for i in range(4):
        queue.add(("b", i), "b")
        queue.add(("a", i), "a")
    assert "".join(drained(queue)) == "babababa"


def test_a_key_of_which_nothing_runs_is_owed_a_place_by_one_with_several() -> None:
    queue = filled({"a": 5})
    for _ in range(3):
        queue.charge(queue.pop()[0], 10)
    assert queue.owing_key is None
    queue.add(("b", 0), "b")
    assert (queue.next_key, queue.owing_key) == ("b", "a")
    assert queue.pop()[0] == "b"
    queue.add(("b", 1), "b")
    assert queue.owing_key is None
    for _ in range(2):
        queue.ended("a")
    queue.add(("c", 0), "c")
    queue.charge("b", 10_000)
    assert (queue.next_key, queue.owing_key) == ("c", None)


def test_who_leaves_does_not_start() -> None:
    queue = filled({"a": 2, "b": 1})
    assert queue.remove(("a", 0), "a")
    assert not queue.remove(("a", 0), "a")
    assert (len(queue), set(queue)) == (2, {("a", 1), ("b", 0)})
    assert sorted(drained(queue)) == ["a", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60))
def test_keys_that_wait_all_along_have_had_alike(asked: list[tuple[str, int]]) -> None:
    """As long as two keys wait, what they have had differs by one item at most."""
    queue = FairQueue[tuple[str, int, int]]()
    for i, (key, cost) in enumerate(asked):
        queue.add((key, i, cost), key)
    had = Counter[str]()
    while queue:
        waits = {key for key, _, _ in queue}
        for one in waits:
            for other in waits:
                assert had[one] - had[other] <= 50
        key, _, cost = queue.pop()
        queue.charge(key, cost)
        queue.ended(key)
        had[key] += cost
