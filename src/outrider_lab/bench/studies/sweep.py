"""A sweep as it runs: the same prompts in every way, each beside plain decoding of that moment.

A visit takes one piece of work (a prompt, or a batch of them) and decodes it plainly and in every
other way, in turns. A piece is handed to `generate` at once; with a level it is a closed loop
(load.py), in which a request is handed in when another has ended. Greedy ids are compared
with those of plain decoding in the same visit. Whatever error one sample ends in is recorded as its
reason, and the sweep goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.metrics import Stats, percentile
from outrider.plugins.measure.turns import Texts
from outrider_lab.bench.load import ClosedLoop, Server, drive
from outrider_lab.bench.requests import Request
from outrider_lab.bench.studies.sweep_plan import PlannedVisit, SweepPiece, Way
from outrider_lab.bench.studies.sweep_record import ResultsFolder, SweepNumbers, SweepSample
from outrider_lab.measure import machine as turns
from outrider_lab.measure.machine import different_tokens, digest_of, facts_of

# Rest of level 0 between two requests.
GAP_SECONDS = 0.05
_STAGES = ("prefill", "draft", "verify", "accept")


class TimedLLM(Server, Protocol):
    """What is timed: `LLM`."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(
        self, prompts: Sequence[str], params: SamplingParams, /
    ) -> list[GenerationResult]: ...


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One timed call, or the reason why it failed."""

    reason: str | None = None
    results: Sequence[GenerationResult] = ()
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    in_loop: bool = False

    @property
    def ids(self) -> Texts:
        return [result.token_ids for result in self.results]

    def numbers(self, k: int, *, identical: bool | None) -> SweepNumbers | None:
        if not self.results:
            return None
        last = max(self.results, key=lambda result: result.total_seconds).stats
        stages = dict.fromkeys(_STAGES, 0.0) if self.in_loop else last.seconds
        stats = [result.stats for result in self.results]
        times = [result.token_seconds for result in self.results if result.token_seconds]
        histograms = [one.acceptance_histogram for one in stats]
        gaps = [gap for result in self.results for gap in result.inter_token_latencies]
        moments = [moment for found in times for moment in found]
        return SweepNumbers(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=sum(map(len, self.ids)),
            seconds=round(self.seconds, 9),
            first_token_seconds=round(max((found[0] for found in times), default=0.0), 9),
            prefill_seconds=stages["prefill"],
            draft_seconds=stages["draft"],
            verify_seconds=stages["verify"],
            accept_seconds=stages["accept"],
            verify_ms=None if self.in_loop else _mean_verify_ms(last),
            num_rounds=sum(one.num_rounds for one in stats),
            num_drafted=sum(one.num_drafted for one in stats),
            num_accepted=sum(one.num_accepted for one in stats),
            accepted_histogram=[sum(c) for c in zip_longest(*histograms, fillvalue=0)] if k else [],
            token_ms=[_ms(gap) for gap in gaps],
            identical=identical,
            digest=digest_of(self.ids),
            request_ms=[_ms(found[-1]) for found in times],
            first_ms=[_ms(found[0]) for found in times],
            cumulative_p95_ms=_ms(percentile(moments, 95)) if moments else None,
        )


def attempt(subject: TimedLLM, piece: SweepPiece, params: SamplingParams) -> TimedCall:
    """What the drafter learnt from earlier pieces is forgotten, so that an attempt does not depend
    on what was before."""
    prompts = [prompt.text for prompt in piece.prompts]

    def prepare() -> int:
        subject.forget()
        return sum(len(subject.tokenizer.encode(prompt)) for prompt in prompts)

    prepared = turns.attempt(prepare)
    if prepared.value is None:
        return TimedCall(reason=prepared.reason)
    if piece.level is not None:
        looped = turns.attempt(lambda: _in_loop(subject, piece, piece.level or 0, params))
        if looped.value is None:
            return TimedCall(reason=looped.reason)
        return replace(looped.value, num_prompt_tokens=prepared.value)
    done = turns.attempt(lambda: subject.generate(prompts, params))
    return TimedCall(
        reason=done.reason,
        results=done.value or (),
        seconds=done.seconds,
        num_prompt_tokens=prepared.value,
    )


def _in_loop(subject: TimedLLM, piece: SweepPiece, level: int, params: SamplingParams) -> TimedCall:
    requests = [
        Request(name=prompt.prompt_id, prompt=prompt.text, max_tokens=params.max_tokens)
        for prompt in piece.prompts
    ]
    loop = ClosedLoop(num_in_flight=max(level, 1), gap_seconds=0.0 if level else GAP_SECONDS)
    done = drive(subject, requests, loop, params)
    return TimedCall(
        reason=done.failure,
        results=[one.result for one in done.served if one.result is not None],
        seconds=done.seconds,
        in_loop=True,
    )


def _mean_verify_ms(stats: Stats) -> float | None:
    """The first round's pass also reads the prompt, so it is not one of these."""
    num = stats.num_rounds - (stats.seconds["prefill"] > 0)
    return round(1000 * stats.seconds["verify"] / num, 6) if num > 0 else None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


class SweepLineup:
    """Engines of one target, one for each way, since an engine is made for its configuration; all
    are in memory together, which is what taking turns costs. `ways` has those that are there, plain
    decoding first; `refused` says for the others why they are not."""

    def __init__(self, target: str, ways: Sequence[Way], *, tolerant: bool = False) -> None:
        """Raises what loading plain decoding, or unless `tolerant` any way, raises."""
        self.ways: list[Way] = []
        self.llms: list[LLM] = []
        self.refused: dict[Way, str] = {}
        for way in ways:
            try:
                llm = LLM(target, draft=way.draft, config=way.engine)
            # Memory that is full is no error of ours, and must not end hours of others.
            except Exception as error:
                if not (tolerant and self.llms):
                    self.close()
                    raise
                self.refused[way] = f"{type(error).__name__}: {error}"
                continue
            self.ways.append(way)
            self.llms.append(llm)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for llm in self.llms for note in llm.notes))

    def facts(self) -> dict[str, object]:
        """What was found while loading, for the record of a run."""
        llm = self.llms[-1]
        return {**facts_of(llm), "num_engines": len(self.llms), "notes": list(self.notes)}

    def close(self) -> None:
        """End their threads and processes."""
        for llm in self.llms:
            llm.close()

    def warm_up(self, visit: PlannedVisit) -> None:
        """Run its piece untimed in every way. A failure is the timed run's to report."""
        params = self._params(replace(visit, repeat=0))
        for llm in self.llms:
            attempt(llm, visit.piece, params)

    def measure(self, visit: PlannedVisit, *, run: int, number: int) -> list[SweepSample]:
        """One sample for each way, in order; `number` is the visit's in the results."""
        params = self._params(visit)
        done = turns.visit(self.llms, visit.turn, lambda llm: attempt(llm, visit.piece, params))
        plain = done.results[0]
        samples: list[SweepSample] = []
        for way, llm, config, own in zip(
            self.ways, self.llms, visit.configs, done.results, strict=True
        ):
            # Greedy text of an exact rule is the target's own; nothing else has to be.
            exact = params.greedy and self.llms[0].exact and llm.exact
            whole = own.reason is None and plain.reason is None
            reason = self._difference(own, plain) if exact and whole else None
            samples.append(
                SweepSample(
                    run=run,
                    visit=number,
                    config=config,
                    piece=visit.piece.name,
                    prompt_ids=[prompt.prompt_id for prompt in visit.piece.prompts],
                    repeat=visit.repeat,
                    reason=own.reason or reason,
                    numbers=own.numbers(
                        way.k, identical=reason is None if exact and whole else None
                    ),
                    foreign_cpu_share=done.foreign_cpu_share,
                )
            )
        return samples

    def _params(self, visit: PlannedVisit) -> SamplingParams:
        """Every repeat has a seed of its own. All ways stop at the shortest limit among them, for a
        larger K leaves less of the window to the text."""
        params = visit.params
        params = params.numbered(visit.repeat)
        try:
            limits = _limits(self.llms, visit.piece, params)
        except (OutriderError, ValueError):
            # The timed run meets it again, and reports it.
            return params
        return replace(params, max_tokens=min(limits), min_tokens=min(params.min_tokens, *limits))

    def _difference(self, ours: TimedCall, plain: TimedCall) -> str | None:
        more = "" if self.llms[0].kernels.exact else "; the kernels are not row-exact"
        return different_tokens(ours.ids, plain.ids, "plain decoding", more)


def run_visits(
    lineup: SweepLineup,
    todo: Sequence[PlannedVisit],
    folder: ResultsFolder,
    *,
    run: int,
    warmup: int,
) -> Iterator[Sequence[SweepSample]]:
    """Measure and append each visit of `todo`; yields the samples of a visit once they are safe."""
    for _ in range(warmup if todo else 0):
        lineup.warm_up(todo[0])
    for visit in todo:
        samples = lineup.measure(visit, run=run, number=folder.next_visit())
        folder.add(samples)
        yield samples


def _limits(llms: Sequence[LLM], piece: SweepPiece, params: SamplingParams) -> list[int]:
    return [llm.fitting_tokens(prompt.text, params) for llm in llms for prompt in piece.prompts]
