"""`outrider generate`: complete one prompt.

`--compare` measures the speed-up of this run: the same prompt with and without speculation,
interleaved. Both sides run once untimed, then in turn, with the same code, sampling and stop
handling; only the drafter differs. A printed ratio is always a measurement, with its interval; if
other programs disturbed it, it is called noise.

`--profile` shows the time and memory of a run, as a record and as a short table. The rounds are
those of the run itself. Kernels are timed in a second run of the same request, because timing them
slows down the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from outrider.api.callers import Prompt
from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.cli.call import Call
from outrider.cli.conversation import given_prompt
from outrider.cli.output import Painter, Steps, answer, duration, fitted, prose, say, screen_table
from outrider.cli.session import open_llm, run_record, show, show_notes, structure_of
from outrider.cli.verb_options import GenerateOptions
from outrider.cli.verdict import RoundsPage, details, headline, is_cut, say_toy
from outrider.core.errors import ConfigError
from outrider.core.fields import size
from outrider.core.params import SamplingParams
from outrider.core.plugins import drafter_named
from outrider.core.settings import Resolved
from outrider.measure import (
    MIN_PAIRS,
    Neighbours,
    Ratio,
    Score,
    is_busy,
    provenance,
    race,
    ratio_of_medians,
    said_of,
)
from outrider.plugins.profile import kernel_times

if TYPE_CHECKING:
    from outrider.api.structure import StructureOptions


def generate(call: Call[GenerateOptions]) -> int:
    shown, resolved = call.options, call.resolved
    text = _prompt_of(call)
    structure = structure_of(shown)
    llm = open_llm(resolved, details=shown.stats)
    prompt, is_message = given_prompt(llm, text, shown, resolved.program().target)
    if shown.compare and not drafter_named(llm.drafter).drafts:
        raise ConfigError("--compare: speculation is off already.", hint="choose a --drafter")
    page = RoundsPage(llm, resolved)
    page.turn(shown.html, flag="--html")
    params = page.asking(resolved.sampling())
    if params.n > 1:
        return _several(llm, (text, prompt), call, page)
    painter = None if shown.json else Painter(resolved.program().color, sys.stdout)
    stream = llm.stream(prompt, params, **structure)
    if painter is not None and not shown.quiet:
        say_toy(resolved.program().target)
    if painter is not None and painter.colored and not is_message:
        painter.write(text)
    reply = show(llm, stream, painter)
    if painter is not None:
        painter.write("" if shown.quiet else painter.mark(cut=is_cut(reply.result)))
        painter.close_text(() if shown.quiet else reply.seen)
    show_notes([reply.result])
    comparison = None
    if shown.compare:
        took = 2 * (NUM_RUNS + 1) * reply.result.stats.seconds["total"]
        title = f"measuring {NUM_RUNS} runs each with and without speculation, about "
        with Steps(title + duration(took), hidden=shown.json or shown.quiet or took < 1):
            comparison = compare_with_off(llm, prompt, resolved, structure)
    if painter is not None and not shown.quiet:
        painter.line(verdict(reply.result, comparison, everything=shown.stats))
    speed_ratio = comparison.summary() if comparison else ""
    _say_line(page.add(text, [reply.result], speed_ratio=speed_ratio))
    record = reply.result.to_dict() | {"run": run_record(llm, resolved)}
    if comparison:
        record["compare"] = comparison.to_dict()
    if resolved.engine().profile:
        record["profile"] = _profile(llm, prompt, reply.result, call)
    answer(shown, record, None)
    return 0


def verdict(
    result: GenerationResult, comparison: Comparison | None, *, everything: bool = False
) -> str:
    speedup, same = (comparison.headline(), comparison.same) if comparison else ("", "")
    lines = [prose(headline(result, speedup=speedup, same=same, more="--max-tokens N"))]
    if everything:
        lines += [details(result), *([comparison.summary()] if comparison else [])]
    return fitted("\n".join(lines))


def _profile(
    llm: LLM, prompt: Prompt, result: GenerationResult, call: Call[GenerateOptions]
) -> dict[str, object]:
    """Return the record of `--profile`; for people, also print it in short."""
    profile = round_profile(llm, result, call.resolved)
    profile["kernels"] = kernel_profile(llm, prompt, call.resolved, structure_of(call.options))
    if not call.options.json and not call.options.quiet:
        print(fitted(profile_text(profile)))
    return profile


def _say_line(line: str) -> None:
    if line:
        say(line)


def _several(
    llm: LLM, given: tuple[str, Prompt], call: Call[GenerateOptions], page: RoundsPage
) -> int:
    """Run `--n`: all completions at once. `given` is the prompt as typed, and for the model."""
    shown = call.options
    if shown.compare:
        raise ConfigError("--compare needs one completion, and --n requests more.", hint="drop one")
    params = page.asking(call.resolved.sampling())
    text, prompt = given
    results = llm.generate([prompt], params, **structure_of(shown))
    if not shown.json:
        if not shown.quiet:
            say_toy(call.resolved.program().target)
        painter = Painter(call.resolved.program().color, sys.stdout)
        for number, result in enumerate(results, start=1):
            if not shown.quiet:
                line = verdict(result, None, everything=shown.stats)
                print(fitted(f"── {number} of {len(results)}: {line}"))
            painter.pieces([f"{result.text}\n\n"], ["plain"])
    show_notes(results)
    _say_line(page.add(text, results))
    record = {
        "completions": [
            result.to_dict() | ({"profile": result.profile()} if result.rounds else {})
            for result in results
        ],
        "run": run_record(llm, call.resolved),
    }
    answer(shown, record, None)
    return 0


def _prompt_of(call: Call[GenerateOptions]) -> str:
    """Return the prompt: argument, --prompt or stdin. Raises ConfigError unless there is one."""
    options, word = call.options, call.named.get("PROMPT")
    given = [text for text in (word, options.prompt) if text is not None]
    if len(given) + options.stdin > 1 or len(call.arguments) > len(call.named):
        raise ConfigError(
            "two prompts: give one, as a word, by --prompt or on stdin.",
            hint="drop one; --model names a model",
        )
    if word is not None:
        _check_no_model(word)
    if given:
        return given[0]
    if not options.stdin:
        raise ConfigError("no prompt.", hint='outrider generate "def f(x):", or - to read stdin')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("the prompt on stdin is not UTF-8 text.") from None


def _check_no_model(prompt: str) -> None:
    """Check the PROMPT argument. Raises ConfigError if it is a model."""
    path = Path(prompt)
    if not path.name:
        return
    is_model = path.suffix == ".gguf" and len(prompt.split()) == 1
    # A prompt may not be a valid path.
    with suppress(OSError, ValueError):
        is_folder = (path / "config.json").is_file() or any(path.glob("*.gguf"))
        is_model = is_model or is_folder or (path.suffix == ".gguf" and path.is_file())
    if is_model:
        raise ConfigError(
            f"{prompt} is a model, and no prompt is given.",
            hint=f"outrider chat {quote(prompt)}, or outrider generate {quote(prompt)} PROMPT; "
            "to use these words as a prompt, give --prompt",
        )


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
    llm: LLM, prompt: Prompt, resolved: Resolved, structure: StructureOptions | None = None
) -> Comparison:
    """Race `llm` against the same target without a drafter."""
    params = resolved.sampling().seeded()
    # Only the speculative side reserves part of the window for drafts; both use its shorter limit.
    limit = llm.fitting_tokens(prompt, params)
    params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
    plain = open_llm(resolved, drafter="none")
    texts: dict[str, set[tuple[int, ...]]] = {"on": set(), "off": set()}
    wanted = structure or {}
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


def round_profile(llm: LLM, result: GenerationResult, resolved: Resolved) -> dict[str, Any]:
    """Return the profile of `result`, with all settings that are needed to repeat it."""
    metadata = {"seed": result.seed, **run_record(llm, resolved)}
    return result.profile(metadata | {"machine": provenance()})


def kernel_profile(
    llm: LLM, prompt: Prompt, resolved: Resolved, structure: StructureOptions | None = None
) -> dict[str, dict[str, float]]:
    """Return calls and milliseconds of every kernel in a second run, the slowest kernel first."""
    asked: StructureOptions = structure or {}
    with kernel_times(llm) as timers:
        llm.generate([prompt], resolved.sampling(), **asked)
    slowest = sorted(timers.summary().items(), key=lambda item: -item[1])
    return {
        name: {"num_calls": timers.count(name), "total_ms": round(total, 6)}
        for name, total in slowest
    }


def profile_text(profile: dict[str, Any]) -> str:
    """Return a short table of a profile."""
    spread = profile["aggregate"]
    stages = [
        (name, *(f"{spread[f'{name}_ms'][key]:.3f}" for key in ("total", "mean", "std")))
        for name in ("draft", "verify", "accept")
    ]
    kernels = [
        (name, f"{kernel['total_ms']:.3f}", f"{kernel['num_calls']} calls")
        for name, kernel in profile["kernels"].items()
    ]
    held = [f"{stage} {size(most)}" for stage, most in profile["memory"].items() if most]
    histogram = profile["counts"]["acceptance_histogram"]
    lines = [
        screen_table(stages, header=("stage", "total ms", "mean", "std")),
        screen_table(kernels, header=("kernel", "total ms", "of a second run")),
        f"peak memory: {', '.join(held)}",
    ]
    if histogram:
        rounds = ", ".join(f"{accepted}: {number}" for accepted, number in enumerate(histogram))
        lines.append(f"rounds by drafts accepted: {rounds}")
    return "\n".join(lines)
