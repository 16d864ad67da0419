"""The verification of drafts that the host made, as one launch: a pass, verdicts, a report.

The host sends all that a round depends on in one copy: the plan of the pass (the one that the
stages would make), the trees, and the sampling parameters of the rows. Shapes are rounded up, so
that few graphs serve all rounds: rows and nodes to powers of two, page tables to powers of two of
columns. Padding rows repeat row 0; padding nodes hang below real ones and are never judged.

Shapes:  B = rows, K = drafted nodes, W = K + 1, N = B times W, P = page-table columns, E = listed
         keys, V = vocabulary, R = K + 3 = a row's report: path, accepted, the target's token,
         whether logits broke.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.pages import Columns, PageTable
from outrider.core.clock import host_rows
from outrider.core.draft import Draft, Verdict, parents_below
from outrider.core.protocols import StepRow
from outrider.core.rng import RoundKeys
from outrider.core.tree import ROOT, ROW_TILE
from outrider.engine.round import Batch, LiveSequence
from outrider.kernels.plan import PackedPlan
from outrider.plugins.gpu.rounds.memory import KEEPS_ALL, StackModel, StaticPass, filters_of
from outrider.plugins.gpu.rounds.program import Launcher, Mailbox, bucket_of
from outrider.plugins.gpu.rounds.sampling import Filters, Rows
from outrider.plugins.gpu.rounds.shaping import (
    Field,
    num_listed,
    shape_logits,
    shaping_fields,
    write_shaping,
)
from outrider.plugins.gpu.rounds.trees import DRAWN_WAYS, TreeProbs, Way
from outrider.plugins.gpu.rounds.verdicts import TreeDrafts, TreeVerdicts

# (way, K) -> the judge.
MakeTrees: TypeAlias = Callable[[Way, int], TreeProbs]
# The parent of a padding node.
_NOWHERE = ROOT - 1
# Smaller page tables are not worth a graph of their own.
_LEAST_COLUMNS = 16
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that a graph is made for. With `listed`, nodes see keys that are not contiguous;
    with `drawn`, some drafts have distributions; with `filtered`, some rows filter tokens. The
    logits of `num_ids` listed ids of each text change."""

    rows: int
    width: int
    columns: int
    way: Way
    listed: bool
    drawn: bool
    filtered: bool
    num_ids: int = 0


class Fields:
    """Numbers of the host on the device, by name: views of one block that is copied whole. Each
    begins at an address that is aligned for wide loads."""

    def __init__(self, wanted: Mapping[str, Field], device: torch.device) -> None:
        parts: dict[str, tuple[int, Field]] = {}
        end = 0
        for name, (shape, dtype) in wanted.items():
            parts[name] = (end, (shape, dtype))
            end += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=on_cuda)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host: Mapping[str, NDArray[Any]] = {
            name: _view(self._host, *part).numpy() for name, part in parts.items()
        }
        self.device = {name: _view(self._device, *part) for name, part in parts.items()}

    def send(self) -> None:
        """Copy the block after the queued work of the stream, and before what follows."""
        self._device.copy_(self._host, non_blocking=True)


def _view(block: Tensor, start: int, part: Field) -> Tensor:
    shape, dtype = part
    size = int(np.prod(shape)) * dtype.itemsize
    return block[start : start + size].view(dtype).view(shape)


def _fields(shape: Shape) -> dict[str, Field]:
    b, w, n = shape.rows, shape.width, shape.rows * shape.width
    int32, int64 = torch.int32, torch.int64
    # Each row of a table begins at a multiple of the alignment.
    numbers, plan = b + b % 2, -(-n // 4) * 4
    fields: dict[str, Field] = {
        "temperature": ((b,), torch.float32),
        "min_p": ((b,), torch.float32),
        "top_p": ((b,), torch.float64),
        "numbers": ((6, numbers), int64),
        "tokens": ((b, w - 1), int64),
        "parents": ((b, w - 1), int64),
        "depths": ((b, w), int64),
        "plan": ((5, plan), int32),
        "pages": ((b, shape.columns), int32),
    }
    if shape.listed:
        fields |= {"offsets": ((n + 1,), int32), "extra": ((n * w,), int32)}
    if shape.num_ids:
        fields |= shaping_fields(b, w, shape.num_ids)
    return fields


@dataclass(slots=True)
class VerifyProgram:
    """A straight line of operators over `fields`, which hold what the host wrote last."""

    shape: Shape
    fields: Mapping[str, Tensor]
    target: StaticPass
    judge: TreeProbs
    q_BKV: Tensor | None
    report_BR: Tensor
    nodes_K: Tensor

    def __call__(self) -> None:
        with torch.inference_mode():
            self._run()

    def _run(self) -> None:
        fields, shape = self.fields, self.shape
        num_nodes = shape.rows * shape.width
        tokens_N, positions_N, slots_N, seq_N, visible_N = fields["plan"][:, :num_nodes].unbind(0)
        # A new plan each time, as kernels may cache results in it.
        plan = PackedPlan(
            page_size=self.target.page_size,
            tokens_N=tokens_N,
            positions_N=positions_N,
            slots_N=slots_N,
            seq_N=seq_N,
            visible_N=visible_N,
            pages_BP=fields["pages"],
            extra_offsets_N1=fields.get("offsets"),
            extra_slots_E=fields.get("extra"),
        )
        logits_NV = self.target.run(plan)
        numbers_6B = fields["numbers"][:, : shape.rows]
        top_k_B, seed_B, sample_B, start_B, size_B, drawn_B = numbers_6B.unbind(0)
        filters = Filters(top_k_B, fields["top_p"], fields["min_p"]) if shape.filtered else None
        rows = Rows(fields["temperature"], size_B, RoundKeys(seed_B, sample_B, start_B), filters)
        drafts = TreeDrafts(fields["tokens"], fields["parents"], drawn_B != 0, self.q_BKV)
        logits_BWV = logits_NV.view(shape.rows, shape.width, -1)
        if shape.num_ids:
            shape_logits(logits_BWV, fields)
        found, broken_B = self.judge.judge(logits_BWV, drafts, fields["depths"], rows)
        if shape.listed:
            self._move(slots_N.view(shape.rows, shape.width).long(), found)
        numbers = [found.num_accepted_B, found.next_B, broken_B.long()]
        self.report_BR.copy_(torch.cat([found.path_BK, torch.stack(numbers, dim=1)], dim=1))

    def _move(self, slots_BW: Tensor, found: TreeVerdicts) -> None:
        """Move the rows of each accepted path behind the pending token's row, in their order. All
        other copies are of that row to itself, since rows that repeat row 0 must not disturb it."""
        pending_B1, nodes_K = slots_BW[:, :1], self.nodes_K
        kept_BK = nodes_K < found.num_accepted_B[:, None]
        path_BK = found.path_BK.clamp(0, max(nodes_K.shape[0] - 1, 0))
        origin_BK = torch.where(kept_BK, slots_BW[:, 1:].gather(1, path_BK), pending_B1)
        into_BK = torch.where(kept_BK, slots_BW[:, 1:], pending_B1)
        self.target.model.state.copy_rows(origin_BK.flatten(), into_BK.flatten())


@dataclass(slots=True)
class VerifyGraph:
    """A program's memory, and its launch."""

    fields: Fields
    report_BR: Tensor
    q_BKV: Tensor | None
    mailbox: Mailbox
    launch: Callable[[], None] | None = None


@dataclass(slots=True)
class VerifyCache:
    """A cache of the graphs and their memory, each made when first needed. Drafts have at most
    `most` nodes. Passes and distributions of one size share memory."""

    target: StackModel
    hidden_layers: tuple[int, ...]
    most: int
    batch_size: int
    launcher: Launcher
    make_trees: MakeTrees
    _graphs: dict[Shape, VerifyGraph] = field(default_factory=dict[Shape, VerifyGraph])
    _passes: dict[int, StaticPass] = field(default_factory=dict[int, StaticPass])
    _drawn: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])

    @property
    def shapes(self) -> Collection[Shape]:
        """The shapes that have graphs."""
        return self._graphs.keys()

    def width(self, batch: Batch) -> int:
        """Return the rows of each sequence of `batch` in a pass: one for its pending token, and as
        many as the longest draft needs, or as fill a tile of rows, which cost no more."""
        longest = max(len(seq.draft) for seq in batch)
        if not longest:
            return 1
        least = ROW_TILE // bucket_of(len(batch), self.batch_size)
        return bucket_of(max(longest + 1, least), self.most + 1)

    def run(
        self, batch: Batch, staged: tuple[Columns, PageTable], width: int, way: Way
    ) -> list[Verdict] | None:
        """Return the verdicts on the drafts of `batch`, which were `staged` in the target's memory
        with `width` nodes each. None if logits are no numbers. Waits for the device."""
        columns, pages_BP = staged
        shape = Shape(
            rows=bucket_of(len(batch), self.batch_size),
            width=width,
            columns=max(_LEAST_COLUMNS, 1 << (pages_BP.shape[1] - 1).bit_length()),
            way=way,
            listed=any(columns.extra),
            drawn=way in DRAWN_WAYS and any(seq.draft.probs_NV is not None for seq in batch),
            filtered=any(filters_of(seq.params) != KEEPS_ALL for seq in batch),
            num_ids=num_listed(batch),
        )
        graph = self.graph(shape)
        fields = graph.fields.host
        _write_plan(fields, columns, pages_BP, shape)
        _write_rows(fields, batch, shape)
        if graph.q_BKV is not None:
            _write_distributions(graph.q_BKV, batch, way)
        if graph.launch is None:
            graph.launch = self.launcher.make(self.program(shape), graph.fields.send)
        else:
            graph.fields.send()
        graph.launch()
        return _verdicts(graph.mailbox.post(graph.report_BR).read(), batch)

    def program(self, shape: Shape) -> VerifyProgram:
        """Return the program of this shape, over the memory of its graph."""
        graph = self.graph(shape)
        return VerifyProgram(
            shape=shape,
            fields=graph.fields.device,
            target=self._pass(shape.rows * shape.width),
            judge=self.make_trees(shape.way, shape.width - 1),
            q_BKV=graph.q_BKV,
            report_BR=graph.report_BR,
            nodes_K=torch.arange(shape.width - 1, device=graph.report_BR.device),
        )

    def graph(self, shape: Shape) -> VerifyGraph:
        """Return the memory and launch of this shape, allocated at its first use."""
        if shape not in self._graphs:
            device = self.target.scratch.x_ND.device
            with torch.inference_mode(False):
                report_BR = torch.zeros(
                    shape.rows, shape.width + 2, dtype=torch.int32, device=device
                )
                self._graphs[shape] = VerifyGraph(
                    fields=Fields(_fields(shape), device),
                    report_BR=report_BR,
                    q_BKV=self._distributions(shape) if shape.drawn else None,
                    mailbox=Mailbox(report_BR),
                )
        return self._graphs[shape]

    def _pass(self, num_rows: int) -> StaticPass:
        if num_rows not in self._passes:
            with torch.inference_mode(False):
                self._passes[num_rows] = StaticPass.of(
                    self.target,
                    num_rows=num_rows,
                    num_logits=num_rows,
                    page_size=self.target.state.page_size,
                    hidden_layers=self.hidden_layers,
                )
        return self._passes[num_rows]

    def _distributions(self, shape: Shape) -> Tensor:
        key = (shape.rows, shape.width - 1)
        if key not in self._drawn:
            vocab_size, device = self.target.spec.vocab_size, self.target.scratch.x_ND.device
            self._drawn[key] = torch.zeros(*key, vocab_size, device=device)
        return self._drawn[key]


def padded_row(seq: LiveSequence, width: int, *, listed: bool) -> StepRow:
    """Return the pending token and the draft below it, padded to a pass of `width` nodes. Padding
    nodes continue the chain, or are leaves if the pass has trees anyway."""
    draft, num_padding = seq.draft, width - 1 - len(seq.draft)
    first = len(draft) - 1
    below = (ROOT,) * num_padding if listed else range(first, first + num_padding)
    tokens = (seq.tokens[-1], *draft.tokens, *(0,) * num_padding)
    return StepRow(seq.seq_id, tokens, parents_below(0, (*draft.parents, *below)))


def _write_plan(
    fields: Mapping[str, NDArray[Any]], columns: Columns, pages_BP: PageTable, shape: Shape
) -> None:
    num_nodes = len(columns.tokens)
    # The node whose work each node repeats.
    source_N = np.arange(shape.rows * shape.width)
    source_N[num_nodes:] %= shape.width
    numbers = (columns.tokens, columns.positions, columns.slots, columns.seq, columns.visible)
    fields["plan"][:, : len(source_N)] = np.array(numbers, dtype=np.int32)[:, source_N]
    fields["pages"][: len(pages_BP), : pages_BP.shape[1]] = pages_BP
    if shape.listed:
        extra = [columns.extra[node] for node in source_N]
        flat = [slot for slots in extra for slot in slots]
        fields["offsets"][1:] = np.cumsum([len(slots) for slots in extra])
        fields["extra"][: len(flat)] = flat


def _write_rows(fields: Mapping[str, NDArray[Any]], batch: Batch, shape: Shape) -> None:
    for row in range(shape.rows):
        seq = batch[row if row < len(batch) else 0]
        # Rows that repeat row 0 accept nothing, so they move nothing.
        draft = seq.draft if row < len(batch) else Draft.empty()
        params, size = seq.params, len(draft)
        top_k, fields["top_p"][row], fields["min_p"][row] = filters_of(params)
        fields["temperature"][row] = params.temperature
        drawn = shape.drawn and draft.probs_NV is not None
        fields["numbers"][:, row] = (
            top_k, params.rng_seed, seq.sample, len(seq.tokens), size, drawn
        )  # fmt: skip
        fields["tokens"][row, :size] = draft.tokens
        fields["tokens"][row, size:] = 0
        fields["parents"][row, :size] = draft.parents
        fields["parents"][row, size:] = _NOWHERE
        depths = fields["depths"][row]
        depths[:] = 0
        for node, parent in enumerate(draft.parents):
            depths[node + 1] = depths[parent + 1] + 1
        if shape.num_ids and row < len(batch):
            write_shaping(fields, row, seq)


def _write_distributions(q_BKV: Tensor, batch: Batch, way: Way) -> None:
    """Write the distributions of drafts; for the block rule, greedy drafts are point masses."""
    for row, seq in enumerate(batch):
        draft, size = seq.draft, len(seq.draft)
        if draft.probs_NV is not None:
            q_BKV[row, :size].copy_(draft.probs_NV)
        elif way == "block" and size:
            index_K1 = torch.tensor(draft.tokens, device=q_BKV.device)[:, None]
            q_BKV[row, :size].zero_().scatter_(1, index_K1, 1.0)


def _verdicts(report_BR: Tensor, batch: Batch) -> list[Verdict] | None:
    reports = host_rows(report_BR)[: len(batch)]
    if any(report[-1] for report in reports):
        return None
    return [Verdict(tuple(path[:kept]), token) for *path, kept, token, _ in reports]
