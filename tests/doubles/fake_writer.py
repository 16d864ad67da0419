"""A contestant of a comparison of drafters that has no model: its rounds are a plan of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from doubles.clocks import FakeClock
from outrider.api.result import GenerationResult
from outrider.bench.studies.drafters_lineup import Runner
from outrider.core.budget import RoundTrace
from outrider.core.params import SamplingParams
from outrider.metrics.summary import summarise


@dataclass(slots=True)
class FakeWriter:
    """Every round drafts `drafted` tokens in `draft_seconds`, keeps `kept` of them, and takes
    `round_seconds` in all. Its text is `lie` if that is not empty. It fails for `broken` prompts;
    `asked` notes what it was given."""

    clock: FakeClock
    round_seconds: float
    drafted: int = 0
    kept: int = 0
    draft_seconds: float = 0.0
    lie: tuple[int, ...] = ()
    broken: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list[str])
    num_forgotten: int = 0

    def generate(self, prompts: Sequence[str], params: SamplingParams, /) -> list[GenerationResult]:
        self.asked += prompts
        return [self._result(prompt, params.max_tokens) for prompt in prompts]

    def forget(self) -> None:
        self.num_forgotten += 1

    def runner(self, name: str) -> Runner:
        return Runner(name, writer=self, k=self.drafted)

    def _result(self, prompt: str, num_tokens: int) -> GenerationResult:
        if prompt in self.broken:
            raise ValueError(f"cannot write {prompt}")
        rounds: list[RoundTrace] = []
        left = num_tokens
        while left:
            emitted = min(self.kept + 1, left)
            left -= emitted
            rounds.append(self._round(len(rounds), emitted))
            self.clock.advance(self.round_seconds)
        stats = summarise(rounds, drafter="fake", k=self.drafted, total_seconds=1.0)
        ids = self.lie or tuple(range(num_tokens))
        return GenerationResult("", ids, "length", stats, rounds=tuple(rounds))

    def _round(self, number: int, emitted: int) -> RoundTrace:
        return RoundTrace(
            seq_id=0,
            pass_index=len(self.asked) * 1000 + number,
            drafter="fake",
            batch_size=1,
            num_target_passes=1,
            num_prompt_tokens=0,
            num_drafted=self.drafted,
            num_accepted=emitted - 1,
            num_emitted=emitted,
            num_rows_copied=0,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.round_seconds - self.draft_seconds,
            accept_seconds=0.0,
        )
