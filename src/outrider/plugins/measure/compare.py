"""The speed-up of one run, for `outrider generate --compare`.

The same prompt runs with and without speculation, interleaved. Both sides run once untimed, then in
turn, with the same code, sampling and stop handling; only the drafter differs. A printed ratio is
always a measurement, with its interval; if other programs disturbed it, it is called noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING

from outrider.api.callers import Prompt
from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.cli.call import Call
from outrider.cli.output import Steps, duration
from outrider.cli.session import open_llm, structure_of
from outrider.cli.verb_options import GenerateOptions
from outrider.core.params import SamplingParams
from outrider.core.settings import Resolved
from outrider.plugins.measure.turns import (
    MIN_PAIRS,
    Neighbours,
    Ratio,
    Score,
    is_busy,
    race,
    ratio_of_medians,
    said_of,
)

if TYPE_CHECKING:
    from outrider.api.structure import StructureOptions

NUM_RUNS = MIN_PAIRS


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second with (`on`) and without (`off`) speculation, the ratio of their medians,
    and whether the token ids were identical. `foreign_cpu_share` is the share of the CPU that other
    programs used in the meantime. `advice` is a command to try if speculation is slower."""

    on: float
    off: float
    ratio: Ratio
    identical: bool
    greedy: bool
    foreign_cpu_share: float | None
    advice: str = ""

    @classmethod
    def of(
        cls,
        on: Score,
        off: Score,
        *,
        identical: bool,
        greedy: bool,
        share: float | None,
        advice: str = "",
    ) -> Comparison:
        ratio = ratio_of_medians(_seconds_per_token(off), _seconds_per_token(on))
        rates = on.tokens_per_second, off.tokens_per_second
        slower = ratio.value < 1
        return cls(*rates, ratio, identical, greedy, share, advice if slower else "")

    @property
    def speedup(self) -> float:
        return self.ratio.value

    @property
    def verdict(self) -> str:
        """The verdict of the interval, unless the machine was too busy."""
        return "not judged" if is_busy(self.foreign_cpu_share) else self.ratio.verdict

    def headline(self) -> str:
        """Return the ratio in a sentence."""
        if is_busy(self.foreign_cpu_share):
            text = f"{self.speedup:.1f}x, which is not judged, for other programs were running"
        elif self.verdict == "no measurable difference":
            text = f"no measurable difference to no speculation ({self.speedup:.2f}x)"
        elif self.speedup > 1:
            text = f"{self.speedup:.1f}x faster than without speculation"
        else:
            text = f"slower than without speculation: {self.speedup:.2f}x"
        if self.advice:
            text += f"; `{self.advice}` measures what would pay"
        return text

    @property
    def same(self) -> str:
        """Comparison of both texts, in words."""
        if self.identical:
            return "identical text"
        return "DIFFERENT text" if self.greedy else "another sample of the same distribution"

    def summary(self) -> str:
        low, high = self.ratio.low, self.ratio.high
        interval = "" if low is None else f", 95 % interval {low:.2f} to {high:.2f}"
        ratio = f"{self.speedup:.2f}× vs off"
        details = f"({NUM_RUNS} runs each{interval}; {self.same})"
        if self.advice:
            details += f"; `{self.advice}` measures what would pay"
        if is_busy(self.foreign_cpu_share):
            return f"noise, not judged: {ratio} {details}. {said_of(self.foreign_cpu_share)}"
        doubt = "" if self.verdict != "no measurable difference" else f", {self.verdict}"
        return f"{ratio}{doubt} {details}"

    def to_dict(self) -> dict[str, object]:
        return {
            "speedup": round(self.speedup, 4),
            "interval": None if self.ratio.low is None else [self.ratio.low, self.ratio.high],
            "verdict": self.verdict,
            "foreign_cpu_share": self.foreign_cpu_share,
            "identical": self.identical,
            "num_runs": NUM_RUNS,
            "advice": self.advice or None,
            "tokens_per_second": {"on": round(self.on, 3), "off": round(self.off, 3)},
        }


def compare_with_off(
    llm: LLM, prompt: Prompt, call: Call[GenerateOptions], result: GenerationResult
) -> Comparison:
    """Race `llm` against the same target without a drafter. A run has given `result`, and each
    takes as long."""
    took = 2 * (NUM_RUNS + 1) * result.stats.seconds["total"]
    title = f"measuring {NUM_RUNS} runs each with and without speculation, about "
    hidden = call.options.json or call.options.quiet or took < 1
    with Steps(title + duration(took), hidden=hidden):
        return _compared(llm, prompt, call.resolved, structure_of(call.options))


def _compared(llm: LLM, prompt: Prompt, resolved: Resolved, wanted: StructureOptions) -> Comparison:
    params = resolved.sampling().seeded()
    # Only the speculative side reserves part of the window for drafts; both use its shorter limit.
    limit = llm.fitting_tokens(prompt, params)
    params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
    plain = open_llm(resolved, drafter="none")
    texts: dict[str, set[tuple[int, ...]]] = {"on": set(), "off": set()}
    contestants = {
        "on": _contestant(llm, params, wanted, texts["on"]),
        "off": _contestant(plain, params, wanted, texts["off"]),
    }
    with Neighbours() as neighbours:
        scores = race(contestants, [prompt] * NUM_RUNS)
    return Comparison.of(
        scores["on"],
        scores["off"],
        identical=texts["on"] == texts["off"] and len(texts["on"]) == 1,
        greedy=params.greedy,
        share=neighbours.share,
        advice=advice_for(resolved.program().target),
    )


def advice_for(target: str) -> str:
    """Return the command that ranks possible drafters for `target`."""
    return f"outrider draft suggest {quote(target)}"


def _seconds_per_token(score: Score) -> list[float]:
    return [
        seconds / max(tokens, 1)
        for seconds, tokens in zip(score.seconds, score.tokens, strict=True)
    ]


def _contestant(
    llm: LLM, params: SamplingParams, structure: StructureOptions, texts: set[tuple[int, ...]]
) -> Callable[[Prompt], Sequence[Sequence[int]]]:
    def run(prompt: Prompt) -> Sequence[Sequence[int]]:
        # Otherwise a drafter that remembers texts would copy its own previous one.
        llm.forget()
        ids = [result.token_ids for result in llm.generate([prompt], params, **structure)]
        texts.update(ids)
        return ids

    return run
