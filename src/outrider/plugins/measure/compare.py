"""The speed-up of one run, for `outrider generate --compare`, or of each prompt of a file.

The same prompt runs with and without speculation, interleaved. Both sides run once untimed, then in
turn, with the same code, sampling and stop handling; only the drafter differs. A printed ratio is
always a measurement, with its interval; if other programs disturbed it, it is called noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from outrider.api.callers import Prompt
from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.cli.call import Call
from outrider.cli.conversation import given_prompt
from outrider.cli.gate import in_line
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import Steps, answer, duration
from outrider.cli.session import interruptible, open_llm, run_record, structure_of
from outrider.cli.verb_options import GenerateOptions
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.plugins import drafter_named
from outrider.core.settings import Resolved
from outrider.plugins.measure.turns import (
    MIN_PAIRS,
    Neighbours,
    Ratio,
    Score,
    Texts,
    is_busy,
    prompts_in,
    race,
    ratio_of_medians,
    said_of,
)

if TYPE_CHECKING:
    from outrider.api.structure import StructureOptions

NUM_RUNS = MIN_PAIRS
# A prompt with its own limit of tokens, and one side of a race.
Piece: TypeAlias = tuple[Prompt, SamplingParams]
Writer: TypeAlias = Callable[[Piece], Texts]


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
        details = f"({self.ratio.num_pairs} runs each{interval}; {self.same})"
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
            "num_runs": self.ratio.num_pairs,
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
    with Steps(title + duration(took), hidden=hidden) as steps:
        steps.begin()
        return _compared(llm, prompt, call.resolved, structure_of(call.options))


def _compared(llm: LLM, prompt: Prompt, resolved: Resolved, wanted: StructureOptions) -> Comparison:
    piece = _piece(llm, prompt, resolved.sampling().seeded())
    texts: dict[str, set[tuple[int, ...]]] = {"on": set(), "off": set()}
    sides = _sides(llm, resolved, wanted, texts)
    with Neighbours() as neighbours:
        scores = race(sides, [piece] * NUM_RUNS)
    return Comparison.of(
        scores["on"],
        scores["off"],
        identical=_same(texts),
        greedy=piece[1].greedy,
        share=neighbours.share,
        advice=advice_for(resolved.program().target),
    )


def _piece(llm: LLM, prompt: Prompt, params: SamplingParams) -> Piece:
    # Only the speculative side reserves part of the window for drafts; both use its shorter limit.
    limit = llm.fitting_tokens(prompt, params)
    return prompt, replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))


def _sides(
    llm: LLM,
    resolved: Resolved,
    wanted: StructureOptions,
    texts: Mapping[str, set[tuple[int, ...]]],
) -> dict[str, Writer]:
    """Return `llm` and the same target without a drafter; their texts are added to `texts`."""
    plain = open_llm(resolved, drafter="none")
    return {
        "on": _contestant(llm, wanted, texts["on"]),
        "off": _contestant(plain, wanted, texts["off"]),
    }


def _same(texts: Mapping[str, set[tuple[int, ...]]]) -> bool:
    return texts["on"] == texts["off"] and len(texts["on"]) == 1


def advice_for(target: str) -> str:
    """Return the command that ranks possible drafters for `target`."""
    return f"outrider draft suggest {quote(target)}"


def _seconds_per_token(score: Score) -> list[float]:
    return [
        seconds / max(tokens, 1)
        for seconds, tokens in zip(score.seconds, score.tokens, strict=True)
    ]


def _contestant(llm: LLM, structure: StructureOptions, texts: set[tuple[int, ...]]) -> Writer:
    def run(piece: Piece) -> Texts:
        prompt, params = piece
        # Otherwise a drafter that remembers texts would copy its own previous one.
        llm.forget()
        ids = [result.token_ids for result in llm.generate([prompt], params, **structure)]
        texts.update(ids)
        return ids

    return run


# `--compare --prompts FILE`: each prompt is a piece of work of one race.


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """Median seconds of a prompt's text without (`off`) and with (`on`) speculation, the ratio of
    both by the token, and whether the token ids were identical."""

    prompt: str
    num_tokens: int
    off: float
    on: float
    ratio: float
    identical: bool

    @classmethod
    def of(cls, prompt: str, scores: Mapping[str, Score], *, identical: bool) -> PromptRow:
        on, off = scores["on"], scores["off"]
        return cls(
            prompt=prompt,
            num_tokens=on.tokens[-1],
            off=median(off.seconds),
            on=median(on.seconds),
            ratio=median(_seconds_per_token(off)) / median(_seconds_per_token(on)),
            identical=identical,
        )

    def line(self, number: int, *, greedy: bool) -> str:
        differs = "DIFFERENT" if greedy else "another"
        text = "identical" if self.identical else differs
        start = in_line(self.prompt[:40])
        return (
            f"{number:>4} {self.off:>9.3f} {self.on:>9.3f} {self.ratio:>7.2f}  {text:<9}  {start}"
        )


_HEADER = f"{'':4} {'plain s':>9} {'with s':>9} {'ratio':>7}  {'text':<9}  prompt"


def compare_prompts(call: Call[GenerateOptions], show: Callable[[str], object]) -> int:
    """Race over the prompts of a file, and `show` a line for each as soon as it is measured. The
    exit code is 1 if texts differ that must be equal."""
    shown, resolved = call.options, call.resolved
    params, texts = resolved.sampling(), _read_prompts(call)
    llm = open_llm(resolved)
    check_drafts(llm)
    pieces = list(_pieces(llm, texts, call))
    ids: dict[str, set[tuple[int, ...]]] = {"on": set(), "off": set()}
    sides = _sides(llm, resolved, structure_of(shown), ids)
    repeats = math.ceil(MIN_PAIRS / len(texts))
    rows, every = list[PromptRow](), {name: Score() for name in sides}
    prints = not shown.json and not shown.quiet
    if prints:
        show(_HEADER)
    with interruptible() as stopped, Neighbours() as neighbours:
        for text, piece in zip(texts, pieces, strict=True):
            scores = race(sides, [piece] * repeats, start=len(rows) * repeats)
            rows.append(PromptRow.of(text, scores, identical=_same(ids)))
            for name, score in scores.items():
                every[name].tokens += score.tokens
                every[name].seconds += score.seconds
                ids[name].clear()
            if prints:
                show(rows[-1].line(len(rows), greedy=params.greedy))
            if stopped():
                break
    found = Comparison.of(
        every["on"],
        every["off"],
        identical=all(row.identical for row in rows),
        greedy=params.greedy,
        share=neighbours.share,
        advice=advice_for(resolved.program().target),
    )
    record = {"prompts": [asdict(row) for row in rows], "compare": found.to_dict()}
    answer(shown, record | {"run": run_record(llm, resolved)}, _summary(rows, found))
    if len(rows) < len(texts):
        return INTERRUPTED
    must_equal = params.greedy and resolved.engine().claims_exact
    return int(must_equal and not found.identical)


def check_drafts(llm: LLM) -> None:
    """Raise ConfigError unless `llm` drafts."""
    if not drafter_named(llm.drafter).drafts:
        raise ConfigError("--compare: speculation is off already.", hint="choose a --drafter")


def _read_prompts(call: Call[GenerateOptions]) -> list[str]:
    """Return the prompts of --prompts. Raises ConfigError for it, or for other options that do not
    go with it."""
    shown, params = call.options, call.resolved.sampling()
    if not shown.compare:
        raise ConfigError(
            "--prompts is measured by --compare.",
            hint="add --compare; `outrider batch` writes the answers of a file of prompts",
        )
    given = {
        "a prompt": bool({"prompt", "stdin"} & call.given) or len(call.arguments) > len(call.named),
        "--html": shown.html is not None,
        "--stats": shown.stats,
        "--n": params.n > 1,
        "--profile": call.resolved.engine().profile,
    }
    others = [what for what, is_given in given.items() if is_given]
    if others:
        raise ConfigError(f"--prompts does not go with {others[0]}.", hint="drop one of the two")
    return prompts_in(Path(str(shown.prompts)))


def _pieces(llm: LLM, texts: Sequence[str], call: Call[GenerateOptions]) -> Iterator[Piece]:
    """Yield the pieces of the texts, as `outrider generate` sends each. Raises ConfigError for one
    that does not fit the window."""
    params = call.resolved.sampling().seeded()
    target = call.resolved.program().target
    first, is_message = given_prompt(llm, texts[0], call.options, target)
    for number, text in enumerate(texts, start=1):
        prompt = first if number == 1 else llm.encode_chat(text) if is_message else text
        try:
            yield _piece(llm, prompt, params)
        except ConfigError as error:
            raise ConfigError(f"prompt {number}: {error}", hint=error.hint) from None


def _summary(rows: Sequence[PromptRow], found: Comparison) -> str:
    plain, drafted = (sum(getattr(row, side) for row in rows) for side in ("off", "on"))
    same = sum(row.identical for row in rows)
    return (
        f"{plain:.2f} s without speculation, {drafted:.2f} s with it; {same} of {len(rows)} texts "
        f"identical\n{found.summary()}"
    )
