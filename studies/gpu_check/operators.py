"""Every Triton operator against its definition in PyTorch, and whether a row's bits are its own.

On a CPU the kernels run in Triton's interpreter, which checks their logic at tiny sizes.

Shapes:  N = rows, I = inputs, O = outputs, D = head or hidden size, E = fused heads, F = FFN size,
         G = key/value heads, S = slots, V = vocabulary, B = sequences, X = rows of each.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from gpu_check.setting import Setting, cell, check
from torch import Tensor

from outrider.core.rng import RoundKeys
from outrider.kernels.plan import PackedPlan
from outrider.kernels.reference import pointwise
from outrider.kernels.reference.attention import TorchAttention
from outrider.kernels.reference.linear import TorchLinear, definition, pack_plain
from outrider.plugins.gpu.rounds.build import torch_distributions
from outrider.plugins.gpu.rounds.memory import PageTables, chains_plan
from outrider.plugins.gpu.rounds.sampling import Judged, RoundProbs
from outrider.plugins.gpu.rounds.sampling import Rows as DraftRows

# Largest error as a share of the largest value: what rounding the inputs of a product leaves.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EPS = 1e-5
SIZES = ((4096, 4096), (6144, 4096), (1000, 1536))
Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """An operator of ours and its definition, both over the rows of `x_NI`. `alone` says whether a
    row's bits are its own, where that is not seen by giving fewer rows."""

    name: str
    ours: Rows
    theirs: Rows
    x_NI: Tensor
    alone: Callable[[], bool] | None = None

    def compare(self, setting: Setting, record: dict[str, Any]) -> None:
        actual, wanted = self.ours(self.x_NI).double(), self.theirs(self.x_NI).double()
        error = float((actual - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        by_row = self.alone() if self.alone else _rows_alone(self.ours, self.x_NI)
        name = f"{self.name} in {setting.precision}" if setting.precision else self.name
        cell(record, operator=name, relative_error=error, row_invariant=by_row)
        # NaN compares false with everything, so it never passes.
        near = error <= TOLERANCE[setting.dtype]
        check(record, f"{name} is near its definition", passed=near, detail=f"{error:.1e}")
        check(record, f"{name}: a row's bits are its own", passed=by_row)


def operators(setting: Setting, record: dict[str, Any]) -> None:
    """Operators, and what samples and accepts, each in a case of its own: one that fails does not
    hide the others. Those that read weights or keys also in float16."""
    setting.need_triton()
    half = replace(setting, precision="float16")
    for now in (setting, half):
        ops = _ops(now)
        op, schemes = ops("none"), ("none", "int8", "int4") if now is setting else ("none",)
        cases = chain(_linears(now, ops, schemes), _attention(now, op))
        for case in chain(cases, _pointwise(now, op) if now is setting else ()):
            _guarded(record, case.name, partial(case.compare, now, record))
    for sampler, temperature in product(("token", "block"), (0.0, 0.8)):
        name = f"drafts and verdicts of the {sampler} rule at temperature {temperature}"
        _guarded(record, name, partial(_verdicts, setting, record, name, (sampler, temperature)))


def _guarded(record: dict[str, Any], name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        logging.exception("operator %s", name)
        last = traceback.format_exc().strip().splitlines()[-1]
        check(record, name, passed=False, detail=last)


def _ops(setting: Setting) -> Callable[[str], Any]:
    """Operators by scheme."""
    # Imported here: Triton comes with PyTorch for CUDA alone.
    from outrider.plugins.gpu.kernels.ops import TritonOps
    from outrider.plugins.gpu.kernels.scratch import Workspace

    workspace = Workspace(setting.device)
    return lambda scheme: TritonOps(workspace, scheme)


def _into(width: int, call: Callable[[Tensor, Tensor], object]) -> Rows:
    """What `call` writes for each row: so many columns, which hold NaN before."""

    def work(x_NI: Tensor) -> Tensor:
        out_NO = torch.full((x_NI.shape[0], width), torch.nan, device=x_NI.device)
        call(x_NI, out_NO)
        return out_NO

    return work


def _rows_alone(call: Rows, x_NI: Tensor) -> bool:
    """Whether rows alone, and in every number up to all, have the bits that they have together."""
    together = call(x_NI)
    counts = (1, 2) if x_NI.shape[0] < 8 else range(1, x_NI.shape[0] + 1)
    return all(torch.equal(call(x_NI[:count].contiguous()), together[:count]) for count in counts)


class Numbers:
    """Fresh random tensors of one device."""

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device
        self._generator = torch.Generator(setting.device).manual_seed(5)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(shape, device=self._device, generator=self._generator)
        return made.to(dtype)


def _linears(
    setting: Setting, ops: Callable[[str], Any], schemes: tuple[str, ...]
) -> Iterator[Case]:
    make, dtype = Numbers(setting), setting.dtype
    rows = 3 if setting.quick else 32

    def linear(call: Any, packed: Any, num_out: int) -> Rows:
        return _into(num_out, lambda x_NI, out_NO: call(x_NI, packed, out_NO))

    for num_out, num_in in ((32, 64),) if setting.quick else SIZES:
        weight_OI, x_NI = make(num_out, num_in, dtype=dtype), make(rows, num_in)
        for scheme in schemes:
            op = ops(scheme)
            ours = linear(op.linear, op.pack(weight_OI), num_out)
            if scheme == "none":
                theirs = linear(TorchLinear(dtype), pack_plain(weight_OI), num_out)
            else:
                rule = definition(scheme)
                theirs = linear(rule.linear, rule.pack(weight_OI), num_out)
            yield Case(f"linear {scheme} {num_out}x{num_in}", ours, theirs, x_NI)


def _pointwise(setting: Setting, op: Any) -> Iterator[Case]:
    make = Numbers(setting)
    rows, size = (3, 32) if setting.quick else (32, 4096)
    x_ND, weight_D, bias_D, wide_N2F = (
        make(*shape) for shape in ((rows, size), (size,), (size,), (rows, 2 * size))
    )

    def norm(call: Callable[..., None], *tables: Tensor) -> Rows:
        return _into(size, lambda x_ND, out_ND: call(x_ND, *tables, EPS, out_ND))

    for name, tables in (("rms_norm", (weight_D,)), ("layer_norm", (weight_D, bias_D))):
        ours, theirs = (norm(getattr(side, name), *tables) for side in (op, pointwise))
        yield Case(name, ours, theirs, x_ND)
    for name, x in (("silu_mul", wide_N2F), ("gelu", x_ND)):
        ours, theirs = (_into(size, getattr(side, name)) for side in (op, pointwise))
        yield Case(name, ours, theirs, x)


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
    cos_TH, sin_TH = (make(max(lengths) + rows + 1, head_dim // 2) for _ in range(2))

    def rope(call: Callable[..., None]) -> Rows:
        def work(qkv_NE: Tensor) -> Tensor:
            mine, k, v = qkv_NE.clone(), k_GSD.clone(), v_GSD.clone()
            call(mine, cos_TH, sin_TH, plan, k, v)
            return torch.cat([mine.flatten(), k.float().flatten(), v.float().flatten()])

        return work

    def attend(call: Callable[..., None]) -> Rows:
        scale = head_dim**-0.5
        return _into(
            heads * head_dim, lambda qkv, out_NO: call(qkv, k_GSD, v_GSD, plan, scale, out_NO)
        )

    yield Case(
        "rope_append", rope(op.rope_append), rope(pointwise.rope_append), qkv_NE, lambda: True
    )
    yield Case(
        "attention",
        attend(op.attention),
        attend(TorchAttention(alone=False)),
        qkv_NE,
        lambda: _attended_alone(
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


def _verdicts(setting: Setting, record: dict[str, Any], name: str, what: tuple[str, float]) -> None:
    """All rows as the definition has them, or all but one in a hundred where distributions are sums
    in another order."""
    # Imported here: Triton comes with PyTorch for CUDA alone.
    from outrider.plugins.gpu.rounds.triton import RoundKernels

    sampler, temperature = what
    batch, size = (3, 32) if setting.quick else (256, 4096)
    generator = torch.Generator(setting.device).manual_seed(3)
    logits_BWV = 2 * torch.randn(batch, K + 1, size, device=setting.device, generator=generator)
    noise_BKV = torch.randn(batch, K, size, device=setting.device, generator=generator)
    q_BKV = logits_BWV[:, :K] + 0.5 * noise_BKV
    numbers_B = torch.arange(batch, device=setting.device)
    rows = DraftRows(
        torch.full((batch,), temperature, device=setting.device),
        numbers_B % (K + 1),
        RoundKeys(numbers_B * 7 + 1, numbers_B % 2, numbers_B + 40),
    )
    room_BKV = torch.zeros_like(q_BKV) if temperature else None
    other_BKV = torch.zeros_like(q_BKV) if temperature else None
    kernels = RoundKernels(setting.device)
    ours = _judged(kernels.make_probs(sampler, other_BKV), logits_BWV, q_BKV, rows)
    wanted = _judged(torch_distributions(sampler, K, room_BKV), logits_BWV, q_BKV, rows)
    same_B = (ours[0] == wanted[0]).all(-1)
    same_B &= (ours[1].kept_B == wanted[1].kept_B) & (ours[1].next_B == wanted[1].next_B)
    same = float(same_B.double().mean())
    check(record, name, passed=same >= (0.99 if temperature else 1.0), detail=f"{same:.3f}")


def _judged(
    distributions: RoundProbs, logits_BWV: Tensor, q_BKV: Tensor, rows: DraftRows
) -> tuple[Tensor, Judged]:
    distributions.begin(rows)
    tokens = [distributions.draft(q_BKV[:, node].contiguous(), rows, node)[0] for node in range(K)]
    tokens_BK = torch.stack(tokens, dim=1)
    return tokens_BK, distributions.judge(logits_BWV, tokens_BK, rows)
