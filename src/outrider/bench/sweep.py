"""The K sweep: the same prompts at every K, each beside plain decoding of the same moment.

A visit takes one piece of work (a prompt, or a batch of them) and runs it at K = 0, which is plain
decoding by the same engine, and at every other K, in an order that rotates from visit to visit:
drift of the machine falls on all alike. Speed-ups are ratios within visits and never between runs.
Greedy ids are compared with those of K = 0 in the same visit. Whatever error one sample ends in is
recorded as its reason, and the sweep goes on.

There is one engine for each K, since an engine is made for its configuration; all of a pair are in
memory together, which is what taking turns costs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.bench.quiet import Neighbours
from outrider.bench.sweep_plan import Piece, Sweep, SweepPair, Visit
from outrider.bench.sweep_results import ResultsFolder
from outrider.bench.sweep_samples import Numbers, Sample
from outrider.core.params import SamplingParams
from outrider.metrics.summary import Stats


class Lineup:
    """A pair's engines, one for each K, loaded and ready to take turns."""

    def __init__(self, sweep: Sweep, pair: SweepPair) -> None:
        self.sweep = sweep
        self.pair = pair
        self.llms = {k: _load(pair, k) for k in sweep.ks_of(pair)}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for llm in self.llms.values() for note in llm.notes))

    def facts(self) -> dict[str, object]:
        """What was found while loading, for the record of a run."""
        llm = self.llms[max(self.llms)]
        return {
            "drafter": llm.drafter,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "row_exact_kernels": llm.kernels.exact,
            "num_engines": len(self.llms),
            "notes": list(self.notes),
        }

    def warm_up(self, piece: Piece) -> None:
        """Run `piece` untimed at every K. A failure is the timed run's to report."""
        for k in self.llms:
            self._attempt(k, piece, self._params(piece, 0))

    def measure(self, visit: Visit, *, run: int, number: int) -> list[Sample]:
        """One sample for each K, in order of K; `number` is the visit's in the results."""
        ks = list(self.llms)
        params = self._params(visit.piece, visit.iteration)
        found: dict[int, _Attempt] = {}
        with Neighbours() as neighbours:
            for place in range(len(ks)):
                k = ks[(visit.turn + place) % len(ks)]
                found[k] = self._attempt(k, visit.piece, params)
        return [
            Sample(
                run=run,
                visit=number,
                config=self.sweep.config(self.pair, visit.piece.domain, k),
                piece=visit.piece.name,
                prompt_ids=[prompt.prompt_id for prompt in visit.piece.prompts],
                iteration=visit.iteration,
                reason=self._reason(found[k], found[0]),
                numbers=found[k].numbers(k, identical=self._identical(found[k], found[0])),
                foreign_cpu_share=neighbours.share,
            )
            for k in ks
        ]

    def _params(self, piece: Piece, iteration: int) -> SamplingParams:
        """Every repetition has a seed of its own. All K stop at the shortest limit among them, for
        a larger K leaves less of the window to the text."""
        params = self.sweep.params
        seed = (params.seed + iteration) % 2**63
        params = replace(params, seed=seed)
        try:
            limits = [
                llm.fitting_tokens(prompt.text, params)
                for llm in self.llms.values()
                for prompt in piece.prompts
            ]
        except Exception:  # noqa: BLE001 - the timed run meets it again, and reports it
            return params
        return replace(params, max_tokens=min(limits), min_tokens=min(params.min_tokens, *limits))

    def _attempt(self, k: int, piece: Piece, params: SamplingParams) -> _Attempt:
        prompts = [prompt.text for prompt in piece.prompts]
        try:
            encode = self.llms[k].tokenizer.encode
            num_prompt_tokens = sum(len(encode(prompt)) for prompt in prompts)
            started = perf_counter()
            results = self.llms[k].generate(prompts, params)
            seconds = perf_counter() - started
        except Exception as error:  # noqa: BLE001 - one sample must not end hours of others
            return _Attempt(reason=f"{type(error).__name__}: {error}")
        return _Attempt(results=results, seconds=seconds, num_prompt_tokens=num_prompt_tokens)

    def _identical(self, ours: _Attempt, plain: _Attempt) -> bool | None:
        """Greedy text of an exact rule is the target's own; nothing else has to be."""
        exact = self.sweep.params.greedy and all(llm.exact for llm in self.llms.values())
        return ours.ids == plain.ids if exact and ours.results and plain.results else None

    def _reason(self, ours: _Attempt, plain: _Attempt) -> str | None:
        if ours.reason is not None or self._identical(ours, plain) is not False:
            return ours.reason
        place = _first_difference(ours.ids, plain.ids)
        exact = "" if self.llms[0].kernels.exact else "; the kernels are not row-exact"
        return f"DifferentTokens: not the ids of plain decoding from {place} on{exact}"


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One timed call, or the reason why it failed."""

    reason: str | None = None
    results: Sequence[GenerationResult] = ()
    seconds: float = 0.0
    num_prompt_tokens: int = 0

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [result.token_ids for result in self.results]

    def numbers(self, k: int, *, identical: bool | None) -> Numbers | None:
        if not self.results:
            return None
        last = max(self.results, key=lambda result: result.total_seconds).stats
        stats = [result.stats for result in self.results]
        first = max(result.time_to_first_token or 0.0 for result in self.results)
        histograms = [one.acceptance_histogram for one in stats]
        gaps = [gap for result in self.results for gap in result.inter_token_latencies]
        return Numbers(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=sum(map(len, self.ids)),
            seconds=round(self.seconds, 9),
            first_token_seconds=round(first, 9),
            prefill_seconds=last.seconds["prefill"],
            draft_seconds=last.seconds["draft"],
            verify_seconds=last.seconds["verify"],
            accept_seconds=last.seconds["accept"],
            verify_ms=_mean_verify_ms(last),
            num_rounds=sum(one.num_rounds for one in stats),
            num_drafted=sum(one.num_drafted for one in stats),
            num_accepted=sum(one.num_accepted for one in stats),
            accepted_histogram=[sum(c) for c in zip_longest(*histograms, fillvalue=0)] if k else [],
            token_ms=[round(1000 * gap, 4) for gap in gaps],
            identical=identical,
            digest=hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:12],
        )


def run_pair(
    sweep: Sweep, lineup: Lineup, folder: ResultsFolder, todo: Sequence[Visit], *, run: int
) -> Iterator[Sequence[Sample]]:
    """Measure and append each visit of `todo`; yields the samples of a visit once they are safe."""
    for _ in range(sweep.warmup if todo else 0):
        lineup.warm_up(todo[0].piece)
    for visit in todo:
        samples = lineup.measure(visit, run=run, number=folder.next_visit())
        folder.add(samples)
        yield samples


def _load(pair: SweepPair, k: int) -> LLM:
    drafter = pair.engine.drafter if k else "none"
    config = replace(pair.engine, k=k, drafter=drafter, profile=False)
    return LLM(pair.target, draft=pair.draft if k else None, config=config)


def _mean_verify_ms(stats: Stats) -> float | None:
    """The first round's pass also reads the prompt, so it is not one of these."""
    num = stats.num_rounds - (stats.seconds["prefill"] > 0)
    return round(1000 * stats.seconds["verify"] / num, 6) if num > 0 else None


def _first_difference(ours: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> str:
    for row, (a, b) in enumerate(zip(ours, plain, strict=True)):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            token = min(len(a), len(b)) if place is None else place
            return f"token {token}" if len(plain) == 1 else f"token {token} of prompt {row}"
    raise AssertionError("called for equal ids")
