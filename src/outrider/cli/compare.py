"""The speed-up of this very run: the same prompt with and without speculation, interleaved.

Both sides run once untimed, then in turns, with the same code, sampling and stop handling; only
the drafter differs. A ratio is printed because it was measured here, never because it is likely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.api.llm import LLM
from outrider.bench.race import race
from outrider.cli.session import open_llm
from outrider.core.params import SamplingParams
from outrider.core.settings import Resolved

NUM_RUNS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens a second with (`on`) and without (`off`) speculation, and whether ids agreed."""

    on: float
    off: float
    identical: bool
    greedy: bool

    @property
    def speedup(self) -> float:
        return self.on / self.off

    def summary(self) -> str:
        if self.identical:
            same = "identical text"
        elif self.greedy:
            same = "DIFFERENT text"
        else:
            same = "another sample of the same law"
        return f"{self.speedup:.2f}× vs off (measured, {NUM_RUNS} runs each; {same})"

    def to_dict(self) -> dict[str, object]:
        return {
            "speedup": round(self.speedup, 4),
            "identical": self.identical,
            "num_runs": NUM_RUNS,
            "tokens_per_second": {"on": round(self.on, 3), "off": round(self.off, 3)},
        }


def compare_with_off(llm: LLM, prompt: str, resolved: Resolved) -> Comparison:
    """Race `llm` against the same target without a drafter."""
    params = resolved.sampling()
    # The window leaves room for a draft on one side only; both stop at the shorter length.
    limit = llm.fitting_tokens(prompt, params)
    params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
    plain = open_llm(resolved, drafter="none")
    texts: dict[str, set[tuple[int, ...]]] = {"on": set(), "off": set()}
    contestants = {
        "on": _contestant(llm, params, texts["on"]),
        "off": _contestant(plain, params, texts["off"]),
    }
    scores = race(contestants, [prompt] * NUM_RUNS)
    return Comparison(
        on=scores["on"].tokens_per_second,
        off=scores["off"].tokens_per_second,
        identical=texts["on"] == texts["off"] and len(texts["on"]) == 1,
        greedy=params.greedy,
    )


def _contestant(
    llm: LLM, params: SamplingParams, texts: set[tuple[int, ...]]
) -> Callable[[str], Sequence[Sequence[int]]]:
    def run(prompt: str) -> Sequence[Sequence[int]]:
        # A drafter that remembers texts would copy the one that it wrote before.
        llm.forget()
        ids = [result.token_ids for result in llm.generate([prompt], params)]
        texts.update(ids)
        return ids

    return run
