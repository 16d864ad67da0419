"""The outcome table: for every verdict that was foreseen, the draft that follows it.

A key is (sequence, start, n, pending): the tokens that the sequence had when the round began, how
many of the round's draft were accepted, and the token that the target chose itself. The start says
which round is meant. Without it, what was prepared for a round could be taken for a later one, if
rounds in between asked for no draft.

What is found may be used whatever the verdict's random numbers were: a branch was drawn from the
drafter's law with numbers of its own round, and which branch is taken depends on the verdict alone.

Shapes:  V = vocabulary, K = nodes of a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftRow
from outrider.core.rng import ROOT, KeyedNoise, Role

# Of nobody's request: these coins must not be the numbers that a request draws with.
_COIN_SEED = 0x6F75_7472_6964_6572


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What was prepared for one round that began with `start` tokens and verified `draft`.

    `branches` are keyed by (n, pending). `likeliest[n]` lists ids that may follow n accepted
    tokens, the likeliest first; the refused one is not among them.
    """

    start: int
    draft: tuple[int, ...]
    branches: Mapping[tuple[int, int], Draft]
    likeliest: Sequence[Sequence[int]]

    def fits(self, row: DraftRow) -> bool:
        """Whether `row` comes right after that round."""
        if row.last is None:
            return False
        start = len(row.tokens) - row.last.num_accepted - 1
        return start == self.start and row.last.draft.tokens == self.draft

    def find(self, row: DraftRow) -> Draft | None:
        """The branch of the verdict that came, within the depth that is asked for now."""
        if row.last is None:
            raise ContractError("the sequence has had no round")
        branch = self.branches.get((row.last.num_accepted, row.tokens[-1]))
        return None if branch is None else _beginning(branch, row.budget.depth)

    def rank(self, row: DraftRow) -> int | None:
        """The place, from 0, of the target's own token among the likeliest; None: beyond them."""
        if row.last is None:
            raise ContractError("the sequence has had no round")
        listed = self.likeliest[row.last.num_accepted]
        return listed.index(row.tokens[-1]) if row.tokens[-1] in listed else None


class OutcomeTable:
    """One round's entries a sequence; the next look takes them away, found or not."""

    def __init__(self) -> None:
        self._rounds: dict[int, Foreseen] = {}

    def put(self, seq_id: int, foreseen: Foreseen) -> None:
        self._rounds[seq_id] = foreseen

    def take(self, row: DraftRow) -> Foreseen | None:
        """What was prepared for the round before `row`, if it was that round."""
        foreseen = self._rounds.pop(row.seq_id, None)
        return foreseen if foreseen is not None and foreseen.fits(row) else None

    def drop(self, seq_id: int) -> None:
        self._rounds.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._rounds)


@dataclass(frozen=True, slots=True)
class ForcedHits:
    """For study: a coin of weight `share` says whether a verdict counts as foreseen.

    Heads: the draft says `hit`. If the verdict was not really foreseen its draft is made now, by
    the model, and counted as made good, not as found; so a round counts as a hit but has the costs
    of a miss, unless the model is one whose words can be had without its work (build.py). Tails:
    the table is not used, and the draft is that of a miss. So a share of 1 makes a run in which all
    drafts count as hits, and a share of 0 one that never uses the table. The coin is a pure
    function of sequence and round.
    """

    share: float

    def hits(self, seq_id: int, start: int) -> bool:
        return KeyedNoise(_COIN_SEED, seq_id, start).coin(self.share, ROOT, Role.DRAFT)


def _beginning(draft: Draft, depth: int) -> Draft:
    """Its first `depth` nodes, with laws of their own: those of its siblings may be forgotten."""
    laws_KV = draft.probs_NV
    return Draft(
        draft.tokens[:depth],
        draft.parents[:depth],
        None if laws_KV is None else laws_KV[:depth].contiguous(),
        draft.hit,
    )
