"""Allotments of a round: how many tokens to draft for each sequence of a batch, by goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Seconds of a round by (packed rows, deepest draft, number of sequences that draft).
RoundSeconds = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Allotment:
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


def allotted(
    prefixes: Sequence[Sequence[float]], depths: Sequence[int], seconds: RoundSeconds
) -> Allotment:
    """What drafts of these `depths` are expected to bring; `prefixes` has P_1 to P_k a sequence.

    Place j of a request's draft is kept with probability P_j, the product of the rates up to it,
    and never more likely than the place before. So of all ways to draft C tokens for the batch, at
    most D for each, the C largest P of places up to D bring most, and they are beginnings of
    drafts. What is left is to choose C and D, with b tokens a round that the target adds by itself:

        goodput(C, D) = (b + the sum of the C largest P) / T(C, D)
    """
    tokens = sum(1 + sum(row[:depth]) for row, depth in zip(prefixes, depths, strict=True))
    num_drafting = sum(depth > 0 for depth in depths)
    deepest = max(depths, default=0)
    took = seconds(len(depths) + sum(depths), deepest, num_drafting)
    return Allotment(tuple(depths), tokens, took)


def best_allotment(prefixes: Sequence[Sequence[float]], seconds: RoundSeconds) -> Allotment:
    """The best by goodput(C, D) over the D that are tried; of equals the one that drafts least.

    C = 0 is plain decoding, with its own cost. TETRIS (Wu et al. 2025, arXiv 2502.15197) allots the
    target's rows in this way. The bound D is there because the drafter's passes cost time as well;
    D is tried at powers of two and at the largest depth. All of it is decided before anything is
    drawn.
    """
    nodes = sorted(
        (-kept, place, index)
        for index, row in enumerate(prefixes)
        for place, kept in enumerate(row, start=1)
    )
    num_sequences = len(prefixes)
    best = allotted(prefixes, [0] * num_sequences, seconds)
    limit, most = 1, max(map(len, prefixes), default=0)
    while num_sequences > 1 and limit < most:
        best = _extended(best, [node for node in nodes if node[1] <= limit], seconds)
        limit *= 2
    return _extended(best, nodes, seconds)


def _extended(
    best: Allotment, nodes: Sequence[tuple[float, int, int]], seconds: RoundSeconds
) -> Allotment:
    """The best of `best` and all beginnings of `nodes`, (-P, place, sequence) in order."""
    num_sequences = len(best.depths)
    tokens, deepest, num_drafting = float(num_sequences), 1, 0
    least, found = best.seconds / best.num_tokens, 0
    result = best
    for count, (lost, place, _) in enumerate(nodes, start=1):
        if lost == 0:
            break
        tokens -= lost
        if place == 1:
            num_drafting += 1
        elif place > deepest:
            deepest = place
        took = seconds(num_sequences + count, deepest, num_drafting)
        if took < least * tokens:
            least, found = took / tokens, count
            result = Allotment((), tokens, took)
        elif took >= least * (tokens - lost * (len(nodes) - count)):
            # Not even if all that follows were as good as this one, and free.
            break
    if not found:
        return best
    depths = [0] * num_sequences
    for _, _, index in nodes[:found]:
        depths[index] += 1
    return Allotment(tuple(depths), result.num_tokens, result.seconds)
