"""Which phases are timed: small and large batches of short texts, and long ones, one and several.

Where passes are slow, less is measured: fewer depths in a turn, shallower drafts for large batches,
and shorter long texts, for all of them are read at what a row costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.bench.calibrate.stands import Stand, Stands
from outrider.bench.calibrate.texts import prompts_of
from outrider.bench.calibrate.turns import ALIKE, LEAST_TURNS, WARM_SECONDS, Phase
from outrider.core.params import SamplingParams

SECONDS = 20.0
# So chosen that batches share numbers of rows, 4 x (7 + 1) = 16 x (1 + 1): only then can what a
# sequence costs be told from what a row does.
KS = (1, 2, 3, 5, 7, 8, 11, 12, 15, 16)
# K of four sequences at which a pass has a row more than whole row tiles of 8, 12 or 16 rows: 17,
# 25, 33, 37 and 49. Alone they are 9, 13 and 17 rows at a K above. Only short texts are tried with
# them: long ones would outgrow their window.
EDGES = (3.25, 5.25, 7.25, 8.25, 11.25)
# Larger batches are tried with every other K: between many rows time goes straight on.
_FEW = 4
BATCHES = (1, 4, 16)
# Two whole pages, which sequences that begin alike share, and little more.
_SHORT = 66
# Of the time, what long texts may take to be read.
_READING_SHARE = 0.3
# Of a phase's time, what its short texts may take to be read. Where it takes more they begin alike
# and are read once, though passes over one text for all are quicker by a tenth than usual ones.
_OPENING_SHARE = 0.1
# Passes that a point should have at least.
LEAST_PASSES = 3
# Long texts shorter than this say nothing of contexts.
_LEAST_LONG = 256
# Long texts at once: sequences that begin alike do not tell what keys and values of their own cost.
_SEVERAL = 4
# Tokens of a long text that may be emitted while others are read.
_OPENING_ROOM = 128
_PILOT_TOKENS, _PILOT_ROUNDS = 128, 16
# Rounds of drafts that take as long as the pass.
_DRAFTING = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which points, with tokens drawn by `params`; `seconds` is how long all of it may take."""

    batches: Sequence[int] = BATCHES
    ks: Sequence[int] = KS
    seconds: float = SECONDS
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a plain round of one sequence, and of a row among many, roughly."""

    plain: float
    row: float

    @classmethod
    def of(cls, stand: Stand, piece: Sequence[int], clock: Callable[[], float]) -> Pace:
        """From reading a prompt and going on from it."""
        (prompt,) = prompts_of(piece, length=_PILOT_TOKENS, count=1)
        params = SamplingParams(max_tokens=_PILOT_ROUNDS + 1, ignore_eos=True)
        started = clock()
        (result,) = stand.llm.generate([prompt], params)
        seconds, first = clock() - started, result.token_seconds[0]
        return cls((seconds - first) / _PILOT_ROUNDS, first / _PILOT_TOKENS)

    def opening(self, batch: int) -> float:
        """Seconds of the rounds of a turn before those that count."""
        return _DRAFTING * self.warm(batch) * self._pass(2 * batch)

    def rounds(self, batch: int, k: float) -> float:
        """Seconds of a turn's rounds at `k`."""
        return _DRAFTING * ALIKE * self._pass(batch * (k + 1))

    def warm(self, batch: int) -> int:
        """Rounds before those that count; none where a pass takes longer than any cache to fill."""
        return round(WARM_SECONDS / self._pass(2 * batch))

    def _pass(self, num_rows: float) -> float:
        return self.plain + self.row * (num_rows - 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A phase to come: `batch` sequences of `context` tokens, on `stands`, with drafts of up to
    `ks` tokens, `most_ks` of them in a turn."""

    batch: int
    context: int
    stands: Sequence[Stand]
    ks: Sequence[float]
    most_ks: int
    alike: bool

    def phase(self, piece: Sequence[int], warm: int, params: SamplingParams) -> Phase:
        count = 1 if self.alike else self.batch
        prompts = prompts_of(piece, length=self.context, count=count)
        if self.alike:
            prompts *= self.batch
        ks = {one.name: (0,) if one.is_plain else (0, *self.ks) for one in self.stands}
        again = self.context == _SHORT
        return Phase(prompts, ks, self.most_ks, self.alike, again, warm, params)


def plans_of(stands: Stands, wanted: Wanted, pace: Pace) -> list[Plan]:
    """Long texts come first: what they take to be read is known best before."""
    every = stands.present
    reading = _READING_SHARE * wanted.seconds / pace.row
    window = stands.plain.llm.spec.max_tokens
    # Where not all engines can read a long text, one that drafts tells what contexts cost.
    readers = every if reading / len(every) >= _LEAST_LONG else every[1:2]
    found: list[Plan] = []
    num_phases = 2 + len(wanted.batches)
    share = reading / len(readers)
    for batch in (_SEVERAL, 1):
        ks, most_ks = _affordable(wanted, pace, batch, len(readers), num_phases)
        # Half of what may be read goes to several texts, if it is worth that.
        tokens = share / 2 / batch if batch > 1 or found else share
        long = min(window - _room(ks, most_ks, pace.warm(batch)), int(tokens))
        if long >= _LEAST_LONG:
            found.append(Plan(batch, long, readers, ks, most_ks, alike=False))
    for batch in wanted.batches:
        edges = EDGES if batch == _FEW else ()
        ks, most_ks = _affordable(wanted, pace, batch, len(every), num_phases, edges=edges)
        read = batch * _SHORT * pace.row * len(every)
        alike = read > _OPENING_SHARE * wanted.seconds / num_phases
        found.append(Plan(batch, _SHORT, every, ks, most_ks, alike))
    return found


def _room(ks: Sequence[float], most_ks: int, warm: int) -> int:
    """Tokens that a text may grow by in the least turns, if all drafts are kept and the next is as
    deep."""
    deepest = sorted(ks)[-most_ks:]
    turn = warm * (min(ks) + 1) + ALIKE * sum(k + 1 for k in (0, *deepest))
    return _OPENING_ROOM + LEAST_TURNS * math.ceil(turn) + math.ceil(max(ks))


def _affordable(
    wanted: Wanted,
    pace: Pace,
    batch: int,
    num_stands: int,
    num_phases: int,
    *,
    edges: Sequence[float] = (),
) -> tuple[tuple[float, ...], int]:
    """Of `ks` and `edges` those that fit into a turn, and how many do together on the mean, one at
    least."""
    share = wanted.seconds / num_phases / num_stands / (LEAST_PASSES + 1)
    share -= pace.opening(batch) + pace.rounds(batch, 0)
    ks = sorted((*(wanted.ks if batch <= _FEW else wanted.ks[::2]), *edges))
    fitting = [k for k in ks if pace.rounds(batch, k) <= share] or ks[:1]
    mean = statistics.fmean(pace.rounds(batch, k) for k in fitting)
    return tuple(fitting), max(1, min(len(fitting), int(share / mean)))
