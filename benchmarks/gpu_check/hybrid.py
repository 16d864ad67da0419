"""Hybrids: the gated delta rule against its definition, what it takes, and greedy text.

Times are those of one recurrent layer, in microseconds: a step of plain decoding, a verification of
8 drafts and a chunk of a prompt, with each kind of memory. Text is that of a model of random
weights, which soon repeats itself, so that lookups have drafts to offer.

Shapes:  N = rows, P = outputs of a layer's first product, O = value heads x value size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_check.models import (
    PAGE,
    QUICK_HYBRID,
    RANDOM_HYBRID,
    config_of,
    let_go,
    random_hybrid,
)
from gpu_check.rounds import run_all
from gpu_check.setting import Setting, SkippedError, check, race

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.spec import RecurrentCapacity
from outrider.drafters.catalog import LoadedModels
from outrider.engine.build import build_engine
from outrider.kernels.reference.delta import Cells, DeltaWeights, StateShape, TokenRun, torch_delta
from outrider.kernels.registry import Delta, choose
from outrider.models.decoder import Room
from outrider.models.qwen_hybrid import QwenHybridModel
from outrider.models.weights import Placement

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
PROMPTS = ((5, 9, 5, 9, 5, 9), (60, 7, 7, 7), (7, 1, 2, 3, 7, 1, 2, 3, 7, 1))


def hybrid(setting: Setting, record: dict[str, Any]) -> None:
    record["cells"] = []
    _kernels(setting, record)
    _texts(setting, record)


def _kernels(setting: Setting, record: dict[str, Any]) -> None:
    try:
        from outrider.kernels.triton.delta_ops import TritonDelta
        from outrider.kernels.triton.scratch import Workspace
        from outrider.kernels.triton.trial import delta_alike
    except ImportError as error:
        if setting.on_cuda:
            raise SkippedError(f"Triton cannot be imported: {error}") from error
        return
    shape = SMALL if setting.quick else config_of(RANDOM_HYBRID).delta
    delta, rows = TritonDelta(Workspace(setting.device)), 2 if setting.quick else 37
    error = _error(setting, delta, shape, rows)
    name = "the delta rule is near its definition"
    check(record, name, passed=error <= TOLERANCE, detail=f"{error:.1e}")
    if setting.quick:
        # The interpreter takes seconds for what follows; the suite has it do that.
        return
    alike = delta_alike(delta, setting.device, shape, rows)
    check(record, "the delta rule: a row's bits are its own", passed=alike)
    _times(setting, record, delta, shape)


def _error(setting: Setting, delta: Delta, shape: StateShape, rows: int) -> float:
    """Largest difference of output and last state, each as a share of the largest value."""
    first_NP, weights = _layer(setting, shape, rows)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rule in (delta, torch_delta):
        cells = Cells([shape.state_cell(setting.device)], [])
        out_NO = torch.empty(rows, shape.num_heads * shape.value_dim, device=setting.device)
        runs = (TokenRun(0, (*_nothing(rows - 1), 0), _nothing(rows)),)
        rule(first_NP, weights, runs, cells, 0, out_NO)
        found.append((out_NO, cells.states[0].state_LHKV))
    pairs = zip(*found, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _times(setting: Setting, record: dict[str, Any], delta: Delta, shape: StateShape) -> None:
    cells = Cells(
        [shape.state_cell(setting.device) for _ in range(32)],
        [shape.input_cell(setting.device) for _ in range(32)],
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
        for side, rule in (("triton", delta), ("torch", torch_delta)):
            if side == "triton" or rows == 1:
                call = partial(rule, first_NP, weights, (one,), cells, 0, out_NO)
                contestants[f"{side} {what} {memory}"] = call
    for name, seconds in race(contestants, setting, calls=4).items():
        record["cells"].append({"delta": name, "us": 1e6 * seconds})


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


def _texts(setting: Setting, record: dict[str, Any]) -> None:
    """The same with every drafter and memory; the plain one of the ring is what counts."""
    plain = None
    for rollback in ("ring", "replay"):
        model = _model(setting, rollback)
        for drafter, nodes in DRAFTERS.items():
            texts, drafted = _run(setting, model, drafter, nodes)
            plain = plain or texts
            same = sum(a == b for a, b in zip(texts, plain, strict=True))
            cell = {"rollback": rollback, "drafter": drafter, "same": same, "of": len(plain)}
            record["cells"].append(cell | {"drafted": drafted})
            if model.kernels.exact:
                name = f"{drafter} with {rollback} changes no token"
                check(record, name, passed=same == len(plain), detail=f"{same} of {len(plain)}")
        del model
        let_go()


def _model(setting: Setting, rollback: str) -> QwenHybridModel:
    place = Placement("random hybrid", setting.dtype, setting.device)
    kernels = choose(
        device=setting.device, dtype=setting.dtype, force_reference=not setting.on_cuda
    )
    states = RecurrentCapacity(rollback=rollback, history=8, num_sequences=4, num_checkpoints=2)
    room = Room(num_slots=4096, page_size=PAGE, max_rows=128, max_logits=64, states=states)
    return random_hybrid(QUICK_HYBRID if setting.quick else RANDOM_HYBRID, kernels, place, room)[0]


def _run(
    setting: Setting, model: QwenHybridModel, drafter: str, nodes: int
) -> tuple[list[list[int]], int]:
    """Texts of all prompts, and how many tokens were drafted."""
    config = EngineConfig(
        k=4,
        tree_nodes=nodes,
        drafter=drafter,
        batch_size=2,
        page_size=PAGE,
        prefill_chunk=16,
        fused_round=False,
    )
    drafted: list[int] = []
    kernels = model.kernels
    models = LoadedModels(model, None, kernels.argmax, sampling=kernels.sampling)
    engine = build_engine(
        models.resolve(config),
        models,
        num_slots=model.state.num_free_tokens,
        sink=lambda trace: drafted.append(trace.num_drafted),
    )
    params = SamplingParams(max_tokens=8 if setting.quick else 64)
    prompts = PROMPTS[: 1 if setting.quick else len(PROMPTS)]
    return run_all(engine, [(prompt, params) for prompt in prompts]), sum(drafted)
