"""What a captured round keeps on the device: fixed memory that outlives its rounds.

The host writes a row when a sequence enters and never looks at it again: the round itself moves
lengths, pending tokens and room, and leaves a report of what it decided. A row whose room is 0 has
ended and stands still until the host has read so.

Idle rows of a bucket do what row 0 does: they read its tokens and write the same keys and values to
the same places. So no memory is set aside for them.

Shapes:  B = rows, S = stop tokens, P = page-table columns, T = positions, K = drafted tokens,
         R = K + 4, a row's report: drafts, depth, kept, the own token, whether logits broke.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from outrider.core.clock import host_rows
from outrider.engine.captured.memory import Entry
from outrider.engine.captured.passes import PageTables

# No token has this id: an unused place in the table of stop tokens.
_NO_TOKEN = -1
BROKE_TARGET, BROKE_DRAFT = 1, 2


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """`length_B` counts a row's text, pending token included. `last_B2` is what the draft model
    reads first: the pending token, and before it the one that it has not read yet (`lag_B` 1) or
    the pending token again (`lag_B` 0). `mirror_B` is the row that a row does the work of."""

    last_B2: Tensor
    length_B: Tensor
    lag_B: Tensor
    room_B: Tensor
    budget_B: Tensor
    temperature_B: Tensor
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
            room_B=ints(),
            budget_B=ints(),
            temperature_B=ints(dtype=torch.float32),
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

    def first(self, num_rows: int) -> RoundBuffers:
        """The same memory, as much of it as a bucket of `num_rows` uses."""
        return RoundBuffers(*(getattr(self, item.name)[:num_rows] for item in fields(self)))

    def write(self, entries: Sequence[Entry]) -> None:
        """Start rounds of these sequences; idle rows get what row 0 gets."""
        num_rows, num_stops = self.mirror_B.shape[0], self.stops_BS.shape[1]
        mirror = [*range(len(entries)), *[0] * (num_rows - len(entries))]
        rows = [entries[index] for index in mirror]
        seqs = [entry.seq for entry in rows]
        self._fill("mirror_B", mirror)
        self._fill("last_B2", [(e.seq.tokens[-1 - e.lag], e.seq.tokens[-1]) for e in rows])
        self._fill("lag_B", [entry.lag for entry in rows])
        self._fill("budget_B", [entry.budget for entry in rows])
        self._fill("length_B", [len(seq.tokens) for seq in seqs])
        self._fill("room_B", [seq.room for seq in seqs])
        self._fill("temperature_B", [seq.params.temperature for seq in seqs])
        self._fill("seed_B", [seq.params.seed for seq in seqs])
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
        padded = torch.tensor([_padded(row, columns, 0) for row in pages], dtype=torch.int32)
        made = PageTables.of(padded, tables.slots_BT.shape[1] // columns)
        tables.pages_BP.copy_(made.pages_BP)
        tables.slots_BT.copy_(made.slots_BT)

    def _fill(self, name: str, values: Sequence[object]) -> None:
        buffer: Tensor = getattr(self, name)
        buffer.copy_(torch.tensor(values, dtype=buffer.dtype))

    def write_budgets(self, budgets: Sequence[int]) -> None:
        """New budgets of the rows in use; idle rows keep theirs, and draft as row 0 does."""
        self.budget_B[: len(budgets)].copy_(torch.tensor(budgets))


def _padded(values: Sequence[int], size: int, filler: int) -> list[int]:
    return [*values, *[filler] * (size - len(values))]


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a round decided for a row, before anything ended it."""

    drafted: tuple[int, ...]
    num_kept: int
    next_token: int
    broke: int


def read_reports(report_BR: Tensor, k: int) -> list[RowReport]:
    """From host memory, to which a report was copied."""
    return [
        RowReport(tuple(row[: row[k]]), row[k + 1], row[k + 2], row[k + 3])
        for row in host_rows(report_BR)
    ]
