"""Portfolio: several drafters draft together for each request and round, as far as that pays.

Look-ups cost nothing, so all of them draft, and each gives the probability that its tokens are
accepted. Members that cost time (a model, heads, a copy of the target) make plans instead
(common/members.py): of all plans the one of highest goodput is carried out, then the next one that
raises the goodput further, if any. Nothing is drafted where that is best.

Greedy drafts of all members become one tree (common/merge.py). At temperature > 0 the drafts of
look-ups do, since they are chosen and not drawn; a drawn draft stays alone.

The choice depends on the text and on measured time, not on anything that the round will draw, so
every exact rule keeps the output's distribution; the text repeats only where tied to the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from outrider.control.scored import BatchRests
from outrider.core.draft import Draft, common_prefix
from outrider.core.errors import CheckpointError, ConfigError, ContractError
from outrider.core.plugins import MODEL, DrafterKind
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, KeepsApart, Remembering
from outrider.drafters.common.context import (
    NO_OFFER,
    BuildContext,
    ScoredDraft,
    ScoredDrafter,
    Stateless,
)
from outrider.drafters.common.members import Allowances, ModelMember, Plan, RowState
from outrider.drafters.common.merge import Proposal, levels_of, merged, num_paying
from outrider.drafters.prediction import PredictionDrafter
from outrider.estimate.acceptance import Acceptance, prefix_products
from outrider.estimate.cost import LEAST_KEPT, ROW_COST

# Positions with rates of their own; later ones have the rate of the last.
_NUM_POSITIONS = 8
# Members that cost time rest while they gain less than this: the tokens that only they had right,
# against the time of their drafts and plans. Measured: look-ups alone are as fast at a gain of 1.1,
# since they would have had some of these tokens soon after. The rounds that are judged together, at
# first and after each rest: a good member has a few bad drafts in a row.
LEAST_GAIN = 1.15
FIRST_JUDGED, LATER_JUDGED = 64, 24


class ForcedDrafter(Stateless):
    """A drafter of chains up to where the mask leaves a choice; empty without a mask.

    A grammar often allows a single token for a while, as within a keyword or before a quotation
    mark. These tokens are drafts that are nearly always accepted. A callback is called for each.
    """

    name = "forced"
    needs = DraftNeeds()

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [offer.draft for offer in self.offers(rows)]

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        return [_forced(row) for row in rows]


def _forced(row: DraftRow) -> ScoredDraft:
    forced = () if row.shaper is None else row.shaper.forced(row.tokens, row.budget.depth)
    return ScoredDraft(tuple(forced), (1.0,) * len(forced)) if forced else NO_OFFER


@dataclass(slots=True)
class ReplayScored:
    """A `ScoredDrafter` from `drafter`, whose drafts are chains and chosen deterministically. It
    drafts only for rows that it `serves`; None is all of them.

    A look-up costs nothing, so it is made every round, and the text that follows shows how much of
    it was right, whichever drafter proposed. The tokens of a round are judged as far as the round
    went; tokens that the text did not reach are no refusal.
    """

    drafter: Drafter
    serves: Callable[[DraftRow], bool] | None = None
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(_NUM_POSITIONS))
    _answers: dict[int, tuple[int, tuple[int, ...]]] = field(
        default_factory=dict[int, tuple[int, tuple[int, ...]]]
    )

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def needs(self) -> DraftNeeds:
        return self.drafter.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.drafter.open(seq_id, prompt)

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        served = rows if self.serves is None else [row for row in rows if self.serves(row)]
        if not served:
            return [NO_OFFER] * len(rows)
        for row in served:
            self._judge(row)
        drafts = self.drafter.propose(served)
        pairs = zip(served, drafts, strict=True)
        offers = {row.seq_id: self._offer(row, draft) for row, draft in pairs}
        return [offers.get(row.seq_id, NO_OFFER) for row in rows]

    def close(self, seq_id: int) -> None:
        self._answers.pop(seq_id, None)
        self.drafter.close(seq_id)

    def _judge(self, row: DraftRow) -> None:
        start, drafted = self._answers.pop(row.seq_id, (0, ()))
        if not drafted:
            return
        written = row.tokens[start : start + len(drafted)]
        self._acceptance.observe(row.seq_id, len(written), common_prefix(drafted, written))

    def _offer(self, row: DraftRow, draft: Draft) -> ScoredDraft:
        if not draft.tokens:
            return NO_OFFER
        self._answers[row.seq_id] = len(row.tokens), draft.tokens
        rates = self._acceptance.rates(row.seq_id)
        rates += rates[-1:] * (len(draft) - len(rates))
        kept = prefix_products(rates[: len(draft)])
        kept = [probability for probability in kept if probability >= LEAST_KEPT]
        return ScoredDraft(draft.tokens[: len(kept)], tuple(kept)) if kept else NO_OFFER


class PortfolioDrafter:
    """A drafter of several members. `members` are free, in order of preference among equal values;
    `models` cost time. `notes` are for users."""

    def __init__(
        self,
        members: Sequence[ScoredDrafter],
        *models: ModelMember,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.notes = notes
        self.name = "portfolio" if models else "lookup"
        self._members = tuple(members)
        self._models = models
        self.allowances = Allowances()
        self._rests = BatchRests(1, LEAST_GAIN, FIRST_JUDGED, LATER_JUDGED)
        self._num_rested, self._planning = 0, 0.0
        self.needs = _joined([m.needs for m in members] + [m.drafter.needs for m in models])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members."""
        return tuple(member.name for member in (*self._members, *self._models))

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        for member in (*self._members, *self._models):
            member.open(seq_id, prompt)

    def open_apart(self, seq_id: int, prompt: Sequence[int]) -> None:
        for member in self._members:
            if isinstance(member, KeepsApart):
                member.open_apart(seq_id, prompt)
            else:
                member.open(seq_id, prompt)
        for model in self._models:
            model.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        for member in (*self._members, *self._models):
            member.close(seq_id)

    def forget(self) -> None:
        """Forget what its members learned from requests."""
        for member in self._members:
            if isinstance(member, Remembering):
                member.forget()

    def member(self, name: str) -> Drafter | None:
        """Return the model or heads among its members that are called `name`, if any: they may
        draft by themselves, for requests that are not opened here."""
        return next((m.drafter for m in self._models if m.name == name), None)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        if not rows:
            return []
        if not self._models:
            return self._looked_up(rows)
        # A request gets the members that it names.
        awake = any(model.name in row.params.drafters for model in self._models for row in rows)
        if awake or not self._rests.is_on(len(rows)):
            self._book(rows, judges=not awake)
        if not awake and self._rests.is_on(len(rows)):
            self._rests.rested()
            self._num_rested += 1
            return [self._first_offer(row) for row in rows]
        clock = self._models[0].pace.clock
        found = self._proposals(rows)
        drafts = [_united(one, row) for one, row in zip(found, rows, strict=True)]
        looked = clock()
        drafts = self._with_models(rows, found, drafts)
        slowed = 1 + sum(
            row_cost(row, len(rows)) * len(d) for row, d in zip(rows, drafts, strict=True)
        )
        for model in self._models:
            model.pace.end_drafting(slowed)
        self._planning = clock() - looked - sum(model.seconds for model in self._models)
        return drafts

    def _book(self, rows: Sequence[DraftRow], *, judges: bool) -> None:
        """Book the last round of the members that cost time, and if it `judges`, judge them
        together."""
        tokens = passes = 1.0
        for model in self._models:
            if self._num_rested:
                model.rested(self._num_rested)
            model.pace.begin_round()
            for row in rows:
                model.learn(row)
            gained, took = model.settle(self.allowances, len(rows))
            tokens, passes = tokens + gained, passes + took
        self.allowances.next_round(1 + self._num_rested)
        # The longest planning that counts; more is a pause of the machine.
        passes += min(self._models[0].pace.passes(self._planning), 1.0)
        self._num_rested, self._planning = 0, 0.0
        if judges:
            self._rests.observe(len(rows), tokens, passes)

    def _looked_up(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Return the drafts of look-ups alone: merged ones, or chains of the best for each row."""
        drafts = [Draft.empty()] * len(rows)
        for index, found in enumerate(self._proposals(rows)):
            if not found:
                continue
            row = rows[index]
            branches = row.budget.size > row.budget.depth
            best = found if branches or len(found) < 2 else [max(found, key=partial(_worth, row))]
            drafts[index] = merged(best, row.budget)
        return drafts

    def _first_offer(self, row: DraftRow) -> Draft:
        """Return the draft of the first look-up that has one which seems to pay, without asking the
        others: they read the text when they are asked again."""
        for member in self._members:
            if serves(row, member.name) or member.name == ForcedDrafter.name:
                offer = member.offers([row])[0]
                if offer is not NO_OFFER and _worth(row, Proposal(member.name, offer)) > 1:
                    return offer.made_by(member.name)
        return Draft.empty()

    def _proposals(self, rows: Sequence[DraftRow]) -> list[list[Proposal]]:
        """Return the offers of look-ups for each row that seem to pay."""
        found: list[list[Proposal]] = [[] for _ in rows]
        every = range(len(rows))
        chosen = [index for index in every if rows[index].params.drafters]
        for member in self._members:
            served: Sequence[int] = every
            if chosen and member.name != ForcedDrafter.name:
                served = [i for i in every if i not in chosen or serves(rows[i], member.name)]
            part = rows if served is every else [rows[index] for index in served]
            for index, offer in zip(served, member.offers(part), strict=True):
                # Most members offer nothing in most rounds.
                if offer is NO_OFFER:
                    continue
                proposal = Proposal(member.name, offer)
                if _worth(rows[index], proposal) > 1:
                    found[index].append(proposal)
        return found

    def _with_models(
        self, rows: Sequence[DraftRow], found: Sequence[list[Proposal]], drafts: list[Draft]
    ) -> list[Draft]:
        """Return `drafts`, which look-ups made of what they `found`, with those of all members
        whose plans raise the goodput."""
        states = _states(rows, drafts)
        made: dict[int, list[tuple[ModelMember, Plan, Draft | Proposal]]] = {}
        for model, plan in self._plans(states, self._models):
            for index, draft in model.draft(states, plan).items():
                made.setdefault(index, []).append((model, plan, draft))
        for index, several in made.items():
            row, base = rows[index], drafts[index]
            alone = next((draft for *_, draft in several if isinstance(draft, Draft)), None)
            offers = [draft for *_, draft in several if isinstance(draft, Proposal)]
            drafts[index] = _united([*found[index], *offers], row) if alone is None else alone
            for model, plan, draft in several:
                own = draft if isinstance(draft, Draft) else draft.offer.draft
                others = [offer for offer in offers if offer is not draft]
                rest = _united([*found[index], *others], row) if others else base
                model.expect(states[index], plan, index, own, rest)
        return drafts

    def _plans(
        self, states: Sequence[RowState], models: Sequence[ModelMember]
    ) -> list[tuple[ModelMember, Plan]]:
        """Return the plans to carry out, the best first; one may be a trial."""
        plans: list[tuple[ModelMember, Plan]] = []
        now = Plan({}, tokens=len(states) + sum(state.num_gained for state in states))
        left = list(models)
        while left:
            found = [(m, plan) for m in left if (plan := m.plan(states, now, self.allowances))]
            if not found:
                break
            model, now = max(found, key=lambda pair: pair[1].goodput)
            plans.append((model, now))
            left.remove(model)
            for index, levels in now.levels.items():
                states[index].add(levels)
        for model in left:
            trial = model.trial(states, self.allowances)
            if trial is not None:
                return [*plans, (model, trial)]
        return plans


def serves(row: DraftRow, name: str) -> bool:
    """Return whether the row's request lets the member `name` draft."""
    return not row.params.drafters or name in row.params.drafters


def _worth(row: DraftRow, proposal: Proposal) -> float:
    """Return the highest goodput of a beginning of the offer; that of no draft is 1."""
    return num_paying(proposal.offer.kept, row.budget.price)[1]


def _united(proposals: Sequence[Proposal], row: DraftRow) -> Draft:
    return merged(proposals, row.budget) if proposals else Draft.empty()


def _states(rows: Sequence[DraftRow], drafts: Sequence[Draft]) -> list[RowState]:
    states: list[RowState] = []
    for row, draft in zip(rows, drafts, strict=True):
        cost = len(rows) * row_cost(row, len(rows))
        price = cost if row.budget.price is None else row.budget.price
        states.append(RowState(row, price, cost, levels_of(draft) if draft.tokens else []))
    return states


def row_cost(row: DraftRow, num_rows: int) -> float:
    """Return the time of one more row, as a share of a pass for `num_rows` without drafts."""
    known = row.budget.row_cost
    # The pass of a batch takes longer than that of one row, so that one more row is less of it.
    return ROW_COST / (1 + ROW_COST * (num_rows - 1)) if known is None else known


def _joined(needs: Sequence[DraftNeeds]) -> DraftNeeds:
    """Return the needs of all of them. Those that read hidden states name all stored layers."""
    layers = {need.hidden_layers for need in needs} - {()}
    if len(layers) > 1:
        raise ContractError("members of a portfolio name different layers as stored")
    return DraftNeeds(
        hidden_layers=next(iter(layers), ()),
        num_likely=max((need.num_likely for need in needs), default=0),
        shares_memory=any(need.shares_memory for need in needs),
    )


def lookup_members(*text: ScoredDrafter) -> tuple[ScoredDrafter, ...]:
    """Return all look-ups: those in `text` after the forced and the predicted tokens, for the most
    reliable ones come first. Of equal offers the first one is used."""
    predicted = ReplayScored(PredictionDrafter(), serves=lambda row: bool(row.prediction))
    return (ForcedDrafter(), predicted, *text)


def build(context: BuildContext) -> PortfolioDrafter:
    """Build look-ups and all models, heads and copies, without those that were found and cannot be
    used."""
    from outrider.drafters import ngram, suffix

    members = lookup_members(suffix.build(context), ngram.build(context))
    resolved = context.resolved
    left_to_us = resolved.left_to_us
    models: list[ModelMember] = []
    notes: list[str] = []
    for kind in resolved.sources:
        if left_to_us and kind.name == MODEL and context.models.draft is None:
            # It could not be loaded, which a note says.
            continue
        at_once = kind.at_once or (kind.name == MODEL and context.models.mask_token is not None)
        try:
            drafter = context.member(kind)
            models.append(
                ModelMember(
                    drafter,
                    branches=not left_to_us,
                    at_once=at_once,
                    most_drafted=resolved.most_drafted,
                )
            )
        except (CheckpointError, ConfigError) as error:
            if not left_to_us or kind.name in context.models.named:
                raise
            notes.append(unusable(kind.name, error))
    return PortfolioDrafter(members, *models, notes=tuple(notes))


def unusable(words: str, why: object) -> str:
    """Return a note on drafts that were found and cannot be used."""
    return f"drafter auto leaves out {words}, which was found and cannot be used: {why}"


KIND = DrafterKind(
    name="portfolio",
    build=build,
    source="draft",
    branches=True,
    reads=("corpus", "prediction"),
    not_in_process="the draft model of a portfolio",
    without_draft="lookup",
    scores=True,
    accepted=0.65,
)
