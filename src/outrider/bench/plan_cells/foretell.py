"""Seconds of a batch of texts whose drafts are known: round by round, from a calibration.

Replay (calibrate/replay.py) says of every text what each of its rounds at depth K drafts and keeps,
and so how long it lives. In round t those that are left share a pass, which takes what the
calibration says of so many rows, contexts and drafts. This is a plan for these very texts; for
texts like them the planner goes by laws instead, and the two agree on the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.bench.calibrate.replay import Ahead, rounds_at
from outrider.estimate.calibration import Calibration, DrafterCosts


@dataclass(frozen=True, slots=True)
class Foretold:
    """`seconds` in which `num_tokens` are emitted in `num_rounds` passes."""

    seconds: float
    num_tokens: int
    num_rounds: int

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(self.num_tokens, 1)


def foretold(
    calibration: Calibration,
    drafter: DrafterCosts,
    texts: Sequence[Sequence[Ahead]],
    *,
    k: int,
    context: int,
    opening: int,
) -> Foretold:
    """Of texts after prompts of `context` tokens. Two rounds of each are not counted: the first, in
    which its prompt is read, drafts nothing, and the second `opening` tokens."""
    starts = [2 + rounds_at(text, opening, start=1)[0].kept for text in texts]
    rows = [_drawn(text, k, start) for text, start in zip(texts, starts, strict=True)]
    passes = [[one for one in live if one is not None] for live in zip_longest(*rows)]
    return Foretold(
        sum(_pass_seconds(calibration, drafter, live, context) for live in passes),
        sum(len(text) - start for text, start in zip(texts, starts, strict=True)),
        len(passes),
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A round of a text, and how many tokens the one before emitted."""

    start: int
    drafted: int
    kept: int
    before: int


def _drawn(text: Sequence[Ahead], k: int, start: int) -> list[_Drawn]:
    """From `start` on, after an opening round that began behind the first token."""
    found: list[_Drawn] = []
    last = 1
    for one in rounds_at(text, k, start=start):
        found.append(_Drawn(one.start, one.drafted, one.kept, one.start - last))
        last = one.start
    return found


def _pass_seconds(
    calibration: Calibration, drafter: DrafterCosts, live: Sequence[_Drawn], prompt: int
) -> float:
    # The pending token is not in memory.
    lengths = [prompt + one.start - 1 for one in live]
    rows = [1 + one.drafted for one in live]
    drafting = [(one, length) for one, length in zip(live, lengths, strict=True) if one.drafted]
    shared = calibration.overhead + calibration.host * len(live) + calibration.rule * sum(rows)
    shared += calibration.token * sum(1 + one.kept for one in live)
    target = calibration.target.seconds(
        sum(rows), sum(lengths), sum(n * length for n, length in zip(rows, lengths, strict=True))
    )
    if not drafting:
        return shared + target
    depth = max(one.drafted for one, _ in drafting)
    draft = drafter.seconds(
        depth,
        len(drafting),
        sum(length for _, length in drafting),
        sum(one.before for one, _ in drafting),
    )
    return shared + target + draft
