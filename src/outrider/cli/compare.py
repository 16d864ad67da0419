"""The speed-up of this very run: the same prompt with and without speculation, interleaved.

Both sides run once untimed, then in turns, with the same code, sampling and stop handling; only
the drafter differs. A ratio is printed because it was measured here, never because it is likely,
with its interval and, where that is all it may be, with the word noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.api.llm import LLM
from outrider.bench.interval import MIN_PAIRS, Ratio, ratio_of_medians
from outrider.bench.quiet import Neighbours, is_busy, said_of
from outrider.bench.race import Score, race
from outrider.cli.session import open_llm
from outrider.core.params import SamplingParams
from outrider.core.settings import Resolved

NUM_RUNS = MIN_PAIRS


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens a second with (`on`) and without (`off`) speculation, the ratio of their medians, and
    whether ids agreed. `foreign_cpu_share` is what others used of the machine meanwhile."""

    on: float
    off: float
    ratio: Ratio
    identical: bool
    greedy: bool
    foreign_cpu_share: float | None

    @classmethod
    def of(
        cls, on: Score, off: Score, *, identical: bool, greedy: bool, share: float | None
    ) -> Comparison:
        ratio = ratio_of_medians(_seconds_per_token(off), _seconds_per_token(on))
        return cls(on.tokens_per_second, off.tokens_per_second, ratio, identical, greedy, share)

    @property
    def speedup(self) -> float:
        return self.ratio.value

    @property
    def verdict(self) -> str:
        """That of the interval, unless the machine was too busy to tell."""
        return "not judged" if is_busy(self.foreign_cpu_share) else self.ratio.verdict

    def summary(self) -> str:
        if self.identical:
            same = "identical text"
        elif self.greedy:
            same = "DIFFERENT text"
        else:
            same = "another sample of the same law"
        low, high = self.ratio.low, self.ratio.high
        interval = "" if low is None else f", 95 % interval {low:.2f} to {high:.2f}"
        ratio = f"{self.speedup:.2f}× vs off"
        told = f"({NUM_RUNS} runs each{interval}; {same})"
        if is_busy(self.foreign_cpu_share):
            return f"noise, not judged: {ratio} {told}. {said_of(self.foreign_cpu_share)}"
        doubt = "" if self.verdict != "no measurable difference" else f", {self.verdict}"
        return f"{ratio}{doubt} {told}"

    def to_dict(self) -> dict[str, object]:
        return {
            "speedup": round(self.speedup, 4),
            "interval": None if self.ratio.low is None else [self.ratio.low, self.ratio.high],
            "verdict": self.verdict,
            "foreign_cpu_share": self.foreign_cpu_share,
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
    with Neighbours() as neighbours:
        scores = race(contestants, [prompt] * NUM_RUNS)
    return Comparison.of(
        scores["on"],
        scores["off"],
        identical=texts["on"] == texts["off"] and len(texts["on"]) == 1,
        greedy=params.greedy,
        share=neighbours.share,
    )


def _seconds_per_token(score: Score) -> list[float]:
    return [
        seconds / max(tokens, 1)
        for seconds, tokens in zip(score.seconds, score.tokens, strict=True)
    ]


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
