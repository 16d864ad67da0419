"""Hold acceptance in a band: draft one token more above it, one fewer below.

Each sequence has its own draft length, since each text is easy or hard in its own way. After a
round that drafted, let a be the mean acceptance (accepted / drafted) of its last four such rounds,
where of a tree only its depth counts as drafted:

    a > target + 0.1   one token more
    a < target - 0.1   one token fewer

Drafts that are refused cost their rows and the drafter's time; drafts that are all accepted were
too short. A sequence whose length fell to 0 observes nothing, so after `WINDOW` plain rounds it
starts over with one token.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.budget import Budget, RoundTrace
from outrider.core.errors import ContractError

INITIAL = 4
STEP = 1
HALF_WIDTH = 0.1
RECENT = 4
WINDOW = 32
# As many as may ever run at once, so only sequences that ended are forgotten.
MOST_SEQUENCES = 1024
# The edges belong to the band, and 0.8 - 0.7 is not 0.1.
_ROUNDING = 1e-9


@dataclass(slots=True)
class _Sequence:
    """`rates` are the acceptances of the last rounds that drafted, newest last."""

    depth: int
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_plain: int = 0


@dataclass(frozen=True, slots=True)
class BandStats:
    """Of one sequence. `acceptance` is the mean over the last 32 rounds that drafted, 0 before the
    first; `num_samples` says how many those are."""

    depth: int
    acceptance: float
    num_samples: int


class BandController:
    """Draft lengths from `min_k` to `k`, at first 4. A pure function of the traces' counts. With
    `num_nodes` the longest drafts are trees of so many tokens, shorter ones of fewer in proportion.

    Nobody says when a sequence ends: of more than 1024 the one least recently seen is forgotten.
    """

    def __init__(self, *, k: int, min_k: int, target: float, num_nodes: int = 0) -> None:
        if not 0 <= min_k <= k:
            raise ContractError("min_k lies between 0 and k")
        self._most = Budget(k, num_nodes=num_nodes)
        self._lowest, self._highest, self._target = min_k, k, target
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self._most.cut(self._sequence(seq_id).depth) for seq_id in seq_ids]

    def observe(self, trace: RoundTrace) -> None:
        seq = self._sequence(trace.seq_id)
        if trace.num_drafted:
            seq.rates.append(trace.num_accepted / trace.num_places)
            seq.depth = self._adapted(seq)
        elif seq.depth == 0:
            seq.num_plain += trace.num_emitted > 0
            if seq.num_plain == WINDOW:
                self._sequences[trace.seq_id] = _Sequence(min(STEP, self._highest))

    def stats(self, seq_id: int) -> BandStats:
        seq = self._sequence(seq_id)
        mean = sum(seq.rates) / len(seq.rates) if seq.rates else 0.0
        return BandStats(seq.depth, mean, len(seq.rates))

    def _sequence(self, seq_id: int) -> _Sequence:
        seq = self._sequences.get(seq_id)
        if seq is None:
            seq = _Sequence(max(self._lowest, min(INITIAL, self._highest)))
            self._sequences[seq_id] = seq
            if len(self._sequences) > MOST_SEQUENCES:
                self._sequences.popitem(last=False)
        self._sequences.move_to_end(seq_id)
        return seq

    def _adapted(self, seq: _Sequence) -> int:
        if len(seq.rates) < RECENT:
            return seq.depth
        above = sum(list(seq.rates)[-RECENT:]) / RECENT - self._target
        if abs(above) <= HALF_WIDTH + _ROUNDING:
            return seq.depth
        if above > 0:
            return min(seq.depth + STEP, self._highest)
        return max(seq.depth - STEP, self._lowest)
