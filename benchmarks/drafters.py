"""`outrider bench drafters` on both tiers, with bars."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import DRAFT, TARGET, Report, study, tier_folders

from outrider import EngineConfig, SamplingParams
from outrider.bench.studies.drafters import Plan, Race, pieces_of
from outrider.bench.studies.drafters_lineup import Drafts, contestants_named, line_up
from outrider.bench.studies.drafters_report import (
    EVERYTHING,
    Cell,
    evidence_of,
    evidence_record,
    findings,
    plan_record,
    runner_record,
)
from outrider.bench.workload import ADVERSARIAL, builtin_texts
from outrider.lab.inflate import ModelShape
from outrider.lab.inflate_files import INFLATABLE, write_inflated_heads
from outrider.models.families import LlamaConfig
from outrider.models.hf_config import read_native_config
from outrider.models.loading import resolve

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
def drafters(options: Namespace, report: Report) -> None:
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
    with tier_folders(options) as folders:
        tiers = [tier for tier in folders if options.tier in ("both", tier)]
        report["tiers"] = [measured(tier, folders[tier], options) for tier in tiers]
    report["bars"] = {"lookups_on_adversarial": FLOOR}


def measured(tier: str, folder: Path, options: Namespace) -> dict[str, Any]:
    plan = plan_of(options)
    words = "ngram,model,model+8,eagle,eagle+8,mtp" if options.quick else options.drafters
    base = EngineConfig(batch_size=1, context=1024, device="cpu")
    with (
        drafts_of(tier, folder) as drafts,
        closing(line_up(contestants_named(words), str(folder), drafts, base)) as lineup,
    ):
        samples = [sample for visit in Race(plan, lineup.present).run() for sample in visit]
        evidence = evidence_of(plan, lineup, samples)
        runners = [runner_record(runner) for runner in lineup.runners]
    print(f"tier {tier}:", *findings(evidence), sep="\n")
    return {
        "tier": tier,
        "plan": plan_record(plan),
        "drafters": runners,
        "met": met(evidence.cells),
        **evidence_record(evidence),
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


def plan_of(options: Namespace) -> Plan:
    num_prompts = 1 if options.quick else options.prompts
    domains = ["code", ADVERSARIAL] if options.quick else options.domains.split(",")
    params = SamplingParams(max_tokens=6 if options.quick else options.max_tokens)
    return Plan(
        pieces=pieces_of({name: builtin_texts(name)[:num_prompts] for name in domains}, at_once=1),
        repeats=1,
        params=params,
        by_domain={ADVERSARIAL: replace(params, temperature=1.0, ignore_eos=True)},
    )


def met(cells: Sequence[Cell]) -> dict[str, bool | None]:
    """The bars; None where one side was not measured."""
    found = {(cell.domain, cell.contestant): cell for cell in cells}
    floors = [found[ADVERSARIAL, name] for name in LOOKUPS if (ADVERSARIAL, name) in found]
    ratios = [cell.speedup.value for cell in floors if cell.speedup is not None]

    def tokens(name: str) -> float | None:
        cell = found.get((EVERYTHING, name))
        return None if cell is None else cell.tokens_per_round

    heads = [value for name in HEADS if (value := tokens(name)) is not None]
    model, tree, chain = tokens("model"), tokens("model:8+16"), tokens("model:16")
    return {
        "lookups_on_adversarial": min(ratios) >= FLOOR if ratios else None,
        "heads_over_model": max(heads) > model if heads and model else None,
        "trees_over_chains": tree > chain if tree and chain else None,
    }
