"""One timed call of a sweep: a piece of work decoded in one way, and what it came to.

A piece is handed to `generate` at once; with a level it is a closed loop (load/drive.py), in which
a request is handed in when another has ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import Protocol

from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.bench.engines.samples import failure_of
from outrider.bench.load.drive import ClosedLoop, Server, drive
from outrider.bench.load.requests import Request
from outrider.bench.sweep_plan import Piece
from outrider.bench.sweep_samples import Numbers
from outrider.core.errors import ContractError
from outrider.core.params import SamplingParams
from outrider.metrics.summary import Stats, percentile

# Rest of level 0 between two requests.
GAP_SECONDS = 0.05
_STAGES = ("prefill", "draft", "verify", "accept")


class Subject(Server, Protocol):
    """What is timed: `LLM`."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(
        self, prompts: Sequence[str], params: SamplingParams, /
    ) -> list[GenerationResult]: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One timed call, or the reason why it failed. `request_seconds` has the moments of each
    result's tokens since its prompt was handed in."""

    reason: str | None = None
    results: Sequence[GenerationResult] = ()
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    in_loop: bool = False

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [result.token_ids for result in self.results]

    def numbers(self, k: int, *, identical: bool | None) -> Numbers | None:
        if not self.results:
            return None
        last = max(self.results, key=lambda result: result.total_seconds).stats
        stages = dict.fromkeys(_STAGES, 0.0) if self.in_loop else last.seconds
        stats = [result.stats for result in self.results]
        times = [result.token_seconds for result in self.results if result.token_seconds]
        first = max((moments[0] for moments in times), default=0.0)
        histograms = [one.acceptance_histogram for one in stats]
        gaps = [gap for result in self.results for gap in result.inter_token_latencies]
        moments = [moment for found in times for moment in found]
        return Numbers(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=sum(map(len, self.ids)),
            seconds=round(self.seconds, 9),
            first_token_seconds=round(first, 9),
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
            digest=hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:12],
            request_ms=[_ms(found[-1]) for found in times],
            first_ms=[_ms(found[0]) for found in times],
            cumulative_p95_ms=_ms(percentile(moments, 95)) if moments else None,
        )


def attempt(subject: Subject, piece: Piece, params: SamplingParams) -> Attempt:
    """Whatever it ends in is the attempt's reason; only an interrupt goes through. What the drafter
    learnt from earlier pieces is forgotten, so that an attempt does not depend on what was before.
    """
    prompts = [prompt.text for prompt in piece.prompts]
    try:
        subject.forget()
        encode = subject.tokenizer.encode
        num_prompt_tokens = sum(len(encode(prompt)) for prompt in prompts)
        if piece.level is not None:
            return _in_loop(subject, piece, params, num_prompt_tokens)
        started = perf_counter()
        results = subject.generate(prompts, params)
        seconds = perf_counter() - started
    except Exception as error:  # noqa: BLE001 - one sample must not end hours of others
        return Attempt(reason=f"{type(error).__name__}: {error}")
    return Attempt(results=results, seconds=seconds, num_prompt_tokens=num_prompt_tokens)


def _in_loop(
    subject: Subject, piece: Piece, params: SamplingParams, num_prompt_tokens: int
) -> Attempt:
    if piece.level is None:
        raise ContractError("the piece has no level")
    requests = [
        Request(name=prompt.prompt_id, prompt=prompt.text, max_tokens=params.max_tokens)
        for prompt in piece.prompts
    ]
    gap = 0.0 if piece.level else GAP_SECONDS
    loop = ClosedLoop(num_in_flight=max(piece.level, 1), gap_seconds=gap)
    done = drive(subject, requests, loop, params)
    return Attempt(
        reason=failure_of(done.served),
        results=[one.result for one in done.served if one.result is not None],
        seconds=done.seconds,
        num_prompt_tokens=num_prompt_tokens,
        in_loop=True,
    )


def _mean_verify_ms(stats: Stats) -> float | None:
    """The first round's pass also reads the prompt, so it is not one of these."""
    num = stats.num_rounds - (stats.seconds["prefill"] > 0)
    return round(1000 * stats.seconds["verify"] / num, 6) if num > 0 else None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)
