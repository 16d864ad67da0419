"""`--profile`: where a run's time and memory went, as a record and as a short table.

Rounds are those of the run itself. Kernels are timed in a second run of the same request, since
timing each of them slows the rounds down.
"""

from __future__ import annotations

from typing import Any

from outrider.api.llm import LLM
from outrider.api.profile import kernel_times
from outrider.api.result import GenerationResult
from outrider.bench.provenance import provenance
from outrider.cli.output import size, table
from outrider.cli.session import run_record
from outrider.core.settings import Resolved


def round_profile(llm: LLM, result: GenerationResult, resolved: Resolved) -> dict[str, Any]:
    """The profile of `result`, with everything that is needed to repeat it."""
    metadata = {"seed": resolved.sampling().seed, **run_record(llm, resolved)}
    return result.profile(metadata | {"machine": provenance()})


def kernel_profile(llm: LLM, prompt: str, resolved: Resolved) -> dict[str, dict[str, float]]:
    """Calls and milliseconds of every kernel in another run of `prompt`, the slowest first."""
    with kernel_times(llm) as timers:
        llm.generate([prompt], resolved.sampling())
    slowest = sorted(timers.summary().items(), key=lambda item: -item[1])
    return {
        name: {"num_calls": timers.count(name), "total_ms": round(total, 6)}
        for name, total in slowest
    }


def profile_text(profile: dict[str, Any]) -> str:
    """What a person wants to see first."""
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
        table(stages, header=("stage", "total ms", "mean", "std")),
        table(kernels, header=("kernel", "total ms", "of a second run")),
        f"peak memory: {', '.join(held)}",
    ]
    if histogram:
        rounds = ", ".join(f"{kept}: {number}" for kept, number in enumerate(histogram))
        lines.append(f"rounds by drafts accepted: {rounds}")
    return "\n".join(lines)
