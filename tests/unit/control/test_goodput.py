"""The goodput controller on toy machines: never far from the best length there is, off included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from checks.controllers import trace
from doubles.planned import ToyMachine
from outrider.control.goodput import (
    FEW,
    MOST_TOGETHER,
    TOGETHER,
    WITHOUT_GAIN,
    GoodputController,
)
from outrider.control.heuristics import FixedController
from outrider.control.scored import PROBE_ROUNDS, SWEEP_ROUNDS
from outrider.core.draft import Budget
from outrider.estimate.cost import HORIZON, CostTable, Curve

K = 8
NUM_TOKENS = 6000
HALF = NUM_TOKENS // 2


def flat(rows: int) -> float:
    return 1.0 + 0.01 * rows


def kneed(rows: int) -> float:
    """Sixteen rows are nearly free."""
    return 1.0 + 0.01 * rows + 0.06 * max(rows - 16, 0)


def steep(rows: int) -> float:
    return 0.6 + 0.4 * rows


# Each machine, and the tokens a second of the best fixed length over which goodput must come.
MACHINES: dict[str, tuple[ToyMachine, float]] = {
    "a cheap drafter": (ToyMachine(flat, 0.05, lambda i, j, n: 0.8), 0.98),
    "a dear one, off is best": (ToyMachine(flat, 0.9, lambda i, j, n: 0.5), 0.98),
    "one that can never pay": (ToyMachine(flat, 9.0, lambda i, j, n: 0.95), 0.98),
    "rows cost, off is best": (ToyMachine(steep, 0.1, lambda i, j, n: 0.5), 0.98),
    "it hardly matters": (ToyMachine(lambda r: 1.0, 0.7, lambda i, j, n: 0.7, noise=0.1), 0.98),
    "acceptance drops": (
        ToyMachine(flat, 0.15, lambda i, j, n: 0.9 if n < HALF else 0.2),
        1.05,
    ),
    "acceptance rises": (
        ToyMachine(flat, 0.15, lambda i, j, n: 0.2 if n < HALF else 0.9),
        1.05,
    ),
    "one easy and one hard request": (
        ToyMachine(flat, 0.15, lambda i, j, n: (0.92, 0.25)[i], num_requests=2),
        1.0,
    ),
    "a batch of all kinds on a knee": (
        ToyMachine(kneed, 0.05, lambda i, j, n: 0.3 + 0.08 * i, num_requests=8),
        0.98,
    ),
    "noise and interruptions": (
        ToyMachine(flat, 0.15, lambda i, j, n: 0.7, noise=0.2, spikes=0.02),
        0.98,
    ),
    "noise where off is best": (
        ToyMachine(flat, 0.6, lambda i, j, n: 0.4, noise=0.2, spikes=0.02),
        0.98,
    ),
    "places differ": (ToyMachine(flat, 0.08, lambda i, j, n: 0.9 - 0.12 * j), 0.98),
    "a drafter that must catch up": (
        ToyMachine(flat, 0.1, lambda i, j, n: 0.7, catch_up=0.02),
        0.98,
    ),
    "the machine slows down": (
        ToyMachine(flat, 0.1, lambda i, j, n: 0.7, speed=lambda n: 1.0 + (n >= HALF)),
        0.98,
    ),
    "judging is dear, off is best": (
        ToyMachine(flat, 0.02, lambda i, j, n: 0.4, judge=0.6, overhead=0.1),
        0.98,
    ),
    "judging costs, and drafts pay": (
        ToyMachine(flat, 0.02, lambda i, j, n: 0.9, judge=0.2, overhead=0.1),
        0.98,
    ),
    "judging is dear, and the machine slows down": (
        ToyMachine(flat, 0.02, lambda i, j, n: 0.4, judge=0.6, speed=lambda n: 1.0 + (n >= HALF)),
        0.98,
    ),
    "short rounds": (ToyMachine(flat, 0.05, lambda i, j, n: 0.8, speed=lambda n: 2e-4), 0.98),
    "short rounds where off is best": (
        ToyMachine(flat, 0.9, lambda i, j, n: 0.5, num_requests=5, speed=lambda n: 2e-4),
        0.98,
    ),
    "acceptance drops in short rounds": (
        ToyMachine(flat, 0.15, lambda i, j, n: 0.9 if n < HALF else 0.2, speed=lambda n: 2e-4),
        1.05,
    ),
    "a round has its own price": (
        ToyMachine(flat, 0.1, lambda i, j, n: 0.6, overhead=1.0),
        0.98,
    ),
}


def fixed_rate(machine: ToyMachine, k: int) -> float:
    """Tokens a second when every round drafts `k`, for `NUM_TOKENS` tokens."""
    piece, seconds = NUM_TOKENS // 20, 0.0
    for start in range(0, NUM_TOKENS, piece):
        requests = range(machine.num_requests)
        tokens = sum(machine.expected(request, k, start) for request in requests)
        seconds += piece / tokens * machine.seconds(k, start)
    return NUM_TOKENS / seconds


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_it_keeps_up_with_the_best_fixed_length(name: str) -> None:
    machine, share = MACHINES[name]
    best = max(fixed_rate(machine, k) for k in range(K + 1))
    found: list[float] = []
    for seed in range(4):
        controller = GoodputController(k=K)
        run = replace(machine, seed=seed).run(controller, NUM_TOKENS)
        found.append(run.tokens_per_second)
        assert controller.stats().probe_share <= 0.02
    assert fmean(found) >= share * best


@pytest.mark.parametrize(("scale", "together"), [(1.0, TOGETHER), (1e-4, MOST_TOGETHER)])
def test_choices_stand_for_as_many_rounds_as_learning_is_worth(scale: float, together: int) -> None:
    """Learning costs its own time, which beside rounds of 0.2 ms is not little."""
    machine = ToyMachine(
        flat, 0.3, lambda i, j, n: 0.7, num_requests=4, noise=0.3, speed=lambda n: scale
    )
    run = machine.run(GoodputController(k=K), NUM_TOKENS)
    late = run.depths[len(run.depths) // 2 :]
    changes = [at for at in range(1, len(late)) if late[at] != late[at - 1]]
    gaps = [after - at for at, after in pairwise(changes)]
    # Looks take four rounds, each of which is learnt from at once.
    assert changes
    assert sum(gap >= together or gap <= PROBE_ROUNDS for gap in gaps) >= 0.9 * len(gaps)


def test_the_costs_of_a_choice_are_of_one_form_of_tree() -> None:
    """Whatever was asked before: more places never cost less."""
    linear = CostTable(Curve(((1.0, 1.0), (65.0, 65.0))), ((1, Curve(((0.0, 0.0), (64.0, 0.01)))),))
    controller = GoodputController(k=K, num_nodes=8 * K, costs=linear)

    def seconds(depth: int) -> float:
        return controller._round_seconds(1, 1 + depth, depth, 1)  # pyright: ignore[reportPrivateUsage]

    for index in range(60):
        num_drafted = K if index < 40 else 8 * K
        one = replace(trace(0, num_drafted, 4), pass_index=index, draft_depth=K)
        controller.observe(replace(one, draft_seconds=0.01, verify_seconds=1.0 + num_drafted))
        if index == 40:
            assert seconds(K) > 0
    found = [seconds(depth) for depth in range(1, K + 1)]
    assert found == sorted(found)


def test_the_yardstick_is_what_fixed_lengths_come_to() -> None:
    machine, _ = MACHINES["acceptance drops"]
    for k in (0, 3):
        run = machine.run(FixedController(Budget(k)), NUM_TOKENS)
        assert run.tokens_per_second == pytest.approx(fixed_rate(machine, k), rel=0.05)


@pytest.mark.parametrize(
    ("draft_pass", "rate", "shortest", "longest"),
    [(0.05, 0.8, 5, 8), (0.9, 0.5, 0, 0), (0.3, 0.7, 1, 3)],
)
def test_most_rounds_draft_the_best_length(
    draft_pass: float, rate: float, shortest: int, longest: int
) -> None:
    run = ToyMachine(flat, draft_pass, lambda i, j, n: rate).run(GoodputController(k=K), 1500)
    late = [depths[0] for depths in run.depths[len(run.depths) // 2 :]]
    assert sum(shortest <= depth <= longest for depth in late) >= 0.9 * len(late)


def test_a_hard_request_is_left_alone_while_an_easy_one_drafts() -> None:
    machine = ToyMachine(
        lambda rows: 1.0 + 0.05 * rows, 0.1, lambda i, j, n: (0.95, 0.05)[i], num_requests=2
    )
    run = machine.run(GoodputController(k=K), 3000)
    late = run.depths[len(run.depths) // 2 :]
    assert sum(easy >= 4 for easy, _ in late) >= 0.9 * len(late)
    assert sum(hard for _, hard in late) <= 0.3 * len(late)


def test_the_first_rounds_try_a_few_lengths() -> None:
    run = ToyMachine(flat, 0.05, lambda i, j, n: 0.9).run(GoodputController(k=K), 200)
    first = [depths[0] for depths in run.depths[: 5 * SWEEP_ROUNDS + 1]]
    # The first draft of all reads what the drafter has not read, and does not count.
    assert first[:5] == [0, 0, 0, 1, 1]
    assert first == sorted(first)
    # What promises too little beside longer ones is gone through faster.
    assert {4, 8} <= set(first)


@pytest.mark.parametrize(("draft_pass", "most"), [(9.0, 2), (2.0, 1 + SWEEP_ROUNDS)])
def test_what_cannot_pay_is_hardly_tried_at_the_start(draft_pass: float, most: int) -> None:
    """Even if all was accepted, a drafter that takes longer than the target loses."""
    run = ToyMachine(flat, draft_pass, lambda i, j, n: 1.0).run(GoodputController(k=K), 30)
    assert 0 < sum(depth > 0 for (depth,) in run.depths) <= most
    assert max(depth for (depth,) in run.depths) == 1


def test_looks_at_what_does_not_pay_are_at_a_few_requests() -> None:
    """Sixteen rows cost sixteen times one, so no draft pays, and each more that drafts loses."""
    machine = ToyMachine(steep, 0.1, lambda i, j, n: 0.5, num_requests=2 * FEW)
    run = machine.run(GoodputController(k=K), NUM_TOKENS)
    drafting = [sum(depth > 0 for depth in depths) for depths in run.depths]
    assert set(drafting) == {0, 2}
    looked = {i for depths in run.depths for i, depth in enumerate(depths) if depth}
    assert len(looked) > 2


@pytest.mark.parametrize(("num_prompt_tokens", "drafts"), [(1, True), (100 * HORIZON, False)])
def test_a_prompt_is_read_by_a_drafter_where_that_pays(
    num_prompt_tokens: int, drafts: bool
) -> None:
    """Reading a token costs a hundredth of a pass, and drafts save half of the time."""
    controller = GoodputController(k=K)
    machine = ToyMachine(flat, 0.05, lambda i, j, n: 0.8, catch_up=0.01)
    machine.run(controller, 300)
    # Long enough to tell what reading costs.
    told = replace(trace(1, 0, 0, reading=True), num_prompt_tokens=100)
    controller.observe(replace(told, pass_index=1000))
    for index in range(1, TOGETHER + 1):
        reading = 1.0 if index == 1 else 0.0
        one = replace(trace(1, 4, 3), draft_seconds=0.2 + reading, verify_seconds=1.05)
        controller.observe(replace(one, pass_index=1000 + index, accept_seconds=0.0))
    told = replace(trace(2, 0, 0, reading=True), num_prompt_tokens=num_prompt_tokens)
    controller.observe(replace(told, pass_index=2000))
    assert bool(controller.budgets([2])[0].depth) == drafts
    # What was read is read.
    assert controller.budgets([1])[0].depth


def test_known_costs_spare_the_sweep() -> None:
    costs = CostTable(Curve(((1.0, 1.0), (9.0, 1.1))), ((1, Curve(((0.0, 0.0), (8.0, 0.4)))),))
    controller = GoodputController(k=K, costs=costs)
    assert not controller.stats().is_sweeping
    assert controller.budgets([0])[0].depth >= 3
    dear = CostTable(Curve(((1.0, 1.0), (9.0, 9.0))), costs.drafts)
    assert GoodputController(k=K, costs=dear).budgets([0])[0].depth == 0


def test_costs_that_were_learnt_serve_the_next_controller() -> None:
    machine = ToyMachine(flat, 0.9, lambda i, j, n: 0.5)
    first = GoodputController(k=K)
    machine.run(first, 500)
    costs = CostTable.of_json(first.stats().costs.to_json())
    run = machine.run(GoodputController(k=K, costs=costs), 100)
    assert sum(depth > 1 for (depth,) in run.depths) <= 5


def test_lanes_may_report_in_turns() -> None:
    """Records of two passes that come mixed are the same as one after the other."""

    def told(order: Callable[[int], list[tuple[int, int]]]) -> list[int]:
        controller = GoodputController(k=K)
        found: list[int] = []
        for index in range(60):
            for pass_index, seq_id in order(index):
                one = trace(seq_id, 2 + pass_index % 2, 1)
                controller.observe(replace(one, pass_index=pass_index, batch_size=2))
            found += [budget.depth for budget in controller.budgets([0, 1, 2, 3])]
        return found

    mixed = told(lambda i: [(2 * i, 0), (2 * i + 1, 2), (2 * i, 1), (2 * i + 1, 3)])
    assert mixed == told(lambda i: [(2 * i, 0), (2 * i, 1), (2 * i + 1, 2), (2 * i + 1, 3)])


def test_a_pass_that_never_ends_is_forgotten() -> None:
    controller = GoodputController(k=K)
    for index in range(500):
        controller.observe(replace(trace(0, 4, 4), pass_index=index, batch_size=2))
    assert controller.stats().is_sweeping
    assert controller.budgets([0]) == GoodputController(k=K).budgets([0])


def test_a_draft_whose_model_catches_up_is_no_measure_of_drafts() -> None:
    """Every draft here is the first after a plain round, or the first of its sequence."""
    controller = GoodputController(k=K)
    for index in range(80):
        seconds = {"verify_seconds": 1.0, "accept_seconds": 0.0}
        first = replace(trace(1000 + index, 4, 2), draft_seconds=50.0, **seconds)
        again = replace(trace(0, 4 * (index % 2), 0), draft_seconds=50.0, **seconds)
        controller.observe(replace(first, pass_index=2 * index))
        controller.observe(replace(again, pass_index=2 * index + 1))
    assert controller.stats().costs.draft_seconds(4, 1) == pytest.approx(0.4)


def test_a_few_passes_are_learnt_from_at_a_time_but_a_refused_draft_at_once() -> None:
    machine = ToyMachine(flat, 0.2, lambda i, j, n: 0.75)
    controller = GoodputController(k=K)
    machine.run(controller, 400)
    seconds = {"draft_seconds": 0.0, "verify_seconds": 1.0, "accept_seconds": 0.0}
    right = replace(trace(0, 2, 1), **seconds)
    # The drafts of a new request, which may be a hard one.
    refused = replace(trace(1, 2, 0), **seconds)
    while not controller.learn([right]):
        pass
    kept = [controller.learn([right]) for _ in range(TOGETHER)]
    assert kept == [False] * (TOGETHER - 1) + [True]
    assert controller.learn([refused])
    # Passes in less than `TOGETHER_SECONDS` wait all the same.
    assert not controller.learn([replace(refused, verify_seconds=1e-4)])


def test_after_64_rounds_without_gain_drafting_is_off_and_one_request_says_so() -> None:
    controller = GoodputController(k=K)
    machine = ToyMachine(flat, 9.0, lambda i, j, n: 0.95)
    run = machine.run(controller, WITHOUT_GAIN // 2)
    assert controller.stats().off == ""
    assert [budget.why for budget in controller.budgets([0])] == [""]
    run = machine.run(controller, 4 * WITHOUT_GAIN)
    assert f"{WITHOUT_GAIN} rounds without gain" in controller.stats().off
    assert run.depths[-1] == [0]
    assert controller.budgets([0])[0].why == controller.stats().off
    # A request that comes later finds it in the statistics.
    assert controller.budgets([7])[0].why == ""


def test_gain_ends_what_was_called_off() -> None:
    controller = GoodputController(k=K)
    ToyMachine(flat, 0.15, lambda i, j, n: 0.05).run(controller, 4 * WITHOUT_GAIN)
    assert controller.stats().off
    better = ToyMachine(flat, 0.15, lambda i, j, n: 0.95)
    assert better.run(controller, 2000).depths[-1] != [0]
    assert controller.stats().off == ""


def test_a_drafter_that_pays_is_never_called_off() -> None:
    controller = GoodputController(k=K)
    ToyMachine(flat, 0.05, lambda i, j, n: 0.8).run(controller, 2000)
    assert controller.stats().off == ""
    assert not controller.budgets([0])[0].why


def test_a_choice_says_what_was_expected_and_that_is_what_comes() -> None:
    """Of the toy's true tokens and seconds; the first lengths are tried, and expect nothing yet."""
    machine = ToyMachine(flat, 0.05, lambda i, j, n: 0.8)
    controller = GoodputController(k=K)
    (first,) = controller.budgets([0])
    assert first.choice is not None
    assert (first.choice.reason, first.choice.gain) == ("trial", None)
    machine.run(controller, 1500)
    settled = [controller.budgets([0])[0] for _ in range(8)]
    gains = [one for one in settled if one.choice is not None and one.choice.reason == "gain"]
    assert gains
    for one in gains:
        assert one.choice is not None
        assert one.choice.tokens == pytest.approx(machine.expected(0, one.depth, 0), rel=0.15)
        assert one.choice.seconds == pytest.approx(machine.seconds(one.depth, 0), rel=0.15)
        true_gain = machine.expected(0, one.depth, 0) * machine.seconds(0, 0)
        true_gain /= machine.seconds(one.depth, 0)
        assert one.choice.gain == pytest.approx(true_gain, rel=0.15)
