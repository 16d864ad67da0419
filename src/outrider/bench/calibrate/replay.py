"""What shorter drafts would have brought, from rounds with deep ones on the same text.

A round at position s of a text that drafted d tokens and kept a of them says of every position from
s on how a draft from there would have fared: from s + i it would have kept a - i tokens, and the
next one would have been refused. For a drafter that goes by the text alone, such as a draft model,
that is exact, and so are the rounds at any K below that follow from it:

    p  ->  p + min(kept at p, K) + 1

Counting places over the deep rounds instead would be wrong: they begin where a token was refused,
which is where drafts are worst, while short drafts mostly begin where the one before was kept. For
drafters that go by what they drafted themselves (MTP, EAGLE) it is an approximation, since a draft
that begins later knows more.

Where the deep draft was kept as a whole, up to its budget, nothing is known of the token after it;
it is taken to have been kept as well. Where the drafter ended it, nothing would have been drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.budget import RoundTrace


@dataclass(frozen=True, slots=True)
class Ahead:
    """From a position of a text: how many tokens a draft would have, and how many were kept."""

    drafted: int
    kept: int


@dataclass(frozen=True, slots=True)
class Round:
    """A round that begins after `start` tokens of the text, with room for a draft of `room`."""

    start: int
    room: int
    drafted: int
    kept: int


def ahead_of(traces: Sequence[RoundTrace], *, deepest: int) -> list[Ahead]:
    """For every position of a request's text but the last, from rounds with a budget of
    `deepest`."""
    emitting = [trace for trace in traces if trace.num_emitted]
    length = sum(trace.num_emitted for trace in emitting)
    found: list[Ahead] = []
    # From the end, since a draft that was kept as a whole goes on in the next round.
    end = length
    for trace in reversed(emitting):
        start = end - trace.num_emitted
        cut = trace.num_drafted >= min(deepest, length - start - 1)
        follows = found[-1] if found else Ahead(0, 0)
        whole = cut and trace.num_accepted == trace.num_drafted
        more = Ahead(1 + follows.drafted, 1 + follows.kept) if whole else Ahead(0, 0)
        found += [
            Ahead(
                trace.num_drafted - place + more.drafted,
                trace.num_accepted - place + more.kept,
            )
            for place in range(trace.num_emitted - 1, -1, -1)
        ]
        end = start
    return found[::-1]


def rounds_at(ahead: Sequence[Ahead], k: int, *, start: int = 0) -> list[Round]:
    """The rounds of a request at depth `k`, from position `start` to the end of its text."""
    rounds: list[Round] = []
    while start < len(ahead):
        room = min(k, len(ahead) - start - 1)
        drafted = min(ahead[start].drafted, room)
        kept = min(ahead[start].kept, drafted)
        rounds.append(Round(start, room, drafted, kept))
        start += kept + 1
    return rounds
