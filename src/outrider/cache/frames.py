"""Frames of the KV cache: where pages lie in the arena of local layers, which see a window alone.

All layers share the pages of a text, their numbers and their places in its table. Layers that see
the whole text keep a page's rows under its number; local ones in a frame, which a page has only as
long as a later token of some text sees it there. So their arena is as large as windows are, however
long texts get, and one list of numbers says for all sequences where a page lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.errors import ContractError
from outrider.kernels.plan import PackedPlan


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
