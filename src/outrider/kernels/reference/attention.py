"""Paged attention in PyTorch, the definition: softmax over exactly the keys that the plan names.

Rows are taken in groups. A group reads the union of its rows' keys and masks, for each row, the
keys of others. On a CPU a group is one row, so that every row is one identical series of calls on
freshly gathered tensors, whatever its neighbours; elsewhere a group is a sequence.

Shapes:  N = packed tokens, n = rows of a group, U = union of their keys, E = packed heads of qkv,
         O = packed query heads, G = key/value heads, R = query heads that share one, M = n times R,
         S = slots, D = head size, B = sequences, P = page-table columns, H = query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.clock import host_ints
from outrider.kernels.kv_rows import floats
from outrider.kernels.plan import AttentionKind, PackedPlan


@dataclass(frozen=True, slots=True)
class RowGroup:
    """`mask_nU` is true where row n may see key U; None when all see all."""

    rows_n: Tensor
    slots_U: Tensor
    mask_nU: Tensor | None


class TorchAttention:
    """`alone` makes every row its own group. Remembers the groups of the last plan, by window."""

    __slots__ = ("_alone", "_groups", "_plan")

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._plan: PackedPlan | None = None
        self._groups: dict[int, list[RowGroup]] = {}

    def __call__(
        self,
        qkv_NE: Tensor,
        k_GSD: Tensor,
        v_GSD: Tensor,
        plan: PackedPlan,
        how: AttentionKind | float,
        out_NO: Tensor,
    ) -> None:
        kind = AttentionKind.of(how)
        if self._plan is not plan:
            self._plan, self._groups = plan, {}
        groups = self._groups.get(kind.window)
        if groups is None:
            groups = list(row_groups(plan, alone=self._alone, window=kind.window))
            self._groups[kind.window] = groups
        for group in groups:
            q_nO = qkv_NE[:, : out_NO.shape[1]].index_select(0, group.rows_n)
            k_GUD = floats(k_GSD.index_select(1, group.slots_U))
            v_GUD = floats(v_GSD.index_select(1, group.slots_U))
            mixed_nO = _attend(q_nO, k_GUD, v_GUD, group.mask_nU, kind)
            out_NO.index_copy_(0, group.rows_n, mixed_nO)


def _attend(
    q_nO: Tensor,
    k_GUD: Tensor,
    v_GUD: Tensor,
    mask_nU: Tensor | None,
    kind: AttentionKind,
) -> Tensor:
    """A row's query heads that share keys count as further rows of one head."""
    num_rows, (num_kv_heads, _, head_dim) = q_nO.shape[0], k_GUD.shape
    q_GnRD = q_nO.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    num_shared = q_GnRD.shape[2]
    q_GMD = q_GnRD.reshape(num_kv_heads, -1, head_dim)
    mask_MU = None if mask_nU is None else mask_nU.repeat_interleave(num_shared, 0)
    if kind.cap or kind.sinks_H is not None:
        sinks_GM1 = None
        if kind.sinks_H is not None:
            sinks_GM1 = kind.sinks_H.view(num_kv_heads, num_shared).repeat(1, num_rows)[..., None]
        mixed_GMD = _weights(q_GMD @ k_GUD.mT * kind.scale, mask_MU, kind.cap, sinks_GM1) @ v_GUD
    else:
        mixed_GMD = functional.scaled_dot_product_attention(
            q_GMD[None], k_GUD[None], v_GUD[None], attn_mask=mask_MU, scale=kind.scale
        )
    mixed_GnRD = mixed_GMD.view(num_kv_heads, num_rows, num_shared, head_dim)
    return mixed_GnRD.transpose(0, 1).reshape(q_nO.shape)


def _weights(
    scores_GMU: Tensor, mask_MU: Tensor | None, cap: float, sinks_GM1: Tensor | None
) -> Tensor:
    if cap:
        scores_GMU = cap * torch.tanh(scores_GMU / cap)
    if mask_MU is not None:
        scores_GMU = scores_GMU.masked_fill(~mask_MU, -torch.inf)
    if sinks_GM1 is None:
        return scores_GMU.softmax(-1)
    return torch.cat([scores_GMU, sinks_GM1], dim=-1).softmax(-1)[..., :-1]


def row_groups(plan: PackedPlan, *, alone: bool, window: int = 0) -> Iterator[RowGroup]:
    """A host sync: reads the plan's lengths. Rows see the last `window` of their keys, if not 0."""
    visible, seqs = host_ints(plan.visible_N), host_ints(plan.seq_N)
    offsets = [0] * (len(visible) + 1)
    if plan.extra_offsets_N1 is not None:
        offsets = host_ints(plan.extra_offsets_N1)
    rows_of: dict[int, list[int]] = {}
    for row, seq in enumerate(seqs):
        rows_of.setdefault(row if alone else seq, []).append(row)
    for rows in rows_of.values():
        seq, length = seqs[rows[0]], max(visible[row] for row in rows)
        slots = [_page_slots(plan, seq, length)]
        if plan.extra_slots_E is not None:
            slots += [plan.extra_slots_E[offsets[row] : offsets[row + 1]] for row in rows]
        slots_U, mask_nU = torch.cat(slots), None
        if len(rows) > 1:
            counts = [offsets[row + 1] - offsets[row] for row in rows]
            mask_nU = _mask([visible[row] for row in rows], counts, window).to(plan.seq_N.device)
            # What none of them sees is not read: the pages may be another text's by now.
            least = min(visible[row] + num for row, num in zip(rows, counts, strict=True))
            unseen = min(max(least - window, 0), length) if window else 0
            slots_U, mask_nU = slots_U[unseen:], mask_nU[:, unseen:]
        elif window:
            slots_U = slots_U[-window:]
        rows_n = torch.tensor(rows, device=plan.seq_N.device)
        yield RowGroup(rows_n, slots_U, mask_nU)


def _page_slots(plan: PackedPlan, seq: int, length: int) -> Tensor:
    within = torch.arange(plan.page_size, dtype=torch.int32, device=plan.pages_BP.device)
    slots_PS = plan.pages_BP[seq, :, None] * plan.page_size + within
    return slots_PS.flatten()[:length]


def _mask(visible: list[int], num_extra: list[int], window: int) -> Tensor:
    """Row n sees the first `visible[n]` paged keys and its own run of the extra keys; of these the
    last `window`, if not 0."""
    visible_n1, extra_n = torch.tensor(visible)[:, None], torch.tensor(num_extra)
    place_P = torch.arange(max(visible))
    paged_nU = place_P < visible_n1
    owner_E = torch.repeat_interleave(torch.arange(len(visible)), extra_n)
    own_nE = owner_E == torch.arange(len(visible))[:, None]
    if window:
        first_n1 = visible_n1 + extra_n[:, None] - window
        run_E = torch.arange(len(owner_E)) - (extra_n.cumsum(0) - extra_n)[owner_E]
        paged_nU &= place_P >= first_n1
        own_nE &= visible_n1 + run_E >= first_n1
    return torch.cat([paged_nU, own_nE], dim=1)
