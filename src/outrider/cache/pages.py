"""Pages of the KV cache: prefix sharing, the pages of a sequence, and the columns of a plan.

Shapes:  N = packed tokens, B = sequences, P = page-table columns, E = extra keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core import early
from outrider.core.errors import CapacityError, address_limits
from outrider.core.fields import size
from outrider.core.files import available_bytes, group_limits, physical_bytes
from outrider.core.process import own_bytes
from outrider.core.spec import ModelSpec, RecurrentCapacity
from outrider.core.tree import ROOT
from outrider.kernels.plan import PackedPlan, sent

PageTable = np.ndarray[tuple[int, int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """Number of slots, in pages of `page_size`; local layers have `num_local_slots` of their own,
    if that is not 0. The last page is whole."""

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
        """Add the tokens of these rows of their sequence, with so many dropped rows before them."""
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
    return sent(tensor, device)


# The salt of sequences that are opened without one of their own: those of drafters.
SALT: ContextVar[str] = ContextVar("outrider_salt", default="")


@contextmanager
def salted(salt: str) -> Generator[None]:
    """A block in which sequences have this salt if they are opened without one of their own."""
    outside = SALT.set(salt)
    try:
        yield
    finally:
        SALT.reset(outside)


# The preceding filling, by its name or as a salt, and a page's own tokens.
_Key = tuple[int | str, tuple[int, ...]]


class PagePool(Pool[_Key]):
    """Pages of texts, found by their content.

    A full page stays findable by its content while it is free, so a later sequence with the same
    prefix shares it instead of computing it again. Shared pages are never written: only whole
    pages are shared, and a sequence writes past its committed length.

    Every filling of a page has a name, which pages of the same text share: a continuation of one of
    them is found after any.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._fillings = count()
        self._name_of = [0] * num_pages
        # In a store, of pages whose content is findable.
        self.stored_names: list[PageName | None] = [None] * num_pages

    def exchange(self, pages: Sequence[int], num_pages: int) -> list[int]:
        """Exchange `pages` of one sequence for `num_pages` that it holds alone. Raises
        CapacityError, with nothing changed, if too few pages would be free."""
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
        """Make `pages[index]`, filled by its share of `tokens`, findable by its content, unless
        another `whole` page with this content is."""
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
        """The longest beginning of `tokens` in known full pages with this salt, as page numbers."""
        found: list[int] = []
        parent: int | str = salt
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self._page_of.get((parent, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            found.append(page)
            parent = self._name_of[page]
        return found

    def key_of(self, page: int) -> _Key | None:
        """The key by which the content of `page` is found, unlike that of any other content; None
        if it is not findable."""
        return self._key_of.get(page)

    def _forget(self, page: int) -> None:
        super()._forget(page)
        self._name_of[page] = next(self._fillings)
        self.stored_names[page] = None


def digest_after(before: str, tokens: Sequence[int]) -> str:
    """The digest of a page with these tokens after the digest of what comes before."""
    own = struct.pack(f"{len(tokens)}q", *tokens)
    return hashlib.sha256(bytes.fromhex(before) + own).hexdigest()


@dataclass(slots=True, eq=False)
class PageName:
    """Name of a page of a text, with the number `index` and these `tokens`: `digest` stands for all
    tokens of the text up to the page's end. It follows `previous`, a name or, at the beginning, a
    digest. Its own is computed when it is first needed, by any thread."""

    previous: PageName | str
    index: int
    tokens: tuple[int, ...]
    known: str = ""

    @property
    def before(self) -> str:
        """The digest that stands for all tokens up to the page's beginning."""
        previous = self.previous
        return previous if isinstance(previous, str) else previous.digest

    @property
    def digest(self) -> str:
        unknown, name = list[PageName](), self
        while not name.known:
            unknown.append(name)
            if isinstance(previous := name.previous, str):
                break
            name = previous
        for one in reversed(unknown):
            before = one.before
            one.known, one.previous = digest_after(before, one.tokens), before
        return self.known


# The bytes of a part of a page, or of a recurrent state.
Part = NDArray[np.uint8]


def bytes_of(part: Tensor) -> Part:
    """The bytes of a tensor in the memory of a CPU, which may be written."""
    return part.view(torch.uint8).numpy()


class PageStore(Protocol):
    """Storage behind the memory for pages, and for recurrent states at page ends. It may lack or
    lose anything, and raises no errors: then the text is read again."""

    def name(self, before: PageName | None, tokens: Sequence[int], salt: str) -> PageName:
        """The name of the page with these tokens after the page `before`."""
        ...

    def has(self, kind: str, name: PageName) -> bool: ...
    def read(self, kind: str, name: PageName, parts: Sequence[Part]) -> bool:
        """Fill `parts` with what was stored, and return True; False, with `parts` in any state, if
        it is missing or damaged."""
        ...

    def offer(
        self,
        kind: str,
        name: PageName,
        copied: Callable[[], Sequence[Part] | None],
        *,
        at_once: bool = False,
    ) -> None:
        """Store later what `copied` returns then, in another thread; None if its memory was used
        again meanwhile. With `at_once` it is called now, if at all."""
        ...

    def used(self, names: Sequence[PageName]) -> None:
        """Take note that a text has ended which began with these pages when it was opened."""
        ...


# Consecutive pages that a sequence takes beyond its prompt: 512 tokens.
GROWTH = 16


@dataclass(frozen=True, slots=True)
class VisibleNodes:
    """The staged nodes that a staged node sees, itself included: the first `run` of them, which lie
    where a chain would put them, and then those in the slots `extra`."""

    run: int = 0
    extra: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.run + len(self.extra)

    def followed_by(self, node: int, slot: int) -> VisibleNodes:
        """The nodes that a child sees if it is staged as `node`, in `slot`."""
        if node == self.run:
            return VisibleNodes(node + 1)
        return VisibleNodes(self.run, (*self.extra, slot))


@dataclass(slots=True)
class SequencePages:
    """Memory of one sequence. The first `num_staged` of `staged` and `parents` are the nodes staged
    since the last commit; later entries were rolled back, and are overwritten. `seen` has the
    visible nodes of the first of them; it is only made once a node branches off.

    The first `num_dropped` committed tokens have no rows any more. No window reaches the first
    `num_freed` of `pages`: tables name them, but they are not read. `num_expected` pages hold the
    prompt and the beginning of an answer. The first `num_known` were filled when it was opened, and
    `names` are those of its first pages in a store."""

    pages: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    seen: list[VisibleNodes] = field(default_factory=list[VisibleNodes])
    num_staged: int = 0
    num_dropped: int = 0
    num_expected: int = GROWTH
    num_freed: int = 0
    salt: str = ""
    names: list[PageName] = field(default_factory=list[PageName])
    num_known: int = 0
    listed: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num_listed: int = 0

    @property
    def table(self) -> NDArray[np.int32]:
        """`pages` as an array. Pages are only ever added, so only new ones are written."""
        count, done = len(self.pages), self.num_listed
        if count > len(self.listed):
            grown = np.zeros(2 * count, np.int32)
            grown[:done] = self.listed[:done]
            self.listed = grown
        if count > done:
            self.listed[done:count] = self.pages[done:]
            self.num_listed = count
        return self.listed[:count]

    def stage(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        del self.seen[self.num_staged :]
        self.staged[self.num_staged :] = tokens
        self.parents[self.num_staged :] = parents
        self.num_staged = len(self.staged)

    def see(self, parent: int, slot: int) -> VisibleNodes:
        """Add and return the visible nodes of the next node, a child of `parent` in `slot`."""
        before = VisibleNodes() if parent == ROOT else self.seen[parent]
        self.seen.append(before.followed_by(len(self.seen), slot))
        return self.seen[-1]

    @property
    def num_rows(self) -> int:
        """Number of committed rows: the physical length, while `tokens` has the logical one."""
        return len(self.tokens) - self.num_dropped

    @property
    def in_window(self) -> Sequence[int]:
        """Pages that later tokens see through a window, or every page without one."""
        return self.pages[self.num_freed :] if self.num_freed else self.pages

    @property
    def staged_is_chain(self) -> bool:
        return self.parents == list(range(ROOT, len(self.parents) - 1))


# Memory limits of the machine, and the number of tokens of KV cache that fit.
#
# A process can be limited by the machine (free memory), by its control group (versions 1 and 2, and
# every group above its own) or by its own limits (RLIMIT_AS, RLIMIT_DATA). RLIMIT limits count
# addresses, the others pages that were written: a KV cache that was never written counts for RLIMIT
# alone.
# Weights, activations and other programs need the remaining memory.
ARENA_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit called `name` that leaves `free` bytes. `of_addresses` says that it counts memory
    when it is reserved, mapped files included, not when it is first written."""

    name: str
    free: int
    of_addresses: bool = False


def limits(device: torch.device, share: float = 1.0) -> tuple[MemoryLimit, ...]:
    """The limits of this process's memory on `device`, of which it may use the `share`."""
    found = list[MemoryLimit]()
    if share < 1:
        name = f"--memory-share {share:.4g} of {size(total_bytes(device))}"
        found.append(MemoryLimit(name, int(share * total_bytes(device))))
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return (*found, MemoryLimit(f"free memory of {device}", free))
    # Pages that wait for weights are free for them.
    written, reserved = early.pages.unused if early.pages else (0, 0)
    found.append(MemoryLimit("free memory of this machine", available_bytes() + written))
    for limit, used in group_limits():
        free = limit - used + written
        found.append(MemoryLimit(f"memory limit of the control group, {size(limit)}", free))
    for resource, command, counted, limit in address_limits():
        used = own_bytes(counted)
        if used is not None:
            name = f"{resource} ({command}), {size(limit)}"
            found.append(MemoryLimit(name, limit - used + reserved, of_addresses=True))
    return tuple(replace(one, free=max(0, one.free)) for one in found)


def free_bytes(device: torch.device) -> int:
    """Memory that `device` can give this process now, in bytes."""
    return min(limit.free for limit in limits(device))


def total_bytes(device: torch.device) -> int:
    """Memory of `device` that this process may use in all, in bytes; for a device that shares the
    host's memory, the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min([physical_bytes(), *(limit for limit, _ in group_limits())])


def arena_slots(
    spec: ModelSpec,
    *,
    num_slots: int,
    device: torch.device,
    num_local_slots: int = 0,
    states: RecurrentCapacity | None = None,
    share: float = 1.0,
) -> int:
    """`num_slots`, or fewer if a quarter of the memory (or of its `share`) holds fewer next to the
    recurrent `states`, if the model has any. Local layers have `num_local_slots` of their own, if
    that is not 0.

    On a CPU, slots that were never written take no physical memory. Raises CapacityError if not a
    single slot is left.
    """
    most = int(total_bytes(device) * share * ARENA_SHARE)
    taken = 0 if states is None else states.num_bytes(spec)
    affordable = (most - taken) // spec.kv_bytes_per_token
    if 0 < num_local_slots < affordable:
        local = spec.arena_bytes(0, num_local_slots)
        affordable = (most - taken - local) // spec.arena_bytes(1, 0)
    if affordable < 1:
        sizes = f"keys and values of one token take {size(spec.kv_bytes_per_token)}"
        if taken:
            sizes = f"the recurrent states take {size(taken)} and {sizes}"
        raise CapacityError(
            f"{sizes}; a quarter of the memory of {device}, the most for arenas, is {size(most)}.",
            hint="lower --batch-size or --state-history, or use --state-rollback replay"
            if taken
            else "choose a smaller model, or a machine with more memory",
        )
    return min(num_slots, affordable)
