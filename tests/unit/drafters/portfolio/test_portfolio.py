"""The portfolio: who proposes, how deep, and what becomes of a member that fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.control.leads import Lead, Leads
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.errors import CapacityError, ContractError, given
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates
from outrider.drafters.common.context import NO_OFFER, LayersDrafter, ScoredDraft
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.testing import row

K = 6
Text = Sequence[int]


@dataclass(slots=True)
class Lookup:
    """Offers as many of its `token` as `kept` says, each that likely; hears every text."""

    name: str
    token: int
    kept: Callable[[Text], Sequence[float]]
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    heard: list[int] = field(default_factory=list[int])
    opened: set[int] = field(default_factory=set[int])

    def open(self, seq_id: int, prompt: Text) -> None:
        del prompt
        self.opened.add(seq_id)

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        self.heard += [len(asked.tokens) for asked in rows]
        kept = [tuple(self.kept(asked.tokens)[: asked.budget.depth]) for asked in rows]
        return [ScoredDraft((self.token,) * len(k), k) if k else NO_OFFER for k in kept]

    def close(self, seq_id: int) -> None:
        self.opened.remove(seq_id)


@dataclass(slots=True)
class Model:
    """Drafts its `token` to the full depth, or fails with the error that it is given."""

    token: int = 9
    error: Callable[[DraftRow], Exception | None] = lambda asked: None
    open_error: Exception | None = None
    name: str = "model"
    needs: DraftNeeds = field(default_factory=lambda: DraftNeeds(hidden_layers=(1, 2)))
    asked: list[Budget] = field(default_factory=list[Budget])

    def open(self, seq_id: int, prompt: Text) -> None:
        del seq_id, prompt
        if self.open_error is not None:
            raise self.open_error

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        for one in rows:
            error = self.error(one)
            if error is not None:
                raise error
        self.asked += [one.budget for one in rows]
        return [Draft.chain([self.token] * one.budget.depth) for one in rows]

    def close(self, seq_id: int) -> None: ...


class Chosen(Leads):
    """Leads of the member called `by`, or of the first one that a request names, always `depth`
    deep."""

    def __init__(self, names: Sequence[str], gain: float = 1.0, depth: int = K) -> None:
        super().__init__(names, k=K)
        self.by, self.gain, self.depth, self.names = names[0], gain, depth, names

    @property
    def name(self) -> str:
        return self.by

    def lead(self, seq_ids: Sequence[int], among: Collection[str] = ()) -> Lead:
        name = next((one for one in among if one in self.names), "") if among else self.by
        return Lead(name, [self.depth if name else 0] * len(seq_ids), self.gain)


def portfolio_of(
    members: Sequence[Lookup], *models: Model, gain: float = 1.0, **settings: Any
) -> PortfolioDrafter:
    leads = Chosen([one.name for one in models], gain)
    return PortfolioDrafter(members, *models, leads=leads, **settings)


def sure(count: int) -> Callable[[Text], Sequence[float]]:
    return lambda text: [0.95**place for place in range(1, count + 1)]


def silent(text: Text) -> Sequence[float]:
    del text
    return []


def even(text: Text) -> Sequence[float]:
    return [] if len(text) % 2 else [0.95, 0.9]


def test_the_best_offer_proposes_and_all_hear() -> None:
    members = [Lookup("a", 1, sure(2)), Lookup("b", 2, sure(4)), Lookup("c", 3, silent)]
    portfolio = PortfolioDrafter(members)
    portfolio.open(0, [5])
    draft = portfolio.propose([row(0, [5, 6], depth=K)])[0]
    assert (draft.tokens, draft.by) == ((2, 2, 2, 2), "b")
    assert [member.heard for member in members] == [[2], [2], [2]]
    assert portfolio.name == "lookup"
    portfolio.close(0)
    assert not any(member.opened for member in members)


def test_the_first_of_equals_proposes() -> None:
    portfolio = PortfolioDrafter([Lookup("a", 1, sure(3)), Lookup("b", 2, sure(3))])
    portfolio.open(0, [5])
    assert portfolio.propose([row(0, [5], depth=K)])[0].by == "a"


def test_each_request_has_its_own_choice() -> None:
    odd = Lookup("odd", 1, lambda text: [0.9] if len(text) % 2 else [])
    even = Lookup("even", 2, lambda text: [] if len(text) % 2 else [0.9])
    portfolio = PortfolioDrafter([odd, even])
    rows = [row(0, [5], depth=K), row(1, [5, 5], depth=K), row(2, [5, 5, 5], depth=0)]
    assert [draft.by for draft in portfolio.propose(rows)] == ["odd", "even", ""]
    assert portfolio.propose([]) == []


def test_an_offer_that_is_not_worth_its_rows_is_left_out() -> None:
    portfolio = PortfolioDrafter([Lookup("a", 1, lambda text: [0.03] * 4)])
    assert portfolio.propose([row(0, [5], depth=K)])[0].tokens == ()


def test_the_leader_drafts_where_lookups_are_silent() -> None:
    model = Model()
    portfolio = portfolio_of([Lookup("a", 1, silent), Lookup("b", 2, even)], model)
    rows = [row(0, [5], depth=K), row(1, [5, 5], depth=K), row(2, [5], depth=2)]
    for one in rows:
        portfolio.open(one.seq_id, one.tokens)
    drafts = portfolio.propose(rows)
    assert [(draft.by, len(draft)) for draft in drafts] == [("model", K), ("b", 2), ("model", 2)]
    assert [part.name for part in drafts[0].parts] == ["model"]
    assert [budget.depth for budget in model.asked] == [K, 2]


@pytest.mark.parametrize(("gain", "by"), [(1.0, "a"), (2.4, "a"), (2.7, "model")])
def test_a_look_up_goes_first_where_it_gains_more_than_the_leader(gain: float, by: str) -> None:
    """Two tokens with 0.95 and 0.9 for two rows of 0.04 of a pass: 2.85 / 1.08 = 2.64."""
    portfolio = portfolio_of([Lookup("a", 1, lambda text: [0.95, 0.9])], Model(), gain=gain)
    portfolio.open(0, [5])
    asked = row(0, [5], depth=K)
    asked = replace(asked, budget=replace(asked.budget, row_cost=0.04))
    assert portfolio.propose([asked])[0].by == by


def test_the_first_look_up_with_an_offer_drafts_alone() -> None:
    """The others read the text when they are asked again."""
    first, second = Lookup("a", 1, even), Lookup("b", 2, sure(2))
    portfolio = portfolio_of([first, second], Model())
    portfolio.open(0, [5])
    found, last = list[str](), None
    for count in (2, 3, 4):
        draft = portfolio.propose([row(0, [5] * count, depth=K, last=last)])[0]
        last = Outcome(0, draft, Verdict((), 5))
        found.append(draft.by)
    assert found == ["a", "b", "a"]
    assert second.heard == [3]


@pytest.mark.parametrize("batch", [1, 3])
def test_look_ups_pause_while_the_controller_cuts_their_drafts_to_nothing(batch: int) -> None:
    """For one, two and four rounds of all requests; a draft that is verified ends that."""
    portfolio = portfolio_of([Lookup("a", 1, sure(2))], Model())
    for seq_id in range(batch):
        portfolio.open(seq_id, [5])
    found, last = "", [None] * batch
    for count in range(1, 15):
        rows = [row(i, [5] * count, depth=K, last=own) for i, own in enumerate(last)]
        drafts = portfolio.propose(rows)
        assert len({draft.by for draft in drafts}) == 1
        found += drafts[0].by[0]
        is_cut = drafts[0].by == "a" and count < 8
        kept = [Draft.empty() if is_cut else draft for draft in drafts]
        last = [Outcome(i, draft, Verdict((), 5)) for i, draft in enumerate(kept)]
    assert found == "amammammmmaaaa"


def test_what_a_round_drafts_itself_is_left_to_it() -> None:
    """Where every request of a batch would be drafted for by the leader, and no look-up drafts."""
    model, silent_now = Model(), [True]
    look = Lookup("a", 1, lambda text: [] if silent_now[0] else [0.9])
    portfolio = portfolio_of([look], model, most_drafted=8)
    rows = [row(0, [5], depth=K), row(1, [5, 5], depth=K)]
    for one in rows:
        portfolio.open(one.seq_id, one.tokens)
    portfolio.left_to_round = model.name.__eq__
    assert [len(draft) for draft in portfolio.propose(rows)] == [0, 0]
    left = portfolio.take_left()
    assert left is not None
    assert (left.member.name, left.depths) == ("model", {0: 4, 1: 4})
    assert model.asked == []
    missed = list[str]()
    assert portfolio.leads is not None
    portfolio.leads.missed = missed.append
    portfolio.missed(left)
    assert missed == ["model"]
    # Nothing more is left to it, unless it says so again.
    assert [draft.by for draft in portfolio.propose(rows)] == ["model", "model"]
    portfolio.left_to_round, silent_now[0] = model.name.__eq__, False
    assert [draft.by for draft in portfolio.propose(rows)] == ["a", "a"]
    assert portfolio.take_left() is None


def test_a_request_is_served_by_the_members_that_it_names() -> None:
    first, model, other = Lookup("a", 1, sure(K)), Model(), Model(name="other", token=8)
    portfolio = portfolio_of([first, Lookup("b", 2, sure(K))], other, model)
    portfolio.open(0, [5])
    for names, by in ((("model",), "model"), (("b",), "b"), ((), "a"), (("other",), "other")):
        asked = row(0, [5], depth=K, params=SamplingParams(drafters=names))
        heard = len(first.heard)
        assert portfolio.propose([asked])[0].by == by
        assert (len(first.heard) > heard) == (not names)


def test_requests_of_one_batch_may_name_different_members() -> None:
    portfolio = portfolio_of([], Model(name="other", token=8), Model())
    names = [("model",), (), ("other",), ("model",)]
    rows = [
        row(seq_id, [5], depth=K, params=SamplingParams(drafters=one))
        for seq_id, one in enumerate(names)
    ]
    for one in rows:
        portfolio.open(one.seq_id, one.tokens)
    assert [d.by for d in portfolio.propose(rows)] == ["model", "other", "other", "model"]


def test_a_round_makes_the_drafts_of_one_member() -> None:
    """Where requests name different members, none of them goes without a draft."""
    portfolio = portfolio_of([], Model(name="other", token=8), Model())
    rows = [row(0, [5], depth=K), row(1, [5], depth=K, params=SamplingParams(drafters=("other",)))]
    for one in rows:
        portfolio.open(one.seq_id, one.tokens)
    portfolio.left_to_round = portfolio.names.__contains__
    assert [draft.by for draft in portfolio.propose(rows)] == ["other", "other"]
    assert portfolio.take_left() is None


def test_needs_are_those_of_all_members() -> None:
    wide = Lookup("wide", 1, silent, needs=DraftNeeds(num_likely=8))
    portfolio = portfolio_of([wide, Lookup("a", 2, silent)], Model())
    assert portfolio.needs == DraftNeeds(hidden_layers=(1, 2), num_likely=8)
    assert portfolio.name == "portfolio"


@pytest.mark.parametrize(
    ("own", "columns", "is_view"),
    [((2, 5), [0, 1], True), ((8,), [3], True), ((9, 2), [2, 0], False), ((5, 9), [1, 2], True)],
)
def test_heads_read_their_own_of_the_layers_that_are_stored(
    own: tuple[int, ...], columns: list[int], *, is_view: bool
) -> None:
    class Reading(Model):
        def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
            read.extend(given(one.hidden, "states").read(3, 7) for one in rows)
            return [Draft.empty()] * len(rows)

    read = list[Tensor]()
    stored_PKD = torch.arange(7 * 4 * 2.0).view(7, 4, 2)
    stored = HiddenStates(7, lambda start, stop: stored_PKD[start:stop])
    drafter = LayersDrafter(Reading(needs=DraftNeeds(own, 3)), (2, 5, 9, 8))
    assert drafter.needs == DraftNeeds((2, 5, 9, 8), 3)
    asked = row(0, [5] * 8, depth=K)
    drafter.propose([replace(asked, hidden=stored)])
    assert torch.equal(read[0], stored_PKD[3:7, columns])
    shares = read[0].untyped_storage().data_ptr() == stored_PKD.untyped_storage().data_ptr()
    assert shares == is_view


def test_members_that_read_other_layers_are_refused() -> None:
    with pytest.raises(ContractError, match="different layers"):
        portfolio_of([], Model(), Model(name="other", needs=DraftNeeds(hidden_layers=(3,))))


def failing(error: Exception, seq_id: int) -> PortfolioDrafter:
    model = Model(error=lambda asked: error if asked.seq_id == seq_id else None)
    portfolio = portfolio_of([Lookup("a", 1, silent)], model)
    for one in (0, 1):
        portfolio.open(one, [5])
    return portfolio


def test_a_model_that_fails_for_one_request_drafts_for_the_others() -> None:
    portfolio = failing(ValueError("no"), 0)
    rows = [row(0, [5], depth=K), row(1, [5], depth=K)]
    for _ in range(2):
        first, second = portfolio.propose(rows)
        assert (len(first), second.by) == (0, "model")


def test_another_member_leads_for_a_request_for_which_one_failed() -> None:
    broken = Model(error=lambda asked: ValueError("no") if asked.seq_id == 0 else None)
    portfolio = PortfolioDrafter(
        [], broken, Model(name="other", token=8), leads=Chosen(["model", "other"])
    )
    rows = [row(0, [5], depth=K), row(1, [5], depth=K)]
    for one in rows:
        portfolio.open(one.seq_id, one.tokens)
    assert [draft.by for draft in portfolio.propose(rows)] == ["", "model"]
    assert [draft.by for draft in portfolio.propose(rows)] == ["other", "model"]
    named = replace(rows[0], params=SamplingParams(drafters=("model",)))
    assert portfolio.propose([named])[0].by == ""


def test_memory_that_is_full_costs_one_draft() -> None:
    full = [True]
    model = Model(error=lambda asked: CapacityError("full") if full[0] else None)
    portfolio = portfolio_of([], model)
    portfolio.open(0, [5])
    rows = [row(0, [5], depth=K)]
    assert portfolio.propose(rows)[0].tokens == ()
    full[0] = False
    assert len(portfolio.propose(rows)[0]) > 0


def test_a_model_that_cannot_open_leaves_the_lookups() -> None:
    silent_now = [False]
    look = Lookup("a", 1, lambda text: [] if silent_now[0] else sure(2)(text))
    model = Model(open_error=CapacityError("full"))
    portfolio = portfolio_of([look], model)
    portfolio.open(0, [5])
    assert portfolio.propose([row(0, [5], depth=K)])[0].by == "a"
    silent_now[0] = True
    assert portfolio.propose([row(0, [5], depth=K)])[0].tokens == ()
    portfolio.close(0)
    assert model.asked == []


@pytest.mark.parametrize(("branches", "num_nodes"), [(True, 8), (False, 0)])
def test_a_shallower_tree_is_a_smaller_one(branches: bool, num_nodes: int) -> None:
    model = Model()
    portfolio = portfolio_of([], model, branches=branches)
    assert isinstance(portfolio.leads, Chosen)
    portfolio.leads.depth = 2
    portfolio.open(0, [5])
    portfolio.propose([replace(row(0, [5], depth=K), budget=Budget(K, num_nodes=24))])
    assert model.asked == [Budget(2, num_nodes=num_nodes)]


def test_the_leader_drafts_no_tokens_that_a_pass_could_not_verify() -> None:
    """A batch whose drafts would be cut afterwards costs the passes of the drafts that are cut."""
    portfolio = portfolio_of([], Model(), most_drafted=8)
    for seq_id in range(10):
        portfolio.open(seq_id, [seq_id])
    for count, depth in ((1, K), (4, 2), (6, 1), (10, 1)):
        rows = [row(seq_id, [seq_id], depth=K) for seq_id in range(count)]
        assert [len(draft) for draft in portfolio.propose(rows)] == [depth] * count
