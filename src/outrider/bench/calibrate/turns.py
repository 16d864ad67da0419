"""Engines run some rounds each, in turns, while their K goes through its values.

A phase is a number of sequences and a context. All engines hold their sequences at once and take
turns; in its turn an engine runs three rounds at each K, in an order that is drawn anew each turn.
The second one counts: the first pays for a shape that is new, and the third tells how long the host
took after the second. The first says one thing all the same: it drafts after a round of another K,
so after another number of tokens. So drift falls on all points alike, and a turn's rounds without a
draft say what the drift is.

A turn begins with rounds that do not count, for other engines drove the weights out of the caches.
A last-level cache takes several passes to hold them again; users' engines, which run alone, are
always past that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter

from outrider.api.request import RequestHandle
from outrider.bench.calibrate.passes import Pass, Request, passes_of
from outrider.bench.calibrate.stands import Stand
from outrider.core.params import SamplingParams

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
    """A sequence for each of `prompts`. Each stand runs at its `ks`, the first of which is 0: in a
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


@dataclass(frozen=True, slots=True)
class Timed:
    """A pass of stand `name` in its `turn` of `phase`; `first` says that it is the first at its
    K."""

    name: str
    phase: int
    turn: int
    one: Pass
    first: bool = False


@dataclass(slots=True)
class _Run:
    """A stand with its requests in flight, and those before them, whose windows were full. `turns`
    says which turn a pass belongs to, and `firsts` are those that are the first at their K."""

    stand: Stand
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

    def begin(self, phase: Phase) -> None:
        """Read all prompts. A draft model reads its own when a draft is first asked for. A lookup
        that remembers these texts would draft what no user's does."""
        self.stand.llm.forget()
        self.stand.dial.set((0,))
        params = endless(phase.params)
        at_once = [phase.prompts[:1], phase.prompts[1:]] if phase.alike else [phase.prompts]
        for prompts in at_once:
            self.handles += [self.stand.llm.submit(prompt, params) for prompt in prompts]
            while not self.has_read and not self.is_over:
                self.stand.llm.advance()

    def turn(self, phase: Phase, number: int) -> None:
        """After rounds of short drafts three at each K drawn, of which the second counts."""
        warm, ks = phase.warm, phase.drawn(self.stand.name, number)
        short = min((k for k in phase.ks[self.stand.name] if k), default=0)
        self.stand.dial.set([short] * warm + [k for k in ks for _ in range(ALIKE)])
        for place in range(-warm, ALIKE * len(ks)):
            if self.is_over:
                return
            self.stand.llm.advance()
            if place >= 0 and place % ALIKE < ALIKE - 1:
                index = self.handles[0].reader.traces[-1].pass_index
                self.turns[index] = number
                if place % ALIKE == 0:
                    self.firsts.add(index)

    def passes(self, phase: int) -> list[Timed]:
        requests = [
            Request(handle.reader.seq.prompt_length, handle.reader.traces)
            for handle in (*self.ended, *self.handles)
        ]
        return [
            Timed(self.stand.name, phase, self.turns[one.index], one, one.index in self.firsts)
            for one in passes_of(requests)
            if one.index in self.turns
        ]

    def begin_anew(self, phase: Phase) -> None:
        """With the same prompts, in place of requests of which some ended."""
        self.end()
        self.ended += self.handles
        self.handles = []
        self.begin(phase)

    def end(self) -> None:
        for handle in self.handles:
            self.stand.llm.cancel(handle)


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
        prediction="",
    )


def run_phase(
    stands: Sequence[Stand],
    phase: Phase,
    *,
    number: int,
    turns: range,
    until: float,
    clock: Callable[[], float] = perf_counter,
) -> list[Timed]:
    """What was timed until about `until`, in `turns` at most; fewer where the window ends before
    and prompts are long. Every engine has its first turn, whatever that takes."""
    runs = [_Run(stand, []) for stand in stands]
    try:
        for run in runs:
            run.begin(phase)
        started = clock()
        for done, turn in enumerate(turns, start=1):
            for place in range(len(runs)):
                if done > 1 and clock() > until + _LATE * (until - started):
                    break
                run = runs[(turn + place) % len(runs)]
                if run.is_over and phase.again:
                    run.begin_anew(phase)
                run.turn(phase, turn)
            now = clock()
            late = now + (now - started) / done > until
            if late or (not phase.again and any(run.is_over for run in runs)):
                break
        return [timed for run in runs for timed in run.passes(number)]
    finally:
        for run in runs:
            run.end()
