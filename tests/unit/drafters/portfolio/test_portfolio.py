"""The portfolio: who proposes, how deep, and what becomes of a member that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from doubles.clocks import FakeClock
from outrider.control.scored import FIRST_REST
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.errors import CapacityError, ContractError, given
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates
from outrider.drafters.common.context import NO_OFFER, LayersDrafter, ScoredDraft
from outrider.drafters.common.members import (
    LOOK_AFTER,
    LOOK_DEPTH,
    LOOK_ROUNDS,
    Allowances,
    DraftCostMeter,
    ModelMember,
    Plan,
    RowState,
)
from outrider.drafters.portfolio import FIRST_JUDGED, PortfolioDrafter
from outrider.testing import GREEDY, row

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
    """Takes `seconds` a token; drafts its `token` to the full depth, or fails as told."""

    clock: FakeClock
    seconds: float = 0.01
    token: int = 9
    error: Callable[[DraftRow], Exception | None] = lambda asked: None
    open_error: Exception | None = None
    name: str = "model"
    needs: DraftNeeds = field(default_factory=lambda: DraftNeeds(hidden_layers=(1, 2)))
    asked: list[int] = field(default_factory=list[int])

    def open(self, seq_id: int, prompt: Text) -> None:
        del seq_id, prompt
        if self.open_error is not None:
            raise self.open_error

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        for one in rows:
            error = self.error(one)
            if error is not None:
                raise error
        self.asked += [one.budget.depth for one in rows]
        self.clock.advance(self.seconds * max(one.budget.depth for one in rows))
        return [Draft.chain([self.token] * one.budget.depth) for one in rows]

    def close(self, seq_id: int) -> None: ...


@dataclass(slots=True)
class Game:
    """A portfolio in play: a pass takes `pass_seconds`, and `truth` says how many tokens of a
    member are right. The text goes on with those of the member that drafted and has the most, then
    with 0."""

    members: Sequence[Lookup]
    truth: Callable[[str], int]
    seconds: float = 0.01
    pass_seconds: float = 1.0
    clock: FakeClock = field(default_factory=FakeClock)
    model: Model = field(init=False)
    portfolio: PortfolioDrafter = field(init=False)
    text: list[int] = field(default_factory=lambda: [0])
    last: Outcome | None = None

    def __post_init__(self) -> None:
        self.model = Model(self.clock, self.seconds)
        self.portfolio = PortfolioDrafter(
            self.members, ModelMember(self.model, DraftCostMeter(clock=self.clock))
        )
        self.portfolio.open(0, self.text)

    def play(self, num_rounds: int, depth: int = K, params: SamplingParams = GREEDY) -> list[str]:
        """Who proposed in each round."""
        who = list[str]()
        for _ in range(num_rounds):
            asked = row(0, self.text, depth=depth, last=self.last, params=params)
            draft = self.portfolio.propose([asked])[0]
            self.clock.advance(self.pass_seconds)
            names = draft.by.split("+")
            every = [one for one in (*self.members, self.model) if one.name in names]
            best = max(every, key=lambda one: self.truth(one.name), default=self.model)
            count = self.truth(best.name) if every else 0
            path, node = list[int](), -1
            for _ in range(count):
                below = (c for c in draft.children(node) if draft.tokens[c] == best.token)
                if (child := next(below, None)) is None:
                    break
                path.append(node := child)
            own = best.token if len(path) < count else 0
            self.last = Outcome(0, draft, Verdict(tuple(path), own))
            self.text += self.last.tokens
            who.append(draft.by)
        return who


def sure(count: int) -> Callable[[Text], Sequence[float]]:
    return lambda text: [0.95**place for place in range(1, count + 1)]


def silent(text: Text) -> Sequence[float]:
    del text
    return []


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


def test_the_model_drafts_where_lookups_are_silent_and_it_pays() -> None:
    game = Game([Lookup("a", 1, silent)], lambda by: K)
    assert set(game.play(40)) == {"model"}
    assert game.model.asked[-1] == K


def test_a_sure_lookup_is_preferred_to_a_model() -> None:
    game = Game([Lookup("a", 1, sure(K))], lambda by: K, seconds=0.2)
    assert set(game.play(60)[-20:]) == {"a"}


def test_the_model_is_preferred_to_a_doubtful_lookup() -> None:
    game = Game([Lookup("a", 1, lambda text: [0.3, 0.2])], lambda by: K if by == "model" else 0)
    assert set(game.play(60)[-20:]) == {"model"}


def test_a_model_that_is_never_right_is_left_out_but_for_short_looks() -> None:
    game = Game([Lookup("a", 1, silent)], lambda by: 0, seconds=0.1)
    who = game.play(3 * LOOK_AFTER)
    looks = [place for place, by in enumerate(who) if by == "model"]
    assert who.count("model") < 0.1 * len(who)
    assert looks[-1] > LOOK_AFTER
    assert game.model.asked[-LOOK_ROUNDS:] == [LOOK_DEPTH] * LOOK_ROUNDS


def test_a_model_that_came_alive_is_found_by_a_look() -> None:
    alive = [0]
    game = Game([Lookup("a", 1, silent)], lambda by: alive[0], seconds=0.05)
    assert game.play(100)[-1] == ""
    alive[0] = K
    assert set(game.play(12 * LOOK_AFTER)[-20:]) == {"model"}


def test_while_members_rest_the_first_look_up_with_an_offer_drafts_alone() -> None:
    """The model is as slow as the target. The others read the text as soon as they are needed."""
    gaps = [False]
    first = Lookup("a", 1, lambda text: [] if gaps[0] else sure(3)(text))
    second = Lookup("b", 1, sure(2))
    game = Game([first, second], lambda by: 3 if by != "model" else 0, seconds=1.0)
    assert set(game.play(FIRST_JUDGED - 1)[-20:]) == {"a+b"}
    second.heard.clear()
    assert set(game.play(FIRST_REST // 2)) == {"a"}
    assert second.heard == []
    gaps[0] = True
    assert set(game.play(4)) == {"b"}
    assert second.heard[-1] == len(game.text) - 3


@pytest.mark.parametrize(("named", "drafts"), [("model", True), ("a", False)])
def test_a_request_gets_the_members_that_it_names_while_they_rest(
    monkeypatch: pytest.MonkeyPatch, named: str, drafts: bool
) -> None:
    monkeypatch.setattr("outrider.drafters.common.members.LOOK_AFTER", 4)
    game = Game([Lookup("a", 1, sure(3))], lambda by: 3 if by == "a" else 0, seconds=0.01)
    game.play(FIRST_JUDGED + 4)
    asked = len(game.model.asked)
    game.play(FIRST_REST // 4)
    assert len(game.model.asked) == asked
    game.play(FIRST_REST // 4, params=SamplingParams(drafters=(named,)))
    assert (len(game.model.asked) > asked) == drafts


def test_a_member_that_gains_never_rests() -> None:
    game = Game([Lookup("a", 1, silent)], lambda by: K, seconds=0.2)
    assert set(game.play(400)[40:]) == {"model"}


def test_short_requests_look_as_well() -> None:
    """None of them lasts as long as one waits for a look."""
    alive = [0]
    game = Game([Lookup("a", 1, silent)], lambda by: alive[0], seconds=0.05)
    who = list[str]()
    for turn in range(80):
        alive[0] = K if turn >= 20 else 0
        game.text, game.last = [0], None
        who = game.play(LOOK_AFTER // 4)
        game.portfolio.close(0)
        game.portfolio.open(0, [0])
    assert set(who[-20:]) == {"model"}


def test_a_machine_that_gets_faster_does_not_shut_the_model_out() -> None:
    """Passes are quicker by half while the model is not asked, and would be too when it is."""
    silent_now = [False]
    sure_once = Lookup("a", 1, lambda text: [] if silent_now[0] else [0.98] * K)
    game = Game([sure_once], lambda by: K, seconds=0.04)
    silent_now[0] = True
    assert set(game.play(40)[-20:]) == {"model"}
    silent_now[0] = False
    game.pass_seconds = 0.1
    assert set(game.play(60)) == {"a"}
    silent_now[0], game.model.seconds = True, 0.004
    assert set(game.play(20)) == {"model"}


def test_levels_that_do_not_pay_are_no_loss() -> None:
    """They will be cut: otherwise a long doubtful draft would seem worse than none, and any model
    better than that."""
    state = RowState(row(0, [5], depth=K), price=0.15, cost=0.15, levels=[0.25, *[0.1] * 11])
    assert state.num_gained == pytest.approx(0.1)


def test_a_model_as_slow_as_the_target_is_left_out() -> None:
    """Three tokens a round, for six passes as long as the target's."""
    game = Game([Lookup("a", 1, silent)], lambda by: 2, seconds=1.0)
    assert game.play(LOOK_AFTER)[-40:] == [""] * 40


def test_each_node_says_who_drafted_it() -> None:
    game = Game([Lookup("a", 1, lambda text: [0.5, 0.4])], lambda by: 0)
    asked = replace(row(0, game.text, depth=K), budget=Budget(K, num_nodes=24))
    draft = game.portfolio.propose([asked])[0]
    assert draft.by == "a+model"
    nodes = {part.name: [draft.tokens[node] for node in part.nodes] for part in draft.parts}
    assert set(nodes["a"]) == {1}
    assert set(nodes["model"]) == {9}
    assert {part.name: part.seconds > 0 for part in draft.parts} == {"a": False, "model": True}
    assert len(draft) == sum(map(len, nodes.values()))


def test_a_request_is_served_by_the_members_that_it_names() -> None:
    alone = SamplingParams(drafters=("model",))
    game = Game([Lookup("a", 1, sure(K)), Lookup("b", 2, sure(K))], lambda by: K)
    assert set(game.play(20, params=alone)) == {"model"}
    assert set(game.play(20, params=SamplingParams(drafters=("b",)))) == {"b"}
    assert game.members[0].heard == []


def test_needs_are_those_of_all_members() -> None:
    wide = Lookup("wide", 1, silent, needs=DraftNeeds(num_likely=8))
    game = Game([wide, Lookup("a", 2, silent)], lambda by: 0)
    assert game.portfolio.needs == DraftNeeds(hidden_layers=(1, 2), num_likely=8)
    assert game.portfolio.name == "portfolio"


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
    drafter = LayersDrafter(Reading(FakeClock(), needs=DraftNeeds(own, 3)), (2, 5, 9, 8))
    assert drafter.needs == DraftNeeds((2, 5, 9, 8), 3)
    asked = row(0, [5] * 8, depth=K)
    drafter.propose([replace(asked, hidden=stored)])
    assert torch.equal(read[0], stored_PKD[3:7, columns])
    shares = read[0].untyped_storage().data_ptr() == stored_PKD.untyped_storage().data_ptr()
    assert shares == is_view


def test_members_that_read_other_layers_are_refused() -> None:
    clock = FakeClock()
    models = [Model(clock), Model(clock, name="other", needs=DraftNeeds(hidden_layers=(3,)))]
    with pytest.raises(ContractError, match="different layers"):
        PortfolioDrafter([], *map(ModelMember, models))


def test_refused_tokens_are_those_of_all_shorter_drafts() -> None:
    """The share that a plan risks at each depth, for requests of different chances and budgets."""
    asked = list[float]()

    class Noting(ModelMember):
        def _may_take(self, depth: int, allowances: Allowances, refused: float) -> bool:
            del depth, allowances
            asked.append(refused)
            return True

    member = Noting(Model(FakeClock()))
    states = list[RowState]()
    for seq_id, depth in enumerate((K, 3, K)):
        member.open(seq_id, [5])
        states.append(RowState(row(seq_id, [5], depth=depth), price=0.01, cost=0.01))
        rates = [0.9 - 0.1 * seq_id] * depth
        member._requests[seq_id].prefixes = [math.prod(rates[: n + 1]) for n in range(depth)]  # pyright: ignore[reportPrivateUsage]
        member._requests[seq_id].num_idle = 3  # pyright: ignore[reportPrivateUsage]
    member.plan(states, Plan({}, tokens=3.0), Allowances())
    kept = [one.prefixes for one in member._requests.values()]  # pyright: ignore[reportPrivateUsage]
    assert [len(own) for own in kept] == [K, 3, K]
    wanted = [1 - sum(sum(own[:depth]) for own in kept) / (depth * 3) for depth in range(1, K + 1)]
    # A plan ends where no deeper draft can be better.
    assert asked == pytest.approx(wanted[: len(asked)])
    assert len(asked) > 3


def failing(error: Exception, seq_id: int) -> PortfolioDrafter:
    clock = FakeClock()
    model = Model(clock, error=lambda asked: error if asked.seq_id == seq_id else None)
    portfolio = PortfolioDrafter(
        [Lookup("a", 1, silent)], ModelMember(model, DraftCostMeter(clock=clock))
    )
    for one in (0, 1):
        portfolio.open(one, [5])
    return portfolio


def test_a_model_that_fails_for_one_request_drafts_for_the_others() -> None:
    portfolio = failing(ValueError("no"), 0)
    rows = [row(0, [5], depth=K), row(1, [5], depth=K)]
    for _ in range(2):
        first, second = portfolio.propose(rows)
        assert (len(first), second.by) == (0, "model")


def test_memory_that_is_full_costs_one_draft() -> None:
    portfolio = failing(CapacityError("full"), 0)
    rows = [row(0, [5], depth=K)]
    assert portfolio.propose(rows)[0].tokens == ()
    again = failing(CapacityError("full"), 1)
    assert len(again.propose(rows)[0]) > 0


def test_a_model_that_cannot_open_leaves_the_lookups() -> None:
    clock = FakeClock()
    model = Model(clock, open_error=CapacityError("full"))
    portfolio = PortfolioDrafter(
        [Lookup("a", 1, sure(2))], ModelMember(model, DraftCostMeter(clock=clock))
    )
    portfolio.open(0, [5])
    assert portfolio.propose([row(0, [5], depth=K)])[0].by == "a"
    portfolio.close(0)
    assert model.asked == []


def test_a_drafter_of_blocks_takes_one_pass_whatever_the_depth() -> None:
    """Half a pass of the target buys six tokens."""
    clock = FakeClock()

    class Block(Model):
        def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
            self.clock.advance(0.5)
            self.asked += [one.budget.depth for one in rows]
            return [Draft.chain([self.token] * one.budget.depth) for one in rows]

    game, model = Game([], lambda by: K, clock=clock), Block(clock)
    member = ModelMember(model, DraftCostMeter(clock=clock), at_once=True)
    game.model, game.portfolio = model, PortfolioDrafter([], member)
    game.portfolio.open(0, game.text)
    game.play(60)
    assert model.asked[-20:] == [K] * 20


def test_a_shallower_tree_is_a_smaller_one() -> None:
    clock = FakeClock()
    seen = list[Budget]()

    class Watching(Model):
        def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
            seen.extend(one.budget for one in rows)
            return Model.propose(self, rows)

    portfolio = PortfolioDrafter(
        [], ModelMember(Watching(clock, 0.01), DraftCostMeter(clock=clock))
    )
    portfolio.open(0, [5])
    asked = replace(row(0, [5], depth=K), budget=Budget(K, num_nodes=24))
    portfolio.propose([asked])
    assert seen[0].num_nodes == 24 * seen[0].depth // K


def test_a_member_drafts_no_tokens_that_a_pass_could_not_verify() -> None:
    """A batch whose drafts would be cut afterwards costs the passes of the drafts that are cut."""
    clock = FakeClock()
    model = Model(clock, 0.0)
    pace = DraftCostMeter(clock=clock)
    for _ in range(6):
        pace.begin_round()
        pace.drafted(0.001, 1)
        pace.end_drafting(1.0)
        clock.advance(1.0)
    member = ModelMember(model, pace, most_drafted=8)
    drafter = PortfolioDrafter([], member)
    for seq_id in range(6):
        drafter.open(seq_id, [seq_id])
    for count, depth in ((1, K), (4, 2), (6, 1)):
        rows = [row(seq_id, [seq_id], depth=K) for seq_id in range(count)]
        model.asked.clear()
        clock.advance(1.0)
        assert [len(draft) for draft in drafter.propose(rows)] == [depth] * count
        assert model.asked == [depth] * count


def priced(seq_id: int, *, length: int, max_tokens: int = 512) -> RowState:
    """A greedy request whose text has so many tokens; it may have `max_tokens` more than one."""
    params = SamplingParams(max_tokens=max_tokens)
    text = row(seq_id, [5] * length, depth=K, params=params)
    return RowState(text, price=0.01, cost=0.01)


def test_a_plan_that_cannot_be_better_is_not_computed() -> None:
    """A token of the member takes a tenth of a pass and is right with 0.9: of six, 4.2 are."""
    planned: list[float] = []

    class Noting(ModelMember):
        def _best(
            self, states: Sequence[RowState], now: Plan, allowances: Allowances
        ) -> Plan | None:
            del states, allowances
            planned.append(now.goodput)
            return None

    member = Noting(Model(FakeClock()))
    member.open(0, [5])
    member._requests[0].prefixes = [0.9**n for n in range(1, K + 1)]  # pyright: ignore[reportPrivateUsage]
    member._requests[0].num_idle = 3  # pyright: ignore[reportPrivateUsage]
    most = sum(member._requests[0].prefixes)  # pyright: ignore[reportPrivateUsage]
    for tokens in (10 * most + 0.1, 10 * most - 0.1, 1.0):
        member.plan([priced(0, length=2)], Plan({}, tokens=tokens), Allowances())
    assert planned == [10 * most - 0.1, 1.0]


def test_the_time_of_a_trial_sends_no_other_member_to_rest() -> None:
    clock, took = FakeClock(), list[float]()
    member = ModelMember(Model(clock, 0.5), DraftCostMeter(clock=clock))
    member.open(0, [5])
    for trial in (True, False):
        member.pace.end_drafting(1.0)
        clock.advance(1.0)
        member.pace.begin_round()
        member.draft([priced(0, length=2)], Plan({0: 2}, trial=trial))
        allowances = Allowances()
        left = allowances.all.left
        took.append(member.settle(allowances, 1)[1])
        # The allowances pay for it all the same.
        assert allowances.all.left == pytest.approx(left - 1.0)
    assert took == [0.0, pytest.approx(1.0)]


def test_a_text_is_not_read_for_the_few_tokens_that_are_left() -> None:
    found: list[Plan | None] = []
    for max_tokens in (3, 512):
        member = ModelMember(Model(FakeClock()))
        member.open(0, [5])
        state = priced(0, length=100, max_tokens=max_tokens + 99)
        member._requests[0].prefixes = [0.8**n for n in range(1, K + 1)]  # pyright: ignore[reportPrivateUsage]
        member._requests[0].num_idle = 3  # pyright: ignore[reportPrivateUsage]
        allowances = Allowances()
        allowances.all.left = allowances.drafts.left = 100.0
        member.pace.caught_up(40.0, 100)
        found.append(member.plan([state], Plan({}, tokens=1.0), allowances))
    assert found[0] is None
    assert found[1] is not None
