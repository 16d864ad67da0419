"""Pages of the KV cache: prefix sharing, a pass's plan columns.

Shapes:  N = packed tokens, B = sequences, P = page-table columns, E = extra keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.kernels.plan import PackedPlan

PageTable = np.ndarray[tuple[int, int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """Slots in pages of `page_size`; local layers have `num_local_slots` of their own, if that is
    not 0. The last page is whole."""

    num_slots: int
    page_size: int
    num_local_slots: int = 0

    @property
    def num_pages(self) -> int:
        return -(-self.num_slots // self.page_size)

    @property
    def num_frames(self) -> int:
        return -(-self.num_local_slots // self.page_size)


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


# What comes before, by its name or as a salt, and a page's own tokens.
_Key = tuple[int | str, tuple[int, ...]]


class PagePool(Pool[_Key]):
    """Pages of texts, found by what they hold.

    A full page stays findable by its content while it is free, so a later sequence with the same
    prefix shares it instead of computing it again. Shared pages are never written: only whole
    pages are shared, and a sequence writes past its committed length.

    Every filling of a page has a name, which pages of the same text share: what follows one of them
    is found behind any.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._fillings = count()
        self._name_of = [0] * num_pages

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

    def remember(
        self,
        pages: Sequence[int],
        tokens: Sequence[int],
        index: int,
        salt: str,
        whole: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Make `pages[index]`, filled by its share of `tokens`, findable by what it holds, unless
        another is, and is `whole`."""
        page = pages[index]
        if page in self._key_of:
            return
        start = index * self.page_size
        parent = self._name_of[pages[index - 1]] if index else salt
        key = (parent, tuple(tokens[start : start + self.page_size]))
        known = self._page_of.get(key)
        if known is not None:
            self._name_of[page] = self._name_of[known]
            if whole(known):
                return
            del self._key_of[known]
        self._know(page, key)

    def find_prefix(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The longest run of known full pages of this salt that `tokens` begins with."""
        found: list[int] = []
        parent: int | str = salt
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self._page_of.get((parent, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            found.append(page)
            parent = self._name_of[page]
        return found

    def _forget(self, page: int) -> None:
        super()._forget(page)
        self._name_of[page] = next(self._fillings)
