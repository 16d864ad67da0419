"""The embedded heads on this device: greedy text with each of them is that without a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_check.exactness import PROMPTS
from gpu_check.models import let_go
from gpu_check.setting import Setting, check

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

# Nodes of their trees; 0 drafts chains.
HEADS = (("mtp", 0), ("mtp", 8), ("eagle", 0), ("eagle", 8), ("medusa", 8))


def run(setting: Setting, record: dict[str, Any]) -> None:
    common = EngineConfig(
        device=setting.device.type,
        force_reference=not setting.on_cuda,
        batch_size=2,
        context=160,
        drafter="none",
    )
    prompts = PROMPTS[: 1 if setting.quick else 4]
    params = SamplingParams(max_tokens=5 if setting.quick else 64)
    plain = [result.token_ids for result in LLM(config=common).generate(prompts, params)]
    record["cells"] = []
    for drafter, nodes in HEADS[1:3] if setting.quick else HEADS:
        llm = LLM(config=replace(common, drafter=drafter, tree_nodes=nodes, k=3))
        results = llm.generate(prompts, params)
        same = sum(a.token_ids == b for a, b in zip(results, plain, strict=True))
        rounds = sum(result.stats.num_rounds for result in results)
        cell = {"drafter": drafter, "nodes": nodes, "same": same, "of": len(plain)}
        record["cells"].append(
            cell | {"tokens_per_round": sum(len(r.token_ids) for r in results) / max(rounds, 1)}
        )
        if llm.kernels.exact:
            name = f"{drafter} with {nodes} nodes changes no token"
            check(record, name, passed=same == len(plain), detail=f"{same} of {len(plain)}")
        del llm
        let_go()
