"""Texts of the embedded pair in other settings: float16, int8 and int4, filters, drafting ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_check.models import let_go
from gpu_check.setting import Setting, cell, check_same
from gpu_check.texts import PROMPTS

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

# Engine settings that must not change a token, by what reports call them.
Ways = dict[str, dict[str, Any]]
SPECULATING: Ways = {
    "a draft model": {"drafter": "model", "k": 3},
    "a draft model, by stages": {"drafter": "model", "k": 3, "fused_round": False},
    "EAGLE trees": {"drafter": "eagle", "k": 3, "tree_nodes": 8},
}


def float16(setting: Setting, record: dict[str, Any]) -> None:
    """Greedy text in float16 with drafts is that without. `operators` compares the kernels."""
    _compare(setting, record, "float16", replace(_common(setting), dtype="float16"), SPECULATING)


def quantised(setting: Setting, record: dict[str, Any]) -> None:
    """Greedy text of weights in 8 and in 4 bits with drafts is that without."""
    for scheme in ("int8", "int4"):
        common = replace(_common(setting), quantise=scheme)
        _compare(setting, record, scheme, common, SPECULATING)


def filters(setting: Setting, record: dict[str, Any]) -> None:
    """Sampled text with top-k, top-p and min-p: that of a seed by the rule `match` whatever drafts,
    and by the rule `block` captured or by stages."""
    params = SamplingParams(
        max_tokens=_most(setting), temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=5
    )
    matching = replace(_common(setting), sampler="match")
    _compare(setting, record, "filters, match", matching, SPECULATING, params)
    by_stages = replace(_common(setting), drafter="model", k=3, fused_round=False)
    ways: Ways = {"with captured rounds": {"fused_round": True}}
    _compare(setting, record, "filters, block", by_stages, ways, params)


def ahead(setting: Setting, record: dict[str, Any]) -> None:
    """Greedy text with schedule ssd, which drafts ahead of verdicts: with the draft model on the
    target's device, and on a second one where there is one."""
    drafts = {"drafter": "model", "k": 3, "schedule": "ssd"}
    ways: Ways = {"ssd": drafts}
    if setting.on_cuda and torch.cuda.device_count() > 1:
        ways["ssd, draft model on cuda:1"] = {**drafts, "drafter_device": "cuda:1"}
    else:
        cell(record, what="ssd, draft model on cuda:1", not_run="there is no second CUDA device")
    _compare(setting, record, "ahead", _common(setting), ways)


def _common(setting: Setting) -> EngineConfig:
    return EngineConfig(
        device=setting.device.type,
        force_reference=not setting.on_cuda,
        batch_size=4,
        context=160,
        drafter="none",
    )


def _most(setting: Setting) -> int:
    return 5 if setting.quick else 48


def _compare(
    setting: Setting,
    record: dict[str, Any],
    what: str,
    common: EngineConfig,
    ways: Ways,
    params: SamplingParams | None = None,
) -> None:
    """Texts of each of the `ways` with those of `common`; tokens a round say what bounds a round's
    gain."""
    params = params or SamplingParams(max_tokens=_most(setting))
    plain: Sequence[tuple[int, ...]] = []
    some = dict(list(ways.items())[: 1 if setting.quick else None])
    for name, options in {"plain": {}, **some}.items():
        llm = LLM(config=replace(common, **options))
        results = llm.generate(PROMPTS[: 1 if setting.quick else 4], params)
        texts = [tuple(result.token_ids) for result in results]
        plain = plain or texts
        same = check_same(record, f"{what}: {name}", texts, plain, exact=llm.kernels.exact)
        num_rounds = sum(result.stats.num_rounds for result in results)
        rate = sum(map(len, texts)) / max(num_rounds, 1)
        kinds = {choice.op: choice.name for choice in llm.kernels.choices}
        cell(
            record,
            what=f"{what}: {name}",
            linears=kinds["linear"],
            same=same,
            of=len(plain),
            tokens_per_round=rate,
        )
        del llm
        let_go()
