"""A portfolio is a drafter with several members. In each round one of them drafts for a request,
where that pays.

Look-ups cost nothing, and each gives the probability that its tokens are accepted. Without others
all of them draft, as one tree (common/merge.py). Members that cost time (a model, heads, a copy of
the target) draft one at a time: the leader (control/leads.py), where no look-up has a draft that
gains as much. So a round costs what it costs with a single drafter: either the first look-up that
has a draft, or the leader, which a native round may run in its own call (engine/native_round.py).

The choice depends on the text and on measured time, not on anything that the round will draw, so
every exact rule keeps the output's distribution. Greedy text, and text of a seed under the rules
match and coupled, does not depend on it; other sampled text may differ from run to run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

from outrider.control.leads import Lead, Leads
from outrider.core.draft import Draft, common_prefix
from outrider.core.errors import CapacityError, CheckpointError, ConfigError, ContractError, given
from outrider.core.plugins import MODEL, DrafterKind
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, KeepsApart, Remembering
from outrider.drafters.common.context import (
    NO_OFFER,
    BuildContext,
    ScoredDraft,
    ScoredDrafter,
    Stateless,
)
from outrider.drafters.common.merge import Proposal, made_by, merged, num_paying, price_of
from outrider.drafters.prediction import PredictionDrafter
from outrider.estimate.acceptance import Acceptance, prefix_products
from outrider.estimate.cost import LEAST_KEPT

_log = logging.getLogger(__name__)

# Positions with rates of their own; later ones have the rate of the last.
_NUM_POSITIONS = 8
# Rounds of the leader without look-ups, at most, before these are asked again.
_LONGEST_PAUSE = 32


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


@dataclass(slots=True)
class Member:
    """A member with any `drafter` that is not free. A request for which it fails goes on with the
    others."""

    drafter: Drafter
    _opened: set[int] = field(default_factory=set[int])
    _broken: set[int] = field(default_factory=set[int])

    @property
    def name(self) -> str:
        return self.drafter.name

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        try:
            self.drafter.open(seq_id, prompt)
        except Exception:  # noqa: BLE001 - a drafter may be any code
            _log.warning("%s did not start; the others draft alone.", self.name, exc_info=True)
        else:
            self._opened.add(seq_id)

    def close(self, seq_id: int) -> None:
        self._broken.discard(seq_id)
        if seq_id in self._opened:
            self._opened.remove(seq_id)
            self.drafter.close(seq_id)

    def drafts_for(self, seq_id: int) -> bool:
        return seq_id in self._opened and seq_id not in self._broken

    def drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Return drafts: none for a request for which it fails, now and later; none now for one
        without memory."""
        try:
            return self.drafter.propose(rows)
        except Exception as error:  # noqa: BLE001 - a drafter may be any code
            if len(rows) > 1:
                return [draft for row in rows for draft in self.drafts([row])]
            if not isinstance(error, CapacityError):
                self._broken.add(rows[0].seq_id)
                _log.warning("%s failed; the others draft alone.", self.name, exc_info=True)
            return [Draft.empty()]


class Left(NamedTuple):
    """Drafts that `member` makes within a round, by sequence: their depths, and whether they are a
    trial."""

    member: Member
    depths: Mapping[int, int]
    trial: bool


class PortfolioDrafter:
    """A drafter of several members. `members` are free, in order of preference; `models` cost time,
    and `leads` chooses among them; without `branches` they draft chains. A pass of the target
    verifies `most_drafted` tokens of all requests at most, if given: more would be drafted for
    nothing. `notes` are for users."""

    def __init__(
        self,
        members: Sequence[ScoredDrafter],
        *models: Drafter,
        leads: Leads | None = None,
        most_drafted: int | None = None,
        branches: bool = True,
        notes: tuple[str, ...] = (),
    ) -> None:
        if (leads is None) == bool(models):
            raise ContractError("members that cost time need leads")
        self.notes = notes
        self.name = "portfolio" if models else "lookup"
        self.leads = leads
        self._members = tuple(members)
        # Those that may draft without masks and a prediction.
        guides = (ForcedDrafter.name, PredictionDrafter.name)
        self._looking = tuple(one for one in members if one.name not in guides)
        self._models = {model.name: Member(model) for model in models}
        self._most_drafted = most_drafted
        self.needs = _joined([one.needs for one in (*members, *models)])
        self._branches = branches
        # Whether the round can make the drafts of a member in its own call; those it must make.
        self.left_to_round: Callable[[str], bool] = _never
        self._left: Left | None = None
        # Requests for which a look-up drafted in their last round; rounds without look-ups.
        self._waiting: set[int] = set()
        self._num_left_out, self._pause = 0, 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members."""
        return tuple(member.name for member in (*self._members, *self._models.values()))

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        for member in (*self._members, *self._models.values()):
            member.open(seq_id, prompt)

    def open_apart(self, seq_id: int, prompt: Sequence[int]) -> None:
        for member in self._members:
            if isinstance(member, KeepsApart):
                member.open_apart(seq_id, prompt)
            else:
                member.open(seq_id, prompt)
        for model in self._models.values():
            model.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._waiting.discard(seq_id)
        for member in (*self._members, *self._models.values()):
            member.close(seq_id)

    def forget(self) -> None:
        """Forget what its members learned from requests."""
        for member in self._members:
            if isinstance(member, Remembering):
                member.forget()

    def member(self, name: str) -> Drafter | None:
        """Return the model or heads among its members that are called `name`, if any: they may
        draft by themselves, for requests that are not opened here."""
        found = self._models.get(name)
        return None if found is None else found.drafter

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        if not rows:
            return []
        if self.leads is None:
            return self._looked_up(rows)
        drafts = [Draft.empty()] * len(rows)
        groups = dict[tuple[str, ...], list[int]]()
        for index, row in enumerate(rows):
            groups.setdefault(self._able(row), []).append(index)
        if len(groups) > 1:
            # A round makes the drafts of one member.
            self.left_to_round = _never
        is_paused = self._pauses(rows)
        for names, group in groups.items():
            lead = self.leads.lead([rows[index].seq_id for index in group], names)
            model = self._models.get(lead.name) if any(lead.depths) else None
            if model is None or not is_paused:
                self._look_up(rows, group, lead.gain, drafts)
            if model is not None and not all(drafts):
                left = dict(zip(group, lead.depths, strict=True))
                self._lead(model, lead, rows, left, drafts)
        return drafts

    def _able(self, row: DraftRow) -> tuple[str, ...]:
        """Return the names of the members that may draft for the row; () if all of them may."""
        failed = [one.name for one in self._models.values() if not one.drafts_for(row.seq_id)]
        named = tuple(row.params.drafters)
        if not failed:
            return named
        return tuple(name for name in named or self.names if name not in failed) or ("",)

    def _pauses(self, rows: Sequence[DraftRow]) -> bool:
        """Return whether the leader drafts without look-ups in this round, since the controller cut
        their last drafts to nothing: for more rounds each time, until one of them is verified."""
        if not self._waiting and not self._num_left_out:
            return False
        cut = [row for row in rows if row.seq_id in self._waiting and row.last is not None]
        self._waiting.difference_update(row.seq_id for row in cut)
        if any(row.last is not None and row.last.draft.tokens for row in cut):
            self._pause = 1
        elif cut:
            self._num_left_out, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        is_paused = self._num_left_out > 0
        self._num_left_out -= is_paused
        return is_paused

    def _lead(
        self,
        model: Member,
        lead: Lead,
        rows: Sequence[DraftRow],
        depths: Mapping[int, int],
        drafts: list[Draft],
    ) -> None:
        """Have `model` draft for the rows that have no draft yet, up to these `depths` by index; or
        leave them to the round."""
        left = {
            index: min(depth, rows[index].budget.depth)
            for index, depth in depths.items()
            if depth and not drafts[index] and model.drafts_for(rows[index].seq_id)
        }
        if self._most_drafted is not None:
            most = max(self._most_drafted // max(len(left), 1), 1)
            left = {index: min(depth, most) for index, depth in left.items()}
        by_id = {rows[index].seq_id: depth for index, depth in left.items()}
        leads = given(self.leads, "leads")
        if left and not any(drafts) and self.left_to_round(model.name):
            self._left = Left(model, by_id, lead.trial)
        elif left and leads.repays(lead, [row.seq_id for row in rows], by_id, drafts):
            asked = [self._cut(rows[index], depth) for index, depth in left.items()]
            started = perf_counter()
            found = model.drafts(asked)
            seconds = perf_counter() - started
            if not any(found):
                leads.missed(model.name)
            for index, draft in zip(left, found, strict=True):
                if draft.tokens:
                    drafts[index] = made_by(draft, model.name, seconds, trial=lead.trial)

    def _cut(self, row: DraftRow, depth: int) -> DraftRow:
        budget = row.budget.cut(depth)
        return replace(row, budget=budget if self._branches else replace(budget, num_nodes=0))

    def take_left(self) -> Left | None:
        """Return what the last call left to the round, if anything; nothing more is left to it."""
        left, self._left, self.left_to_round = self._left, None, _never
        return left

    def missed(self, left: Left) -> None:
        """Count that the round made no draft of what was `left` to it."""
        given(self.leads, "leads").missed(left.member.name)

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

    def _look_up(
        self, rows: Sequence[DraftRow], asked: Sequence[int], gain: float, drafts: list[Draft]
    ) -> None:
        """Give each row that is `asked` for the draft of the first look-up that has one which seems
        to pay, without asking the others: they read the text when they are asked again. It must
        gain more than `gain` over plain decoding."""
        guided = any(rows[index].shaper is not None or rows[index].prediction for index in asked)
        for member in self._members if guided else self._looking:
            free = member.name == ForcedDrafter.name
            part = [i for i in asked if not drafts[i] and (free or serves(rows[i], member.name))]
            if not part:
                continue
            for index, offer in zip(part, member.offers([rows[i] for i in part]), strict=True):
                budget = rows[index].budget
                if offer is NO_OFFER or offer.kept[0] <= price_of(budget.price):
                    continue
                if gain <= 1 or num_paying(offer.kept, budget.row_cost)[1] > gain:
                    self._waiting.add(rows[index].seq_id)
                    drafts[index] = offer.made_by(member.name)

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


def _never(name: str) -> bool:
    del name
    return False


def serves(row: DraftRow, name: str) -> bool:
    """Return whether the row's request lets the member `name` draft."""
    return not row.params.drafters or name in row.params.drafters


def _worth(row: DraftRow, proposal: Proposal) -> float:
    """Return the highest goodput of a beginning of the offer; that of no draft is 1."""
    return num_paying(proposal.offer.kept, row.budget.price)[1]


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
    models: list[Drafter] = []
    notes: list[str] = []
    for kind in resolved.sources:
        if left_to_us and kind.name == MODEL and context.models.draft is None:
            # It could not be loaded, which a note says.
            continue
        try:
            models.append(context.member(kind))
        except (CheckpointError, ConfigError) as error:
            if not left_to_us or kind.name in context.models.named:
                raise
            notes.append(unusable(kind.name, error))
    # If the size of drafts was not chosen, only look-ups branch.
    num_nodes = 0 if left_to_us else resolved.num_nodes
    names = [model.name for model in models]
    return PortfolioDrafter(
        members,
        *models,
        leads=Leads(names, k=resolved.k, num_nodes=num_nodes) if models else None,
        most_drafted=resolved.most_drafted,
        branches=not left_to_us,
        notes=tuple(notes),
    )


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
