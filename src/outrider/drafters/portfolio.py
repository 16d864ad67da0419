"""Portfolio: of several drafters, each request and round gets the draft of highest goodput.

Look-ups cost nothing, so all of them draft, and each gives the probability that its tokens are
accepted. A model costs time, so the value of its draft is predicted and it drafts only if it wins:

    goodput = (1 + sum of P) / (1 + 0.04 rows + share of a pass that the model takes)

P is the probability of each token to be accepted. The goodput of no draft is 1. The choice depends
on the text and on measured time, not on anything that the round will draw, so every exact rule
keeps the output's distribution; the text repeats only where tied to the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.core.draft import Draft, common_prefix
from outrider.core.errors import ContractError
from outrider.core.logits import LogitsProcessor
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, KeepsApart, Remembering
from outrider.drafters.none import Stateless
from outrider.drafters.portfolio_model import ModelMember, goodput
from outrider.drafters.proposals import NO_OFFER, ScoredDraft, ScoredDrafter
from outrider.estimate.acceptance import Acceptance
from outrider.estimate.cost import LEAST_KEPT
from outrider.estimate.theory import prefix_products


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
        return [NO_OFFER if row.shaper is None else _offer(row, row.shaper) for row in rows]


def _offer(row: DraftRow, shaper: LogitsProcessor) -> ScoredDraft:
    forced = shaper.forced(row.tokens, row.budget.depth)
    return ScoredDraft(tuple(forced), (1.0,) * len(forced)) if forced else NO_OFFER


# Positions with rates of their own; later ones have the rate of the last.
_NUM_POSITIONS = 8


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
