"""A cell as it runs: plain decoding and the drafter on the same prompts, in turns.

Texts are short, and a machine that others use too deviates by a sixth from one hundredth of a
second to the next. So a repeat has as many runs as fill its time, of both sides in turns.

A run is timed from when all prompts are read, by the drafter too, until the last text is done, ends
of the batch included. A draft model reads when it is first asked for a draft, and heads once the
target has, so a round that drafts goes before. Before all of it the engine runs a little for
nothing: the other side was at work just now and drove this one's weights out of the caches, where
those of a user's only engine stay. So seconds a token are those of decoding, and their ratio is the
speed-up that a prediction has to meet.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from outrider.api.request import RequestHandle
from outrider.core.params import SamplingParams
from outrider.plugins.measure.turns import Neighbours, rotated
from outrider_lab.bench.calibrate.engines import TimedEngine
from outrider_lab.bench.calibrate.rounds import WARM_SECONDS

Prompts = Sequence[Sequence[int]]
# Drafts of the round in which drafters read prompts.
OPENING_K = 1
# Of the text that warms the caches.
_WARM_PROMPT, _WARM_TOKENS = 8, 256


@dataclass(frozen=True, slots=True)
class Repeats:
    """So many, each until every side has taken `seconds`."""

    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`seconds` in which `num_tokens` were emitted in `num_rounds` passes; `texts` are whole."""

    seconds: float
    num_tokens: int
    num_rounds: int
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds a token of every repeat, the two sides of one at one place, and how many runs of each
    side there were in all. `num_tokens` and `num_rounds` are those of a run. `same` says whether
    all texts were those of plain decoding."""

    plain: tuple[float, ...]
    drafted: tuple[float, ...]
    num_runs: int
    num_tokens: int
    num_rounds: int
    same: bool
    foreign_cpu_share: float | None

    @property
    def speed_up(self) -> float:
        return statistics.median(self.plain) / statistics.median(self.drafted)


def run_once(
    engine: TimedEngine,
    prompts: Prompts,
    params: SamplingParams,
    k: int,
    *,
    clock: Callable[[], float] = perf_counter,
) -> Run:
    """Nothing is left in flight, whatever happens, and no text is remembered from before: a lookup
    that knows what it wrote would be right always."""
    llm, dial = engine.llm, engine.dial
    _warm_up(engine, prompts[0], k, clock)
    llm.forget()
    dial.set((0,))
    handles: list[RequestHandle] = []
    try:
        handles.extend(llm.submit(prompt, params) for prompt in prompts)
        while not all(handle.reader.seq.num_emitted for handle in handles):
            llm.advance()
        dial.set((min(k, OPENING_K),))
        llm.advance()
        before = [handle.reader.seq.num_emitted for handle in handles]
        first = max(len(handle.reader.traces) for handle in handles)
        dial.set((k,))
        started = clock()
        while not all(handle.done for handle in handles):
            llm.advance()
        seconds = clock() - started
    finally:
        for handle in handles:
            llm.cancel(handle)
    after = [handle.reader.seq.num_emitted for handle in handles]
    return Run(
        seconds=seconds,
        num_tokens=sum(after) - sum(before),
        num_rounds=max(len(handle.reader.traces) for handle in handles) - first,
        texts=tuple(handle.result().token_ids for handle in handles),
    )


def _warm_up(
    engine: TimedEngine, prompt: Sequence[int], k: int, clock: Callable[[], float]
) -> None:
    engine.dial.set((k,))
    params = SamplingParams(max_tokens=_WARM_TOKENS, ignore_eos=True)
    handle = engine.llm.submit(prompt[:_WARM_PROMPT], params)
    until = clock() + WARM_SECONDS
    try:
        while not handle.done and clock() < until:
            engine.llm.advance()
    finally:
        engine.llm.cancel(handle)


def measure(
    plain: TimedEngine,
    drafting: TimedEngine,
    prompts: Prompts,
    params: SamplingParams,
    *,
    k: int,
    repeats: Repeats,
) -> Measured:
    with Neighbours() as neighbours:
        every = _repeated(((plain, 0), (drafting, k)), prompts, params, repeats)
    runs = [run for repeat in every for side in repeat for run in side]
    drafted = every[0][1][0]
    return Measured(
        plain=tuple(_seconds_per_token(of_plain) for of_plain, _ in every),
        drafted=tuple(_seconds_per_token(of_drafting) for _, of_drafting in every),
        num_runs=len(runs) // 2,
        num_tokens=drafted.num_tokens,
        num_rounds=drafted.num_rounds,
        same=all(run.texts == runs[0].texts for run in runs),
        foreign_cpu_share=neighbours.share,
    )


def speed_ups(
    plain: TimedEngine,
    drafting: TimedEngine,
    prompts: Prompts,
    params: SamplingParams,
    *,
    ks: Sequence[int],
    repeats: Repeats,
) -> dict[int, float]:
    """At each of `ks`, all of them and plain decoding in turns."""
    every = _repeated(((plain, 0), *((drafting, k) for k in ks)), prompts, params, repeats)
    base, *taken = (
        statistics.median(map(_seconds_per_token, of)) for of in zip(*every, strict=True)
    )
    return {k: base / own for k, own in zip(ks, taken, strict=True)}


def _repeated(
    sides: Sequence[tuple[TimedEngine, int]],
    prompts: Prompts,
    params: SamplingParams,
    repeats: Repeats,
) -> list[list[list[Run]]]:
    """By repeat and side; which side goes first changes every time."""
    firsts = count()

    def in_turns() -> list[list[Run]]:
        runs: list[list[Run]] = [[] for _ in sides]
        while not runs[0] or any(_seconds(side) < repeats.seconds for side in runs):
            for at in rotated(range(len(sides)), next(firsts)):
                engine, depth = sides[at]
                runs[at].append(run_once(engine, prompts, params, depth))
        return runs

    return [in_turns() for _ in range(repeats.count)]


def _seconds_per_token(runs: Sequence[Run]) -> float:
    return _seconds(runs) / max(sum(run.num_tokens for run in runs), 1)


def _seconds(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs)
