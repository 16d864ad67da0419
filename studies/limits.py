"""How near plain decoding comes to what this machine can do: one sequence, and many.

Shapes:  N = rows, D = hidden size, E = fused q, k and v, F = FFN size, S = keys, H = heads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from common import (
    Report,
    bare_pass,
    fill,
    first_prompts,
    in_turns,
    kernel_names,
    medians,
    note,
    repeated,
    study,
    target_of,
    tier_folders,
    timed,
)
from options import Options
from torch import Tensor
from torch.nn import functional

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.kernels.native.cpu import hardware_threads
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.doctor.ceilings import BandwidthReader, ceilings
from outrider_lab.models.gemm import GemmShape
from outrider_lab.models.synthetic import write_random

SCHEMES = ("none", "int8", "int4")
CONTEXT = 256
# A turn of tier A is many passes, or each would find its caches filled by others.
PASSES = {"a": 20, "b": 1}
NUM_TOKENS = 9
# So narrow that the weights of all layers stay in a core's own cache.
SHALLOW, DEEP, QUICK_DEEP = 8, 40, 16
HIDDEN_SIZE, FFN_SIZE, HEAD_DIM, QKV_SIZE, VOCAB_SIZE = 32, 64, 16, 64, 256
SHARE_BAR, LAYER_BAR_US = 0.78, 10.0
COUNTS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, BATCH_TOKENS = 64, 24
BATCH_BAR = 8.0


@study(tiers=True)
def limits(options: Options, report: Report) -> None:
    """How near plain decoding comes to what this machine can do.

    - Ceilings: read bandwidth of each cache and of memory, by one thread and by all.
    - Share: a decoding pass against a bare read of the same weights, for tier A and tier B, in
      bfloat16, int8 and int4. A pass is one row at context 256; `round` is a whole round of the
      engine with drafting off. Bare reads (by every number of threads, of which the faster counts),
      passes and the precisions of a tier take turns in one run. Bar: 0.78 of the ceiling for tier B
      in bfloat16.
    - Overhead: microseconds a layer of a native forward over many layers too narrow to take time
      themselves, against the same layers in eager PyTorch. Bar: 10 microseconds.
    """
    repeats = 2 if options.quick else 11
    with tier_folders(options) as folders:
        threads = sorted({1, len(hardware_threads())})
        report["ceilings"] = [asdict(ceiling) for ceiling in ceilings(threads)]
        for found in report["ceilings"]:
            print(f"{found['level']:6} {found['threads']} threads: {found['gb_per_second']} GB/s")
        report["context"] = CONTEXT
        for tier, folder in folders.items():
            times = 1 if options.quick else PASSES[tier]
            for cell in shares(folder, threads, times, repeats):
                note(report, tier=tier, **cell)
        report["layers"] = layer_cost(QUICK_DEEP if options.quick else DEEP, repeats)
        report["bars"] = {"share_b_bfloat16": SHARE_BAR, "us_a_layer": LAYER_BAR_US}


def shares(folder: Path, threads: list[int], times: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A cell a precision; all of them take turns, of so many passes each."""
    contestants: dict[tuple[str, str], Callable[[], float]] = {}
    llms = {scheme: plain_llm(folder, scheme) for scheme in SCHEMES}
    for scheme, llm in llms.items():
        model = target_of(llm)
        fill(model, -1, CONTEXT)
        calls = {"pass": bare_pass(model, -1, 1)}
        calls |= {f"read {n}": partial(BandwidthReader(n).read, model.streamed) for n in threads}
        for name, call in calls.items():
            contestants[scheme, name] = mean_seconds(call, times)
        contestants[scheme, "round"] = partial(round_seconds, llm, times * NUM_TOKENS)
    seconds = medians(in_turns(contestants, repeats))
    for scheme, llm in llms.items():
        num_bytes = sum(tensor.nbytes for tensor in target_of(llm).streamed)
        read = min(seconds[scheme, f"read {number}"] for number in threads)
        spent, spent_a_round = seconds[scheme, "pass"], seconds[scheme, "round"]
        yield {
            "quantise": scheme,
            "kernels": kernel_names(llm.kernels),
            "num_bytes": num_bytes,
            "read_ms": round(1e3 * read, 4),
            "read_gb_per_second": round(num_bytes / read / 1e9, 2),
            "pass_ms": round(1e3 * spent, 4),
            "round_ms": round(1e3 * spent_a_round, 4),
            "share_of_read_ceiling": round(read / spent, 3),
            "share_of_whole_rounds": round(read / spent_a_round, 3),
            "against_bfloat16": round(spent / seconds["none", "pass"], 3),
        }


def plain_llm(folder: Path, scheme: str) -> LLM:
    config = EngineConfig(
        drafter="none", quantise=scheme, batch_size=1, device="cpu", arena_tokens=2 * CONTEXT + 512
    )
    return LLM(folder, config=config)


def mean_seconds(call: Callable[[], object], times: int) -> Callable[[], float]:
    """Of so many warm calls."""
    turn = timed(repeated(call, times))
    return lambda: turn() / (times + 1)


def round_seconds(llm: LLM, num_tokens: int) -> float:
    """Of a round after the first, of a run that writes so many tokens."""
    prompt = [(7 * i) % llm.spec.vocab_size for i in range(CONTEXT)]
    params = SamplingParams(max_tokens=min(num_tokens, CONTEXT), ignore_eos=True)
    times = llm.generate([prompt], params)[0].token_seconds
    return (times[-1] - times[0]) / (len(times) - 1)


def layer_cost(deep: int, repeats: int) -> dict[str, Any]:
    """Microseconds that a layer adds: the difference of two depths over that of their layers.

    PyTorch has one thread here, with which layers so narrow are fastest.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="outrider-narrow-") as folder:
        calls: dict[tuple[str, int], Callable[[], float]] = {}
        for depth in (SHALLOW, deep):
            model = narrow_model(Path(folder) / str(depth), depth)
            fill(model, 0, 32)
            calls["native", depth] = mean_seconds(bare_pass(model, 0, 1), 10)
            calls["eager", depth] = mean_seconds(EagerLayers(depth), 2)
        found = medians(in_turns(calls, repeats))
    a_layer = {
        side: (found[side, deep] - found[side, SHALLOW]) / (deep - SHALLOW)
        for side in ("native", "eager")
    }
    result: dict[str, Any] = {f"{side}_us": round(1e6 * s, 2) for side, s in a_layer.items()}
    sizes = {"hidden_size": HIDDEN_SIZE, "intermediate_size": FFN_SIZE}
    sizes |= {"head_dim": HEAD_DIM, "vocab_size": VOCAB_SIZE}
    result |= {"depths": [SHALLOW, deep], "sizes": sizes}
    result["eager_over_native"] = round(a_layer["eager"] / a_layer["native"], 1)
    print(f"a layer: {result['native_us']} us native, {result['eager_us']} us eager PyTorch")
    return result


def narrow_model(folder: Path, num_layers: int) -> LlamaModel:
    """Layers of random weights, so narrow that their arithmetic takes about a microsecond."""
    shape = GemmShape(
        name="narrow",
        hidden_size=HIDDEN_SIZE,
        ffn_size=FFN_SIZE,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        whole_layers=num_layers,
    )
    write_random(folder, shape, torch.bfloat16, max_tokens=256)
    model = load_model(folder, LoadOptions(capacity=ModelCapacity(num_slots=256), device="cpu"))
    assert isinstance(model, LlamaModel)
    return model


class EagerLayers:
    """The same layers as a lean PyTorch decoder runs them: one row, keys in a cache."""

    def __init__(self, num_layers: int) -> None:
        rng = torch.Generator().manual_seed(0)
        sizes = ((QKV_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE, 2 * HEAD_DIM))
        sizes += ((2 * FFN_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE, FFN_SIZE))
        self._layers = [
            [0.05 * torch.randn(size, generator=rng) for size in sizes] for _ in range(num_layers)
        ]
        self._norm_D = torch.ones(HIDDEN_SIZE)
        self._cos_D, self._sin_D = torch.ones(HEAD_DIM), torch.zeros(HEAD_DIM)
        self._keys = [torch.zeros(2, 1, 1, 64, HEAD_DIM) for _ in range(num_layers)]

    @torch.inference_mode()
    def __call__(self) -> None:
        x_ND = torch.ones(1, HIDDEN_SIZE)
        for (qkv, out, up, down), cache in zip(self._layers, self._keys, strict=True):
            norm_ND = functional.rms_norm(x_ND, x_ND.shape[1:], self._norm_D)
            qkv_NE = functional.linear(norm_ND, qkv)
            q_NE, k_NE, v_NE = torch.split(qkv_NE, [2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], 1)
            q_H1D = self._turned(q_NE.view(1, 2, 1, HEAD_DIM))
            cache[0, :, :, 33:34] = self._turned(k_NE.view(1, 1, 1, HEAD_DIM))
            cache[1, :, :, 33:34] = v_NE.view(1, 1, 1, HEAD_DIM)
            keys, values = cache[0, :, :, :34], cache[1, :, :, :34]
            attended = functional.scaled_dot_product_attention(q_H1D, keys, values, enable_gqa=True)
            x_ND = x_ND + functional.linear(attended.reshape(1, 2 * HEAD_DIM), out)
            norm_ND = functional.rms_norm(x_ND, x_ND.shape[1:], self._norm_D)
            gate_NF, up_NF = functional.linear(norm_ND, up).chunk(2, 1)
            fed_NF = functional.silu(gate_NF) * up_NF
            x_ND = x_ND + functional.linear(fed_NF, down)

    def _turned(self, heads: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        swapped = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        return heads * self._cos_D + swapped * self._sin_D


@study(tiers=True, quantise=SCHEMES)
def batch(options: Options, report: Report) -> None:
    """Throughput of plain decoding by the number of sequences that run at once, on tier B.

    One engine decodes 1, 2, 4, 8 and 16 prompts of one length at once, greedily, each to the same
    number of tokens. `decode` counts from when the last sequence has its first token, so that
    prefill is left out; `whole` counts everything. Numbers of sequences take turns, and figures are
    medians. Bar: 16 sequences decode at 8 times the rate of one.
    """
    repeats, num_tokens = (1, 6) if options.quick else (4, BATCH_TOKENS)
    with tier_folders(options) as folders:
        config = EngineConfig(
            drafter="none",
            batch_size=max(COUNTS),
            quantise=options.quantise,
            device="cpu",
            arena_tokens=max(COUNTS) * 4 * (PROMPT_TOKENS + BATCH_TOKENS),
        )
        llm = LLM(folders["b"], config=config)
        report |= {"kernels": kernel_names(llm.kernels), "quantise": options.quantise}
        report |= {"prompt_tokens": PROMPT_TOKENS, "max_tokens": num_tokens}
        batch_cells(llm, num_tokens, repeats, report)
        report |= {"ratio_at_16": report["cells"][-1]["decode_ratio"], "bar": BATCH_BAR}


def batch_cells(llm: LLM, num_tokens: int, repeats: int, report: Report) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    # Of one length; no two share a beginning.
    ids = [llm.tokenizer.encode(text)[-PROMPT_TOKENS:] for text in first_prompts(None)]
    prompts = [found for found in ids if len(found) == PROMPT_TOKENS][: max(COUNTS)]

    def turn(count: int) -> tuple[float, float]:
        started = perf_counter()
        results = llm.generate(prompts[:count], params)
        seconds = perf_counter() - started
        return decode_rate(results), count * num_tokens / seconds

    found = in_turns({count: partial(turn, count) for count in COUNTS}, repeats)
    decode = {count: statistics.median(rate for rate, _ in turns) for count, turns in found.items()}
    whole = {count: statistics.median(rate for _, rate in turns) for count, turns in found.items()}
    for count in COUNTS:
        note(
            report,
            sequences=count,
            decode_tokens_per_second=round(decode[count], 2),
            whole_tokens_per_second=round(whole[count], 2),
            decode_ratio=round(decode[count] / decode[1], 3),
            whole_ratio=round(whole[count] / whole[1], 3),
        )


def decode_rate(results: Sequence[GenerationResult]) -> float:
    """Tokens a second once every sequence has its first."""
    started = max(result.token_seconds[0] for result in results)
    ended = max(result.token_seconds[-1] for result in results)
    later = sum(second > started for result in results for second in result.token_seconds)
    return later / (ended - started)
