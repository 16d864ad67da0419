"""Samples of a sweep that nobody measured, and an LLM for sweeps that writes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from outrider.api.result import GenerationResult
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.params import SamplingParams
from outrider.metrics import Stats
from outrider_lab.bench.studies.sweep_record import (
    BenchmarkConfig,
    Circumstances,
    ResultsFolder,
    SweepNumbers,
    SweepSample,
)

SETTINGS = {"temperature": 0.0, "max_tokens": 8, "batch_size": 1, "sampler": "block"}


def circumstances(**changes: object) -> Circumstances:
    terms: dict[str, object] = {
        "pair": "toy",
        "machine": {"cpu": "abacus", "cores": 2, "device": "cpu", "gpu": None},
        "settings": SETTINGS | {"drafter": "model"},
        "weights": {"target": "aa", "draft": "bb"},
        "prompt_sets": {"code": "cc", "maths": "dd"},
    }
    return Circumstances(**(terms | changes))  # pyright: ignore[reportArgumentType]


def config(k: int, domain: str = "code") -> BenchmarkConfig:
    return BenchmarkConfig(
        model_pair_name="toy",
        prompt_domain=domain,
        k=k,
        temperature=0.0,
        max_tokens=8,
        seed=0,
        drafter="model" if k else "none",
    )


def numbers(k: int, seconds: float, *, accepted: int = 4, identical: bool = True) -> SweepNumbers:
    """Eight tokens. With drafts, in four rounds of which `accepted` kept one each."""
    histogram = [4 - accepted, accepted, *[0] * (k - 1)] if k else []
    return SweepNumbers(
        num_prompt_tokens=5,
        num_tokens=8,
        seconds=seconds,
        first_token_seconds=seconds / 8,
        prefill_seconds=seconds / 8,
        draft_seconds=seconds / 4 if k else 0.0,
        verify_seconds=seconds / 2,
        accept_seconds=seconds / 16,
        verify_ms=1 + k / 10,
        num_rounds=4 if k else 8,
        num_drafted=4 * k,
        num_accepted=accepted if k else 0,
        accepted_histogram=histogram,
        token_ms=[seconds * 100 * (1 + i / 10) for i in range(7)],
        identical=identical,
        digest="0123456789ab",
        request_ms=[seconds * 1000],
        first_ms=[seconds * 125],
        cumulative_p95_ms=seconds * 950,
    )


def sample(
    k: int,
    piece: int,
    measured: SweepNumbers | None,
    *,
    domain: str = "code",
    visit: int | None = None,
    reason: str | None = None,
) -> SweepSample:
    """Of the piece that is one prompt, number `piece` of its domain."""
    return SweepSample(
        run=1,
        visit=piece + 1 if visit is None else visit,
        config=config(k, domain),
        piece=f"{domain}_{piece:03d}",
        prompt_ids=[f"{domain}_{piece:03d}"],
        repeat=0,
        reason=reason,
        numbers=measured,
        foreign_cpu_share=0.01,
    )


def folder_of(path: Path, *samples: SweepSample) -> ResultsFolder:
    """A folder on disk that holds these, as one run."""
    folder = ResultsFolder.open(path)
    folder.add_run(circumstances(), {"notes": []})
    folder.add(samples)
    return folder


def small_sweep(path: Path) -> ResultsFolder:
    """Two domains of five pieces; K=2 wins by a half in code, K=4 loses in maths."""
    seconds = {("code", 2): 0.5, ("code", 4): 0.8, ("maths", 2): 1.0, ("maths", 4): 2.0}
    found: list[SweepSample] = []
    for number, domain in enumerate(("code", "maths")):
        for piece in range(5):
            for k in (0, 2, 4):
                took = (1 + piece / 10) * seconds.get((domain, k), 1.0)
                visit = 5 * number + piece + 1
                found.append(sample(k, piece, numbers(k, took), domain=domain, visit=visit))
    return folder_of(path, *found)


@dataclass
class QuickTicket:
    """A request that ends at the next `advance`."""

    answer: GenerationResult
    done: bool = False

    def result(self) -> GenerationResult:
        return self.answer


class QuickLLM:
    """Writes three tokens; a draft of K has one of them accepted a round. `wrong` maps a drafter
    and a prompt's beginning to what is raised for it, and `absent` drafters that do not load."""

    made: list[QuickLLM] = []  # noqa: RUF012 - one list for all of a test's
    wrong: dict[tuple[str, str], BaseException] = {}  # noqa: RUF012
    absent: dict[str, Exception] = {}  # noqa: RUF012

    def __init__(self, target: str, *, draft: str | None, config: EngineConfig) -> None:
        if config.drafter in self.absent:
            raise self.absent[config.drafter]
        self.target, self.draft, self.config = target, draft, config
        self.drafter, self.k = config.drafter, config.most_k
        self.exact = config.drafter == "none" or config.sampler in EXACT_SAMPLERS
        self.notes = ()
        self.kernels = SimpleNamespace(choices=(), exact=True)
        self.tokenizer = SimpleNamespace(encode=str.split)
        self.calls: list[tuple[str, SamplingParams]] = []
        self.most_in_flight = 0
        self.num_forgotten = 0
        self.closed = False
        self._tickets: list[QuickTicket] = []
        self.made.append(self)

    @property
    def has_work(self) -> bool:
        return bool(self._tickets)

    def close(self) -> None:
        self.closed = True

    def fitting_tokens(self, prompt: str, params: SamplingParams) -> int:
        del prompt
        return params.max_tokens

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[GenerationResult]:
        return [self._result(prompt, params) for prompt in prompts]

    def submit(self, prompt: str, params: SamplingParams) -> QuickTicket:
        ticket = QuickTicket(self._result(prompt, params))
        self._tickets.append(ticket)
        self.most_in_flight = max(self.most_in_flight, len(self._tickets))
        return ticket

    def advance(self) -> None:
        self._tickets.pop(0).done = True

    def cancel(self, ticket: QuickTicket) -> None:
        self._tickets.remove(ticket)

    def forget(self) -> None:
        self.num_forgotten += 1

    def _result(self, prompt: str, params: SamplingParams) -> GenerationResult:
        self.calls.append((prompt, params))
        for (drafter, start), error in self.wrong.items():
            if drafter == self.drafter and prompt.startswith(start):
                raise error
        seconds = {"prefill": 0.1, "draft": 0.1, "verify": 0.2, "accept": 0.1, "total": 0.5}
        drafted, accepted = (2 * self.k, 1) if self.k else (0, 0)
        stats = Stats(
            self.drafter, self.k, 2, 3, drafted, accepted, 2, seconds, (1, 1) if self.k else ()
        )
        return GenerationResult("", (1, 2, 3), None, stats, token_seconds=(0.1, 0.2, 0.3))
