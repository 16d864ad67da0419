"""Page pool of the KV cache: free pages, reference counts, prefix sharing, a pass's plan columns.

Shapes:  N = packed tokens, B = sequences, P = page-table columns, E = extra keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import CapacityError, ContractError
from outrider.kernels.plan import PackedPlan

PageTable = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class Columns:
    """The growing columns of a plan, one entry a packed token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.seq: list[int] = []
        self.visible: list[int] = []
        self.extra: list[Sequence[int]] = []

    def add_chain(self, rows: range, num_dropped: int = 0) -> None:
        """Tokens that are these rows of their sequence, of which so many were dropped before."""
        self.positions += range(rows.start + num_dropped, rows.stop + num_dropped)
        self.visible += range(rows.start + 1, rows.stop + 1)
        self.extra += [()] * len(rows)

    def add_node(self, *, position: int, visible: int, extra: Sequence[int]) -> None:
        self.positions.append(position)
        self.visible.append(visible)
        self.extra.append(extra)

    def plan(self, pages_BP: PageTable, page_size: int, device: torch.device) -> PackedPlan:
        columns = [self.tokens, self.positions, self.slots, self.seq, self.visible]
        packed_5N = _tensor(np.array(columns, dtype=np.int32), device)
        tokens_N, positions_N, slots_N, seq_N, visible_N = packed_5N.unbind(0)
        offsets_N1, extra_E = None, None
        if any(self.extra):
            ends = np.cumsum([0, *map(len, self.extra)], dtype=np.int32)
            flat = [slot for slots in self.extra for slot in slots]
            offsets_N1 = _tensor(ends, device)
            extra_E = _tensor(np.array(flat, dtype=np.int32), device)
        return PackedPlan(
            page_size=page_size,
            tokens_N=tokens_N,
            positions_N=positions_N,
            slots_N=slots_N,
            seq_N=seq_N,
            visible_N=visible_N,
            pages_BP=_tensor(pages_BP, device),
            extra_offsets_N1=offsets_N1,
            extra_slots_E=extra_E,
        )


def _tensor(array: np.ndarray[Any, np.dtype[np.int32]], device: torch.device) -> Tensor:
    tensor: Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return tensor.to(device)


# Of a stretch of pages, the open ones: how many at its left end, how many at its right end, the
# length of the longest run and the first page of that.
_Runs = tuple[int, int, int, int]


class OpenPages:
    """Pages that may be taken, and the longest run of them: a binary tree over the arena.

    To open or to close a page takes log(pages) steps, to ask for the longest run one.
    """

    def __init__(self, num_pages: int) -> None:
        self._width = 1 << (num_pages - 1).bit_length()
        self._runs: list[_Runs] = [(0, 0, 0, 0)] * (2 * self._width)
        self._open = set(range(num_pages))
        self._mark(range(num_pages), 1)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, page: int) -> bool:
        return page in self._open

    @property
    def longest(self) -> range:
        """The longest run of open pages, of equals the first."""
        _, _, length, start = self._runs[1]
        return range(start, start + length)

    def add(self, page: int) -> None:
        self._open.add(page)
        self._mark((page,), 1)

    def remove(self, page: int) -> None:
        self._open.remove(page)
        self._mark((page,), 0)

    def _mark(self, pages: Sequence[int], length: int) -> None:
        for page in pages:
            self._runs[self._width + page] = (length, length, length, page)
        nodes, half = {(self._width + page) // 2 for page in pages} - {0}, 1
        while nodes:
            for node in nodes:
                self._runs[node] = self._joined(node, half)
            nodes, half = {node // 2 for node in nodes} - {0}, 2 * half

    def _joined(self, node: int, half: int) -> _Runs:
        """What a node's two children have together, each of `half` pages."""
        left, end, length, start = self._runs[2 * node]
        begin, right, other, other_start = self._runs[2 * node + 1]
        if end + begin > length:
            length, start = end + begin, (2 * node + 1) * half - self._width - end
        if other > length:
            length, start = other, other_start
        if left == half:
            left += begin
        if right == half:
            right += end
        return left, right, length, start


# A page is named by (number, generation); the generation says which filling of it is meant.
_Name = tuple[int, int]
_Key = tuple[_Name | str, tuple[int, ...]]


class PagePool:
    """Reference counts, the free pages and the index of full ones. All integers, no tensors.

    A full page stays findable by its content while it is free, so a later sequence with the same
    prefix shares it instead of computing it again. Shared pages are never written: only whole
    pages are shared, and a sequence writes past its committed length.

    Free pages that hold nothing findable are open, that is, may be taken. The others form a ring,
    given back at the tail and opened at the head: only where open pages have no run of the length
    that a sequence asks for, and only until they have or half of all free pages are open. So what
    was held last lives on longest. Open pages are taken by place: a sequence goes on in the page
    behind its last one where it can.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._open = OpenPages(num_pages)
        self._ring: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._generation = [0] * num_pages
        self._key_of: dict[int, _Key] = {}
        self._page_of: dict[_Key, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._open) + len(self._ring)

    def require(self, num_pages: int) -> None:
        """Raise CapacityError unless so many pages are free."""
        if num_pages > self.num_free:
            raise CapacityError(
                f"the KV arena is full: {num_pages} more pages of {self.page_size} tokens are "
                f"needed, and of {self.num_pages} pages {self.num_free} are free.",
                hint="raise --arena-tokens, or lower --batch-size or --max-tokens",
            )

    def take(self, pages: Sequence[int] = (), room: int = 1) -> int:
        """A free page to follow `pages`, for the caller alone; what it held is forgotten. Where it
        is not the next in the arena, `room` of them are to lie in a row. Raises CapacityError."""
        self.require(1)
        page = self._place(pages, room)
        self._open.remove(page)
        self._holders[page] = 1
        self._generation[page] += 1
        self._forget(page)
        return page

    def _place(self, pages: Sequence[int], room: int) -> int:
        if pages and pages[-1] + 1 in self._open:
            return pages[-1] + 1
        while len(self._run()) < room and len(self._open) < len(self._ring):
            page, _ = self._ring.popitem(last=False)
            self._open.add(page)
        return self._run().start

    def _run(self) -> range:
        """Where a sequence may begin: in the longest run, or behind its first half where the page
        before it may be the last of a sequence that grows."""
        run = self._open.longest
        is_behind_others = run.start > 0 and self._holders[run.start - 1] > 0
        return run[len(run) // 2 :] if is_behind_others else run

    def share(self, page: int) -> None:
        """One more holder of `page`, which is free no more."""
        self._ring.pop(page, None)
        if page in self._open:
            self._open.remove(page)
        self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up `pages` of one sequence; the last become free first, so beginnings live on."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise ContractError("a page was given back twice")
            if self._holders[page] == 0 and page in self._key_of:
                self._ring[page] = None
            elif self._holders[page] == 0:
                self._open.add(page)

    def exchange(self, pages: Sequence[int], num_pages: int) -> list[int]:
        """Give up `pages` of one sequence for `num_pages` that are its alone. Raises CapacityError,
        with nothing changed, where those are not free and will not be."""
        alone = sum(self._holders[page] == 1 for page in pages)
        self.require(num_pages - alone)
        self.release(pages)
        taken = list[int]()
        for missing in range(num_pages, 0, -1):
            taken.append(self.take(taken, missing))
        return taken

    def remember(self, pages: Sequence[int], tokens: Sequence[int], index: int, salt: str) -> None:
        """Make `pages[index]`, filled by its share of `tokens`, findable by what it holds."""
        page = pages[index]
        if page in self._key_of:
            return
        start = index * self.page_size
        parent = self._name(pages[index - 1]) if index else salt
        key = (parent, tuple(tokens[start : start + self.page_size]))
        if key not in self._page_of:
            self._key_of[page] = key
            self._page_of[key] = page

    def find_prefix(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The longest run of known full pages of this salt that `tokens` begins with."""
        found: list[int] = []
        parent: _Name | str = salt
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self._page_of.get((parent, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            found.append(page)
            parent = self._name(page)
        return found

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that every page is free or held by exactly as many sequences as counted."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        if counts != self._holders:
            raise ContractError("holders of pages are counted wrong")
        free = sorted((*self._ring, *(page for page in range(len(counts)) if page in self._open)))
        if free != [page for page, count in enumerate(counts) if count == 0]:
            raise ContractError("pages that nobody holds are free")

    def _name(self, page: int) -> _Name:
        return page, self._generation[page]

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
