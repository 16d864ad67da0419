"""How much of its drafts is kept on given prompts: counts only, no times.

A drafter writes every prompt with drafts as deep as any that will be planned, and replay says what
shorter drafts would have brought. A round at position s of a text that drafted d tokens and kept a
of them says of every position from s on how a draft from there would have fared: from s + i it
would have kept a - i tokens, and the next one would have been refused. For a drafter that goes by
the text alone, such as a draft model, that is exact, and so are the rounds at any K below:

    p  ->  p + min(kept at p, K) + 1

Counting places over the deep rounds instead would be wrong: they begin where a token was refused,
which is where drafts are worst, while short drafts mostly begin where the one before was kept. For
drafters that go by what they drafted themselves (MTP, EAGLE) it is an approximation, since a draft
that begins later knows more. Where the deep draft was kept as a whole, up to its budget, nothing is
known of the token after it; it is taken to have been kept as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.api.request import RequestHandle
from outrider.api.result import GenerationResult
from outrider.core.params import SamplingParams
from outrider_lab.bench.calibrate.engines import TimedEngine
from outrider_lab.planner.calibration import DrafterCosts, PlaceCount, RoundStats
from outrider_lab.planner.rounds import fitted_carry


@dataclass(frozen=True, slots=True)
class Ahead:
    """From a position of a text: how many tokens a draft would have, and how many were kept."""

    drafted: int
    kept: int


@dataclass(frozen=True, slots=True)
class ProbeRound:
    """A round that begins after `start` tokens of the text, with room for a draft of `room`."""

    start: int
    room: int
    drafted: int
    kept: int


class CountedRound(Protocol):
    """What is counted of a round; a `RoundTrace` is one."""

    @property
    def num_drafted(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def num_emitted(self) -> int: ...


def ahead_of(traces: Sequence[CountedRound], *, deepest: int) -> list[Ahead]:
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
            Ahead(trace.num_drafted - place + more.drafted, trace.num_accepted - place + more.kept)
            for place in range(trace.num_emitted - 1, -1, -1)
        ]
        end = start
    return found[::-1]


def rounds_at(ahead: Sequence[Ahead], k: int, *, start: int = 0) -> list[ProbeRound]:
    """The rounds of a request at depth `k`, from position `start` to the end of its text."""
    rounds: list[ProbeRound] = []
    while start < len(ahead):
        room = min(k, len(ahead) - start - 1)
        drafted = min(ahead[start].drafted, room)
        kept = min(ahead[start].kept, drafted)
        rounds.append(ProbeRound(start, room, drafted, kept))
        start += kept + 1
    return rounds


# K at which the carry of a drafter is found: between the shortest drafts and the deepest.
_MIDDLE_K = 4

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """`texts` has, for each prompt, how a draft from each position of its text would fare, up to
    `deepest` tokens. `same` says whether all texts were those of plain decoding, None where that
    need not be. `miss_seconds` is what asking for a draft takes where none is found, and
    `hit_seconds` where a lookup finds one; 0 where nobody knows."""

    name: str
    deepest: int
    texts: tuple[tuple[Ahead, ...], ...]
    same: bool | None
    miss_seconds: float = 0.0
    hit_seconds: float = 0.0

    def rounds(self, k: int) -> list[list[ProbeRound]]:
        """Of each text, those that were not cut by its end; all of them where every one was."""
        found = [rounds_at(text, k) for text in self.texts]
        whole = [[one for one in rounds if one.room == k] for rounds in found]
        return [some or every for some, every in zip(whole, found, strict=True) if every]

    def stats(self, k: int) -> RoundStats:
        """Of rounds at depth `k`, by replay."""
        rounds = [one for text in self.rounds(k) for one in text]
        drafted = [one.drafted for one in rounds if one.drafted]
        return RoundStats(
            tuple(sum(one.kept > place for one in rounds) / len(rounds) for place in range(k)),
            len(drafted) / len(rounds),
            statistics.fmean(drafted) if drafted else 0.0,
        )

    def spread(self, k: int) -> float:
        """The relative deviation between texts of their tokens a round, beyond what a single text
        scatters by itself."""
        texts = self.rounds(k)
        means = [1 + statistics.fmean(one.kept for one in text) for text in texts]
        if len(means) < 2:
            return 0.0
        within = [statistics.pvariance([one.kept for one in text]) / len(text) for text in texts]
        between = statistics.variance(means) - statistics.fmean(within)
        return max(between, 0.0) ** 0.5 / statistics.fmean(means)

    def counted(self, costs: DrafterCosts) -> DrafterCosts:
        """`costs` with the places of deep drafts, text by text, where the next draft is, and
        what rounds at each depth bring."""
        texts = self.rounds(self.deepest)
        every = [one for text in texts for one in text]
        found = replace(
            costs,
            places=_places(every, self.deepest),
            requests=tuple(_places(text, self.deepest) for text in texts),
            num_rounds=len(every) if any(one.drafted < one.room for one in every) else 0,
            miss=self.miss_seconds,
        )
        if not found.places:
            return found
        stats = tuple(self.stats(k) for k in range(1, self.deepest + 1))
        middle = stats[min(_MIDDLE_K, self.deepest) - 1]
        carry = fitted_carry(found, min(_MIDDLE_K, self.deepest), middle.tokens)
        return replace(found, carry=carry, laws=stats)


def probe(
    engines: Sequence[TimedEngine],
    prompts: Prompts,
    params: SamplingParams,
    *,
    deepest: int,
    comparable: Callable[[TimedEngine], bool],
) -> Iterator[Probe]:
    """One for each engine that drafts; the first of `engines` decodes plainly."""
    plain = [result.token_ids for result in _written(engines[0], prompts, params, 0)]
    for engine in engines[1:]:
        results = _written(engine, prompts, params, deepest)
        same = [result.token_ids for result in results] == plain
        yield Probe(
            engine.name,
            deepest,
            tuple(tuple(ahead_of(result.rounds, deepest=deepest)) for result in results),
            same if comparable(engine) else None,
        )


def written_until(
    engine: TimedEngine,
    prompts: Prompts,
    params: SamplingParams,
    ks: Sequence[int],
    *,
    at_once: int,
    go_on: Callable[[Sequence[RequestHandle]], bool],
) -> list[GenerationResult]:
    """What `engine` wrote of the first prompts while `go_on`, `at_once` of them at a time, with
    rounds of `ks` in turns."""
    engine.dial.set(ks)
    engine.llm.forget()
    handles: list[RequestHandle] = []
    try:
        while go_on(handles):
            running = sum(not handle.done for handle in handles)
            if running < at_once and len(handles) < len(prompts):
                handles.append(engine.llm.submit(prompts[len(handles)], params))
            elif running:
                engine.advance(handles)
            else:
                break
    finally:
        for handle in handles:
            engine.llm.cancel(handle)
    return [handle.result() for handle in handles]


def _written(
    engine: TimedEngine, prompts: Prompts, params: SamplingParams, k: int
) -> list[GenerationResult]:
    engine.dial.set((k,))
    engine.llm.forget()
    return engine.llm.generate(prompts, params)


def _places(rounds: Sequence[ProbeRound], deepest: int) -> tuple[PlaceCount, ...]:
    """Up to the last place that anybody drafted."""
    counts = [
        PlaceCount(
            drafted=sum(one.drafted > place and one.kept >= place for one in rounds),
            accepted=sum(one.kept > place for one in rounds),
        )
        for place in range(deepest)
    ]
    while counts and not counts[-1].drafted:
        counts.pop()
    return tuple(counts)
