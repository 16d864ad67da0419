"""Allocation of a round: the number of tokens to draft for each sequence of a batch, by goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Seconds of a round by (packed rows, deepest draft, number of sequences that draft).
RoundSeconds = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft lengths in the order of the batch; expected tokens and seconds of the round."""

    depths: tuple[int, ...]
    num_tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds if self.seconds > 0 else float("inf")

    @property
    def is_plain(self) -> bool:
        return not any(self.depths)


def allocated(
    prefixes: Sequence[Sequence[float]], depths: Sequence[int], seconds: RoundSeconds
) -> Allocation:
    """The expected tokens and seconds of drafts of these `depths`; `prefixes` has P_1 to P_k a
    sequence.

    Position j of a request's draft is accepted with probability P_j, the product of the rates up to
    it, and never more likely than the position before. So of all ways to draft C tokens for the
    batch, at most D for each, the best is to take the C largest P of positions up to D, and these
    are beginnings of drafts. It remains to choose C and D, with b tokens a round that the target
    adds by itself:

        goodput(C, D) = (b + the sum of the C largest P) / T(C, D)
    """
    tokens = sum(1 + sum(row[:depth]) for row, depth in zip(prefixes, depths, strict=True))
    num_drafting = sum(depth > 0 for depth in depths)
    deepest = max(depths, default=0)
    took = seconds(len(depths) + sum(depths), deepest, num_drafting)
    return Allocation(tuple(depths), tokens, took)


def best_allocation(prefixes: Sequence[Sequence[float]], seconds: RoundSeconds) -> Allocation:
    """The allocation with the largest goodput(C, D) over the tried D; of equals the smallest C.

    C = 0 is plain decoding, with its own cost. TETRIS (Wu et al. 2025, arXiv 2502.15197) allocates
    the target's rows in this way. The bound D is there because the drafter's passes cost time as
    well; D is tried at powers of two and at the largest depth. All is decided before anything is
    drawn.
    """
    nodes = sorted(
        (-prob, depth, index)
        for index, row in enumerate(prefixes)
        for depth, prob in enumerate(row, start=1)
    )
    num_sequences = len(prefixes)
    best = allocated(prefixes, [0] * num_sequences, seconds)
    limit, most = 1, max(map(len, prefixes), default=0)
    while num_sequences > 1 and limit < most:
        best = _extended(best, [node for node in nodes if node[1] <= limit], seconds)
        limit *= 2
    return _extended(best, nodes, seconds)


def _extended(
    best: Allocation, nodes: Sequence[tuple[float, int, int]], seconds: RoundSeconds
) -> Allocation:
    """The best of `best` and all beginnings of `nodes`, (-P, depth, sequence) in order."""
    num_sequences = len(best.depths)
    tokens, deepest, num_drafting = float(num_sequences), 1, 0
    least, found = best.seconds / best.num_tokens, 0
    result = best
    for count, (lost, depth, _) in enumerate(nodes, start=1):
        if lost == 0:
            break
        tokens -= lost
        if depth == 1:
            num_drafting += 1
        elif depth > deepest:
            deepest = depth
        took = seconds(num_sequences + count, deepest, num_drafting)
        if took < least * tokens:
            least, found = took / tokens, count
            result = Allocation((), tokens, took)
        elif took >= least * (tokens - lost * (len(nodes) - count)):
            # The rest cannot help, even if every later node were as likely as this one, and free.
            break
    if not found:
        return best
    depths = [0] * num_sequences
    for _, _, index in nodes[:found]:
        depths[index] += 1
    return Allocation(tuple(depths), result.num_tokens, result.seconds)
