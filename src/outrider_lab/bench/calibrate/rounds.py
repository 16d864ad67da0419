"""Engines run some rounds each, in turns, while their K goes through its values.

A phase is a number of sequences and a context. All engines hold their sequences at once and take
turns; in its turn an engine runs three rounds at each K, in an order that is drawn anew each turn.
The second one counts: the first pays for a shape that is new, and the third tells how long the host
took after the second. The first says one thing all the same: it drafts after a round of another K,
so after another number of tokens. So drift falls on all points alike, and a turn's rounds without a
draft say what the drift is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from time import perf_counter

from outrider.api.request import RequestHandle
from outrider.core.draft import RoundTrace
from outrider.core.params import SamplingParams
from outrider_lab.bench.calibrate.engines import TimedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """`rows` is the sum of R_i, `context` that of S_i, the tokens in memory before, and `reads`
    that of R_i S_i. `depth` is that of the longest draft of `drafting` sequences, and `before` how
    many tokens these have got since their last draft. `host` are seconds beside drafting and the
    target's pass, up to the next pass: text and records of what this one emitted are in them."""

    index: int
    batch: int
    rows: int
    context: int
    reads: int
    depth: int
    drafting: int
    before: int
    emitted: int
    draft: float
    verify: float
    host: float

    @property
    def seconds(self) -> float:
        """From its beginning to that of the next one."""
        return self.draft + self.verify + self.host

    def undelayed(self, delay: float) -> Pass:
        """With the seconds in which it had a CPU, if it took `delay` times as long."""
        parts = self.draft / delay, self.verify / delay, self.host / delay
        return replace(self, draft=parts[0], verify=parts[1], host=parts[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Pass):
    """A pass of engine `name` in its `turn` of `phase`; `first` says that it is the first at its
    K."""

    name: str
    phase: int
    turn: int
    first: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """The records of one request, in order, and how long its prompt was."""

    num_prompt: int
    traces: Sequence[RoundTrace]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a pass was for a sequence of `length` tokens, `before` of them since its last draft."""

    trace: RoundTrace
    length: int
    before: int


def passes_of(requests: Iterable[Request]) -> list[Pass]:
    """Those of which all sequences are among `requests`, in order; the last pass is left out, since
    nobody knows what came after it."""
    parts: dict[int, list[_Part]] = {}
    for request in requests:
        # The last token is pending: it is not in memory yet.
        length, before = request.num_prompt - 1, 0
        for trace in request.traces:
            parts.setdefault(trace.pass_index, []).append(_Part(trace, length, before))
            length += trace.num_emitted
            before = trace.num_emitted + (0 if trace.num_drafted else before)
    return [
        _joined(parts[index], parts[index + 1][0].trace.gap_seconds)
        for index in sorted(parts)
        if index + 1 in parts and _is_whole(parts[index])
    ]


def _is_whole(parts: Sequence[_Part]) -> bool:
    first = parts[0].trace
    return len(parts) == first.batch_size and all(
        one.trace.num_emitted and not one.trace.num_prompt_tokens for one in parts
    )


def _joined(parts: Sequence[_Part], gap: float) -> Pass:
    shared = parts[0].trace
    drafted = [one.trace.num_drafted for one in parts]
    return Pass(
        index=shared.pass_index,
        batch=len(parts),
        rows=len(parts) + sum(drafted),
        context=sum(one.length for one in parts),
        reads=sum((1 + one.trace.num_drafted) * one.length for one in parts),
        depth=max(drafted),
        drafting=sum(count > 0 for count in drafted),
        before=sum(one.before for one in parts if one.trace.num_drafted),
        emitted=sum(one.trace.num_emitted for one in parts),
        draft=shared.draft_seconds,
        verify=shared.verify_seconds,
        host=shared.accept_seconds + gap,
    )


# So many tokens that no request ends by itself; the window cuts it.
_NO_END = 1 << 20
# Turns that a long text has room for, and those that a phase may have in a row: a prime, so that
# each time another engine begins.
LEAST_TURNS, MOST_TURNS = 3, 61
# Rounds in a row at one K.
ALIKE = 3
# In so many seconds of passes caches hold again what an engine reads: 100 MB at 16 GB/s.
WARM_SECONDS = 0.006
# Of a phase's time, how much longer a turn that has begun may take.
_LATE = 0.25


@dataclass(frozen=True, slots=True)
class Phase:
    """A sequence for each of `prompts`. Each engine runs at its `ks`, the first of which is 0: in a
    turn at that and at `most_ks` others, drawn anew. `alike` are prompts that begin alike, up to
    their last page: it is read once, by the first of them. `again` says that full windows do not
    end the phase: short prompts are quickly read again. A turn has `warm` rounds before those that
    count. `params` say how tokens are drawn, for sampled rounds may take another way than greedy
    ones."""

    prompts: Sequence[Sequence[int]]
    ks: Mapping[str, Sequence[float]]
    most_ks: int
    alike: bool = False
    again: bool = False
    warm: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)

    def drawn(self, name: str, turn: int) -> list[float]:
        """The Ks of a turn, in their order."""
        rng, (plain, *others) = Random(turn), self.ks[name]
        rng.shuffle(others)
        found = [plain, *others[: self.most_ks]]
        rng.shuffle(found)
        return found


@dataclass(slots=True)
class _Run:
    """An engine with its requests in flight, and those before them, whose windows were full.
    `turns` says which turn a pass belongs to, and `firsts` are the passes that are the first at
    their K."""

    engine: TimedEngine
    handles: list[RequestHandle]
    ended: list[RequestHandle] = field(default_factory=list[RequestHandle])
    turns: dict[int, int] = field(default_factory=dict[int, int])
    firsts: set[int] = field(default_factory=set[int])

    @property
    def is_over(self) -> bool:
        return any(handle.done for handle in self.handles)

    @property
    def has_read(self) -> bool:
        """Whether all prompts are in memory."""
        return all(handle.reader.seq.num_emitted for handle in self.handles)

    def begin(self, phase: Phase, span: Span) -> None:
        """Read all prompts, unless the span stops before. A draft model reads its own when a draft
        is first asked for. A lookup that remembers these texts would draft what no user's does."""
        self.engine.llm.forget()
        self.engine.dial.set((0,))
        params = endless(phase.params)
        at_once = [phase.prompts[:1], phase.prompts[1:]] if phase.alike else [phase.prompts]
        for prompts in at_once:
            self.handles += [self.engine.llm.submit(prompt, params) for prompt in prompts]
            while not self.has_read and not self.is_over and not span.has_stopped:
                self.engine.llm.advance()

    def turn(self, phase: Phase, number: int, span: Span) -> None:
        """After rounds of short drafts three at each K drawn, of which the second counts."""
        warm, ks = phase.warm, phase.drawn(self.engine.name, number)
        short = min((k for k in phase.ks[self.engine.name] if k), default=0)
        self.engine.dial.set([short] * warm + [k for k in ks for _ in range(ALIKE)])
        for place in range(-warm, ALIKE * len(ks)):
            if self.is_over or span.has_stopped:
                return
            index = self.engine.advance(self.handles)
            if place >= 0 and place % ALIKE < ALIKE - 1:
                self.turns[index] = number
                if place % ALIKE == 0:
                    self.firsts.add(index)

    def passes(self, phase: int) -> list[Timed]:
        requests = [
            Request(handle.reader.seq.prompt_length, handle.reader.traces)
            for handle in (*self.ended, *self.handles)
        ]
        return [
            Timed(
                **asdict(one.undelayed(self.engine.delays[one.index])),
                name=self.engine.name,
                phase=phase,
                turn=self.turns[one.index],
                first=one.index in self.firsts,
            )
            for one in passes_of(requests)
            if one.index in self.turns
        ]

    def begin_anew(self, phase: Phase, span: Span) -> None:
        """With the same prompts, in place of requests of which some ended."""
        self.end()
        self.ended += self.handles
        self.handles = []
        self.begin(phase, span)

    def end(self) -> None:
        for handle in self.handles:
            self.engine.llm.cancel(handle)


def endless(params: SamplingParams) -> SamplingParams:
    """The same draws of a text that nothing but the window ends."""
    return replace(
        params,
        max_tokens=_NO_END,
        min_tokens=0,
        ignore_eos=True,
        stop=(),
        n=1,
        logprobs=False,
        top_logprobs=0,
        round_events=False,
        prediction="",
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A phase's time: it lasts until about `until`, and runs no pass after `stop`. `tick` is called
    between turns."""

    until: float
    clock: Callable[[], float] = perf_counter
    stop: float = math.inf
    tick: Callable[[], None] = lambda: None

    @property
    def has_stopped(self) -> bool:
        return self.clock() > self.stop


def run_phase(
    engines: Sequence[TimedEngine], phase: Phase, *, number: int, turns: range, span: Span
) -> list[Timed]:
    """What was timed in `turns` at most; fewer where the window ends before and prompts are long.
    Every engine has its first turn, whatever that takes, unless the span stops before."""
    runs: list[_Run] = []
    clock, until, stop = span.clock, span.until, span.stop
    try:
        for engine in engines:
            if span.has_stopped:
                break
            runs.append(_Run(engine, []))
            runs[-1].begin(phase, span)
        started = clock()
        for done, turn in enumerate(turns, start=1):
            for place in range(len(runs)):
                span.tick()
                late = done > 1 and clock() > until + _LATE * (until - started)
                if late or span.has_stopped:
                    break
                run = runs[(turn + place) % len(runs)]
                if run.is_over and phase.again:
                    run.begin_anew(phase, span)
                run.turn(phase, turn, span)
            now = clock()
            late = now + (now - started) / done > min(until, stop)
            if late or (not phase.again and any(run.is_over for run in runs)):
                break
        return [timed for run in runs for timed in run.passes(number)]
    finally:
        for run in runs:
            run.end()
