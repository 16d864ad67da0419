"""What share of drafts is kept on given prompts; each drafter is counted in its part of the time.

A drafter that reads the text alone is counted by replay of what plain decoding wrote, which takes
next to no time, so those come first; where passes are slow it writes a few rounds as well, since
those tell what its rounds take. All others write. Texts are compared with plain decoding's last.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

from outrider.api.request import RequestHandle
from outrider.api.result import GenerationResult
from outrider.core.config import EXACT_SAMPLERS
from outrider.core.draft import Budget, common_prefix
from outrider.core.params import SamplingParams
from outrider.core.plugins import drafter_named
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, Remembering
from outrider.core.rng import KeyedRng
from outrider_lab.bench.calibrate.engines import TimedEngine, TimedEngines
from outrider_lab.bench.calibrate.extent import Bounds, Extent
from outrider_lab.bench.calibrate.probe import Ahead, Probe, ahead_of, written_until
from outrider_lab.bench.calibrate.rounds import Request, Timed, passes_of

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
    """Of the first `texts` while `go_on`; of an empty one nothing. What costs a pass drafts for
    `at_once` texts together; a lookup is asked at every position, and of each text as of its
    first."""
    drafter = engine.llm.proposer
    asked = _Asked(drafter, params, deepest)
    found: list[tuple[Ahead, ...]] = []
    looks_up = drafter_named(engine.contestant.drafter).source == "text"
    if looks_up:
        found += [tuple(asked.everywhere(text)) for text in texts if go_on()]
    else:
        for first in range(0, len(texts), at_once):
            rounds = asked.rounds(texts[first : first + at_once], go_on)
            found += [tuple(ahead_of(one, deepest=deepest)) for one in rounds]
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
        places = {seq_id: place for seq_id, place in places.items() if place[0].written}
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


# What plain decoding, where its texts are replayed and where not, and a drafter that is replayed
# count for where the time is shared out; any other drafter counts for 1.
_PLAIN_WEIGHT, _PLAIN_ALONE, _REPLAYED_WEIGHT = 3.0, 0.5, 0.75
# Passes of a large target, and those of them with drafts, in which a drafter that is replayed shows
# what its rounds take.
_SHOWN_PASSES, _SHOWN_DRAFTS = 12, 6

GoOn = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Counted:
    """What one engine brought: `timed` are its passes where they were timed meanwhile, `results`
    what it wrote."""

    name: str
    probe: Probe | None
    timed: Sequence[Timed]
    results: Sequence[GenerationResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """Of prompts that are written with `params`, in `share` of the time that is left. With
    `compares` texts are compared with plain decoding's, so every drafter must write some. `goes_on`
    says whether a moment has come."""

    engines: TimedEngines
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    extent: Extent
    bounds: Bounds
    compares: bool
    goes_on: Callable[[float], bool]
    share: float = 1.0

    def run(self, hear: Callable[[str, float], None]) -> Iterator[Counted]:
        """One engine after the other, those first that take the least."""
        extent = self.extent
        replays = {one.name for one in self.engines.drafting if can_replay(one, self.params)}
        plain_writes = bool(replays) or self.compares or extent.is_large
        order = sorted(self.engines.drafting, key=lambda one: one.name not in replays)
        order = [*([self.engines.plain] if plain_writes else []), *order]
        weights = [self._weight(one, replays) for one in order]
        plain: list[GenerationResult] = []
        end = self.bounds.part(self.share)
        for number, engine in enumerate(order):
            hear("counting", number / len(order))
            share = weights[number] / sum(weights[number:])
            known: Replayed | None = None
            if engine.name in replays:
                known = self._replayed(engine, plain, self._part(share / 2, end))
                share /= 2
            until = self._part(share, end)
            rests = known is not None and not extent.is_large
            results = [] if rests else self._written(engine, until, shows=known is not None)
            plain = results if engine.is_plain else plain
            timed = _timed(engine, self.prompts, results) if extent.is_large else []
            yield Counted(engine.name, self._probe(engine, results, plain, known), timed, results)

    def compared(
        self, counted: Sequence[Counted], hear: Callable[[str, float], None]
    ) -> Iterator[Probe]:
        """The probes of drafters that were replayed and wrote nothing, if texts are to be compared:
        they write while there is time."""
        if not (counted and self.compares and self._is_tied):
            return
        # Plain decoding comes first.
        plain = _ids(counted[0].results)
        silent = [one.probe for one in counted if one.probe is not None and not one.results]
        for number, probe in enumerate(silent):
            hear("comparing", number / len(silent))
            engine = self.engines.named(probe.name)
            until = self.bounds.part(1 / (len(silent) - number))
            results = self._written(engine, until, shows=False)
            yield replace(probe, same=_agree(_ids(results), plain) if _is_exact(engine) else None)

    def _part(self, share: float, end: float) -> float:
        """The moment at which this share of the time up to `end` will have gone."""
        now = self.bounds.clock()
        return now if now >= end else now + share * (end - now)

    def _weight(self, engine: TimedEngine, replays: set[str]) -> float:
        if engine.is_plain:
            return _PLAIN_WEIGHT if replays else _PLAIN_ALONE
        return _REPLAYED_WEIGHT if engine.name in replays else 1.0

    @property
    def _at_once(self) -> int:
        """Texts of which an engine holds all tokens."""
        extent = self.extent
        longest = max(map(len, self.prompts)) + self.params.max_tokens + extent.deepest
        return max(1, min(extent.batch_size, extent.room // longest))

    def _written(self, engine: TimedEngine, until: float, *, shows: bool) -> list[GenerationResult]:
        """With drafts as deep as any that is planned; one that only `shows` what its rounds take
        has shorter ones among them, and does not write for long."""
        extent = self.extent
        ks = (0,) if engine.is_plain else (extent.deepest,)
        if shows:
            ks = (*ks, *extent.least_ks[:1])
        return written_until(
            engine,
            self.prompts,
            self.params,
            ks,
            at_once=self._at_once,
            go_on=lambda handles: self.goes_on(until) and not (shows and _has_shown(handles)),
        )

    def _replayed(
        self, engine: TimedEngine, plain: Sequence[GenerationResult], until: float
    ) -> Replayed:
        """Of what plain decoding wrote after its first token, which comes of reading the prompt."""
        pairs = zip(self.prompts, _ids(plain), strict=False)
        return replayed(
            engine,
            [Text((*prompt, *ids[:1]), ids[1:]) for prompt, ids in pairs],
            self.params,
            deepest=self.extent.deepest,
            at_once=self._at_once,
            go_on=lambda: self.goes_on(until),
        )

    def _probe(
        self,
        engine: TimedEngine,
        results: Sequence[GenerationResult],
        plain: Sequence[GenerationResult],
        known: Replayed | None,
    ) -> Probe | None:
        """None where nothing was counted."""
        if engine.is_plain:
            return None
        deepest = self.extent.deepest
        if known is None:
            # The first pass reads the prompt; who needs its states drafts nothing there.
            texts = tuple(tuple(ahead_of(one.rounds, deepest=deepest)[1:]) for one in results)
            known = Replayed(texts, _miss_seconds(engine, results))
        same = None
        if self._is_tied and _is_exact(engine):
            same = _agree(_ids(results), _ids(plain))
        if not any(known.texts):
            return None
        return Probe(engine.name, deepest, known.texts, same, known.miss_seconds, known.hit_seconds)

    @property
    def _is_tied(self) -> bool:
        """Whether every drafter's text is plain decoding's."""
        sampler = self.engines.plain.llm.config.sampler
        return self.params.greedy or sampler in ("match", "coupled")


def _ids(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def _miss_seconds(engine: TimedEngine, results: Sequence[GenerationResult]) -> float:
    """Median seconds of asking for a draft where none was found; 0 where one always is."""
    if drafter_named(engine.contestant.drafter).source != "text":
        return 0.0
    traces = (trace for result in results for trace in result.rounds)
    misses = [
        trace.draft_seconds / trace.batch_size
        for trace in traces
        if trace.num_emitted and not trace.num_drafted and not trace.num_prompt_tokens
    ]
    return statistics.median(misses) if misses else 0.0


def _has_shown(handles: Sequence[RequestHandle]) -> bool:
    traces = [trace for one in handles for trace in one.reader.traces]
    num_drafts = sum(trace.num_drafted > 0 for trace in traces)
    return len(traces) >= _SHOWN_PASSES and num_drafts >= _SHOWN_DRAFTS


def _timed(
    engine: TimedEngine, prompts: Sequence[Sequence[int]], results: Sequence[GenerationResult]
) -> list[Timed]:
    """The passes in which texts were written together."""
    pairs = zip(prompts, results, strict=False)
    requests = [Request(len(prompt), result.rounds) for prompt, result in pairs]
    passes = passes_of(one for one in requests if one.traces)
    own = [one.undelayed(engine.delays.get(one.index, 1.0)) for one in passes]
    return [Timed(**asdict(one), name=engine.name, phase=0, turn=0) for one in own]


def _agree(texts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> bool | None:
    """Whether texts agree as far as both were written; None if none was."""
    pairs = [(one, other) for one, other in zip(texts, plain, strict=False) if one and other]
    cut = [min(len(one), len(other)) for one, other in pairs]
    if not pairs:
        return None
    return all(
        tuple(one[:length]) == tuple(other[:length])
        for (one, other), length in zip(pairs, cut, strict=True)
    )


def _is_exact(engine: TimedEngine) -> bool:
    return engine.llm.kernels.exact and engine.llm.config.sampler in EXACT_SAMPLERS
