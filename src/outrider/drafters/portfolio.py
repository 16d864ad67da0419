"""Portfolio: of several drafters, each request and round gets the draft of highest goodput.

Look-ups cost nothing, so all of them draft, and each gives the probability that its tokens are
accepted. A model costs time, so the value of its draft is predicted and it drafts only if it wins:

    goodput = (1 + sum of P) / (1 + 0.04 rows + share of a pass that the model takes)

P is the probability of each token to be accepted, of a model by its earlier drafts. The goodput of
no draft is 1. The choice depends on the text and on measured time, not on anything that the round
will draw, so every exact rule keeps the output's distribution; the text repeats only where tied to
the seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import Budget, Draft, common_prefix
from outrider.core.errors import CapacityError, CheckpointError, ConfigError, ContractError
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, KeepsApart, Remembering
from outrider.drafters.common.context import (
    NO_OFFER,
    BuildContext,
    ScoredDraft,
    ScoredDrafter,
    Stateless,
)
from outrider.drafters.prediction import PredictionDrafter
from outrider.estimate.acceptance import Acceptance, RunningMedian
from outrider.estimate.cost import ASSUMED_DRAFT, LEAST_KEPT, ROW_COST
from outrider.estimate.theory import prefix_products

_log = logging.getLogger(__name__)

# The portfolio's draft model: the depth at which it pays, from measured cost and acceptance.
#
# The value of a model's draft must be predicted before its cost is paid: acceptance from its
# earlier drafts (estimate/acceptance.py), time from its last ones (`DraftCostMeter`). A model that
# has not drafted for long makes some short drafts, since texts change.
_WINDOW = 31
# Up to so many measurements, the assumed cost of a draft is used.
_SETTLED = 5


@dataclass(slots=True)
class DraftCostMeter:
    """A meter of drafting costs. `_drafting` is the seconds per token of the draft being verified,
    0 if the model did not draft or had to catch up; `_slowed` is how much its rows slow the pass.

    Between the end of drafting and the next round the target verifies, so the time between them is
    that of a pass, and now and then of a pause too. A draft is compared with the very pass that
    verified it, because a machine's speed drifts. The median leaves pauses and slowed rounds out.
    """

    clock: Clock = HOST_CLOCK
    _shares: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    _ended: float = 0.0
    _drafting: float = 0.0
    _slowed: float = 1.0
    _share: float = ASSUMED_DRAFT

    def begin_round(self) -> None:
        """Begin a round."""
        if not self._drafting:
            return
        passing = (self.clock() - self._ended) / self._slowed
        if passing > 0:
            self._shares.add(self._drafting / passing)
            if len(self._shares) >= _SETTLED:
                self._share = self._shares.low
        self._drafting = 0.0

    def drafted(self, seconds: float, num_passes: int) -> None:
        """Record that the model drafted in `seconds`, with so many passes of its own."""
        self._drafting = seconds / num_passes

    def end_drafting(self, num_rows: int) -> None:
        """Record that drafts of `num_rows` tokens in all were returned."""
        self._ended, self._slowed = self.clock(), 1 + ROW_COST * num_rows

    @property
    def share(self) -> float:
        """The time of one of the model's passes as a share of the target's."""
        return self._share


# Positions with rates of their own; later ones have the rate of the last.
_NUM_POSITIONS = 8
# Rounds of a request, or of all, without the model before it is probed; the number of rounds of a
# probe, since in the first one it must catch up and is not timed; and the depth of a probe.
LOOK_AFTER = 128
LOOK_AFTER_ALL = 256
LOOK_ROUNDS = 3
LOOK_DEPTH = 2
# Its expected value is computed anew in one of so many rounds without it: it hardly changes in
# between.
_BID_EVERY = 8


def goodput(
    num_expected: float, num_rows: int, share: float = 0.0, price: float | None = None
) -> float:
    """Return tokens per pass time: `num_expected` draft tokens and the target's own, for `num_rows`
    of drafts that took `share` of a pass to make. A row costs `price` of a pass, if known."""
    cost = ROW_COST if price is None else price
    return (1 + num_expected) / (1 + cost * num_rows + share)


@dataclass(frozen=True, slots=True)
class Bid:
    """The expected goodput of a draft of `depth` tokens by the model."""

    depth: int
    goodput: float


@dataclass(slots=True)
class _RequestBids:
    """Bids for one request. `num_idle` rounds passed since the model's last draft; `num_looks` of a
    probe are due. `bid` is the last one, for at most `limit` tokens."""

    num_idle: int = 0
    num_looks: int = 0
    broken: bool = False
    bid: Bid | None = None
    limit: int = 0

    @property
    def is_fresh(self) -> bool:
        """True if the last bid is still valid, given the same limit."""
        idle = self.num_idle
        return idle > 1 and idle % _BID_EVERY > 0


@dataclass(slots=True)
class ModelMember:
    """A member with any `drafter` that is not free; without `branches` it drafts chains only."""

    drafter: Drafter
    branches: bool = field(default=True, kw_only=True)
    pace: DraftCostMeter = field(default_factory=DraftCostMeter)
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(_NUM_POSITIONS))
    _requests: dict[int, _RequestBids] = field(default_factory=dict[int, _RequestBids])
    # Rounds of all requests since it last drafted for one.
    _num_idle: int = 0

    @property
    def _is_up_to_date(self) -> bool:
        """True if it has read every text, since the target has."""
        return self.drafter.needs.shares_memory

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        try:
            self.drafter.open(seq_id, prompt)
        except Exception:  # noqa: BLE001 - a drafter may be any code
            _log.warning("%s did not start; lookups draft alone.", self.drafter.name, exc_info=True)
        else:
            self._requests[seq_id] = _RequestBids()

    def close(self, seq_id: int) -> None:
        if self._requests.pop(seq_id, None) is not None:
            self.drafter.close(seq_id)

    def learn(self, row: DraftRow) -> None:
        """Learn the verdict on its last draft."""
        request = self._requests.get(row.seq_id)
        if request is None:
            return
        last = row.last
        if last is None or last.draft.by != self.drafter.name:
            self._acceptance.observe(row.seq_id, 0, 0)
            request.num_idle += 1
            self._num_idle += 1
            return
        self._acceptance.observe(row.seq_id, last.draft.max_depth, last.num_accepted)
        request.num_idle = self._num_idle = 0

    def bid(self, row: DraftRow) -> Bid | None:
        """Return the depth with the highest goodput; None if the model cannot draft."""
        request, depth = self._requests.get(row.seq_id), row.budget.depth
        if request is None or request.broken or not depth:
            return None
        if request.num_idle >= LOOK_AFTER or self._num_idle >= LOOK_AFTER_ALL:
            request.num_looks, self._num_idle = LOOK_ROUNDS, 0
        if request.num_looks:
            return Bid(min(LOOK_DEPTH, depth), float("inf"))
        if request.bid is None or request.limit != depth or not request.is_fresh:
            bid = self._bid(row.seq_id, request, depth, row.budget.price)
            request.bid, request.limit = bid, depth
        return request.bid

    def draft(self, wanted: Sequence[tuple[DraftRow, int]]) -> list[Draft]:
        """Return drafts of these depths. A request for which the model fails gets none, now and
        later; one without memory gets none now."""
        if not wanted:
            return []
        rows = [replace(row, budget=self._cut(row.budget, depth)) for row, depth in wanted]
        for row in rows:
            request = self._requests[row.seq_id]
            request.num_looks = max(request.num_looks - 1, 0)
        # The time of a model that must first catch up does not measure its drafts.
        on_time = self._is_up_to_date or not any(
            self._requests[row.seq_id].num_idle for row in rows
        )
        started = self.pace.clock()
        drafts = self._proposed(rows)
        if on_time and any(drafts):
            self.pace.drafted(self.pace.clock() - started, max(depth for _, depth in wanted))
        return [replace(draft, by=self.drafter.name) for draft in drafts]

    def _cut(self, budget: Budget, depth: int) -> Budget:
        cut = budget.cut(depth)
        return cut if self.branches else replace(cut, num_nodes=0)

    def _bid(self, seq_id: int, request: _RequestBids, depth: int, price: float | None) -> Bid:
        rates = self._acceptance.rates(seq_id)
        rates += rates[-1:] * (depth - len(rates))
        # After rounds without it, the model must first catch up.
        late = request.num_idle > 0 and not self._is_up_to_date
        best, num_expected = Bid(0, 0.0), 0.0
        for length, kept in enumerate(prefix_products(rates[:depth]), start=1):
            num_expected += kept
            value = goodput(num_expected, length, self.pace.share * (length + late), price)
            if value > best.goodput:
                best = Bid(length, value)
        return best

    def _proposed(self, rows: Sequence[DraftRow]) -> list[Draft]:
        try:
            return self.drafter.propose(rows)
        except Exception as error:  # noqa: BLE001 - a drafter may be any code
            if len(rows) > 1:
                return [draft for row in rows for draft in self._proposed([row])]
            if not isinstance(error, CapacityError):
                self._requests[rows[0].seq_id].broken = True
                _log.warning("%s failed; lookups draft alone.", self.drafter.name, exc_info=True)
            return [Draft.empty()]


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
class MemberStats:
    """Rounds in which a member proposed, the tokens that it drafted in them and those accepted."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class PortfolioDrafter:
    """A drafter of several members. `members` are free, in order of preference among equal values;
    `neural` is not free. `notes` are for users."""

    def __init__(
        self,
        members: Sequence[ScoredDrafter],
        neural: ModelMember | None = None,
        *,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.notes = notes
        self.name = "lookup" if neural is None else "portfolio"
        self._members = tuple(members)
        self._neural = neural
        self.needs = _joined(
            [m.needs for m in members] + ([] if neural is None else [neural.drafter.needs])
        )
        self._stats = {member.name: MemberStats() for member in members}
        if neural is not None:
            self._stats[neural.drafter.name] = MemberStats()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        for member in self._members:
            member.open(seq_id, prompt)
        if self._neural is not None:
            self._neural.open(seq_id, prompt)

    def open_apart(self, seq_id: int, prompt: Sequence[int]) -> None:
        for member in self._members:
            if isinstance(member, KeepsApart):
                member.open_apart(seq_id, prompt)
            else:
                member.open(seq_id, prompt)
        if self._neural is not None:
            self._neural.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        for member in self._members:
            member.close(seq_id)
        if self._neural is not None:
            self._neural.close(seq_id)

    def forget(self) -> None:
        """Forget what its members learned from requests."""
        for member in self._members:
            if isinstance(member, Remembering):
                member.forget()

    def member(self, name: str) -> Drafter | None:
        """Return the model or heads among its members, if they are called `name`: they may draft by
        themselves, for requests that are not opened here."""
        own = None if self._neural is None else self._neural.drafter
        return own if own is not None and own.name == name else None

    def stats(self) -> dict[str, MemberStats]:
        """Return statistics by name, as far as verdicts have come back."""
        return {name: replace(stats) for name, stats in self._stats.items()}

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        if not rows:
            return []
        if self._neural is None:
            self._learn(rows)
            return self._looked_up(rows)[0]
        self._neural.pace.begin_round()
        self._learn(rows)
        drafts = self._with_model(rows, self._neural)
        self._neural.pace.end_drafting(sum(map(len, drafts)))
        return drafts

    def _learn(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            if self._neural is not None:
                self._neural.learn(row)
            last = row.last
            stats = self._stats.get(last.draft.by) if last is not None else None
            if last is not None and stats is not None:
                stats.num_rounds += 1
                stats.num_drafted += len(last.draft)
                stats.num_accepted += last.num_accepted

    def _looked_up(self, rows: Sequence[DraftRow]) -> tuple[list[Draft], list[float]]:
        """Return the best offer for each row, and its goodput; that of no draft is 1."""
        best, worths = [("", NO_OFFER)] * len(rows), [1.0] * len(rows)
        for member in self._members:
            for index, offer in enumerate(member.offers(rows)):
                # Most members offer nothing in most rounds.
                if offer is NO_OFFER:
                    continue
                worth = goodput(
                    offer.num_expected, len(offer.tokens), 0.0, rows[index].budget.price
                )
                if worth > worths[index]:
                    best[index], worths[index] = (member.name, offer), worth
        return [offer.made_by(name) for name, offer in best], worths

    def _with_model(self, rows: Sequence[DraftRow], neural: ModelMember) -> list[Draft]:
        """Return drafts in which the model drafts the rows for which it has a higher goodput."""
        drafts, worths = self._looked_up(rows)
        deep: dict[int, tuple[DraftRow, int]] = {}
        for index, row in enumerate(rows):
            bid = neural.bid(row)
            if bid is not None and bid.goodput > worths[index]:
                deep[index] = row, bid.depth
        for index, draft in zip(deep, neural.draft(list(deep.values())), strict=True):
            drafts[index] = draft
        return drafts


def _joined(needs: Sequence[DraftNeeds]) -> DraftNeeds:
    """Return the needs of all of them. Only one may read hidden states."""
    layers = [need.hidden_layers for need in needs if need.hidden_layers]
    if len(layers) > 1:
        raise ContractError("only one drafter of a portfolio reads hidden states")
    return DraftNeeds(
        hidden_layers=layers[0] if layers else (),
        num_likely=max((need.num_likely for need in needs), default=0),
        shares_memory=any(need.shares_memory for need in needs),
    )


def lookup_members(*text: ScoredDrafter) -> tuple[ScoredDrafter, ...]:
    """Return all look-ups: those in `text` after the forced and the predicted tokens, for the most
    reliable ones come first. Of equal offers the first one is used."""
    predicted = ReplayScored(PredictionDrafter(), serves=lambda row: bool(row.prediction))
    return (ForcedDrafter(), predicted, *text)


def build(context: BuildContext) -> PortfolioDrafter:
    """Build look-ups and the model or heads; without a model that was found and cannot be used."""
    from outrider.drafters import ngram, suffix

    members = lookup_members(suffix.build(context), ngram.build(context))
    left_to_us = context.resolved.left_to_us
    try:
        neural = ModelMember(context.member(), branches=not left_to_us)
    except (CheckpointError, ConfigError) as error:
        if not left_to_us:
            raise
        return PortfolioDrafter(members, notes=(alone_for(error),))
    return PortfolioDrafter(members, neural)


def alone_for(error: Exception) -> str:
    """Return a note for look-ups whose model could not be loaded."""
    return f"look-ups draft alone, since the draft model that was found cannot be used: {error}"


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
