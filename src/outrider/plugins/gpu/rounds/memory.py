"""Static device memory of captured rounds: rows, page tables, reports, and a pass over them.

The host writes a row when a sequence enters; from then on the round itself moves lengths, pending
tokens and remaining counts, and leaves a report of its decisions. A row without remaining tokens
does not change. Idle rows of a bucket repeat row 0: they write the same to the same slots.

Shapes:  B = rows or sequences, S = stop tokens or slots of a page, P = page-table columns,
         T = positions (P times S), K = drafted tokens, R = K + 4 = a row's report: drafts, depth,
         accepted, the target's token, whether logits broke. X = rows of each, N = B times X,
         M = rows whose logits are wanted, V = vocabulary, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.clock import host_rows
from outrider.core.draft import Outcome
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.engine.round import LiveSequence
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedPlan
from outrider.models.decoder import Scratch, Stack, residuals


class StackModel(Stack, Protocol):
    """A decoder whose layers can be run one by one over given memory."""

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
    """Pages of each sequence, and the slot of each position that follows from them. Both int32."""

    pages_BP: Tensor
    slots_BT: Tensor

    @classmethod
    def of(cls, pages_BP: Tensor, page_size: int) -> PageTables:
        within = torch.arange(page_size, dtype=torch.int32, device=pages_BP.device)
        slots_BPS = pages_BP[..., None] * page_size + within
        return cls(pages_BP, slots_BPS.flatten(1))


@dataclass(frozen=True, slots=True)
class StaticPass:
    """A pass over positions that are tensors on the device.

    `PagedKV.plan` walks lists on the host; here slots follow from the page table by arithmetic.
    Rows are chains of equal length. The pass never waits for the host. It stores the states of
    `hidden_layers`. `logits_MV` and `scratch` fit every pass; each call overwrites both.
    """

    model: StackModel
    scratch: Scratch
    logits_MV: Tensor
    page_size: int
    hidden_layers: tuple[int, ...] = ()
    seqs: dict[torch.Size, Tensor] = field(default_factory=dict[torch.Size, Tensor])

    @classmethod
    def of(
        cls,
        model: StackModel,
        *,
        num_rows: int,
        num_logits: int,
        page_size: int,
        hidden_layers: tuple[int, ...] = (),
    ) -> StaticPass:
        """Allocate a pass with memory of its own, in parallel with others outside the graph."""
        like = model.scratch
        own = [_rows_like(getattr(like, item.name), num_rows) for item in fields(like)]
        vocab_size = model.spec.vocab_size
        logits_MV = torch.zeros(num_logits, vocab_size, device=like.x_ND.device)
        return cls(model, Scratch(*own), logits_MV, page_size, hidden_layers)

    def __call__(
        self, tokens_BX: Tensor, positions_BX: Tensor, tables: PageTables, wanted_M: Tensor | None
    ) -> Tensor:
        """Return logits_MV of the packed rows `wanted_M` (None: all of them), a view."""
        plan = chains_plan(tokens_BX, positions_BX, tables, self.page_size, self.seqs)
        return self.run(plan, wanted_M)

    def run(self, plan: PackedPlan, wanted_M: Tensor | None = None) -> Tensor:
        """Return the logits of a plan whose tensors exist already, a view."""
        state, scratch = self.model.state, self.scratch.first(plan.num_tokens)
        self.model.embed(plan, scratch)
        layers = (
            partial(self.model.layer, depth, plan, scratch, kv)
            for depth, kv in enumerate(state.layers)
        )
        hidden_NKD = residuals(layers, scratch.x_ND, self.hidden_layers)
        if hidden_NKD is not None:
            state.keep_hidden(plan.slots_N, hidden_NKD)
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
    """Return a plan of the slots that chains at these positions (int64) read and write.

    Every pass gets a new plan, as kernels may cache results in it; it takes few operators, each a
    launch within the graph. `seqs` caches what depends on shapes alone.
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


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model and the drafter that owns its memory."""

    model: StackModel
    drafter: ModelDrafter


@dataclass(frozen=True, slots=True)
class Entry:
    """The data of a sequence that enters a round. `lag` is 1 if the draft model has yet to read the
    token before the pending one, else 0."""

    seq: LiveSequence
    budget: int
    lag: int
    target_pages: Sequence[int]
    draft_pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RoundMemory:
    """The memory of captured rounds. Every round drafts and stages `k` tokens, even if fewer count.

    A captured round writes keys and values to slots that the host reserved when the sequence
    entered: enough for all that it may ever hold, as its admission assumed. So page tables do not
    change while it runs. The host commits a round's tokens by counting them.
    """

    target: StackModel
    drafting: DraftModel | None
    k: int

    def most_tokens(self, seq: LiveSequence) -> int:
        """Return the number of positions that rounds of `seq` may write."""
        return seq.prompt_length + seq.limit + self.k

    def enter(self, seq: LiveSequence, budget: int) -> Entry:
        """Let the draft model read up to the pending token, as the target has, and reserve pages.

        Raises CapacityError if an arena lacks them.
        """
        target_pages = self._pages(self.target, seq)
        if self.drafting is None:
            return Entry(seq, budget, 0, target_pages)
        unread = self.drafting.drafter.begin(seq.seq_id, seq.tokens)
        draft_pages = self._pages(self.drafting.model, seq)
        return Entry(seq, budget, len(unread) - 1, target_pages, draft_pages)

    def note(self, seq: LiveSequence, outcome: Outcome) -> None:
        """Record that the emitted tokens, except the last, are staged in the target's memory."""
        self.target.state.note_chain(seq.seq_id, (seq.tokens[-1], *outcome.tokens[:-1]))

    def keep_draft(self, seq: LiveSequence, outcome: Outcome) -> None:
        """Record the emitted tokens as read by the draft model, if there is one."""
        if self.drafting is None:
            return
        state = self.drafting.model.state
        start = len(seq.tokens) - len(outcome.tokens)
        # The last of K drafts was never fed.
        ready = start + min(outcome.num_accepted, self.k - 1)
        read = seq.tokens[state.length(seq.seq_id) : ready]
        state.note_chain(seq.seq_id, read)
        state.commit({seq.seq_id: range(len(read))})

    def _pages(self, model: StackModel, seq: LiveSequence) -> Sequence[int]:
        missing = self.most_tokens(seq) - model.state.length(seq.seq_id)
        model.state.reserve({seq.seq_id: missing})
        return tuple(model.state.pages(seq.seq_id))


# No token has this id: it fills unused entries of the table of stop tokens.
_NO_TOKEN = -1
BROKE_TARGET, BROKE_DRAFT = 1, 2


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """Tensors of a round, a row each. `length_B` counts a row's text, pending token included.
    `last_B2` is what the draft model reads first: the pending token, and before it the token that
    it has not read (`lag_B` 1) or the pending token again (`lag_B` 0). `remaining_B` counts tokens
    that a row may still emit. `mirror_B` is the row whose work a row repeats."""

    last_B2: Tensor
    length_B: Tensor
    lag_B: Tensor
    remaining_B: Tensor
    budget_B: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    sample_B: Tensor
    stops_BS: Tensor
    target_pages_BP: Tensor
    target_slots_BT: Tensor
    draft_pages_BP: Tensor
    draft_slots_BT: Tensor
    mirror_B: Tensor
    report_BR: Tensor

    @classmethod
    def allocate(
        cls,
        device: torch.device,
        *,
        num_rows: int,
        num_pages: int,
        page_size: int,
        num_stops: int,
        k: int,
    ) -> RoundBuffers:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            last_B2=ints(2),
            length_B=ints(),
            lag_B=ints(),
            remaining_B=ints(),
            budget_B=ints(),
            temperature_B=ints(dtype=torch.float32),
            top_k_B=ints(),
            top_p_B=ints(dtype=torch.float64),
            min_p_B=ints(dtype=torch.float32),
            seed_B=ints(),
            sample_B=ints(),
            stops_BS=ints(num_stops),
            target_pages_BP=ints(num_pages, dtype=torch.int32),
            target_slots_BT=ints(num_pages * page_size, dtype=torch.int32),
            draft_pages_BP=ints(num_pages, dtype=torch.int32),
            draft_slots_BT=ints(num_pages * page_size, dtype=torch.int32),
            mirror_B=ints(),
            report_BR=ints(k + 4, dtype=torch.int32),
        )

    def first(self, num_rows: int, num_pages: int | None = None) -> RoundBuffers:
        """Return the part that a bucket of `num_rows` with tables of `num_pages` uses; None is all
        pages. Tables of every size are contiguous."""
        most = self.target_pages_BP.shape[1]

        def part(name: str) -> Tensor:
            all_B = getattr(self, name)
            if "pages" not in name and "slots" not in name:
                return all_B[:num_rows]
            size = all_B.shape[1] // most * (num_pages or most)
            return all_B.flatten()[: num_rows * size].view(num_rows, size)

        return RoundBuffers(*(part(item.name) for item in fields(self)))

    def write(self, entries: Sequence[Entry]) -> None:
        """Start rounds of these sequences; idle rows repeat row 0. Does not wait."""
        num_rows, num_stops = self.mirror_B.shape[0], self.stops_BS.shape[1]
        mirror = [*range(len(entries)), *[0] * (num_rows - len(entries))]
        rows = [entries[index] for index in mirror]
        seqs = [entry.seq for entry in rows]
        self._fill("mirror_B", mirror)
        self._fill("last_B2", [(e.seq.tokens[-1 - e.lag], e.seq.tokens[-1]) for e in rows])
        self._fill("lag_B", [entry.lag for entry in rows])
        self._fill("budget_B", [entry.budget for entry in rows])
        self._fill("length_B", [len(seq.tokens) for seq in seqs])
        self._fill("remaining_B", [seq.num_remaining for seq in seqs])
        filters = [filters_of(seq.params) for seq in seqs]
        self._fill("temperature_B", [seq.params.temperature for seq in seqs])
        self._fill("top_k_B", [top_k for top_k, _, _ in filters])
        self._fill("top_p_B", [top_p for _, top_p, _ in filters])
        self._fill("min_p_B", [min_p for _, _, min_p in filters])
        self._fill("seed_B", [seq.params.rng_seed for seq in seqs])
        self._fill("sample_B", [seq.sample for seq in seqs])
        stops = [_padded(sorted(seq.stop_ids), num_stops, _NO_TOKEN) for seq in seqs]
        self._fill("stops_BS", stops)
        self._fill_tables(self.target, [entry.target_pages for entry in rows])
        self._fill_tables(self.draft, [entry.draft_pages for entry in rows])

    @property
    def target(self) -> PageTables:
        return PageTables(self.target_pages_BP, self.target_slots_BT)

    @property
    def draft(self) -> PageTables:
        return PageTables(self.draft_pages_BP, self.draft_slots_BT)

    def _fill_tables(self, tables: PageTables, pages: Sequence[Sequence[int]]) -> None:
        columns = tables.pages_BP.shape[1]
        send([_padded(row[:columns], columns, 0) for row in pages], tables.pages_BP)
        made = PageTables.of(tables.pages_BP, tables.slots_BT.shape[1] // columns)
        tables.slots_BT.copy_(made.slots_BT)

    def _fill(self, name: str, values: Sequence[object]) -> None:
        send(values, getattr(self, name))

    def write_budgets(self, budgets: Sequence[int]) -> None:
        """Write new budgets of the rows in use; idle rows keep theirs."""
        send(budgets, self.budget_B[: len(budgets)])


def send(values: Sequence[object], out: Tensor) -> None:
    """Copy numbers of the host, of the shape of `out`, behind the queued work of its device; from
    pageable memory the copy would wait."""
    pinned = torch.tensor(values, dtype=out.dtype, pin_memory=out.is_cuda)
    out.copy_(pinned, non_blocking=True)


# Top-k, top-p and min-p of a row that keeps all tokens.
KEEPS_ALL = (0, 1.0, 0.0)


def filters_of(params: SamplingParams) -> tuple[int, float, float]:
    """Return a request's top-k, top-p and min-p. Greedy rows keep all tokens."""
    if params.greedy:
        return KEEPS_ALL
    # Integers of a device have 64 bits, and no vocabulary has so many tokens.
    return min(params.top_k, 2**31), params.top_p, params.min_p


def _padded(values: Sequence[int], size: int, filler: int) -> list[int]:
    return [*values, *[filler] * (size - len(values))]


@dataclass(frozen=True, slots=True)
class RowReport:
    """A round's decision for a row, before stop tokens or limits end it."""

    drafted: tuple[int, ...]
    num_kept: int
    next_token: int
    broke: int


def read_reports(report_BR: Tensor, k: int) -> list[RowReport]:
    """Return the rows of a report that was copied to host memory."""
    return [
        RowReport(tuple(row[: row[k]]), row[k + 1], row[k + 2], row[k + 3])
        for row in host_rows(report_BR)
    ]
