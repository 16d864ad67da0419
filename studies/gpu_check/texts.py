"""Texts: greedy ones of the embedded pair, of the embedded heads and of hybrids.

Of hybrids also the gated delta rule against its definition, and what it takes: microseconds of one
recurrent layer, for a step of plain decoding, a verification of 8 drafts and a chunk of a prompt,
with each kind of memory. Their text is that of a model of random weights, which soon repeats
itself, so that lookups have drafts to offer.

Shapes:  N = rows, P = outputs of a layer's first product, O = value heads x value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from gpu_check import models
from gpu_check.models import (
    PAGE,
    QUICK_HYBRID,
    RANDOM_HYBRID,
    config_of,
    kernels_of,
    let_go,
    random_hybrid,
)
from gpu_check.rounds import Bench
from gpu_check.setting import Setting, cell, check, check_same, race

from outrider.api.llm import LLM
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.spec import RecurrentCapacity, StateShape
from outrider.kernels.operators import Delta
from outrider.kernels.reference.delta import (
    Cells,
    DeltaWeights,
    InputCell,
    StateCell,
    TokenRun,
    torch_delta,
)
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve
from outrider.models.weights import Placement
from outrider.plugins.hybrids.model import HybridModel

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
    stages. At temperature > 0 a seed has one text, captured or by stages."""
    tokenizer = Tokenizer.load(resolve(models.TARGET))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[: 2 if setting.quick else None]]
    depths, batches = ((3,), (2,)) if setting.quick else ((1, 4, 8), (1, 3, 8))
    capacity = models.room_for(max(batches), 256, rows=max(batches) * 9 + 128, logits=128)
    target = models.embedded(models.TARGET, setting, capacity)
    draft = models.embedded(models.DRAFT, setting, capacity)
    exact = target.kernels.exact
    greedy = SamplingParams(max_tokens=6 if setting.quick else 96)
    wanted = [(prompt, greedy) for prompt in prompts]
    plain = Bench(setting, target, None, k=0, batch=1).run(wanted, captured=False)
    record["exact_kernels"] = exact
    for k, batch, captured in product(depths, batches, (True, False)):
        texts = Bench(setting, target, draft, k=k, batch=batch).run(wanted, captured=captured)
        name = f"texts at K={k} in batches of {batch}, {'captured' if captured else 'by stages'}"
        same = check_same(record, name, texts, plain, exact=exact)
        cell(record, k=k, batch=batch, captured=captured, same=same, of=len(plain))
    seeded = [(prompt, replace(greedy, temperature=0.8, seed=7)) for prompt in prompts]
    for sampler in ("token", "block"):
        bench = Bench(setting, target, draft, k=3, batch=2, sampler=sampler)
        by_stages, texts = bench.run(seeded, captured=False), bench.run(seeded)
        same = check_same(record, f"seeded texts of {sampler}", texts, by_stages, exact=exact)
        cell(record, k=3, batch=2, sampler=sampler, same=same, of=len(texts))
    record["num_differing_cells"] = sum(one["same"] != one["of"] for one in record["cells"])


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
    for drafter, nodes in HEADS[1:3] if setting.quick else HEADS:
        llm = LLM(config=replace(common, drafter=drafter, tree_nodes=nodes, k=3))
        results = llm.generate(prompts, params)
        texts = [result.token_ids for result in results]
        name = f"{drafter} with {nodes} nodes changes no token"
        same = check_same(record, name, texts, plain, exact=llm.kernels.exact)
        rounds = sum(result.stats.num_rounds for result in results)
        rate = sum(map(len, texts)) / max(rounds, 1)
        cell(record, drafter=drafter, nodes=nodes, same=same, of=len(plain), tokens_per_round=rate)
        del llm
        models.let_go()


def lanes(setting: Setting, record: dict[str, Any]) -> None:
    """Eight short texts at once, of which some end by a stop string and others take their pages:
    with captured rounds and with lanes they are those of one lane by stages."""
    common = EngineConfig(
        device=setting.device.type,
        force_reference=not setting.on_cuda,
        batch_size=8,
        context=160,
        k=3,
        fused_round=False,
    )
    prompts = PROMPTS[:2] if setting.quick else 4 * PROMPTS
    most = 3 if setting.quick else 24
    params = [
        SamplingParams(max_tokens=2 + 7 * i % most, stop=("\n",) if i % 2 else ())
        for i in range(len(prompts))
    ]
    plain: list[tuple[int, ...]] = []
    ways = (("single", False), ("single", True), ("pd", True), ("pdv", True))
    for schedule, fused in ways[:: 2 if setting.quick else 1]:
        llm = LLM(config=replace(common, schedule=schedule, fused_round=fused))
        texts = [tuple(result.token_ids) for result in llm.generate(prompts, params)]
        plain = plain or texts
        name = f"texts with schedule {schedule}, {'fused' if fused else 'by stages'}"
        same = check_same(record, name, texts, plain, exact=llm.kernels.exact)
        cell(record, schedule=schedule, fused=fused, same=same, of=len(plain))
        del llm
        let_go()


# What a float32 sum of another order leaves, as a share of the largest value.
TOLERANCE = 1e-4
SMALL = StateShape(
    num_layers=1,
    num_taps=4,
    num_channels=2 * 8 + 2 * 8,
    num_key_heads=1,
    num_heads=2,
    key_dim=8,
    value_dim=8,
)
DRAFTERS = {"none": 0, "ngram": 0, "recycling": 8}
IDS = ((5, 9, 5, 9, 5, 9), (60, 7, 7, 7), (7, 1, 2, 3, 7, 1, 2, 3, 7, 1))


def delta(setting: Setting, record: dict[str, Any]) -> None:
    """The gated delta rule of hybrids against its definition, and what a layer of it takes."""
    setting.need_triton()
    # Imported here: Triton comes with PyTorch for CUDA alone.
    from outrider.plugins.gpu.kernels.delta_ops import TritonDelta
    from outrider.plugins.gpu.kernels.scratch import Workspace
    from outrider.plugins.gpu.kernels.trial import delta_alike

    shape = SMALL if setting.quick else config_of(RANDOM_HYBRID).delta
    rule, rows = TritonDelta(Workspace(setting.device)), 2 if setting.quick else 37
    error = _error(setting, rule, shape, rows)
    name = "the delta rule is near its definition"
    check(record, name, passed=error <= TOLERANCE, detail=f"{error:.1e}")
    if setting.quick:
        # The interpreter takes seconds for what follows; the suite has it do that.
        return
    alike = delta_alike(rule, setting.device, shape, rows)
    check(record, "the delta rule: a row's bits are its own", passed=alike)
    _times(setting, record, rule, shape)


def _error(setting: Setting, ours: Delta, shape: StateShape, rows: int) -> float:
    """Largest difference of output and last state, each as a share of the largest value."""
    first_NP, weights = _layer(setting, shape, rows)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rule in (ours, torch_delta):
        cells = Cells([StateCell.zeros(shape, setting.device)], [])
        out_NO = torch.empty(rows, shape.num_heads * shape.value_dim, device=setting.device)
        runs = (TokenRun(0, (*_nothing(rows - 1), 0), _nothing(rows)),)
        rule(first_NP, weights, runs, cells, 0, out_NO)
        found.append((out_NO, cells.states[0].state_LHKV))
    pairs = zip(*found, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _times(setting: Setting, record: dict[str, Any], ours: Delta, shape: StateShape) -> None:
    cells = Cells(
        [StateCell.zeros(shape, setting.device) for _ in range(32)],
        [InputCell.zeros(shape, setting.device) for _ in range(32)],
    )
    runs = {
        ("decode", "replay"): TokenRun(0, (None,), (0,), 0, (9,), 1),
        ("decode", "ring"): TokenRun(0, (1,), (None,), 0),
        ("verify", "replay"): TokenRun(0, _nothing(9), tuple(range(9)), 0, tuple(range(9, 14)), 1),
        ("verify", "ring"): TokenRun(0, tuple(range(1, 10)), _nothing(9), 0),
        ("prompt", "replay"): TokenRun(0, (*_nothing(127), 1), _nothing(128), 0),
    }
    contestants: dict[str, Callable[[], object]] = {}
    for (what, memory), one in runs.items():
        rows = one.stop
        first_NP, weights = _layer(setting, shape, rows)
        out_NO = torch.empty(rows, shape.num_heads * shape.value_dim, device=setting.device)
        for side, rule in (("triton", ours), ("torch", torch_delta)):
            if side == "triton" or rows == 1:
                call = partial(rule, first_NP, weights, (one,), cells, 0, out_NO)
                contestants[f"{side} {what} {memory}"] = call
    for name, seconds in race(contestants, setting, calls=4).items():
        cell(record, delta=name, us=1e6 * seconds)


def _layer(setting: Setting, shape: StateShape, rows: int) -> tuple[torch.Tensor, DeltaWeights]:
    rng = torch.Generator(setting.device).manual_seed(3)
    heads, channels = shape.num_heads, shape.num_channels
    drawn = partial(torch.randn, device=setting.device, generator=rng)
    weights = DeltaWeights(
        drawn(shape.num_taps, channels),
        drawn(heads).abs(),
        drawn(heads),
        shape.num_key_heads,
        shape.key_dim,
    )
    return drawn(rows, channels + 2 * heads), weights


def _nothing(count: int) -> tuple[None, ...]:
    return (None,) * count


def hybrid(setting: Setting, record: dict[str, Any]) -> None:
    """Greedy text of a hybrid: the same with every drafter and memory as without a draft."""
    plain = None
    for rollback in ("ring", "replay"):
        model = _model(setting, rollback)
        for drafter, nodes in DRAFTERS.items():
            texts, drafted = _run(setting, model, drafter, nodes)
            plain = plain or texts
            name = f"{drafter} with {rollback} changes no token"
            same = check_same(record, name, texts, plain, exact=model.kernels.exact)
            told = {"rollback": rollback, "drafter": drafter, "same": same, "of": len(plain)}
            cell(record, **told, drafted=drafted)
        del model
        let_go()


def _model(setting: Setting, rollback: str) -> HybridModel:
    placement = Placement("random hybrid", setting.dtype, setting.device)
    states = RecurrentCapacity(rollback=rollback, history=8, num_sequences=4, num_checkpoints=2)
    capacity = ModelCapacity(
        num_slots=4096, page_size=PAGE, max_rows=128, max_logits=64, states=states
    )
    return random_hybrid(
        QUICK_HYBRID if setting.quick else RANDOM_HYBRID, kernels_of(setting), placement, capacity
    )[0]


def _run(
    setting: Setting, model: HybridModel, drafter: str, nodes: int
) -> tuple[list[list[int]], int]:
    """Texts of all prompts, and how many tokens were drafted."""
    target = cast("LlamaModel", model)
    bench = Bench(setting, target, None, k=4, batch=2, drafter=drafter, tree_nodes=nodes)
    params = SamplingParams(max_tokens=8 if setting.quick else 64)
    wanted = [(prompt, params) for prompt in IDS[: 1 if setting.quick else None]]
    return bench.run(wanted, captured=False), sum(trace.num_drafted for trace in bench.traces)
