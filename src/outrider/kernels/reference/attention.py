"""Paged attention in PyTorch, the definition: softmax over exactly the keys that the plan names.

If the pages of a sequence are consecutive, its keys are a view of the arena; otherwise they are
gathered, once a layer for all rows of the sequence. On a CPU every row makes the same series of
calls on the first of those keys, whatever its neighbours. On other devices the rows of a sequence
are one call with a mask, and the nodes of a tree are read from their own slots.

Shapes:  N = packed tokens, n = rows of a call, U = keys of a call, E = packed heads of qkv,
         O = packed query heads, G = key/value heads, R = query heads that share one, M = n times R,
         S = slots, D = head size, H = query heads, T = tail keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.clock import host_ints, host_rows
from outrider.kernels.plan import AttentionKind, PackedPlan, floats

# Elements of float32 in a cache line.
_LINE = 16


@dataclass(frozen=True, slots=True)
class Call:
    """Rows that attend to keys `first` to `stop` of those that were read. `mask_nU` is true where
    row n may see key U; None means that all rows see all keys. Before the call, the last of these
    keys are overwritten with those in the slots `tail_T`, if any."""

    rows_n: Tensor
    first: int
    stop: int
    mask_nU: Tensor | None = None
    tail_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SequenceKeys:
    """The keys to read for the rows of a sequence: the slots `where`, or a slice of slots. The
    order of `calls` is such that no tail overwrites a key that a later call reads."""

    where: Tensor | slice
    calls: Sequence[Call]

    def read(self, x_GSD: Tensor, *, alone: bool) -> Tensor:
        """Keys or values as float32: a view for a slice of float32, else a copy."""
        if isinstance(self.where, slice):
            x_GUD = x_GSD[:, self.where]
        else:
            x_GUD = x_GSD.index_select(1, self.where)
        is_view = isinstance(self.where, slice) and x_GSD.dtype == torch.float32
        x_GUD = floats(x_GUD)
        if not alone:
            return x_GUD
        if x_GUD.shape[2] % _LINE:
            # The last bit of BLAS may depend on a row's offset in a cache line.
            return functional.pad(x_GUD, (0, -x_GUD.shape[2] % _LINE))[..., : x_GUD.shape[2]]
        has_tails = any(call.tail_T is not None for call in self.calls)
        return x_GUD.clone() if is_view and has_tails else x_GUD


class TorchAttention:
    """The operator `attention`. With `alone`, every row is computed by itself. It stores the keys
    of the last plan for each window, as local layers may have a plan of their own."""

    __slots__ = ("_alone", "_known")

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._known: dict[int, tuple[PackedPlan, list[SequenceKeys]]] = {}

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
        known, sequences = self._known.get(kind.window, (None, ()))
        if known is not plan:
            sequences = list(sequence_keys(plan, alone=self._alone, window=kind.window))
            self._known[kind.window] = plan, sequences
        for keys in sequences:
            k_GUD = keys.read(k_GSD, alone=self._alone)
            v_GUD = keys.read(v_GSD, alone=self._alone)
            for call in keys.calls:
                if call.tail_T is not None:
                    tail = slice(call.stop - len(call.tail_T), call.stop)
                    k_GUD[:, tail] = floats(k_GSD.index_select(1, call.tail_T))
                    v_GUD[:, tail] = floats(v_GSD.index_select(1, call.tail_T))
                q_nO = qkv_NE[:, : out_NO.shape[1]].index_select(0, call.rows_n)
                mine = slice(call.first, call.stop)
                mixed_nO = _attend(q_nO, k_GUD[:, mine], v_GUD[:, mine], call.mask_nU, kind)
                out_NO.index_copy_(0, call.rows_n, mixed_nO)


def _attend(
    q_nO: Tensor, k_GUD: Tensor, v_GUD: Tensor, mask_nU: Tensor | None, kind: AttentionKind
) -> Tensor:
    """Attend with rows of queries. A row's query heads that share keys become rows of one head."""
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


@dataclass(frozen=True, slots=True)
class _Row:
    """Row `index` of the pass. It sees the keys at positions `first` to `visible` of its sequence,
    and those in the slots `extra`, which take the positions up to `stop`."""

    index: int
    first: int
    visible: int
    stop: int
    extra: Sequence[int]


def sequence_keys(plan: PackedPlan, *, alone: bool, window: int = 0) -> Iterator[SequenceKeys]:
    """The keys that sequences read; rows see the last `window`, if not 0. A host sync."""
    rows_of: dict[int, list[_Row]] = {}
    for row, seq in zip(_rows(plan, window), host_ints(plan.seq_N), strict=True):
        rows_of.setdefault(seq, []).append(row)
    tables, ask = host_rows(plan.pages_BP), _row_by_row if alone else _in_one_call
    for seq, rows in rows_of.items():
        yield ask(plan, tables[seq], rows)


def _rows(plan: PackedPlan, window: int) -> Iterator[_Row]:
    visible = host_ints(plan.visible_N)
    offsets, extra = [0] * (len(visible) + 1), list[int]()
    if plan.extra_offsets_N1 is not None and plan.extra_slots_E is not None:
        offsets, extra = host_ints(plan.extra_offsets_N1), host_ints(plan.extra_slots_E)
    for index, num_visible in enumerate(visible):
        own = extra[offsets[index] : offsets[index + 1]]
        stop = num_visible + len(own)
        first = max(stop - window, 0) if window else 0
        yield _Row(index, first, num_visible, stop, own[max(first - num_visible, 0) :])


def _row_by_row(plan: PackedPlan, pages: list[int], rows: Sequence[_Row]) -> SequenceKeys:
    """A call for each row, longest first: a tail overwrites keys that only longer rows read."""
    device, rows = plan.seq_N.device, sorted(rows, key=lambda row: -row.visible)
    order_N = torch.tensor([row.index for row in rows], device=device)
    begin, end = min(row.first for row in rows), max(row.stop for row in rows)
    calls: list[Call] = []
    for position, row in enumerate(rows):
        tail_T = torch.tensor(row.extra, device=device) if row.extra else None
        mine = order_N[position : position + 1]
        calls.append(Call(mine, row.first - begin, row.stop - begin, tail_T=tail_T))
    return SequenceKeys(_where(plan, pages, begin, end), calls)


def _in_one_call(plan: PackedPlan, pages: list[int], rows: Sequence[_Row]) -> SequenceKeys:
    size = plan.page_size
    # Nodes come after the text's own keys, where each page has its column (a column without a page
    # has a 0). Before that, the table may have pages that were freed.
    held = min(row.visible for row in rows) // size
    column_of = {page: column for column, page in reversed([*enumerate(pages[held:], held)])}
    nodes = [[column_of[s // size] * size + s % size for s in row.extra] for row in rows]
    begin = min(row.first for row in rows)
    last = [*(row.visible for row in rows), *(position + 1 for own in nodes for position in own)]
    end = max(last)
    sees_nU = np.zeros((len(rows), end - begin), dtype=bool)
    for sees_U, row, positions in zip(sees_nU, rows, nodes, strict=True):
        sees_U[row.first - begin : max(row.visible - begin, 0)] = True
        sees_U[[position - begin for position in positions]] = True
    device = plan.seq_N.device
    mask_nU = None if sees_nU.all() else torch.tensor(sees_nU, device=device)
    rows_n = torch.tensor([row.index for row in rows], device=device)
    keys = Call(rows_n, 0, end - begin, mask_nU)
    return SequenceKeys(_where(plan, pages, begin, end), [keys])


def _where(plan: PackedPlan, pages: list[int], begin: int, end: int) -> Tensor | slice:
    """The slots of positions `begin` to `end` of a sequence; a slice for consecutive pages."""
    size = plan.page_size
    first, last = begin // size, (end - 1) // size
    held = pages[first : last + 1]
    if held == list(range(held[0], held[0] + len(held))):
        start = held[0] * size + begin % size
        return slice(start, start + end - begin)
    positions_U = torch.arange(begin, end)
    slots_U = torch.tensor(pages)[positions_U // size] * size + positions_U % size
    return slots_U.to(plan.pages_BP.device)
