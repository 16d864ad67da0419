"""Time and memory of a run, for `outrider generate --profile`: a record and a short table.

The rounds are those of the run itself. Kernels are timed in a second run of the same request,
because timing them slows down the rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.api.callers import Prompt
from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.cli.call import Call
from outrider.cli.output import screen_table
from outrider.cli.session import run_record, structure_of
from outrider.cli.verb_options import GenerateOptions
from outrider.core.fields import size
from outrider.core.settings import Resolved
from outrider.plugins.measure.timers import kernel_times
from outrider.plugins.measure.turns import provenance

if TYPE_CHECKING:
    from outrider.api.structure import StructureOptions


def profile_of(
    llm: LLM, prompt: Prompt, call: Call[GenerateOptions], result: GenerationResult
) -> dict[str, Any]:
    """Return the record of `--profile` for a run that gave `result`."""
    found = round_profile(llm, result, call.resolved)
    found["kernels"] = kernel_profile(llm, prompt, call.resolved, structure_of(call.options))
    return found


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
