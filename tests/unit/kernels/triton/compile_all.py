# Triton's compiler has no types.
# pyright: basic, reportPrivateImportUsage=false
"""Reads each kernel as launched for typical shapes, and prints the names; no GPU is needed. Its
argument is the number of launches of a kernel that differ, beyond which no more are read."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any, get_args

import torch
from gpu_compile.meta import META, no_weights
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import mangle_type

from outrider.core.rng import Role, RoundKeys
from outrider.kernels.reference.delta import TokenRun
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve
from outrider.models.weights import Placement
from outrider.plugins.gpu.kernels import delta_ops, filters, ops, trees
from outrider.plugins.gpu.kernels import launchers as distributions
from outrider.plugins.gpu.kernels.build import triton_kernels
from outrider.plugins.gpu.kernels.delta_ops import TritonDelta
from outrider.plugins.gpu.kernels.launchers import Chains, ProbRows, TritonProbs, Verdicts
from outrider.plugins.gpu.kernels.ops import TritonOps
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.tiles import Launch
from outrider.plugins.gpu.rounds.program import EagerLauncher, GraphCache, RoundSizes
from outrider.plugins.gpu.rounds.trees import Way
from outrider.plugins.gpu.rounds.triton import RoundKernels
from outrider.plugins.gpu.rounds.verify import Shape, VerifyCache
from unit.kernels.delta_cases import WIDE, Text, layer_of, nothing, some_cells, some_text
from unit.kernels.paged_cases import Heads, Sequenced, chain, make_pass

SEEN: set[tuple[object, ...]] = set()
# Of each kernel, how many sets of types and constants were read, and are at most.
NUM_READ, MOST = Counter[str](), int(sys.argv[1])
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg")
CPU = torch.device("cpu")


def read(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Instead of `launch`: to Triton's intermediate form, which is checked, once for each set of
    types and constants."""
    from triton._C.libtriton import ir

    form = Launch(kernel, grid, arguments, constants).form
    if form in SEEN or NUM_READ[kernel.__name__] >= MOST:
        return
    SEEN.add(form)
    NUM_READ[kernel.__name__] += 1
    backend: Any = make_backend(TARGET)
    options = backend.parse_options(
        {name: constants.pop(name) for name in OPTIONS if name in constants}
    )
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    for name, argument in zip(kernel.arg_names, arguments, strict=False):
        # As a launch does, which makes a constant of a 1 unless it must not.
        signature[name] = mangle_type(argument, name not in kernel.do_not_specialize)
        if signature[name] == "constexpr":
            constants[name] = argument
    source = ASTSource(kernel, signature, constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        TARGET,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    assert module.verify()
    sys.stdout.write(f"{kernel.__name__}\n")


def read_ops() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        weight_OI, x_NI, out_NO = torch.randn(64, 256), torch.randn(2, 256), torch.empty(2, 64)
        for scheme in ("none", "int8", "int4"):
            one = TritonOps(Workspace(CPU), scheme)
            for pack in (one.pack, one.pack_head):
                one.linear(x_NI, pack(weight_OI.to(dtype)), out_NO, accumulate=True)
        one = TritonOps(Workspace(CPU))
        one.rms_norm(out_NO, x_NI[0], 1e-5, torch.empty(2, 64, dtype=dtype))
        one.layer_norm(out_NO, x_NI[0], x_NI[0], 1e-5, out_NO)
        one.silu_mul(torch.empty(2, 128), out_NO)
        one.gelu(out_NO, out_NO)
        for sequences, heads in (
            ([chain(5, 3)], Heads(8, 2, 64)),
            ([Sequenced(5, (-1, -1))], Heads(8, 1, 64)),
        ):
            case = make_pass(sequences, heads=heads, dtype=dtype)
            arena, table_TH, norm_D = (case.k_GSD, case.v_GSD), x_NI[:, :32], torch.ones(64)
            one.head_norm(case.qkv_NE, norm_D, norm_D, heads.num_kv_heads, 1e-5)
            one.rope_append(case.qkv_NE, table_TH, table_TH, case.plan, *arena)
            out_NO = torch.empty(case.plan.num_tokens, 512)
            one.attention(case.qkv_NE, *arena, case.plan, 1.0, out_NO)
            out_NO = torch.empty(2, 64)


def read_distributions(length: int, size: int) -> None:
    one, place_B = TritonProbs(Workspace(CPU)), torch.zeros(2, dtype=torch.int32)
    p_BWV, q_BKV = torch.empty(2, length + 1, size), torch.empty(2, length, size)
    temperature_B, tokens_BK = torch.ones(2), torch.zeros(2, length).long()
    keys = RoundKeys(place_B.long(), place_B, place_B)
    chains, out = Chains(tokens_BK, place_B), Verdicts(place_B, place_B)
    for temperature in (temperature_B, None):
        p, q = ProbRows(p_BWV, temperature), ProbRows(q_BKV, temperature)
        for drafter in (q, None):
            for block in (True, False):
                one.judge(chains, p, drafter, keys, out, block=block)
        row = ProbRows(q_BKV[:, 0].contiguous(), temperature)
        one.draw(row, keys, 0, Role.DRAFT, place_B)
        one.pick(row, torch.zeros(2, dtype=torch.float64), place_B)
    one.argmax(q_BKV[:, 0].contiguous(), place_B.long())
    one.softmax(q_BKV.view(-1, size), temperature_B, q_BKV)
    share_1, sums_C = torch.ones(1).double(), torch.ones(distributions.num_pieces(size)).double()
    for proposal in (p_BWV[0, 1], 5):
        one.leftover(q_BKV[0, 0], proposal, share_1, p_BWV[0, 0], sums_C)


def read_delta(text: Text) -> None:
    runs = [
        TokenRun(0, (0, None), (None, 0), fold=1),
        TokenRun(2, nothing(1), nothing(1), replayed=(0,)),
    ]
    layer_of(TritonDelta(Workspace(CPU)), text, runs, some_cells(text.shape))


def model_without_data() -> LlamaModel:
    kernels = triton_kernels(META, torch.bfloat16, "none", (), exact=True)
    config = read_native_config(resolve("outrider/embedded-draft"))
    assert isinstance(config, LlamaConfig)
    capacity = ModelCapacity(
        num_slots=512, page_size=4, max_rows=128, max_logits=64, hidden_layers=(2,)
    )
    placement = Placement("no data", torch.bfloat16, META)
    return LlamaModel(
        config, no_weights(torch.bfloat16), kernels=kernels, placement=placement, capacity=capacity
    )


def read_round(k: int, sampler: str) -> None:
    """Every launch of a captured round. It asks the host for no number, so it runs without data."""
    table = GraphCache(
        sizes=RoundSizes(k=k, batch_size=4, page_size=4, num_pages=24, makes_distributions=True),
        target=model_without_data(),
        draft=model_without_data() if k else None,
        launcher=EagerLauncher(),
        make_distributions=partial(RoundKernels(META).make_probs, sampler),
    )
    for rows in (1, 4):
        for sampled, filtered in ((False, False), (True, False), (True, True)):
            table.program(rows, sampled=sampled, filtered=filtered)()


def read_verification(way: Way) -> None:
    """The same of rounds whose drafts the host makes."""
    target, made = model_without_data(), RoundKernels(META).make_trees
    table = VerifyCache(target, (2,), 9, 4, EagerLauncher(), made)
    for rows, width in ((1, 1), (1, 2), (4, 8)):
        for listed, drawn, filtered in ((False, False, False), (True, True, True)):
            some_drawn = drawn and way in ("token", "block") and width > 1
            table.program(Shape(rows, width, 16, way, listed, some_drawn, filtered))()


for module in (ops, distributions, filters, trees, delta_ops):
    vars(module)["launch"] = read
read_ops()
read_delta(some_text(3))
read_delta(some_text(3, WIDE))
read_distributions(3, 9000)
read_distributions(1, 300)
for k, sampler in ((0, "block"), (1, "block"), (3, "block"), (3, "token")):
    read_round(k, sampler)
for way in get_args(Way):
    read_verification(way)
