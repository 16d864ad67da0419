"""Every Triton operator against its definition in PyTorch, and whether a row's bits are its own.

On a CPU the kernels run in Triton's interpreter, which checks their logic at tiny sizes.

Shapes:  N = rows, I = inputs, O = outputs, D = head or hidden size, E = fused heads, F = FFN size,
         G = key/value heads, S = slots, V = vocabulary, B = sequences, X = rows of each.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_check.setting import Setting, SkippedError, check
from torch import Tensor

from outrider.core.rng import RoundKeys
from outrider.engine.cuda_graph.build import torch_laws, triton_laws
from outrider.engine.cuda_graph.memory import PageTables, chains_plan
from outrider.engine.cuda_graph.sampling import Judged, RoundLaws, Rows
from outrider.kernels.plan import PackedPlan
from outrider.kernels.reference import pointwise
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.linear import TorchLinear, TorchQuantised, pack_plain

# Largest error as a share of the largest value: what rounding the inputs of a product leaves.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
EPS = 1e-5
Case = tuple[str, Callable[[], Tensor], Callable[[], Tensor], bool]


def operators(setting: Setting, record: dict[str, Any]) -> None:
    """Operators, and what samples and accepts, each in a case of its own."""
    ops = _ops(setting)
    record["cells"] = []
    for case in _cases(setting, ops):
        _guarded(record, case[0], partial(_compare, setting, record, case))
    for name, compare in _sampling_cases(setting):
        _guarded(record, name, partial(_verdict, record, name, compare))


def _guarded(record: dict[str, Any], name: str, work: Callable[[], None]) -> None:
    """An operator that fails does not hide the others."""
    try:
        work()
    except Exception:
        logging.exception("operator %s", name)
        last = traceback.format_exc().strip().splitlines()[-1]
        check(record, name, passed=False, detail=last)


def _verdict(record: dict[str, Any], name: str, compare: Callable[[], bool]) -> None:
    check(record, name, passed=compare())


def _ops(setting: Setting) -> Callable[[str], Any]:
    """Operators by scheme. Imported here: Triton comes with PyTorch for CUDA alone."""
    try:
        from outrider.kernels.triton.ops import TritonOps
        from outrider.kernels.triton.scratch import Workspace
    except ImportError as error:
        raise SkippedError(f"Triton cannot be imported: {error}") from error
    room = Workspace(setting.device)
    return lambda scheme: TritonOps(room, scheme)


def _compare(setting: Setting, record: dict[str, Any], case: Case) -> None:
    name, ours, reference, by_row = case
    actual, wanted = ours().double(), reference().double()
    error = float((actual - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    record["cells"].append({"operator": name, "relative_error": error, "row_invariant": by_row})
    tolerance = TOLERANCE[setting.dtype]
    # NaN compares false with everything, so it never passes.
    check(
        record, f"{name} is near its definition", passed=error <= tolerance, detail=f"{error:.1e}"
    )
    check(record, f"{name}: a row's bits are its own", passed=by_row)


class Numbers:
    """Fresh random tensors of one device."""

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device
        self._generator = torch.Generator(setting.device).manual_seed(5)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(shape, device=self._device, generator=self._generator)
        return made.to(dtype)


def _cases(setting: Setting, ops: Callable[[str], Any]) -> Iterator[Case]:
    yield from _linears(setting, ops)
    yield from _pointwise(setting, ops("none"))
    yield from _attention(setting, ops("none"))


def _linears(setting: Setting, ops: Callable[[str], Any]) -> Iterator[Case]:
    make, dtype = Numbers(setting), setting.dtype
    rows = 3 if setting.quick else 32
    sizes = ((32, 64),) if setting.quick else ((4096, 4096), (6144, 4096), (1000, 1536))
    for num_out, num_in in sizes:
        weight_OI, x_NI = make(num_out, num_in, dtype=dtype), make(rows, num_in)
        for scheme in ("none", "int8", "int4"):
            op = ops(scheme)
            packed = op.pack(weight_OI)
            definition = TorchLinear(dtype) if scheme == "none" else TorchQuantised(scheme)
            plain = pack_plain(weight_OI) if scheme == "none" else definition.pack(weight_OI)
            call = definition if scheme == "none" else definition.linear
            ours = _applied(op.linear, packed, x_NI, num_out)
            theirs = _applied(call, plain, x_NI, num_out)
            name = f"linear {scheme} {num_out}x{num_in}"
            by_row = _rows_alone(
                lambda x, p=packed, o=op, n=num_out: _applied(o.linear, p, x, n)(), x_NI
            )
            yield name, ours, theirs, by_row


def _applied(linear: Any, packed: Any, x_NI: Tensor, num_out: int) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out_NO = torch.full((x_NI.shape[0], num_out), torch.nan, device=x_NI.device)
        linear(x_NI, packed, out_NO)
        return out_NO

    return call


def _rows_alone(call: Callable[[Tensor], Tensor], x_NI: Tensor) -> bool:
    """Whether rows alone, and in every number up to all, have the bits that they have together."""
    together = call(x_NI)
    counts = (1, 2) if x_NI.shape[0] < 8 else range(1, x_NI.shape[0] + 1)
    return all(torch.equal(call(x_NI[:count].contiguous()), together[:count]) for count in counts)


def _pointwise(setting: Setting, op: Any) -> Iterator[Case]:
    make = Numbers(setting)
    rows, size = (3, 32) if setting.quick else (32, 4096)
    x_ND, weight_D, bias_D = make(rows, size), make(size), make(size)

    def norm(call: Callable[..., None], *tables: Tensor) -> Callable[[Tensor], Tensor]:
        def work(x: Tensor) -> Tensor:
            out = torch.full_like(x, torch.nan)
            call(x, *tables, EPS, out)
            return out

        return work

    for name, tables in (("rms_norm", (weight_D,)), ("layer_norm", (weight_D, bias_D))):
        ours, theirs = norm(getattr(op, name), *tables), norm(getattr(pointwise, name), *tables)
        yield _case(name, ours, theirs, x_ND)
    wide_N2F = make(rows, 2 * size)

    def gate(call: Callable[..., None]) -> Callable[[Tensor], Tensor]:
        def work(x: Tensor) -> Tensor:
            out = torch.full((x.shape[0], size), torch.nan, device=x.device)
            call(x, out)
            return out

        return work

    yield _case("silu_mul", gate(op.silu_mul), gate(pointwise.silu_mul), wide_N2F)
    yield _case("gelu", gate(op.gelu), gate(pointwise.gelu), x_ND)


def _case(
    name: str,
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
    x_ND: Tensor,
) -> Case:
    return name, lambda: ours(x_ND), lambda: theirs(x_ND), _rows_alone(ours, x_ND)


def _attention(setting: Setting, op: Any) -> Iterator[Case]:
    """Rotation, append and attention of chains behind contexts of different lengths."""
    make = Numbers(setting)
    lengths = (5, 2) if setting.quick else (256, 1000, 17, 2049)
    heads, kv_heads, head_dim, page = (4, 2, 16, 4) if setting.quick else (32, 8, 64, 32)
    rows, num_seqs = 2 if setting.quick else 8, len(lengths)
    columns = -(-(max(lengths) + rows) // page)
    pages_BP = torch.arange(num_seqs * columns, dtype=torch.int32, device=setting.device)
    pages_BP = pages_BP.view(num_seqs, columns).flip(1).contiguous()
    at_B1 = torch.tensor(lengths, device=setting.device)[:, None]
    positions_BX = at_B1 + torch.arange(rows, device=setting.device)
    plan = _plan(positions_BX, pages_BP, page)
    shape = (kv_heads, num_seqs * columns * page, head_dim)
    k_GSD, v_GSD = make(*shape, dtype=setting.dtype), make(*shape, dtype=setting.dtype)
    qkv_NE = make(num_seqs * rows, (heads + 2 * kv_heads) * head_dim)
    cos_TH, sin_TH = (
        make(max(lengths) + rows + 1, head_dim // 2),
        make(max(lengths) + rows + 1, head_dim // 2),
    )

    def rope(call: Callable[..., None]) -> Callable[[], Tensor]:
        def work() -> Tensor:
            mine, k, v = qkv_NE.clone(), k_GSD.clone(), v_GSD.clone()
            call(mine, cos_TH, sin_TH, plan, k, v)
            return torch.cat([mine.flatten(), k.float().flatten(), v.float().flatten()])

        return work

    def attend(call: Callable[..., None]) -> Callable[[], Tensor]:
        def work() -> Tensor:
            out = torch.full((qkv_NE.shape[0], heads * head_dim), torch.nan, device=setting.device)
            call(qkv_NE, k_GSD, v_GSD, plan, head_dim**-0.5, out)
            return out

        return work

    yield "rope_append", rope(op.rope_append), rope(pointwise.rope_append), True
    yield (
        "attention",
        attend(op.attention),
        attend(TorchAttention(alone=False)),
        _attended_alone(
            op, (qkv_NE, k_GSD, v_GSD), (positions_BX, pages_BP, page), heads * head_dim
        ),
    )


def _attended_alone(
    op: Any, memory: tuple[Tensor, ...], where: tuple[Tensor, Tensor, int], width: int
) -> bool:
    """Whether one sequence's rows have the same bits without the other sequences, row by row."""
    qkv_NE, k_GSD, v_GSD = memory
    positions_BX, pages_BP, page = where
    num_seqs, rows = positions_BX.shape

    def attended(qkv: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        plan = _plan(positions, pages, page)
        out = torch.full((qkv.shape[0], width), torch.nan, device=qkv.device)
        op.attention(qkv, k_GSD, v_GSD, plan, k_GSD.shape[2] ** -0.5, out)
        return out

    together = attended(qkv_NE, positions_BX, pages_BP)
    same = True
    for seq in range(num_seqs):
        for row in range(rows):
            at, one = seq * rows + row, positions_BX[seq : seq + 1, row : row + 1]
            alone = attended(qkv_NE[at : at + 1].contiguous(), one, pages_BP[seq : seq + 1])
            same &= torch.equal(alone[0], together[at])
    return same


def _plan(positions_BX: Tensor, pages_BP: Tensor, page: int) -> PackedPlan:
    tables = PageTables.of(pages_BP, page)
    return chains_plan(torch.zeros_like(positions_BX), positions_BX, tables, page, {})


K = 3


def _sampling_cases(setting: Setting) -> Iterator[tuple[str, Callable[[], bool]]]:
    for sampler in ("token", "block"):
        for temperature in (0.0, 0.8):
            name = f"drafts and verdicts of the {sampler} rule at temperature {temperature}"
            yield name, lambda s=sampler, t=temperature: _same_verdicts(setting, s, t)


def _same_verdicts(setting: Setting, sampler: str, temperature: float) -> bool:
    """All rows, or all but one in a hundred where laws are sums in another order."""
    batch, size = (3, 32) if setting.quick else (256, 4096)
    generator = torch.Generator(setting.device).manual_seed(3)
    logits_BWV = 2 * torch.randn(batch, K + 1, size, device=setting.device, generator=generator)
    noise_BKV = torch.randn(batch, K, size, device=setting.device, generator=generator)
    q_BKV = logits_BWV[:, :K] + 0.5 * noise_BKV
    numbers_B = torch.arange(batch, device=setting.device)
    rows = Rows(
        torch.full((batch,), temperature, device=setting.device),
        numbers_B % (K + 1),
        RoundKeys(numbers_B * 7 + 1, numbers_B % 2, numbers_B + 40),
    )
    room_BKV = torch.zeros_like(q_BKV) if temperature else None
    other_BKV = torch.zeros_like(q_BKV) if temperature else None
    ours = _judged(triton_laws(setting.device, sampler)(other_BKV), logits_BWV, q_BKV, rows)
    wanted = _judged(torch_laws(sampler, K, room_BKV), logits_BWV, q_BKV, rows)
    same_B = (ours[0] == wanted[0]).all(-1)
    same_B &= (ours[1].kept_B == wanted[1].kept_B) & (ours[1].next_B == wanted[1].next_B)
    return float(same_B.double().mean()) >= (0.99 if temperature else 1.0)


def _judged(
    laws: RoundLaws, logits_BWV: Tensor, q_BKV: Tensor, rows: Rows
) -> tuple[Tensor, Judged]:
    laws.begin(rows)
    tokens = [laws.draft(q_BKV[:, node].contiguous(), rows, node)[0] for node in range(K)]
    tokens_BK = torch.stack(tokens, dim=1)
    return tokens_BK, laws.judge(logits_BWV, tokens_BK, rows)
