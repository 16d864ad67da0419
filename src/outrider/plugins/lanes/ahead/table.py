"""The table of predicted verdicts (a cache of drafts), the choice of verdicts, and their number.

A key is (sequence, start, n, pending): the tokens of the sequence when the round began, how many
draft tokens were accepted, and the target's own token. Without `start`, a branch of one round could
be taken for a later one. A branch may be used whatever the verdict's random numbers were: it was
drawn with numbers of its own round, and the verdict alone decides which branch is taken.

Shapes:  V = vocabulary, K = nodes of a chain, N = positions of a draft, the root first, M = listed
         ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from outrider.core.clock import host_rows
from outrider.core.draft import Draft
from outrider.core.errors import given
from outrider.core.protocols import DraftRow
from outrider.core.rng import KeyedRng, Role
from outrider.core.tree import ROOT
from outrider.plugins.lanes.ahead.forecast import NUM_RANKS, Forecast

# No request has this seed: these coins must not be the numbers that a request draws with.
_COIN_SEED = 0x6F75_7472_6964_6572


@dataclass(frozen=True, slots=True)
class PreparedRound:
    """Drafts prepared for one round that began with `start` tokens and verified `draft`.

    `branches` are keyed by (n, pending). `likeliest[n]` lists ids that may follow n accepted
    tokens, the likeliest first; the refused one is not among them.
    """

    start: int
    draft: tuple[int, ...]
    branches: Mapping[tuple[int, int], Draft]
    likeliest: Sequence[Sequence[int]]

    def fits(self, row: DraftRow) -> bool:
        """Return whether `row` comes right after that round."""
        if row.last is None:
            return False
        start = len(row.tokens) - row.last.num_accepted - 1
        return start == self.start and row.last.draft.tokens == self.draft

    def find(self, row: DraftRow) -> Draft | None:
        """Return the branch of the actual verdict, within the requested depth, or None."""
        last = given(row.last, "round")
        branch = self.branches.get((last.num_accepted, row.tokens[-1]))
        return None if branch is None else _beginning(branch, row.budget.depth)

    def rank(self, row: DraftRow) -> int | None:
        """Return the rank, from 0, of the target's token among the likeliest, else None."""
        listed = self.likeliest[given(row.last, "round").num_accepted]
        return listed.index(row.tokens[-1]) if row.tokens[-1] in listed else None


class SpeculationCache:
    """A cache of one prepared round per sequence; the next look-up removes it, found or not."""

    def __init__(self) -> None:
        self._rounds: dict[int, PreparedRound] = {}

    def put(self, seq_id: int, prepared: PreparedRound) -> None:
        self._rounds[seq_id] = prepared

    def take(self, row: DraftRow) -> PreparedRound | None:
        """Return what was prepared for the round before `row`, if it was that round."""
        prepared = self._rounds.pop(row.seq_id, None)
        return prepared if prepared is not None and prepared.fits(row) else None

    def drop(self, seq_id: int) -> None:
        self._rounds.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._rounds)


@dataclass(frozen=True, slots=True)
class ForcedHits:
    """A coin of weight `share` that says, for studies, whether a verdict counts as predicted.

    Heads: the draft says `hit`. If the verdict was not really predicted its draft is made now, by
    the model, and counted as made good, not as found; so a round counts as a hit but has the costs
    of a miss, unless the model has a copy that takes no time (`CostFree`). Tails: the table is not
    used, and the draft is that of a miss. So a share of 1 makes a run in which all drafts count as
    hits, and a share of 0 one that never uses the table. The coin depends on sequence and round.
    """

    share: float

    def hits(self, seq_id: int, start: int) -> bool:
        return KeyedRng(_COIN_SEED, seq_id, start).coin(self.share, ROOT, Role.DRAFT)


def _beginning(draft: Draft, depth: int) -> Draft:
    """Return its first `depth` nodes, with copied distributions: others may be freed."""
    probs_KV = draft.probs_NV
    return Draft(
        draft.tokens[:depth],
        draft.parents[:depth],
        None if probs_KV is None else probs_KV[:depth].contiguous(),
        draft.hit,
    )


@dataclass(frozen=True, slots=True)
class Branch:
    """A verdict: `accepted` tokens of the draft, then `token`."""

    accepted: int
    token: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates for n = 0..d accepted tokens: ids by falling share, and the share of each."""

    ids: Sequence[Sequence[int]]
    shares: Sequence[Sequence[float]]


def rank(logits_NV: Tensor, draft: Sequence[int], temperature: float) -> Ranking:
    """Return what may follow each position of `draft`, by the draft model's logits after it. Shares
    are at `temperature`, or at 1 if that is 0, and sum to one together with the unlisted ids.

    Writes over the logits of refused tokens.
    """
    positions = masked_positions(draft)
    with torch.inference_mode():
        logits_NV[positions, [draft[position] for position in positions]] = float("-inf")
        scaled_NV = logits_NV / (temperature or 1.0)
        count = min(NUM_RANKS, logits_NV.shape[-1])
        top_NM, ids_NM = torch.topk(scaled_NV, count, dim=-1)
        shares_NM = (top_NM - scaled_NV.logsumexp(-1, keepdim=True)).exp()
        shares = cast("list[list[float]]", cast("object", host_rows(shares_NM)))
    # The refused token, and tokens that a mask of the model itself forbids, come last with no
    # share.
    kept = [sum(share > 0 for share in row) for row in shares]
    ids = [row[:n] for row, n in zip(host_rows(ids_NM), kept, strict=True)]
    return Ranking(ids, [row[:n] for row, n in zip(shares, kept, strict=True)])


def masked_positions(draft: Sequence[int]) -> list[int]:
    """Return positions whose drafted token the target cannot choose itself: all but the last."""
    return list(range(len(draft)))


def fork(ranking: Ranking, forecast: Forecast, budget: int, *, hit: bool) -> list[Branch]:
    """Return at most `budget` branches, by the forecast's policy, after a `hit` or not.

    A verdict is n accepted tokens and one of the target's own. If the token after them was refused,
    the target's own token is another: the residual max(p - q, 0) has no mass where q was larger,
    and a greedy target chose something else. So the refused token is left out of the list; only
    after a draft that was accepted whole may any token follow. Leaving it out changes no
    distribution that is drawn from, only what is prepared.
    """
    depth = len(ranking.ids) - 1
    if forecast.policy == "top":
        return _top(ranking, forecast.chances(depth, hit=hit), budget)
    counts = forecast.counts(budget, depth, hit=hit)
    return [
        Branch(n, token)
        for n, (ids, count) in enumerate(zip(ranking.ids, counts, strict=True))
        for token in ids[:count]
    ]


def _top(ranking: Ranking, likely: Sequence[float], budget: int) -> list[Branch]:
    """Return the likeliest branches: P(n) times the share of the token there."""
    scored = [
        (p * share, Branch(n, token))
        for n, p in enumerate(likely)
        for token, share in zip(ranking.ids[n], ranking.shares[n], strict=True)
    ]
    return [branch for _, branch in heapq.nlargest(budget, scored, key=lambda pair: pair[0])]


# The factors by which one observation may change the number of predicted verdicts.
SLOWER, FASTER = 0.5, 1.25
# Rounds without drafting ahead, at first and at most.
FIRST_REST, LONGEST_REST = 8, 256


@dataclass(slots=True)
class FanOutLimiter:
    """A limit on the predicted verdicts of a sequence: at most `most`, and with `always` at least
    one. It is a pure function of what it observes.

    The next round waits for drafts that are still being made ahead when the verdict is there. So
    fewer verdicts are predicted while drafting ahead takes longer than verifications do, and more
    again while there is time left. If even one verdict takes too long, nothing is drafted ahead for
    a while, unless the settings say always.
    """

    most: int
    always: bool = False
    _share: float = 1.0
    _resting: int = 0
    _next_rest: int = FIRST_REST

    @property
    def fan_out(self) -> int:
        """Verdicts to predict for a sequence in the round that begins; 0 while it rests."""
        return 0 if self._resting else max(round(self._share * self.most), 1)

    def rest(self) -> None:
        """Count a round without drafting ahead."""
        self._resting = max(self._resting - 1, 0)

    def observe(self, seconds: float, window: float, saved: float) -> None:
        """Learn that drafting ahead took `seconds` of a verification's `window` (0: unknown). It
        saves `saved` seconds a round, on average, by not drafting in turns."""
        if window <= 0 or seconds <= 0:
            return
        at_least = self.fan_out == 1
        change = min(max(window / seconds, SLOWER), FASTER)
        self._share = min(max(self._share * change, 1 / self.most), 1.0)
        if at_least and seconds - window > saved and not self.always:
            self._resting, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        elif seconds <= window:
            self._next_rest = FIRST_REST
