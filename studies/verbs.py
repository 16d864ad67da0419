"""`outrider bench engines` and `outrider bench drafters` on both tiers, with bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import DRAFT, TARGET, Report, study, tier_folders
from options import Options

from outrider import EngineConfig, SamplingParams
from outrider.models.configs import LlamaConfig
from outrider.models.families import read_native_config
from outrider.models.loading import resolve
from outrider_lab.bench.requests import texts_of
from outrider_lab.bench.studies import drafters_report as told
from outrider_lab.bench.studies.drafters import Race, RacePlan, pieces_of
from outrider_lab.bench.studies.drafters_lineup import Drafts, contestants_named, line_up
from outrider_lab.bench.studies.engines_cells import EngineSample
from outrider_lab.bench.studies.engines_plan import (
    ENGINES,
    LEVELS,
    OFF,
    EnginePlan,
    Levels,
    Prompts,
    levels_named,
)
from outrider_lab.bench.studies.engines_report import (
    LOW_BAR,
    MEDIAN_BAR,
    evidence_record,
    findings,
    meets_bar,
)
from outrider_lab.bench.studies.engines_run import Models, evidence_of, load_engines, run
from outrider_lab.bench.workload import ADVERSARIAL, builtin_texts
from outrider_lab.models.inflate import ModelShape
from outrider_lab.models.inflate_files import INFLATABLE, write_inflated_heads

FEW, MANY, GROWTH_BAR = 1, 8, 4.0
NUM_TO_GROW = 32
MAX_TOKENS = {"a": 64, "b": 32}


Measure = Callable[[str, Path, Options], dict[str, Any]]


def of_tiers(options: Options, measured: Measure) -> list[dict[str, Any]]:
    """What was measured of the tiers that were asked for."""
    with tier_folders(options) as folders:
        chosen = [tier for tier in folders if options.tier in ("both", tier)]
        return [measured(tier, folders[tier], options) for tier in chosen]


@study(tiers=True, tier=("both", "a", "b"), levels="", max_tokens=0, repeats=5)
def engines(options: Options, report: Report) -> None:
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
    report["tiers"] = of_tiers(options, engines_of)
    report["bars"] = {"growth_at_8": GROWTH_BAR, "auto_median": MEDIAN_BAR, "auto_low": LOW_BAR}


def plan_of(tier: str, options: Options) -> EnginePlan:
    levels: Sequence[int] = (FEW, 2) if options.quick else sorted({*LEVELS, MANY})
    if options.levels:
        levels = levels_named("--levels", options.levels)
    num_requests = 2 if options.quick else 10
    return plan_over(levels, tier, options, num_requests, 1 if options.quick else options.repeats)


def plan_over(
    levels: Sequence[int], tier: str, options: Options, num_requests: int, repeats: int
) -> EnginePlan:
    max_tokens = options.max_tokens or (4 if options.quick else MAX_TOKENS[tier])
    asked = Levels(levels=levels, num_requests=num_requests, gap_seconds=0.05)
    prompts = Prompts(texts=texts_of("mixed"), max_tokens=max_tokens)
    return asked.plan(prompts, SamplingParams(), repeats)


def engines_of(tier: str, folder: Path, options: Options) -> dict[str, Any]:
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


FLOOR = 0.97
LOOKUPS = ("ngram", "suffix", "lookup")
HEADS = ("eagle", "eagle+16", "mtp", "mtp:2")


@study(
    tiers=True,
    tier=("both", "a", "b"),
    drafters="all,model:8+16,model:16",
    domains="code,maths,echo,adversarial",
    prompts=8,
    max_tokens=64,
)
def drafters(options: Options, report: Report) -> None:
    """Drafters on both tiers: acceptance, tokens a round, share of time, speed-up over plain.

    The same run as `outrider bench drafters` (docs/drafters.md), for tier A and tier B: every
    drafter of this version on the same prompts in turns, so many of each domain. Tier B computes
    what the embedded target does, so that target's draft model drafts for it too; its EAGLE heads
    and MTP block are inflated to the width of the states there, if none lie in the folder of
    `--model` or beside it. Bars:

    - lookups on prompts that repeat nothing: at least 0.97 of plain decoding;
    - trained heads (EAGLE or MTP): more tokens a round than the separate draft model;
    - trees: more tokens a round than chains of as many rows (model:8+16 beside model:16).
    """
    report["tiers"] = of_tiers(options, drafters_of)
    report["bars"] = {"lookups_on_adversarial": FLOOR}


def drafters_of(tier: str, folder: Path, options: Options) -> dict[str, Any]:
    plan = race_of(options)
    words = "ngram,model,model+8,eagle,eagle+8,mtp" if options.quick else options.drafters
    base = EngineConfig(batch_size=1, context=1024, device="cpu")
    with (
        drafts_of(tier, folder) as drafts,
        closing(line_up(contestants_named(words), str(folder), drafts, base)) as lineup,
    ):
        samples = [sample for visit in Race(plan, lineup.present).run() for sample in visit]
        evidence = told.evidence_of(plan, lineup, samples)
        runners = [told.runner_record(runner) for runner in lineup.runners]
    print(f"tier {tier}:", *told.findings(evidence), sep="\n")
    return {
        "tier": tier,
        "plan": told.plan_record(plan),
        "drafters": runners,
        "met": met(evidence.cells),
        **told.evidence_record(evidence),
    }


@contextmanager
def drafts_of(tier: str, folder: Path) -> Generator[Drafts]:
    """What drafts for the target in `folder`; on tier B with the embedded heads at its width."""
    drafts = Drafts.of(str(folder), DRAFT)
    config = read_native_config(folder)
    if tier == "a" or not isinstance(config, LlamaConfig):
        yield drafts
        return
    shape = ModelShape(
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.ffn_size,
    )
    with TemporaryDirectory(prefix="outrider-heads-") as room:
        heads = {kind: Path(room) / kind for kind in INFLATABLE if kind not in drafts.heads}
        for kind, place in heads.items():
            own = resolve(f"{TARGET}-{kind}")
            write_inflated_heads(own, resolve(TARGET), shape, place, torch.bfloat16)
        yield replace(drafts, heads={**drafts.heads, **heads})


def race_of(options: Options) -> RacePlan:
    num_prompts = 1 if options.quick else options.prompts
    domains = ["code", ADVERSARIAL] if options.quick else options.domains.split(",")
    params = SamplingParams(max_tokens=6 if options.quick else options.max_tokens)
    return RacePlan(
        pieces=pieces_of({name: builtin_texts(name)[:num_prompts] for name in domains}, at_once=1),
        repeats=1,
        params=params,
        by_domain={ADVERSARIAL: replace(params, temperature=1.0, ignore_eos=True)},
    )


def met(cells: Sequence[told.DrafterCell]) -> dict[str, bool | None]:
    """The bars; None where one side was not measured."""
    found = {(cell.domain, cell.contestant): cell for cell in cells}
    floors = [found[ADVERSARIAL, name] for name in LOOKUPS if (ADVERSARIAL, name) in found]
    ratios = [cell.speedup.value for cell in floors if cell.speedup is not None]

    def tokens(name: str) -> float | None:
        cell = found.get((told.EVERYTHING, name))
        return None if cell is None else cell.tokens_per_round

    heads = [value for name in HEADS if (value := tokens(name)) is not None]
    model, tree, chain = tokens("model"), tokens("model:8+16"), tokens("model:16")
    return {
        "lookups_on_adversarial": min(ratios) >= FLOOR if ratios else None,
        "heads_over_model": max(heads) > model if heads and model else None,
        "trees_over_chains": tree > chain if tree and chain else None,
    }
