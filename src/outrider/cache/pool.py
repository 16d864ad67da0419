"""Page pool: free pages of an arena, owners of the others, contents of free ones; and the frames of
pages in the arena of local layers, which see only a window.

All layers share the pages of a text, their numbers and their indices in its table. Layers that see
the whole text store a page's rows under its number; local layers in a frame, which a page has only
as long as a later token of some text sees it there. So the local arena is as large as windows are,
for texts of any length, and one list of frame numbers locates the pages of all sequences in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import CapacityError, ConfigError, ContractError
from outrider.kernels.plan import PackedPlan

# Open pages of a stretch: the number at its left end and at its right end, the length of the
# longest run and the first page of that run.
_Runs = tuple[int, int, int, int]


class OpenPages:
    """Pages that may be taken, and the longest run of them, in a binary tree over the arena.

    Opening or closing a page takes log(pages) steps, finding the longest run one.
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
        """The longest run of open pages; of equals the first."""
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
        """The runs of a node from those of its two children, each of `half` pages."""
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
    """Reference counts, free pages and an index of the contents of pages. All integers, no tensors.

    A page with content stays findable by its key while it is free, until it is taken again.

    Free pages without findable content are open, that is, may be taken. The others form a ring,
    released at the tail and opened at the head: only if no run of open pages is as long as a
    sequence needs, and only until one is or half of all free pages are open. So the most recent
    content survives longest. Open pages are taken by position: a sequence continues in the page
    after its last one if possible.
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

    def take(self, pages: Sequence[int] = (), run: int = 1) -> int:
        """Take a free page to follow `pages`, for the caller alone; its content is forgotten. If it
        is not the next one in the arena, it begins a run of `run` open pages if possible. Raises
        CapacityError."""
        self.require(1)
        page = self._next_page(pages, run)
        self._open.remove(page)
        self._holders[page] = 1
        self._forget(page)
        return page

    def _next_page(self, pages: Sequence[int], run: int) -> int:
        if pages and pages[-1] + 1 in self._open:
            return pages[-1] + 1
        while len(self._run()) < run and len(self._open) < len(self._ring):
            page, _ = self._ring.popitem(last=False)
            self._open.add(page)
        return self._run().start

    def _run(self) -> range:
        """Pages where a sequence may begin: the longest run, or its second half if the page before
        it may be the last of a growing sequence."""
        run = self._open.longest
        is_behind_others = run.start > 0 and self._holders[run.start - 1] > 0
        return run[len(run) // 2 :] if is_behind_others else run

    def share(self, page: int) -> None:
        """Add a holder to `page`, which is free no more."""
        self._ring.pop(page, None)
        if page in self._open:
            self._open.remove(page)
        self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Release `pages` of one sequence; the last become free first, so beginnings survive."""
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
            raise ContractError("the free pages are not those without holders")

    def _know(self, page: int, key: Key) -> None:
        """Make `page` findable by `key`."""
        self._key_of[page] = key
        self._page_of[key] = page

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]


class Frames(Pool[int]):
    """Frames found by the page that they hold, with counts of the texts that see it.

    `arena` is that of local layers only, [layers, 2, KV heads, slots, elements of a row]. A page
    that no text sees any more stays in its frame, and may be seen again, until another page needs
    the frame. `of_P` (int32, never moved) has the frame of every page; any number if it has none.
    """

    def __init__(self, arena: Tensor, num_pages: int, page_size: int) -> None:
        super().__init__(arena.shape[3] // page_size, page_size)
        self.arena = arena
        self.of_P = torch.zeros(num_pages, dtype=torch.int32, device=arena.device)

    def give(self, page: int, pages: Sequence[int]) -> None:
        """Give a frame to `page`, which was taken to follow `pages`. Raises CapacityError."""
        old = self._page_of.get(page)
        if old is not None:
            # The frame of the page's former content, which no text sees.
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
        """Count one more text that sees these pages, all of which have frames."""
        for page in pages:
            self.share(self._page_of[page])

    def let_go(self, pages: Sequence[int]) -> None:
        """Count one text less that sees these pages."""
        self.release([self._page_of[page] for page in pages])

    def last_missing(self, pages: Sequence[int]) -> int | None:
        """The index in `pages` of the last one without a frame; None if all have one."""
        indices = range(len(pages) - 1, -1, -1)
        return next((index for index in indices if not self.has(pages[index])), None)

    def check_seen(self, seen: Sequence[Sequence[int]]) -> None:
        """Assert that all visible pages have frames, and none leaked or is counted twice."""
        if any(self.last_missing(pages) is not None for pages in seen):
            raise ContractError("a page that is seen has no frame")
        self.check([[self._page_of[page] for page in pages] for pages in seen])
        if any(int(self.of_P[page]) != frame for page, frame in self._page_of.items()):
            raise ContractError("a page lies in another frame than kernels read")

    def slots(self, slots_N: Tensor) -> Tensor:
        """Slots of these rows in the arena of local layers."""
        size = self.page_size
        return self.of_P[slots_N // size] * size + slots_N % size

    def copy(self, into_C: Tensor, origin_C: Tensor) -> None:
        """Copy the contents of slots to other slots, int64."""
        rows = self.arena[:, :, :, self.slots(origin_C)]
        self.arena.index_copy_(3, self.slots(into_C), rows)

    def plan(self, plan: PackedPlan) -> PackedPlan:
        """`plan` with the slots of local layers."""
        extra_E = plan.extra_slots_E
        return replace(
            plan,
            slots_N=self.slots(plan.slots_N),
            pages_BP=self.of_P[plan.pages_BP],
            extra_slots_E=None if extra_E is None else self.slots(extra_E),
        )


# SnapKV: choice of the keys to keep of a long prompt, by the attention of its last tokens.
#
# The last `window` tokens attend to the whole prompt. A key's vote is the attention that it gets,
# summed over these tokens and averaged over the query heads that share the key; votes are pooled
# over neighbours. Each layer and KV head keeps the `budget` best keys, the window included (Li et
# al. 2024, arXiv 2404.14469). The choice depends on the prompt and the model alone. Votes are
# summed in float64 and compared in float32, so that the order of a sum does not matter; of equals
# the first stays.
#
# Shapes:  W = window, T = prompt tokens, P = those before the window, G = KV heads, R = query heads
#          that share one, H = query heads, D = head size, M = budget.
# Neighbours whose votes are averaged.
POOLED = 5


@dataclass(frozen=True, slots=True)
class Keep:
    """The number of keys to keep of a longer prompt, and the number of tokens that choose them.
    Raises ConfigError for a window that leaves nothing to choose."""

    budget: int
    window: int

    def __post_init__(self) -> None:
        if not 0 < self.window < self.budget:
            raise ConfigError(
                f"kv_window={self.window} leaves nothing to choose of kv_budget={self.budget}.",
                hint="lower --kv-window or raise --kv-budget",
            )


def kept_keys(q_WHD: Tensor, k_GTD: Tensor, keep: Keep, scale: float) -> Tensor:
    """Positions of the keys to keep, kept_GM (int64), in the order of the text.

    `q_WHD` are the queries of the last W of T tokens, `k_GTD` all keys, both as attention reads
    them; T is above the budget.
    """
    num_before = k_GTD.shape[1] - q_WHD.shape[0]
    votes = [
        _votes(q_WRD, k_TD, scale)
        for q_WRD, k_TD in zip(_by_key_head(q_WHD, k_GTD), k_GTD, strict=True)
    ]
    votes_GP = torch.stack(votes)[:, :num_before]
    pooled_GP = functional.avg_pool1d(votes_GP, POOLED, stride=1, padding=POOLED // 2).float()
    order_GP = pooled_GP.sort(dim=-1, descending=True, stable=True).indices
    chosen_GB = order_GP[:, : keep.budget - keep.window].sort(dim=-1).values
    window_W = torch.arange(num_before, k_GTD.shape[1], device=k_GTD.device)
    return torch.cat([chosen_GB, window_W.expand(k_GTD.shape[0], -1)], dim=1)


def _by_key_head(q_WHD: Tensor, k_GTD: Tensor) -> tuple[Tensor, ...]:
    num_window, _, head_dim = q_WHD.shape
    return q_WHD.reshape(num_window, k_GTD.shape[0], -1, head_dim).unbind(1)


def _votes(q_WRD: Tensor, k_TD: Tensor, scale: float) -> Tensor:
    """Attention of the window to each token, votes_T."""
    # MPS lacks float64; ties may differ there.
    dtype = torch.float32 if k_TD.device.type == "mps" else torch.float64
    num_window, num_tokens = q_WRD.shape[0], k_TD.shape[0]
    scores_RWT = (q_WRD.to(dtype).transpose(0, 1) @ k_TD.to(dtype).T) * scale
    ahead_WT = torch.ones(num_window, num_tokens, dtype=torch.bool, device=k_TD.device)
    ahead_WT = ahead_WT.triu(num_tokens - num_window + 1)
    shares_RWT = scores_RWT.masked_fill(ahead_WT, float("-inf")).softmax(-1)
    return shares_RWT.sum(1).mean(0)
