"""One pass of a model over static memory, from tensors alone: no host number, no wait.

Where `PagedKV.plan` walks lists on the host, here positions are tensors on the device and slots
follow from the page table by arithmetic. Rows are chains of equal length, as rounds have them.

Shapes:  B = sequences, X = rows of each, N = B times X, M = rows whose logits are wanted,
         P = page-table columns, S = slots of a page, T = positions = P times S, V = vocabulary,
         D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.plan import PackedPlan
from outrider.kernels.registry import Kernels
from outrider.models.decoder import Scratch, Stack


class StackModel(Stack, Protocol):
    """A decoder whose layers can be run one by one over memory that is handed in."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def state(self) -> PagedKV: ...
    @property
    def kernels(self) -> Kernels: ...
    @property
    def scratch(self) -> Scratch: ...
    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class PageTables:
    """Pages of each sequence and, of each position, the slot that follows. Both int32."""

    pages_BP: Tensor
    slots_BT: Tensor

    @classmethod
    def of(cls, pages_BP: Tensor, page_size: int) -> PageTables:
        within = torch.arange(page_size, dtype=torch.int32, device=pages_BP.device)
        slots_BPS = pages_BP[..., None] * page_size + within
        return cls(pages_BP, slots_BPS.flatten(1))


@dataclass(frozen=True, slots=True)
class StaticPass:
    """`logits_MV` and `scratch` have room for every pass; each call overwrites both."""

    model: StackModel
    scratch: Scratch
    logits_MV: Tensor
    page_size: int
    seqs: dict[torch.Size, Tensor] = field(default_factory=dict[torch.Size, Tensor])

    @classmethod
    def of(cls, model: StackModel, *, num_rows: int, num_logits: int, page_size: int) -> StaticPass:
        """Memory of its own, so that passes outside the graph may run beside it."""
        like = model.scratch
        own = [_rows_like(getattr(like, item.name), num_rows) for item in fields(like)]
        vocab_size = model.spec.vocab_size
        logits_MV = torch.zeros(num_logits, vocab_size, device=like.x_ND.device)
        return cls(model, Scratch(*own), logits_MV, page_size)

    def __call__(
        self, tokens_BX: Tensor, positions_BX: Tensor, tables: PageTables, wanted_M: Tensor | None
    ) -> Tensor:
        """logits_MV of the packed rows `wanted_M` (None: all of them), a view."""
        plan = chains_plan(tokens_BX, positions_BX, tables, self.page_size, self.seqs)
        scratch = self.scratch.first(plan.num_tokens)
        self.model.embed(plan, scratch)
        for depth, kv in enumerate(self.model.state.layers):
            self.model.layer(depth, plan, scratch, kv)
        x_MD, norm_MD = scratch.x_ND, scratch.norm_ND
        if wanted_M is not None:
            part = self.scratch.first(wanted_M.shape[0])
            torch.index_select(x_MD, 0, wanted_M, out=part.norm_ND)
            x_MD, norm_MD = part.norm_ND, part.x_ND
        logits_MV = self.logits_MV[: x_MD.shape[0]]
        self.model.head(x_MD, norm_MD, logits_MV)
        return logits_MV


PassFunction = Callable[[Tensor, Tensor, PageTables, Tensor | None], Tensor]


def chains_plan(
    tokens_BX: Tensor,
    positions_BX: Tensor,
    tables: PageTables,
    page_size: int,
    seqs: dict[torch.Size, Tensor],
) -> PackedPlan:
    """Where chains at these positions (int64) read and write; a new plan, as kernels may remember
    what they worked out for one. `seqs` keeps what depends on shapes alone.

    A plan is made for every pass, so it is few operators: each is a launch within the graph.
    """
    positions_N = _flat(positions_BX)
    if tokens_BX.shape not in seqs:
        seq_B1 = torch.arange(tokens_BX.shape[0], device=tokens_BX.device)[:, None]
        seqs[tokens_BX.shape] = _flat(seq_B1.expand_as(tokens_BX))
    return PackedPlan(
        page_size=page_size,
        tokens_N=_flat(tokens_BX),
        positions_N=positions_N,
        slots_N=_flat(tables.slots_BT.gather(1, positions_BX)),
        seq_N=seqs[tokens_BX.shape],
        visible_N=positions_N + 1,
        pages_BP=tables.pages_BP,
    )


def _flat(tensor_BX: Tensor) -> Tensor:
    return tensor_BX.reshape(-1).to(torch.int32)


def _rows_like(buffer: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, buffer.shape[1], dtype=buffer.dtype, device=buffer.device)
