"""Drafts counted on texts that are known, without a pass of the target.

A drafter that reads nothing but the text drafts the same tokens whoever wrote it, so it is asked
for drafts of what plain decoding wrote, and each draft is compared with what comes next there. That
counts what rounds would have kept where the draft is chosen, not drawn: with p the target's
probability of the drafted token, a round keeps it with probability p, and the text has it with p.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.bench.calibrate.engines import TimedEngine
from outrider.bench.calibrate.probe import Ahead, ahead_of
from outrider.core.budget import Budget
from outrider.core.config import EXACT_SAMPLERS
from outrider.core.draft import common_prefix
from outrider.core.drafter_kinds import drafter_named
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, Remembering
from outrider.core.rng import KeyedRng

# Sequences of a replay have numbers that no request of an engine has.
_FIRST_ID = 1 << 40


@dataclass(frozen=True, slots=True)
class Text:
    """What was written after `prompt`."""

    prompt: Sequence[int]
    written: Sequence[int]


@dataclass(frozen=True, slots=True)
class KnownRound:
    """A round of a known text, as `ahead_of` reads it."""

    num_drafted: int
    num_accepted: int

    @property
    def num_emitted(self) -> int:
        return self.num_accepted + 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """For each text how a draft from each of its positions fares, and the median seconds of asking
    for a draft where none was found, 0 if one always was, and where a lookup found one, 0 if it
    never did."""

    texts: tuple[tuple[Ahead, ...], ...]
    miss_seconds: float
    hit_seconds: float = 0.0


def can_replay(engine: TimedEngine, params: SamplingParams) -> bool:
    """Whether the drafter of `engine` reads the text alone and chooses what it drafts."""
    kind = drafter_named(engine.contestant.drafter)
    exact = engine.llm.config.sampler in EXACT_SAMPLERS
    chooses = kind.source == "text" or (kind.source == "model" and params.greedy)
    return exact and chooses and engine.llm.proposer.needs == DraftNeeds()


def replayed(
    engine: TimedEngine,
    texts: Sequence[Text],
    params: SamplingParams,
    *,
    deepest: int,
    at_once: int,
    go_on: Callable[[], bool],
) -> Replayed:
    """Of the first `texts` while `go_on`. What costs a pass drafts for `at_once` texts together; a
    lookup is asked at every position, and of each text as of its first."""
    drafter = engine.llm.proposer
    asked = _Asked(drafter, params, deepest)
    texts = [text for text in texts if text.written]
    found: list[tuple[Ahead, ...]] = []
    looks_up = drafter_named(engine.contestant.drafter).source == "text"
    if looks_up:
        found += [tuple(asked.everywhere(text)) for text in texts if go_on()]
    else:
        for first in range(0, len(texts), at_once):
            rounds = asked.rounds(texts[first : first + at_once], go_on)
            found += [tuple(ahead_of(one, deepest=deepest)) for one in rounds if one]
    miss = statistics.median(asked.misses) if asked.misses else 0.0
    hit = statistics.median(asked.hits) if looks_up and asked.hits else 0.0
    return Replayed(tuple(found), miss, hit)


@dataclass(slots=True)
class _Asked:
    """A drafter that is asked for greedy or chosen drafts of up to `deepest` tokens. `misses` are
    the seconds of those times when it found nothing, `hits` those of the others."""

    drafter: Drafter
    params: SamplingParams
    deepest: int
    misses: list[float] = field(default_factory=list[float])
    hits: list[float] = field(default_factory=list[float])

    def everywhere(self, text: Text) -> Iterator[Ahead]:
        """A draft from every position of one text."""
        if isinstance(self.drafter, Remembering):
            self.drafter.forget()
        self.drafter.open(_FIRST_ID, text.prompt)
        try:
            for start in range(len(text.written)):
                (one,) = self._drafted({_FIRST_ID: (text, start)})
                yield Ahead(one.num_drafted, one.num_accepted)
        finally:
            self.drafter.close(_FIRST_ID)

    def rounds(self, texts: Sequence[Text], go_on: Callable[[], bool]) -> list[list[KnownRound]]:
        """The rounds of `texts`, which go on together. A text that was not replayed to its end by
        the time that `go_on` says no has the rounds up to there."""
        places = {seq_id: (text, 0) for seq_id, text in enumerate(texts, _FIRST_ID)}
        rounds: dict[int, list[KnownRound]] = {seq_id: [] for seq_id in places}
        for seq_id, (text, _) in places.items():
            self.drafter.open(seq_id, text.prompt)
        try:
            while places and go_on():
                found = dict(zip(places, self._drafted(places), strict=True))
                for seq_id, one in found.items():
                    text, start = places.pop(seq_id)
                    rounds[seq_id].append(one)
                    if start + one.num_emitted < len(text.written):
                        places[seq_id] = text, start + one.num_emitted
        finally:
            for seq_id in rounds:
                self.drafter.close(seq_id)
        return list(rounds.values())

    def _drafted(self, places: dict[int, tuple[Text, int]]) -> list[KnownRound]:
        """A round of each text, from a position of what was written."""
        rows = [self._row(seq_id, *place) for seq_id, place in places.items()]
        # A round without room for a draft asks for none.
        rows = [row for row in rows if row.budget.depth]
        began = perf_counter()
        drafts = self.drafter.propose(rows) if rows else []
        seconds = perf_counter() - began
        if rows:
            found_some = any(draft.tokens for draft in drafts)
            (self.hits if found_some else self.misses).append(seconds / len(rows))
        tokens = {row.seq_id: draft.tokens for row, draft in zip(rows, drafts, strict=True)}
        found: list[KnownRound] = []
        for seq_id, (text, start) in places.items():
            drafted = tokens.get(seq_id, ())
            found.append(KnownRound(len(drafted), common_prefix(drafted, text.written[start:])))
        return found

    def _row(self, seq_id: int, text: Text, start: int) -> DraftRow:
        room = len(text.written) - start - 1
        return DraftRow(
            seq_id,
            [*text.prompt, *text.written[:start]],
            None,
            Budget(min(self.deepest, room)),
            self.params,
            KeyedRng(0, 0, start),
        )
