"""Speculation against what its parts predict, and plain decoding beside a lean peer.

Tier B is the embedded target at the cost of a bigger shape: real text, real acceptance. Tier C is
the true shape with random weights and a coin for each drafted token. In both the draft model is the
embedded one. Predicted is E / (T_draft + T_verify + T_rest): E the mean of emitted tokens a round,
T_draft and T_verify those passes captured and timed alone before, T_rest what a captured round of
the small pair takes beyond its own passes.

Shapes:  D = hidden size, G = KV heads, R = query heads each, H = head size, T = cache positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from gpu_check import models
from gpu_check.rounds import Bench, captured_pass, read, text
from gpu_check.setting import Setting, cell, check, seconds_of
from gpu_check.texts import PROMPTS
from torch import Tensor
from torch.nn import functional

from outrider.api.tokenizer import Tokenizer
from outrider.core.params import SamplingParams
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve
from outrider.plugins.gpu.rounds.program import launcher_for
from outrider.plugins.gpu.rounds.sampling import GreedyProbs, Judged, Rows
from outrider.plugins.gpu.rounds.verdicts import kept_prefix
from outrider.plugins.measure.timers import synced_seconds
from outrider_lab.models.inflate import ModelShape

ALPHA, LEAST = 0.8, 0.95


def speculation(setting: Setting, record: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(resolve(models.TARGET))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[: 1 if setting.quick else 4]]
    most = 6 if setting.quick else 128
    depths = (2,) if setting.quick else (4, 8)
    room = models.room_for(1, 512, rows=160, logits=16)
    draft = models.embedded(models.DRAFT, setting, room)
    rests = {k: _rest_seconds(setting, draft, k) for k in depths}
    for name, tier in product(setting.shapes, ("B", "C")):
        shape, size = setting.shapes[name], draft.spec.vocab_size
        if tier == "B":
            target = models.inflated(shape, setting, room)
        else:
            target = models.random_model(shape, setting, room, vocab_size=size)
        plain = _run(setting, Bench(setting, target, None, k=0, batch=1), prompts, most)
        for k in depths:
            bench = Bench(setting, target, draft, k=k, batch=1)
            if tier == "C":
                bench.make_distributions = lambda _: CoinProbs(ALPHA)
            parts = _parts(setting, bench, rests[k])
            found = _run(setting, bench, prompts, most)
            predicted = found["tokens_per_round"] / (1e-3 * parts["round_ms"])
            share = found["tokens_per_second"] / predicted
            cell(
                record,
                **found,
                **parts,
                shape=name,
                tier=tier,
                k=k,
                weight_bytes=sum(one.nbytes for one in (*target.streamed, *k * draft.streamed)),
                launches=_counts(bench, prompts[0]),
                predicted_tokens_per_second=predicted,
                achieved_of_predicted=share,
                speed_up=found["tokens_per_second"] / plain["tokens_per_second"],
            )
            if setting.on_cuda:
                words = f"tier {tier} {name} at K={k} achieves {LEAST} of what is predicted"
                check(record, words, passed=share >= LEAST, detail=f"{share:.3f}")
        del target, bench
        models.let_go()


def _run(setting: Setting, bench: Bench, prompts: list[list[int]], most: int) -> dict[str, Any]:
    """All prompts one after the other, by the engine. Rates are those of rounds: from one read by
    the host to the next, or from a launch where nothing was in flight."""
    params = SamplingParams(max_tokens=most)
    bench.traces.clear()
    wanted = [(prompt, params) for prompt in prompts]
    started = synced_seconds(setting.device)
    texts = bench.run(wanted)
    seconds = synced_seconds(setting.device) - started
    rounds = [trace for trace in bench.traces if trace.num_emitted]
    emitted = sum(trace.num_emitted for trace in rounds)
    drafted = sum(trace.num_drafted for trace in rounds)
    in_rounds = sum(trace.verify_seconds for trace in rounds)
    return {
        "tokens": sum(map(len, texts)),
        "wall_seconds": seconds,
        "tokens_per_second": emitted / in_rounds,
        "tokens_per_round": emitted / len(rounds),
        "acceptance": sum(trace.num_accepted for trace in rounds) / drafted if drafted else None,
    }


def _parts(setting: Setting, bench: Bench, rest: float) -> dict[str, float]:
    """Milliseconds of a round's parts, each captured and timed alone."""
    assert bench.draft is not None
    verify = _pass_seconds(setting, bench.target, bench.k + 1)
    first = _pass_seconds(setting, bench.draft, 2)
    step = _pass_seconds(setting, bench.draft, 1)
    drafting = first + (bench.k - 1) * step
    parts = {"draft": drafting, "verify": verify, "rest": rest, "round": drafting + verify + rest}
    return {f"{name}_ms": 1e3 * seconds for name, seconds in parts.items()}


def _pass_seconds(setting: Setting, model: LlamaModel, rows: int) -> float:
    context = 32 if setting.quick else 96
    read(model, 0, text(context, model.spec.vocab_size))
    work = captured_pass(model, setting, rows=rows, context=context)
    seconds = seconds_of(work, setting, calls=1 if setting.quick else 8)
    model.state.close(0)
    return seconds


def _counts(bench: Bench, prompt: list[int]) -> dict[str, int]:
    """Kernels that one of its rounds launches."""
    rounds = bench.launches([prompt], SamplingParams(max_tokens=32))
    found = rounds.counts()
    rounds.close()
    return found


def _rest_seconds(setting: Setting, draft: LlamaModel, k: int) -> float:
    """A captured round of the draft model with itself as the target, but for its passes."""
    room = models.room_for(1, 512, rows=160, logits=16)
    target = models.embedded(models.DRAFT, setting, room)
    bench = Bench(setting, target, draft, k=k, batch=1)
    rounds = bench.launches([text(32, draft.spec.vocab_size)], SamplingParams(max_tokens=400))
    rounds.stand_still()
    whole = seconds_of(rounds.launch, setting, calls=setting.rounds)
    rounds.close()
    passes = _pass_seconds(setting, draft, 2) + (k - 1) * _pass_seconds(setting, draft, 1)
    return max(whole - passes - _pass_seconds(setting, target, k + 1), 0.0)


class CoinProbs(GreedyProbs):
    """Greedy, but a drafted token is kept by a coin: acceptance of a given rate, of any model."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self._alpha = alpha

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        judged = super().judge(logits_BWV, tokens_BK, rows)
        place_BK = torch.ones_like(tokens_BK).cumsum(-1)
        # A number of the text's length, as even as a table of random ones.
        spot_BK = (rows.keys.start_B[:, None] * 0.6180339887 + place_BK * 0.7548776662) % 1.0
        kept_B = kept_prefix(spot_BK < self._alpha, rows.depth_B)
        return Judged(kept_B, judged.next_B, judged.broken_B)


LayerStep = Callable[..., Tensor]
CONTEXT, LENGTH = 256, 2048
HEAD = 64


@dataclass(frozen=True, slots=True)
class Layer:
    norms_2D: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    cache_2GTH: Tensor


def peer(setting: Setting, record: dict[str, Any]) -> None:
    kinds: list[tuple[str, LayerStep]] = [("library kernels", layer_step)]
    if setting.on_cuda:
        # Last, for compiling may take what is left of the section's budget.
        kinds.append(("torch.compile", torch.compile(layer_step, dynamic=False)))
    for (kind, layer), (name, shape) in product(kinds, setting.shapes.items()):
        found: dict[str, object] = {}
        try:
            seconds = _seconds(setting, shape, layer)
            found = {"ms": 1e3 * seconds, "tokens_per_second": 1 / seconds}
        except RuntimeError as error:
            logging.exception("peer %s", kind)
            found["refused"] = str(error).splitlines()[0]
        cell(record, shape=name, kind=kind, **found)
        models.let_go()
    record["note"] = "its matrices and output head are those of `plain`, in bfloat16"


def _seconds(setting: Setting, shape: ModelShape, layer: LayerStep) -> float:
    peer = Peer(shape, setting)
    launch = launcher_for(setting.device).make(lambda: peer.step(layer), peer.rewind)
    return seconds_of(launch, setting, calls=setting.rounds)


class Peer:
    """In the manner of gpt-fast: plain PyTorch in bfloat16, a static cache, one CUDA graph, one
    greedy sequence. Every layer goes through torch.compile where that works, and library kernels
    where it does not. It reads as many weights as our model does, one token a step; `position` and
    `token` live on the device."""

    def __init__(self, shape: ModelShape, setting: Setting) -> None:
        head = HEAD if not setting.quick else 32
        width, kv = shape.num_heads * head, shape.num_kv_heads * head
        make = {"device": setting.device, "dtype": setting.dtype}
        length = 64 if setting.quick else LENGTH

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, **make).mul_(0.02)

        self.layers = [
            Layer(
                torch.ones(2, shape.hidden_size, **make),
                weight(width + 2 * kv, shape.hidden_size),
                weight(shape.hidden_size, width),
                weight(2 * shape.ffn_size, shape.hidden_size),
                weight(shape.hidden_size, shape.ffn_size),
                torch.zeros(2, shape.num_kv_heads, length, head, **make),
            )
            for _ in range(shape.num_layers)
        ]
        self.embedding = weight(setting.vocabulary, shape.hidden_size)
        self.output = weight(setting.vocabulary, shape.hidden_size)
        self.norm_D = torch.ones(shape.hidden_size, **make)
        self.token_1 = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self.position_1 = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self.start = 8 if setting.quick else CONTEXT

    def rewind(self) -> None:
        self.position_1.fill_(self.start)

    def step(self, layer: LayerStep) -> None:
        with torch.inference_mode():
            x_1D = self.embedding[self.token_1]
            for one in self.layers:
                x_1D = layer(
                    x_1D, one.norms_2D, one.qkv, one.out, one.gate_up, one.down, one.cache_2GTH,
                    self.position_1,
                )  # fmt: skip
            logits_1V = functional.linear(normed(x_1D, self.norm_D), self.output)
            self.token_1.copy_(logits_1V.argmax(-1))
            # The cache is a ring here, so that a timing may take as many steps as it wants.
            length = self.layers[0].cache_2GTH.shape[2]
            self.position_1.copy_((self.position_1 + 1) % length)


def normed(x_1D: Tensor, weight_D: Tensor) -> Tensor:
    x_1D = x_1D.float()
    return (x_1D * torch.rsqrt(x_1D.square().mean(-1, keepdim=True) + 1e-5)).to(
        weight_D.dtype
    ) * weight_D


def layer_step(  # noqa: PLR0913 torch.compile takes tensors, not objects, without a guard each
    x_1D: Tensor,
    norms_2D: Tensor,
    qkv: Tensor,
    out: Tensor,
    gate_up: Tensor,
    down: Tensor,
    cache_2GTH: Tensor,
    position_1: Tensor,
) -> Tensor:
    _, num_kv, length, head = cache_2GTH.shape
    mixed = functional.linear(normed(x_1D, norms_2D[0]), qkv).view(-1, head)
    q, k, v = mixed[: -2 * num_kv], mixed[-2 * num_kv : -num_kv], mixed[-num_kv:]
    angle = position_1 * torch.arange(1, head // 2 + 1, device=x_1D.device) / head
    q, k = turned(q, angle), turned(k, angle)
    cache_2GTH[:, :, position_1] = torch.stack([k, v])[:, :, None]
    seen = torch.arange(length, device=x_1D.device) <= position_1
    attended = functional.scaled_dot_product_attention(
        q.view(1, num_kv, -1, head),
        cache_2GTH[0][None],
        cache_2GTH[1][None],
        attn_mask=seen[None, None, None],
    )
    x_1D = x_1D + functional.linear(attended.reshape(1, -1), out)
    gate, up = functional.linear(normed(x_1D, norms_2D[1]), gate_up).chunk(2, -1)
    return x_1D + functional.linear(functional.silu(gate) * up, down)


def turned(heads: Tensor, angle: Tensor) -> Tensor:
    low, high = heads.chunk(2, -1)
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
