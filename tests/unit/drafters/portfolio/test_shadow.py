"""Shadow scores: a lookup's acceptance is known without drafting by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from doubles.drafters import RowDrafter
from outrider.core.draft import Draft
from outrider.core.protocols import DraftRow
from outrider.drafters.portfolio import ReplayScored
from outrider.estimate.cost import LEAST_KEPT
from outrider.testing import row


def shadow(guess: Callable[[Sequence[int]], Sequence[int]]) -> ReplayScored:
    def draft(asked: DraftRow) -> Draft:
        return Draft.chain(guess(asked.tokens)[: asked.budget.depth])

    return ReplayScored(RowDrafter(draft))


def follow(shadowed: ReplayScored, text: Sequence[int], cuts: Sequence[int]) -> list[float]:
    """What the first token was said to be worth at each cut of the text, 0 without an offer."""
    found = list[float]()
    for cut in cuts:
        offer = shadowed.offers([row(0, text[:cut], depth=4)])[0]
        assert len(offer.kept) == len(offer.draft)
        found.append(offer.kept[0] if offer.kept else 0.0)
    return found


def test_it_rises_where_guesses_are_right_and_falls_where_they_are_wrong() -> None:
    text = list(range(200))
    right = shadow(lambda tokens: [tokens[-1] + place for place in (1, 2, 3, 4)])
    wrong = shadow(lambda tokens: [tokens[-1]] * 4)
    cuts = range(1, 80)
    rising, falling = follow(right, text, cuts), follow(wrong, text, cuts)
    assert rising[-1] > 0.9 > rising[0]
    assert falling[-1] == 0.0 < falling[0]
    assert len(right.offers([row(0, text[:80], depth=4)])[0].draft) == 4


def test_a_place_that_the_text_did_not_reach_is_no_refusal() -> None:
    """Plain rounds emit one token: of each answer only the first was judged, and was right."""
    text = list(range(100))
    shadowed = shadow(lambda tokens: [tokens[-1] + 1, 0, 0, 0])
    follow(shadowed, text, range(1, 60))
    offer = shadowed.offers([row(0, text[:60], depth=4)])[0]
    assert offer.kept[0] > 0.9
    assert offer.kept[1] > LEAST_KEPT


def test_later_places_are_judged_where_the_text_got_there() -> None:
    """Rounds of four tokens: the first two places are right, the third never."""
    text = list(range(200))
    shadowed = shadow(lambda tokens: [tokens[-1] + 1, tokens[-1] + 2, 0, 0])
    follow(shadowed, text, range(1, 200, 4))
    offer = shadowed.offers([row(0, text[:190], depth=4)])[0]
    assert offer.draft.tokens == (190, 191)


def test_a_request_that_ends_leaves_nothing_behind() -> None:
    shadowed = shadow(lambda tokens: [tokens[-1] + 1])
    shadowed.open(0, [1])
    shadowed.offers([row(0, [1], depth=4)])
    shadowed.close(0)
    shadowed.open(0, [5])
    assert shadowed.offers([row(0, [5], depth=4)])[0].draft.tokens == (6,)


def test_it_is_asked_only_for_rows_that_it_serves() -> None:
    asked = list[int]()

    def draft(one: DraftRow) -> Draft:
        asked.append(one.seq_id)
        return Draft.chain([7])

    shadowed = ReplayScored(RowDrafter(draft), serves=lambda one: one.seq_id == 1)
    offers = shadowed.offers([row(i, [5], depth=4) for i in range(3)])
    assert [len(offer.draft) for offer in offers] == [0, 1, 0]
    assert shadowed.offers([row(0, [5], depth=4)])[0].kept == ()
    assert asked == [1]
