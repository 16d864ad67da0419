"""The watchdog: dead drafts are left out with a reason, live ones never, and it looks again."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.controllers import trace
from checks.effort import examples
from outrider.control.heuristics import (
    FADE,
    FIRST_REST,
    LEAST_ROUNDS,
    LONGEST_REST,
    PROBE_ROUNDS,
    SHARED_ROUNDS,
    FixedController,
    Watchdog,
)
from outrider.core.draft import Budget
from outrider.estimate.cost import ROW_COST

K = 4


def watchdog(*, shared: bool = False, k: int = K) -> Watchdog:
    return Watchdog(FixedController(Budget(k, num_nodes=9)), shared=shared)


def depth(dog: Watchdog, seq_id: int = 0) -> int:
    return dog.budgets([seq_id])[0].depth


def run(dog: Watchdog, accepted: int, num_rounds: int, seq_id: int = 0) -> list[int]:
    """The depth that each round was given; `accepted` tokens of it are kept."""
    depths = list[int]()
    for _ in range(num_rounds):
        depths.append(depth(dog, seq_id))
        dog.observe(trace(seq_id, depths[-1], min(accepted, depths[-1])))
    return depths


def test_drafts_that_are_never_kept_are_left_out_and_tried_again() -> None:
    depths = run(watchdog(), 0, 400)
    off = depths.index(0)
    assert LEAST_ROUNDS <= off <= 2 * LEAST_ROUNDS
    rest, probe = FIRST_REST, PROBE_ROUNDS
    assert depths[off : off + rest] == [0] * rest
    assert depths[off + rest : off + rest + probe] == [K] * probe
    second = off + rest + probe
    assert depths[second : second + 2 * rest] == [0] * (2 * rest)


def test_rests_grow_up_to_a_bound() -> None:
    depths = run(watchdog(), 0, 8000)
    rests = [len(part) for part in "".join(str(d) for d in depths).split(str(K)) if part]
    assert rests[:5] == [64, 128, 256, 512, 1024]
    assert max(rests) == LONGEST_REST


def test_it_says_why_in_the_budget_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    dog = watchdog()
    with caplog.at_level(logging.WARNING):
        run(dog, 0, 60)
    budget = dog.budgets([0])[0]
    assert (budget.depth, budget.size) == (0, 0)
    assert "0.00 tokens a round" in budget.why
    assert "0.16 would pay" in budget.why
    assert caplog.text.count("rests for request 0") == 1
    assert budget.why in caplog.text


def test_drafts_that_come_alive_are_drafted_again() -> None:
    dog = watchdog()
    depths = run(dog, 0, 60)
    assert depths[-1] == 0
    depths = run(dog, 2, FIRST_REST + PROBE_ROUNDS + 40)
    assert depths[-40:] == [K] * 40
    assert dog.budgets([0])[0].why == ""


@pytest.mark.parametrize("every", [2, 3, 4])
def test_drafts_that_pay_for_their_rows_are_never_left_out(every: int) -> None:
    """A token in every fourth round is more than four rows take."""
    dog = watchdog()
    for place in range(600):
        assert depth(dog) == K
        dog.observe(trace(0, K, int(place % every == 0)))


@examples(40)
@given(st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, K]), min_size=30, max_size=150))
def test_no_request_is_left_out_that_gets_what_pays(accepted: list[int]) -> None:
    """Whatever the order: who is left out got less of late, and by more than chance."""
    dog = watchdog()
    rounds = total = 0.0
    # One more looks at what all of them lead to.
    for count in (*accepted, 0):
        if depth(dog) == 0:
            assert (total + 1) / rounds < ROW_COST * K
            return
        dog.observe(trace(0, K, count))
        rounds, total = FADE * rounds + 1, FADE * total + count


def test_each_request_is_judged_by_itself() -> None:
    dog = watchdog()
    for _ in range(60):
        for seq_id, accepted in ((0, 0), (1, 3)):
            dog.observe(trace(seq_id, depth(dog, seq_id), min(accepted, depth(dog, seq_id))))
    assert [budget.depth for budget in dog.budgets([0, 1, 2])] == [0, K, K]


def test_rounds_without_a_draft_say_nothing() -> None:
    """A lookup that finds nothing is silent by itself."""
    dog = watchdog()
    for _ in range(500):
        dog.observe(trace(0, 0, 0))
        dog.observe(trace(0, 0, 0, reading=True))
    assert depth(dog) == K


def test_rounds_without_a_draft_count_in_rests_alone() -> None:
    dog = watchdog()
    run(dog, 0, 40, seq_id=1)
    assert depth(dog, 1) == 0
    assert depth(dog, 2) == K
    for _ in range(FIRST_REST):
        for seq_id in (1, 2):
            dog.observe(trace(seq_id, 0, 0))
    assert depth(dog, 1) == K
    assert depth(dog, 2) == K


def test_short_requests_are_judged_together_where_that_was_asked_for() -> None:
    together, apart = watchdog(shared=True), watchdog()
    for seq_id in range(SHARED_ROUNDS // 10 + 2):
        for dog in (together, apart):
            run(dog, 0, 10, seq_id)
    assert depth(apart, 1000) == K
    budget = together.budgets([1000])[0]
    assert budget.depth == 0
    assert "0.00 tokens a round" in budget.why
    run(together, K, FIRST_REST + PROBE_ROUNDS, 1001)
    assert depth(together, 1002) == K


def test_its_inner_controller_hears_of_everything() -> None:
    heard = list[int]()

    class Listening:
        def budgets(self, seq_ids: list[int]) -> list[Budget]:
            return [Budget(K, 1.5)] * len(seq_ids)

        def observe(self, trace: object) -> None:
            del trace
            heard.append(1)

    dog = Watchdog(Listening())  # pyright: ignore[reportArgumentType]
    run(dog, 0, 60)
    assert len(heard) == 60
    assert replace(dog.budgets([0])[0], why="") == Budget(0, 1.5)
