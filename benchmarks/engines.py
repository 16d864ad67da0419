"""`outrider bench engines` on both tiers, with bars."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import DRAFT, Report, study, tier_folders

from outrider import EngineConfig, SamplingParams
from outrider.bench.requests import texts_of
from outrider.bench.studies.engines_cells import EngineSample
from outrider.bench.studies.engines_plan import (
    ENGINES,
    LEVELS,
    OFF,
    EnginePlan,
    Levels,
    Prompts,
    levels_named,
)
from outrider.bench.studies.engines_report import (
    LOW_BAR,
    MEDIAN_BAR,
    evidence_record,
    findings,
    meets_bar,
)
from outrider.bench.studies.engines_run import Models, evidence_of, load_engines, run

FEW, MANY, GROWTH_BAR = 1, 8, 4.0
NUM_TO_GROW = 32
MAX_TOKENS = {"a": 64, "b": 32}


@study(tiers=True, tier=("both", "a", "b"), levels="", max_tokens=0, repeats=5)
def engines(options: Namespace, report: Report) -> None:
    """Engines by requests in flight: do lanes, drafting ahead and `auto` pay, and what bounds them?

    The same run as `outrider bench engines` (docs/engines.md), for tier A and tier B: closed loops
    of 0 (one at a time, with rests) to 10 requests in flight, all engines in turns, five repeats.
    Tier A writes 64 tokens a request and tier B 32, if --max-tokens does not say. Bars:

    - plain decoding with 8 in flight: 4 times the throughput of 1, over 32 requests, so that the
      few that end alone count for little;
    - `auto` against the best fixed engine and against speculation off, at every level: a median of
      0.97 and a lower 95 % bound of 0.95.

    The other ratios have no bar: `pdv` over `pd` stands beside the bound of bare reads, `ssd` over
    `single` beside Theorem 7 with the run's own times.
    """
    with tier_folders(options) as folders:
        tiers = [tier for tier in folders if options.tier in ("both", tier)]
        report["tiers"] = [measured(tier, folders[tier], options) for tier in tiers]
    report["bars"] = {"growth_at_8": GROWTH_BAR, "auto_median": MEDIAN_BAR, "auto_low": LOW_BAR}


def plan_of(tier: str, options: Namespace) -> EnginePlan:
    levels: Sequence[int] = (FEW, 2) if options.quick else sorted({*LEVELS, MANY})
    if options.levels:
        levels = levels_named("--levels", options.levels)
    num_requests = 2 if options.quick else 10
    return plan_over(levels, tier, options, num_requests, 1 if options.quick else options.repeats)


def plan_over(
    levels: Sequence[int], tier: str, options: Namespace, num_requests: int, repeats: int
) -> EnginePlan:
    max_tokens = options.max_tokens or (4 if options.quick else MAX_TOKENS[tier])
    asked = Levels(levels=levels, num_requests=num_requests, gap_seconds=0.05)
    prompts = Prompts(texts=texts_of("mixed"), max_tokens=max_tokens)
    return asked.plan(prompts, SamplingParams(), repeats)


def measured(tier: str, folder: Path, options: Namespace) -> dict[str, Any]:
    plan = plan_of(tier, options)
    base = EngineConfig(batch_size=plan.most_in_flight, context=1024, device="cpu")
    with closing(load_engines(ENGINES, Models(str(folder), DRAFT), base)) as loaded:
        samples = [one.sample for visit in run(plan, loaded.contestants) for one in visit]
        evidence = evidence_of(samples, loaded)
    found = findings(evidence)
    num_requests = 2 if options.quick else NUM_TO_GROW
    growth = growth_of(plan_over((FEW, MANY), tier, options, num_requests, 3), folder, base)
    print(f"tier {tier}: plain decoding, {MANY} in flight over {FEW}: {growth}")
    print("\n".join(found))
    # One copy of the published table is enough, and it is in bench/references/.
    record = {k: v for k, v in evidence_record(evidence).items() if k != "reference"}
    bars = {f"{c.role}, {c.level}": meets_bar(c.throughput) for c in evidence.comparisons}
    return {
        "tier": tier,
        "plan": plan.record,
        "growth_at_8": growth,
        "auto_bars": {name: met for name, met in bars.items() if name.startswith("auto")},
        **record,
    }


def growth_of(plan: EnginePlan, folder: Path, base: EngineConfig) -> float | None:
    """Of plain decoding alone, with enough requests to keep MANY in flight."""
    base = replace(base, batch_size=MANY)
    with closing(load_engines((OFF,), Models(str(folder), DRAFT), base)) as loaded:
        return grown([one.sample for visit in run(plan, loaded.contestants) for one in visit])


def grown(samples: Sequence[EngineSample]) -> float | None:
    """Plain throughput with MANY in flight over FEW, as medians over repeats."""
    rates: dict[int, list[float]] = {}
    for sample in samples:
        if sample.engine == OFF and sample.ok and sample.numbers:
            rates.setdefault(sample.level, []).append(sample.numbers.tokens_per_second)
    if FEW not in rates or MANY not in rates:
        return None
    return round(statistics.median(rates[MANY]) / statistics.median(rates[FEW]), 3)
