# Triton's compiler has no types.
# pyright: basic, reportPrivateImportUsage=false
"""Reads each kernel as launched for typical shapes, and prints the names; no GPU is needed."""

from __future__ import annotations

import sys
from typing import Any, get_args

sys.path.insert(0, sys.argv[1])

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

from outrider.core.rng import Role, RoundKeys
from outrider.engine.cuda_graph.build import triton_distributions, triton_trees
from outrider.engine.cuda_graph.program import EagerLauncher, GraphCache, RoundSizes
from outrider.engine.cuda_graph.trees import Way
from outrider.engine.cuda_graph.verify import Shape, VerifyCache
from outrider.kernels import registry
from outrider.kernels.reference.delta import TokenRun
from outrider.kernels.triton import delta_ops, filters, ops, trees
from outrider.kernels.triton import launchers as distributions
from outrider.kernels.triton.delta_ops import TritonDelta
from outrider.kernels.triton.launchers import Chains, ProbRows, TritonProbs, Verdicts
from outrider.kernels.triton.ops import TritonOps
from outrider.kernels.triton.scratch import Workspace
from outrider.models.decoder import Room
from outrider.models.families import LlamaConfig
from outrider.models.hf_config import read_native_config
from outrider.models.llama import LlamaModel
from outrider.models.llama_weights import EMBEDDING
from outrider.models.loading import resolve
from outrider.models.weights import Placement, Weights
from unit.kernels.delta_cases import WIDE, Text, layer_of, nothing, some_cells, some_text
from unit.kernels.paged_cases import Heads, Sequenced, chain, make_pass

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
SEEN: set[tuple[object, ...]] = set()
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg")
CPU, META = torch.device("cpu"), torch.device("meta")


def type_of(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def read(kernel: Any, _: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Instead of `launch`: to Triton's intermediate form, which is checked, once for each set of
    types and constants."""
    from triton._C.libtriton import ir

    form = (kernel.__name__, *map(type_of, arguments), *constants.items())
    form += tuple(one == 1 for one in arguments if type(one) is int)
    if form in SEEN:
        return
    SEEN.add(form)
    backend: Any = make_backend(TARGET)
    options = backend.parse_options(
        {name: constants.pop(name) for name in OPTIONS if name in constants}
    )
    names = kernel.arg_names
    signature = dict(zip(names, map(type_of, arguments), strict=False))
    signature |= dict.fromkeys(names[len(arguments) :], "constexpr")
    for name, argument in zip(names, arguments, strict=False):
        # What a launch does with a 1, unless it is told not to.
        if type(argument) is int and argument == 1 and name not in kernel.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
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
    kernels = registry._triton(META, torch.bfloat16, "none", (), exact=True)
    config = read_native_config(resolve("outrider/embedded-draft"))
    assert isinstance(config, LlamaConfig)
    room = Room(num_slots=512, page_size=4, max_rows=128, max_logits=64, hidden_layers=(2,))
    place = Placement("no data", torch.bfloat16, META)
    return LlamaModel(config, NoData(), kernels=kernels, place=place, room=room)


def read_round(k: int, sampler: str) -> None:
    """Every launch of a captured round. It asks the host for no number, so it runs without data."""
    table = GraphCache(
        sizes=RoundSizes(k=k, batch_size=4, page_size=4, num_pages=24, makes_distributions=True),
        target=model_without_data(),
        draft=model_without_data() if k else None,
        launcher=EagerLauncher(),
        make_distributions=triton_distributions(META, sampler),
    )
    for rows in (1, 4):
        for sampled, filtered in ((False, False), (True, False), (True, True)):
            table.program(rows, sampled=sampled, filtered=filtered)()


def read_verification(way: Way) -> None:
    """The same of rounds whose drafts the host makes."""
    target, made = model_without_data(), triton_trees(META)
    table = VerifyCache(target, (2,), 9, 4, EagerLauncher(), made)
    for rows, width in ((1, 1), (1, 2), (4, 8)):
        for listed, drawn, filtered in ((False, False, False), (True, True, True)):
            some_drawn = drawn and way in ("token", "block") and width > 1
            table.program(Shape(rows, width, 16, way, listed, some_drawn, filtered))()


class NoData(Weights):
    """Weights of any name and shape without a value."""

    def __init__(self) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return name == EMBEDDING

    def take(self, name: str, *shape: int, **_: object) -> torch.Tensor:
        del name
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def check_all_taken(self, **_: object) -> None:
        pass


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
