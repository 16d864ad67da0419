"""Passes over a paged arena in which every slot that no token may read holds NaN.

Shapes:  N = packed tokens, G = key/value heads, S = slots, D = head size, E = packed heads,
         T = a token's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.kernels.plan import PackedPlan


@dataclass(frozen=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64

    @property
    def row_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class Pass:
    """`keys[n]` are the slots of token n's keys in logical order."""

    heads: Heads
    plan: PackedPlan
    keys: tuple[tuple[int, ...], ...]
    qkv_NE: Tensor
    k_GSD: Tensor
    v_GSD: Tensor

    def rows(self, rows: Sequence[int]) -> Pass:
        """The same tokens, but only these and in this order."""
        plan, index = self.plan, torch.tensor(rows)
        offsets, slots = None, None
        if plan.extra_offsets_N1 is not None and plan.extra_slots_E is not None:
            old = host_ints(plan.extra_offsets_N1)
            runs = [plan.extra_slots_E[old[row] : old[row + 1]] for row in rows]
            ends = torch.tensor([0, *(len(run) for run in runs)]).cumsum(0)
            offsets, slots = ends.int(), torch.cat(runs)
        plan = PackedPlan(
            plan.page_size,
            plan.tokens_N[index],
            plan.positions_N[index],
            plan.slots_N[index],
            plan.seq_N[index],
            plan.visible_N[index],
            plan.pages_BP,
            offsets,
            slots,
        )
        keys = tuple(self.keys[row] for row in rows)
        return replace(self, plan=plan, keys=keys, qkv_NE=self.qkv_NE[index])

    def poisoned(self) -> Pass:
        """NaN in every slot that this pass does not name."""
        named = torch.tensor(sorted({slot for keys in self.keys for slot in keys}))
        k_GSD, v_GSD = self.k_GSD.clone().fill_(torch.nan), self.v_GSD.clone().fill_(torch.nan)
        k_GSD[:, named], v_GSD[:, named] = self.k_GSD[:, named], self.v_GSD[:, named]
        return replace(self, k_GSD=k_GSD, v_GSD=v_GSD)


@dataclass(frozen=True)
class Sequenced:
    """A sequence of `committed` tokens and new ones: node i hangs from `parents[i]` (or -1)."""

    committed: int
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))


def chain(committed: int, num_new: int) -> Sequenced:
    return Sequenced(committed, tuple(range(-1, num_new - 1)))


def make_pass(
    sequences: Sequence[Sequenced],
    *,
    heads: Heads | None = None,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    seed: int | None = 0,
    as_tree: bool = False,
) -> Pass:
    """`seed` decides where pages lie, None puts those of a sequence in a row; what a token's keys
    hold depends on its place in logic only.

    `as_tree` names the new tokens of chains one by one, as if they were a tree.
    """
    heads = heads or Heads()
    tables = _tables(sequences, page_size, seed)
    num_slots = int(tables.max() + 2) * page_size
    content, random = torch.Generator().manual_seed(1), torch.full
    shape = (2, heads.num_kv_heads, num_slots, heads.head_dim)
    arena = random(shape, torch.nan, dtype=dtype)
    columns: list[tuple[int, int, int, int, list[int]]] = []
    keys: list[tuple[int, ...]] = []
    for index, sequence in enumerate(sequences):
        length = sequence.committed + len(sequence.parents)
        slots = [
            int(tables[index, t // page_size]) * page_size + t % page_size for t in range(length)
        ]
        rows = torch.randn((2, heads.num_kv_heads, length, heads.head_dim), generator=content)
        arena[:, :, torch.tensor(slots, dtype=torch.int64)] = rows.to(dtype)
        listed = as_tree or not sequence.is_chain
        for node in range(len(sequence.parents)):
            path = [slots[sequence.committed + i] for i in sequence.path(node)]
            keys.append((*slots[: sequence.committed], *path))
            visible = sequence.committed + (0 if listed else len(path))
            position = sequence.committed + len(path) - 1
            columns.append((position, path[-1], index, visible, path if listed else []))
    qkv_NE = torch.randn((len(columns), heads.row_size), generator=content)
    return Pass(heads, _plan(columns, tables, page_size), tuple(keys), qkv_NE, arena[0], arena[1])


def _tables(sequences: Sequence[Sequenced], page_size: int, seed: int | None) -> Tensor:
    lengths = [sequence.committed + len(sequence.parents) for sequence in sequences]
    num_columns = max(-(-length // page_size) for length in lengths)
    pages = torch.arange(len(lengths) * num_columns + 3)
    if seed is not None:
        pages = pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))]
    return pages[: len(lengths) * num_columns].view(len(lengths), num_columns).int()


def _plan(
    columns: list[tuple[int, int, int, int, list[int]]], tables: Tensor, page_size: int
) -> PackedPlan:
    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    positions, slots, seqs, visible, extra = zip(*columns, strict=True)
    offsets, extra_slots = None, None
    if any(extra):
        offsets = ints([0, *(len(run) for run in extra)]).cumsum(0).int()
        extra_slots = ints([slot for run in extra for slot in run])
    return PackedPlan(
        page_size,
        ints([0] * len(columns)),
        ints(positions),
        ints(slots),
        ints(seqs),
        ints(visible),
        tables.contiguous(),
        offsets,
        extra_slots,
    )
