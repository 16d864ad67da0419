"""An LLM for sweeps that writes at once: no weights, and errors where it was told to make some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from outrider.api.result import GenerationResult
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.params import SamplingParams
from outrider.metrics.summary import Stats


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
        self.drafter, self.k = config.drafter, config.k
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
