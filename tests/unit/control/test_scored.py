"""The goodput controller of drafters that score their tokens: drafts are cut to what pays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from checks.controllers import trace
from outrider.control.scored import FIRST_REST, IDLE, ScoredController
from outrider.core.draft import Draft, RoundTrace
from outrider.core.errors import ContractError
from outrider.estimate.cost import FIRST_LOSS, LOSS_SHARE, CostMeter

K, NODES = 12, 24
Cost = Callable[[int], float]


def chain(*probs: float, by: str = "") -> Draft:
    return Draft.chain(range(len(probs)), by=by, accept_probs=tuple(probs))


def flat(rows: int) -> float:
    return 1.0 + 0.01 * rows


def steep(rows: int) -> float:
    return 0.2 + 0.8 * rows


def sloped(rows: int) -> float:
    return 1.0 + 0.15 * rows


def stepped(rows: int) -> float:
    """The second row costs as much as the next seven together."""
    return 1.0 + 0.3 * (rows > 1) + 0.3 * (rows > 8)


class Play:
    """Rounds of one controller on a machine where a pass over n rows takes `cost(n)` seconds. A
    node is accepted with the probability that `truth` says of the one that its drafter expects."""

    def __init__(self, cost: Cost, *, truth: Callable[[float], float] = lambda p: p) -> None:
        self.controller = ScoredController(k=K, num_nodes=NODES)
        self.cost, self.truth = cost, truth
        self.random = random.Random(5)
        self.num_passes, self.tokens, self.seconds = 0, 0, 0.0
        self.draft_seconds = 0.0

    def round(self, offers: list[Draft]) -> list[Draft]:
        """What is left of `offers`, one a sequence, after they were cut and verified."""
        seq_ids = list(range(len(offers)))
        drafts = self.controller.trim(seq_ids, offers).drafts
        rows = len(offers) + sum(map(len, drafts))
        seconds = self.cost(rows)
        for seq_id, draft in enumerate(drafts):
            accepted, before = 0, 1.0
            for expected in draft.accept_probs:
                if self.random.random() >= self.truth(expected) / before:
                    break
                before = self.truth(expected)
                accepted += 1
            self.tokens += accepted + 1
            one = trace(seq_id, len(draft), accepted)
            self.controller.observe(
                replace(
                    one,
                    pass_index=self.num_passes,
                    batch_size=len(offers),
                    draft_seconds=self.draft_seconds,
                    verify_seconds=seconds,
                    accept_seconds=0.0,
                )
            )
        self.seconds += seconds
        self.num_passes += 1
        return drafts

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def learnt(cost: Cost, num_sequences: int = 1, **settings: Callable[[float], float]) -> Play:
    """After drafts of all lengths, and then so many without that time has its plain price."""
    play = Play(cost, **settings)
    for count in range(64):
        sizes = [1 + (count + index) % NODES for index in range(num_sequences)]
        play.round([chain(*(0.97**n for n in range(1, size + 1))) for size in sizes])
    for _ in range(400):
        play.round([chain()] * num_sequences)
    return play


def test_budgets_are_the_longest_drafts() -> None:
    budgets = ScoredController(k=K, num_nodes=NODES).budgets([3, 4])
    assert [(one.depth, one.size) for one in budgets] == [(K, NODES)] * 2
    with pytest.raises(ContractError):
        ScoredController(k=-1)


def test_where_rows_are_cheap_unlikely_tokens_are_drafted_and_where_they_are_dear_none() -> None:
    offer = chain(0.6, 0.3, 0.1, 0.05)
    assert len(learnt(flat).round([offer])[0]) == 4
    assert not learnt(steep).round([offer])[0]


def test_a_first_row_that_costs_more_must_be_paid_by_the_whole_draft() -> None:
    play = learnt(stepped)
    assert not play.round([chain(0.2, 0.05)])[0]
    assert len(play.round([chain(0.2, 0.18, 0.16, 0.15, 0.14, 0.13)])[0]) == 6


def test_of_a_batch_the_likeliest_nodes_are_verified() -> None:
    def kneed(rows: int) -> float:
        return 1.0 + 0.5 * max(rows - 8, 0)

    play = learnt(kneed, num_sequences=4)
    drafts = play.round([chain(0.9, 0.8, 0.7), chain(0.1), chain(), chain(0.5, 0.2)])
    # Four rows are free beyond those of the sequences themselves.
    assert [len(draft) for draft in drafts] == [3, 0, 0, 1]


def test_drafts_of_a_pass_are_bounded() -> None:
    controller = ScoredController(k=K, num_nodes=NODES, most_drafted=3)
    drafts = controller.trim([0, 1], [chain(0.9, 0.5, 0.4), chain(0.8, 0.7)]).drafts
    assert [len(draft) for draft in drafts] == [1, 2]


def test_drafts_without_probabilities_and_drawn_ones_stay_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    drawn = Draft.chain((1, 2), torch.full((2, 4), 0.25), accept_probs=(0.01, 0.001))
    forced = Draft.chain((1, 2, 3))
    drafts = learnt(steep, num_sequences=2).controller.trim([0, 1], [drawn, forced]).drafts
    assert [len(draft) for draft in drafts] == [2, 3]


def test_a_tree_is_cut_behind_parents() -> None:
    tree = Draft((5, 6, 7, 8), (-1, 0, 0, 1), accept_probs=(0.9, 0.5, 0.3, 0.2))
    for most in range(5):
        controller = ScoredController(k=K, num_nodes=NODES, most_drafted=most)
        cut = controller.trim([0], [tree]).drafts[0]
        assert (cut.tokens, cut.parents) == (tree.tokens[:most], tree.parents[:most])


def test_expectations_that_are_too_high_are_corrected() -> None:
    """Half as many tokens are accepted as the drafter expects: what seemed to pay does not."""

    def priced(rows: int) -> float:
        return 1.0 + 0.4 * (rows - 1)

    honest, boastful = learnt(priced), learnt(priced, truth=lambda p: 0.5 * p)
    for play in (honest, boastful):
        for _ in range(60):
            play.round([chain(0.6)])
    assert len(honest.round([chain(0.6)])[0]) == 1
    assert not boastful.round([chain(0.6)])[0]


def test_a_short_draft_is_tried_again_after_a_while() -> None:
    play = learnt(steep)
    drafts = [play.round([chain(0.3, 0.2, 0.1, 0.1, 0.1, by="a")])[0] for _ in range(200)]
    tried = [draft for draft in drafts if draft]
    assert 1 <= len(tried) <= 4
    assert max(map(len, tried)) <= 4
    # Records say that these were made to learn.
    assert all(part.trial and part.name == "a" for draft in tried for part in draft.parts)


def test_a_drafter_that_boasts_is_stopped_and_others_go_on() -> None:
    """Nothing of what it calls likely is right, and its rows cost little each."""
    play = Play(lambda rows: 1.0 + 0.04 * rows, truth=lambda p: p if p < 0.9 else 0.0)
    wrong = chain(0.92, 0.91, 0.91, 0.91, by="boast")
    sizes = [len(play.round([wrong])[0]) for _ in range(1000)]
    assert sum(sizes) * 0.04 < 1.5 * FIRST_LOSS + LOSS_SHARE * 1000
    assert len(play.round([chain(0.8, 0.7, by="other")])[0]) == 2


def test_a_bad_moment_does_not_end_drafting() -> None:
    slow = [True]

    def cost(rows: int) -> float:
        return flat(rows) * (20.0 if slow[0] and rows > 1 else 1.0)

    play = Play(cost)
    for _ in range(3):
        play.round([chain(0.9, 0.8)])
    slow[0] = False
    for _ in range(400):
        play.round([chain(0.7, 0.5)])
    assert play.round([chain(0.7, 0.5)])[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("cost", [flat, steep, stepped, sloped])
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_it_is_never_slower_than_plain_decoding_nor_than_a_fixed_length(
    cost: Cost, num_sequences: int
) -> None:
    dice = random.Random(1)

    def offer() -> Draft:
        first = dice.choice((0.0, 0.2, 0.5, 0.95))
        return chain(*(first**n for n in range(1, K + 1) if first**n > 0.04))

    offers = [[offer() for _ in range(num_sequences)] for _ in range(1500)]
    play = Play(cost)
    for some in offers:
        play.round(some)
    rates = list[float]()
    for most in (0, 1, 2, 4, 12):
        tokens = sum(1 + sum(one.accept_probs[:most]) for some in offers for one in some)
        seconds = sum(cost(sum(1 + min(len(one), most) for one in some)) for some in offers)
        rates.append(tokens / seconds)
    # The first passes, in which nothing is known of costs, are counted too.
    assert play.rate >= 0.97 * max(rates)


def test_it_reports_what_it_expects_of_a_pass() -> None:
    choice = learnt(flat).controller.trim([0], [chain(0.9, 0.5)]).choice
    assert choice.reason == "gain"
    assert choice.tokens == pytest.approx(2.4, abs=0.3)
    assert choice.seconds == pytest.approx(flat(3), rel=0.1)
    assert choice.gain == pytest.approx(2.4 * flat(1) / flat(3), rel=0.15)


def rested(play: Play, sizes: Sequence[int], offer: Draft) -> list[bool]:
    """Whether the controller lets batches of these sizes rest, pass by pass."""
    found: list[bool] = []
    for size in sizes:
        budgets = play.controller.budgets(range(size))
        found.append(not budgets[0].depth)
        play.round([chain() if found[-1] else offer] * size)
    return found


def test_drafting_rests_in_a_batch_that_gains_next_to_nothing() -> None:
    """No pass of the first rest has drafts, and most later passes have none."""
    play = learnt(steep, num_sequences=8)
    assert all(rested(play, [8] * FIRST_REST, chain(0.1)))
    shares = [sum(rested(play, [8] * 600, chain(0.1))) / 600 for _ in range(4)]
    assert min(shares) > 0.8


def test_a_rest_ends_when_half_of_a_batch_has_ended() -> None:
    play = learnt(steep, num_sequences=8)
    assert rested(play, [8, 5, 4, 3, 2, 1], chain(0.1)) == [True, True, False, False, False, False]


def test_drafting_does_not_rest_where_it_gains_nor_where_few_requests_draft_in_no_time() -> None:
    assert not any(rested(Play(flat), [8] * 400, chain(0.9)))
    assert not any(rested(learnt(steep, num_sequences=3), [3] * 200, chain(0.1)))


def test_drafters_that_find_nothing_are_called_as_rarely_as_their_time_demands() -> None:
    """Calls that take 0.016 of a plain pass have 6 passes without calls behind them."""
    play, never = learnt(flat, num_sequences=1), Draft.empty()
    play.draft_seconds, play.truth = 0.01625 * flat(1), lambda p: 1.0
    play.round([chain(0.9)])
    assert rested(play, [1] * 60, never).index(True) == IDLE
    assert sum(rested(play, [1] * 700, never)) == pytest.approx(600, abs=5)
    # An accepted draft ends it.
    while not rested(play, [1], never)[0]:
        pass
    while rested(play, [1], chain(0.9))[0]:
        pass
    assert not any(rested(play, [1] * IDLE, never))
    # Cheap calls never rest.
    cheap = learnt(flat, num_sequences=1)
    cheap.draft_seconds = 0.00225 * flat(1)
    assert not any(rested(cheap, [1] * 300, never))


def test_drafting_itself_counts_as_time_of_a_batch() -> None:
    """Rows are nearly free and half of the drafts are accepted, but drafting takes too long."""
    slow = Play(flat)
    slow.draft_seconds = 1.0
    assert any(rested(slow, [8] * 300, chain(0.5)))
    assert not any(rested(Play(flat), [8] * 300, chain(0.5)))


def test_of_passes_without_drafts_few_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight after the first ones; and each pass with a draft."""
    measured: list[int] = []

    def observe(meter: CostMeter, traces: Sequence[RoundTrace], *, caught_up: bool) -> None:
        del meter, caught_up
        measured.append(len(traces))

    monkeypatch.setattr(CostMeter, "observe", observe)
    play = Play(flat)
    for _ in range(32):
        play.round([Draft.empty()])
    before = len(measured)
    assert before == 32
    for _ in range(80):
        play.round([Draft.empty()])
    assert len(measured) - before == 10
    play.round([chain(0.9)])
    assert len(measured) - before == 11
