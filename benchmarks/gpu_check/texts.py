"""Greedy text of the embedded pair and of the embedded heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_check import models
from gpu_check.rounds import Bench
from gpu_check.setting import Setting, check

from outrider.api.llm import LLM
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.models.loading import resolve

PROMPTS = (
    "def quicksort(items):",
    "import os\n\nclass Reader:\n    def __init__(self",
    "Question: Tom has 12 apples and gives 5 away.",
    "def fibonacci(n):\n    if n",
    "for line in open(path):",
    "Question: A train travels 60 miles",
    "class Stack:\n",
    "from collections import",
)


def exactness(setting: Setting, record: dict[str, Any]) -> None:
    """Greedy text of the embedded pair: the same with speculation and without, captured and by
    stages.

    Where kernels are not row-invariant a difference is a near-tie that fell the other way; then it
    is counted and told, and no check fails.
    """
    tokenizer = Tokenizer.load(resolve(models.TARGET))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    most = 6 if setting.quick else 96
    depths, batches = ((3,), (2,)) if setting.quick else ((1, 4, 8), (1, 3, 8))
    room = models.room_for(max(batches), 256, rows=max(batches) * 9 + 128, logits=128)
    target = models.embedded(models.TARGET, setting, room)
    draft = models.embedded(models.DRAFT, setting, room)
    params = SamplingParams(max_tokens=most)
    wanted = [(prompt, params) for prompt in prompts[: 2 if setting.quick else len(prompts)]]
    plain = Bench(setting, target, None, k=0, batch=1).run(wanted, captured=False)
    record["exact_kernels"], record["cells"] = target.kernels.exact, []
    for k in depths:
        for batch in batches:
            bench = Bench(setting, target, draft, k=k, batch=batch)
            for captured in (True, False):
                texts = bench.run(wanted, captured=captured)
                same = sum(a == b for a, b in zip(texts, plain, strict=True))
                record["cells"].append(
                    {"k": k, "batch": batch, "captured": captured, "same": same, "of": len(plain)}
                )
    _compare_seeds(setting, record, (target, draft), wanted)
    differing = [cell for cell in record["cells"] if cell["same"] != cell["of"]]
    if target.kernels.exact:
        check(record, "all texts are the same", passed=not differing, detail=str(differing[:3]))
    record["num_differing_cells"] = len(differing)


def _compare_seeds(
    setting: Setting,
    record: dict[str, Any],
    pair: tuple[Any, Any],
    wanted: list[tuple[list[int], SamplingParams]],
) -> None:
    """At temperature > 0 a seed has one text, captured or by stages."""
    params = SamplingParams(max_tokens=wanted[0][1].max_tokens, temperature=0.8, seed=7)
    sampled = [(prompt, params) for prompt, _ in wanted]
    for sampler in ("token", "block"):
        bench = Bench(setting, *pair, k=3, batch=2, sampler=sampler)
        by_stages = bench.run(sampled, captured=False)
        captured = bench.run(sampled)
        same = sum(a == b for a, b in zip(captured, by_stages, strict=True))
        cell = {"k": 3, "batch": 2, "sampler": sampler, "same": same, "of": len(captured)}
        record["cells"].append(cell)


# Nodes of their trees; 0 drafts chains.
HEADS = (("mtp", 0), ("mtp", 8), ("eagle", 0), ("eagle", 8), ("medusa", 8))


def heads(setting: Setting, record: dict[str, Any]) -> None:
    """The embedded heads on this device: greedy text with each of them is that without a draft."""
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
        models.let_go()
