"""Page pool: free pages of an arena, owners of the others, contents of free ones; and frames, where
pages lie in the arena of local layers, which see a window alone.

All layers share the pages of a text, their numbers and their positions in its table. Layers that
see the whole text store a page's rows under its number; local ones in a frame, which a page has
only as long as a later token of some text sees it there. So their arena is as large as windows are,
however long texts get, and one list of numbers locates the pages of all sequences in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from outrider.core.errors import CapacityError, ContractError
from outrider.kernels.plan import PackedPlan

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


Key = TypeVar("Key", bound=Hashable)


class Pool(Generic[Key]):
    """Reference counts, the free pages and an index of what pages hold. All integers, no tensors.

    A page that holds something stays findable by its key while it is free, until it is taken again.

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
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}

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

    def _know(self, page: int, key: Key) -> None:
        """`page` is found by `key` from now on."""
        self._key_of[page] = key
        self._page_of[key] = page

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]


class Frames(Pool[int]):
    """Frames found by the page that they hold, and counted by the texts that see it.

    `arena` is that of local layers alone, [layers, 2, KV heads, slots, elements of a row]. What
    nobody sees any more stays in its frame, and may be seen again, until another page needs
    that. `of_P` (int32, never moved) has the frame of every page; of one that has none, any.
    """

    def __init__(self, arena: Tensor, num_pages: int, page_size: int) -> None:
        super().__init__(arena.shape[3] // page_size, page_size)
        self.arena = arena
        self.of_P = torch.zeros(num_pages, dtype=torch.int32, device=arena.device)

    def give(self, page: int, pages: Sequence[int]) -> None:
        """A frame for `page`, which was taken to follow `pages`. Raises CapacityError."""
        old = self._page_of.get(page)
        if old is not None:
            # Of what the page held before; nobody sees that.
            self._ring.pop(old, None)
            self._open.add(old)
            self._forget(old)
        before = self._page_of.get(pages[-1]) if pages else None
        frame = self.take(() if before is None else (before,))
        self._know(frame, page)
        self.of_P[page] = frame

    def has(self, page: int) -> bool:
        return page in self._page_of

    def hold(self, pages: Sequence[int]) -> None:
        """One more text sees these pages, all of which have frames."""
        for page in pages:
            self.share(self._page_of[page])

    def let_go(self, pages: Sequence[int]) -> None:
        """A text does not see these pages any more, or ends."""
        self.release([self._page_of[page] for page in pages])

    def last_missing(self, pages: Sequence[int]) -> int | None:
        """The place in `pages` of the last one without a frame; None where all have one."""
        places = range(len(pages) - 1, -1, -1)
        return next((place for place in places if not self.has(pages[place])), None)

    def check_seen(self, seen: Sequence[Sequence[int]]) -> None:
        """Assert that all pages that texts see have frames, none leaked or counted twice."""
        if any(self.last_missing(pages) is not None for pages in seen):
            raise ContractError("a page that is seen has no frame")
        self.check([[self._page_of[page] for page in pages] for pages in seen])
        if any(int(self.of_P[page]) != frame for page, frame in self._page_of.items()):
            raise ContractError("a page lies in another frame than kernels are told")

    def slots(self, slots_N: Tensor) -> Tensor:
        """Where the rows of these slots lie in the arena of local layers."""
        size = self.page_size
        return self.of_P[slots_N // size] * size + slots_N % size

    def copy(self, into_C: Tensor, origin_C: Tensor) -> None:
        """Copy what some slots hold to others, int64."""
        rows = self.arena[:, :, :, self.slots(origin_C)]
        self.arena.index_copy_(3, self.slots(into_C), rows)

    def plan(self, plan: PackedPlan) -> PackedPlan:
        """`plan` as local layers see it."""
        extra_E = plan.extra_slots_E
        return replace(
            plan,
            slots_N=self.slots(plan.slots_N),
            pages_BP=self.of_P[plan.pages_BP],
            extra_slots_E=None if extra_E is None else self.slots(extra_E),
        )
