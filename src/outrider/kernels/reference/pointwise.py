"""Norms, activations, rotary positions with KV append, and argmax in PyTorch; each row by itself.

On a CPU these operators are row-invariant because they use only additions, products, divisions and
square roots, which IEEE rounds alike in vector and scalar loops. The exponentials of SiLU, GELU
and tanh differ in the last bit between the two kinds of loops, so functions whose names end with
`by_row` make one identical call for each row.

Shapes:  N = packed tokens, E = packed query, key and value heads, D = head size or hidden size,
         F = feed-forward size, T = positions, H = head size / 2, G = key/value heads, S = slots,
         M = logits rows, V = vocabulary, A = all query and key heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.clock import host_ints
from outrider.core.errors import ContractError
from outrider.kernels.plan import PackedPlan, head_dim_of, same_memory, stored


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor) -> None:
    mean_N1 = (x_ND * x_ND).mean(-1, keepdim=True)
    torch.mul(x_ND / (mean_N1 + eps).sqrt_(), weight_D, out=out_ND)


def layer_norm(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out_ND: Tensor) -> None:
    """The RMS norm of the centred row, plus a bias."""
    rms_norm(x_ND - x_ND.mean(-1, keepdim=True), weight_D, eps, out_ND)
    out_ND.add_(bias_D)


def head_norm(
    qkv_NE: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_kv_heads: int, eps: float
) -> None:
    """The RMS norm of each query and key head of `qkv_NE`, in place."""
    heads_NAD = qkv_NE.view(qkv_NE.shape[0], -1, q_weight_D.shape[0])
    num_heads = heads_NAD.shape[1] - 2 * num_kv_heads
    for heads, weight_D in (
        (slice(num_heads), q_weight_D),
        (slice(num_heads, num_heads + num_kv_heads), k_weight_D),
    ):
        part_NAD = heads_NAD[:, heads]
        normed_NAD = torch.empty(part_NAD.shape, device=part_NAD.device)
        rms_norm(part_NAD.flatten(0, 1), weight_D, eps, normed_NAD.flatten(0, 1))
        part_NAD.copy_(normed_NAD)


def silu_mul(gate_up_N2F: Tensor, out_NF: Tensor) -> None:
    size = out_NF.shape[1]
    torch.mul(functional.silu(gate_up_N2F[:, :size]), gate_up_N2F[:, size:], out=out_NF)


def silu_mul_by_row(gate_up_N2F: Tensor, out_NF: Tensor) -> None:
    size = out_NF.shape[1]
    gate_NF = gate_up_N2F[:, :size]
    for gate_F, out_F in zip(gate_NF, out_NF, strict=True):
        out_F.copy_(functional.silu(gate_F))
    out_NF.mul_(gate_up_N2F[:, size:])


def sigmoid_mul(gate_NF: Tensor, x_NF: Tensor) -> None:
    """x * sigmoid(gate), in place."""
    x_NF.mul_(gate_NF.sigmoid())


def sigmoid_mul_by_row(gate_NF: Tensor, x_NF: Tensor) -> None:
    for gate_F, x_F in zip(gate_NF, x_NF, strict=True):
        x_F.mul_(gate_F.sigmoid())


def gelu(x_NF: Tensor, out_NF: Tensor) -> None:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which GPT-2 calls gelu_new."""
    out_NF.copy_(functional.gelu(x_NF, approximate="tanh"))


def gelu_mul(gate_up_N2F: Tensor, out_NF: Tensor) -> None:
    """gelu(gate) * up."""
    size = out_NF.shape[1]
    gelu(gate_up_N2F[:, :size], out_NF)
    out_NF.mul_(gate_up_N2F[:, size:])


def gelu_mul_by_row(gate_up_N2F: Tensor, out_NF: Tensor) -> None:
    size = out_NF.shape[1]
    gelu_by_row(gate_up_N2F[:, :size], out_NF)
    out_NF.mul_(gate_up_N2F[:, size:])


def soft_cap(x_NF: Tensor, cap: float) -> None:
    """cap * tanh(x / cap), in place."""
    x_NF.div_(cap).tanh_().mul_(cap)


def soft_cap_by_row(x_NF: Tensor, cap: float) -> None:
    for x_F in x_NF:
        soft_cap(x_F, cap)


def gelu_by_row(x_NF: Tensor, out_NF: Tensor) -> None:
    for x_F, out_F in zip(x_NF, out_NF, strict=True):
        out_F.copy_(functional.gelu(x_F, approximate="tanh"))


def rotate(heads_NAD: Tensor, cos_TH: Tensor, sin_TH: Tensor, positions_N: Tensor) -> None:
    """Rotate heads in place."""
    cos_N1H, sin_N1H = cos_TH[positions_N, None], sin_TH[positions_N, None]
    low_NAH, high_NAH = torch.chunk(heads_NAD, 2, dim=-1)
    new_low_NAH = low_NAH * cos_N1H - high_NAH * sin_N1H
    new_high_NAH = high_NAH * cos_N1H + low_NAH * sin_N1H
    low_NAH.copy_(new_low_NAH)
    high_NAH.copy_(new_high_NAH)


def rope_append(
    qkv_NE: Tensor, cos_TH: Tensor, sin_TH: Tensor, plan: PackedPlan, k_GSD: Tensor, v_GSD: Tensor
) -> None:
    """Rotate the query and key heads of `qkv_NE` in place; write keys and values to the arena.
    Values that are keys (one memory for both) are not written. An arena without key heads gets
    nothing: rows are queries then."""
    num_kv_heads, head_dim = k_GSD.shape[0], head_dim_of(k_GSD)
    heads_NAD = qkv_NE.view(plan.num_tokens, -1, head_dim)
    rotated_NAD = heads_NAD[:, : heads_NAD.shape[1] - num_kv_heads]
    rotate(rotated_NAD, cos_TH, sin_TH, plan.positions_N)
    kinds = [(k_GSD, rotated_NAD), (v_GSD, heads_NAD)]
    for rows_GSD, new_NAD in kinds[: 1 if same_memory(k_GSD, v_GSD) else 2]:
        new_GND = new_NAD[:, new_NAD.shape[1] - num_kv_heads :].transpose(0, 1)
        rows_GSD[:, plan.slots_N] = stored(new_GND, rows_GSD.dtype)


def argmax(logits_MV: Tensor) -> list[int]:
    """The first largest of each row; -1 for a NaN, PyTorch's largest. A host sync."""
    best_M = logits_MV.argmax(-1)
    is_nan_M = logits_MV.gather(-1, best_M[:, None])[:, 0].isnan()
    return host_ints(best_M.masked_fill(is_nan_M, -1))


# Greedy acceptance of chains on tensors: a draft is accepted as far as it is the target's argmax.
#
#     accept_len = the largest n with draft_i = argmax(logits_i) for all i < n
#
# Of equal logits the first one counts, as everywhere. Row i of the logits is compared with draft
# token i, so the row after the last draft token, which gives the bonus token, is not passed.
# Shorter drafts are padded with -1, which is never accepted.
#
# Shapes:  B = sequences, K = drafted tokens, V = vocabulary, M = logits rows.
def verify_prefix(
    logits_BKV: Tensor,
    draft_ids_BK: Tensor,
    argmax: Callable[[Tensor], list[int]] = argmax,
) -> tuple[Tensor, Tensor]:
    """(accept_len_B, mask_BK): int64 lengths, and which draft tokens are accepted. A host sync."""
    if logits_BKV.shape[:2] != draft_ids_BK.shape:
        raise ContractError("there is a row of logits for each draft id")
    chosen = argmax(logits_BKV.flatten(0, 1)) if draft_ids_BK.numel() else []
    choices_BK = torch.tensor(chosen, device=draft_ids_BK.device).view(draft_ids_BK.shape)
    agrees_BK = (choices_BK == draft_ids_BK) & (draft_ids_BK >= 0)
    accept_len_B = agrees_BK.cumprod(-1).sum(-1)
    position_K = torch.arange(draft_ids_BK.shape[1], device=draft_ids_BK.device)
    return accept_len_B, position_K < accept_len_B[:, None]
