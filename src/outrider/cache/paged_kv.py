"""Paged KV cache: one allocation, append in place, rollback by moving an integer.

Committed tokens fill a sequence's pages from position 0. Staged (speculative) nodes follow at
positions `length`, `length + 1`, ... in the order they were fed, whatever the shape of the tree.
Committing a chain changes integers only; committing another path first moves its rows in order.
Rows of rejected tokens are dead space: no plan names their slots, and later nodes overwrite them.
Hidden states for a drafter lie in the slots of their tokens (`hidden_SKD`). Lanes may use different
sequences concurrently; one lock guards the shared page accounts.

Shapes:  L = layers of an arena, G = KV heads, S = slots, D = head size, N = packed tokens,
         B = sequences, P = page-table columns, E = extra keys, K = captured layers (then D is the
         hidden size), M = remaining rows of a prompt, R = elements of a stored row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pages import (
    GROWTH,
    SALT,
    ArenaSize,
    Columns,
    PageName,
    PagePool,
    PageStore,
    PageTable,
    Part,
    SequencePages,
    bytes_of,
)
from outrider.cache.pool import Frames
from outrider.core.errors import CapacityError, ContractError, given
from outrider.core.process import WholeLock
from outrider.core.protocols import StepRow
from outrider.core.spec import ModelSpec
from outrider.core.tree import ROOT
from outrider.kernels.native.huge_pages import zeros
from outrider.kernels.plan import PackedPlan, row_size


class PagedKV:
    """HiddenStore over one arena tensor of shape [L, 2, G, S, R], allocated and written once. A row
    has the D elements of a head, or the bytes of kernels/plan.py if the spec says int8. It holds
    `num_hidden` hidden states of each token, in `dtype`. If values are keys (`values_in_keys`), the
    second axis has the size 1, and keys and values of a layer are the same tensor. Layers whose
    keys have another shape lie in another of the `arenas`; layers may share keys and values.

    Rows of a prompt may be dropped (`replace`). Then a sequence has fewer rows than tokens: later
    tokens follow the remaining rows, at their positions in the text.

    Pages that no later token sees within the `reach` of the spec are released, unless hidden states
    are stored. Positions and table indices stay the same. With local slots, the local layers of the
    spec have an arena of their own, where pages have `frames` as long as later tokens see them.

    `on_copy` is called before slots are copied, so that the arenas of other ranks follow.
    `before_close` waits for launched work that still writes pages of a sequence. A `store` has more
    pages than the memory: a text continues with them when it is opened, and full pages are offered
    to it.
    """

    on_copy: Callable[[Sequence[int], Sequence[int]], None] | None = None
    before_close: Callable[[int], None] | None = None
    store: PageStore | None = None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        size: ArenaSize,
        num_hidden: int = 0,
    ) -> None:
        num_pages, page_size = size.num_pages, size.page_size
        kept = torch.int8 if spec.kv_dtype == "int8" else dtype
        self._local_layers = local = spec.local_layers if size.num_frames else ()
        keys = replace(spec, num_kv_layers=None).layer_keys
        layers = dict[int, Tensor]()

        def arenas(depths: Sequence[int], pages: int) -> tuple[Tensor, ...]:
            """Memory for the layers at `depths` that store keys, an arena for each shape."""
            shapes = dict[tuple[int, int], list[int]]()
            for depth in depths:
                if keys[depth].source == depth:
                    shape = keys[depth].num_heads, keys[depth].head_dim
                    shapes.setdefault(shape, []).append(depth)
            made: list[Tensor] = []
            for (num_heads, head_dim), own in shapes.items():
                width = row_size(head_dim, kept)
                shape = (len(own), spec.rows_per_token, num_heads, pages * page_size, width)
                made.append(zeros(shape, dtype=kept, device=device))
                layers.update(zip(own, made[-1], strict=True))
            return tuple(made)

        self.arenas = arenas([d for d in range(len(keys)) if d not in local], num_pages)
        self.arena = self.arenas[0]
        self.frames: Frames | None = None
        if local:
            (in_frames,) = arenas(local, size.num_frames)
            self.frames = Frames(in_frames, num_pages, page_size)
        kinds = [layers[one.source].unbind() for one in keys]
        self.layers = tuple((rows[0], rows[-1]) for rows in kinds)
        hidden = (num_pages * page_size, num_hidden, spec.hidden_size)
        self.hidden_SKD = zeros(hidden, dtype=dtype, device=device)
        self._pool = PagePool(num_pages, page_size)
        self._page_size = page_size
        self.reach = 0 if num_hidden else spec.reach
        self._window = spec.window if self._local_layers else self.reach
        self._device = device
        self._sequences: dict[int, SequencePages] = {}
        self._lock = WholeLock()

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        if seq_id in self._sequences:
            raise ContractError("the sequence is open already")
        salt = salt or SALT.get()
        with self._lock:
            pages = self._seen_by_all(self._pool.find_prefix(tokens, salt))
            reused = len(pages) * self._page_size
            seq = SequencePages(pages, list(tokens[:reused]), salt=salt)
            seq.num_expected = len(tokens) // self._page_size + GROWTH
            seq.num_freed = self._num_unseen(reused)
            self._share(seq)
            self._sequences[seq_id] = seq
            if self.store is not None:
                # Now: some pages may be taken for other texts once no token sees them.
                seq.names = self._names_in_memory(self.store, pages, tokens, salt)
        if self.store is not None:
            self._restore(seq_id, tokens)
            seq.num_known = len(seq.names)
        return len(seq.tokens)

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        if new in self._sequences:
            raise ContractError("the sequence is open already")
        old = self._sequences[source]
        if not (length is None or 0 <= length <= len(old.tokens)):
            raise ContractError("a fork is no longer than its source")
        tokens, num_dropped = old.tokens[:length], old.num_dropped
        shorter = num_dropped and len(tokens) < len(old.tokens)
        if shorter or old.num_freed > self._num_unseen(len(tokens)):
            raise ContractError("some of its beginning is gone")
        whole, rest = divmod(len(tokens) - num_dropped, self._page_size)
        with self._lock:
            self._require(int(rest > 0))
            pages = old.pages[:whole]
            seq = SequencePages(pages, tokens, salt=old.salt, names=old.names[:whole])
            seq.num_dropped, seq.num_freed = num_dropped, old.num_freed
            self._share(seq)
            self._sequences[new] = seq
            if rest:
                pages.append(self._take(pages, GROWTH))
        if rest:
            start = whole * self._page_size
            self._moved(*(self._slots(one, start, rest) for one in (old, self._sequences[new])))

    def length(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].tokens)

    def num_staged(self, seq_id: int) -> int:
        return self._sequences[seq_id].num_staged

    @property
    def is_idle(self) -> bool:
        """True if no request has a sequence; other ids are negative."""
        return all(seq_id < 0 for seq_id in self._sequences.copy())

    def names(self, seq_id: int, count: int) -> Sequence[PageName]:
        """The names of the first `count` pages of a sequence, in the store that it has."""
        return self._named(given(self.store, "store of pages"), self._sequences[seq_id], count)

    @property
    def num_free_tokens(self) -> int:
        return self._pool.num_free * self._page_size

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        return sum(self._commit(self._sequences[seq_id], path) for seq_id, path in paths.items())

    def close(self, seq_id: int) -> None:
        if self.before_close is not None:
            self.before_close(seq_id)
        with self._lock:
            seq = self._sequences.pop(seq_id)
            if self.frames is not None:
                self.frames.let_go(seq.in_window)
            self._pool.release(self._held(seq))
        if self.store is not None:
            self.store.used(seq.names[: seq.num_known])

    def read(self, seq_id: int) -> Tensor:
        """A copy of the committed keys and values, of shape [L, 2, G, rows, R]."""
        self._check_alike()
        return self.arena[:, :, :, self.slots(seq_id)]

    def tokens(self, seq_id: int) -> Sequence[int]:
        """The committed tokens; read only."""
        return self._sequences[seq_id].tokens

    def slots(self, seq_id: int) -> Tensor:
        """Slots of the committed rows in all layers, in order, int64."""
        seq = self._sequences[seq_id]
        if seq.num_freed or self.frames is not None:
            raise ContractError("some of its rows are gone, or lie in an arena of their own")
        slots = self._slots(seq, 0, seq.num_rows)
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def num_dropped(self, seq_id: int) -> int:
        """Number of committed tokens without rows: logical length less physical length."""
        return self._sequences[seq_id].num_dropped

    def replace(self, seq_id: int, rows_L2GMR: Tensor) -> None:
        """Replace all committed rows by M rows, M of them at most, on pages of its own.

        Rows of one index need not belong to one token: each head may keep others. Shared pages stay
        as they are for other sequences, and findable; this sequence's pages cannot be found any
        more. Nothing may be staged. Raises CapacityError, with nothing changed, if too few pages
        are free.
        """
        seq, num_rows = self._sequences[seq_id], rows_L2GMR.shape[3]
        if seq.num_staged:
            raise ContractError("nodes are staged")
        if self._window:
            raise ContractError("windows need texts with all of their rows")
        self._check_alike()
        if num_rows > seq.num_rows:
            raise ContractError("more rows than the sequence has")
        self._finish_reading()
        with self._lock:
            pages = self._pool.exchange(seq.pages, -(-num_rows // self._page_size))
            other = SequencePages(pages, seq.tokens, num_dropped=len(seq.tokens) - num_rows)
            self._sequences[seq_id] = other
        self.arena.index_copy_(3, self.slots(seq_id), rows_L2GMR)

    def hidden(self, seq_id: int, start: int, stop: int) -> Tensor:
        seq = self._sequences[seq_id]
        if not 0 <= start <= stop <= len(seq.tokens):
            raise ContractError("states of tokens that are not there")
        if seq.num_dropped:
            raise ContractError("hidden states go with the rows of their tokens")
        slots = self._slots(seq, start, stop - start)
        return self.hidden_SKD[torch.tensor(slots, dtype=torch.int64, device=self._device)]

    def keep_hidden(self, slots_N: Tensor, hidden_NKD: Tensor) -> None:
        """Write the hidden states of a pass whose tokens lie in `slots_N` (int32)."""
        self.hidden_SKD.index_copy_(0, slots_N.long(), hidden_NKD.to(self.hidden_SKD.dtype))

    def check(self) -> None:
        """Assert that no page leaked or is counted twice."""
        with self._lock:
            self._pool.check([self._held(seq) for seq in self._sequences.values()])
            if self.frames is not None:
                self.frames.check_seen([seq.in_window for seq in self._sequences.values()])

    @property
    def page_size(self) -> int:
        return self._page_size

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Hold pages for so many more nodes of each sequence. Raises CapacityError, holding no more
        than before, if the free pages do not suffice."""
        missing = {seq_id: self._missing(seq_id, count) for seq_id, count in counts.items()}
        if not any(missing.values()):
            return
        with self._lock:
            self._require(sum(missing.values()))
            for seq_id, num_pages in missing.items():
                seq = self._sequences[seq_id]
                run = max(num_pages, seq.num_expected - len(seq.pages))
                for _ in range(num_pages):
                    # One at a time: an interrupt must not leave a page without a holder.
                    seq.pages.append(self._take(seq.pages, run))

    def pages(self, seq_id: int) -> Sequence[int]:
        """The pages of a sequence in order; slot t of it lies in page t // page_size. The same
        object at every call, to which pages are only ever added."""
        return self._sequences[seq_id].pages

    def note_chain(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Stage a chain of nodes, written on held pages without a plan."""
        self.note_tree(seq_id, tokens, range(ROOT, len(tokens) - 1))

    def note_tree(self, seq_id: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Stage a tree, as `note_chain` does a chain."""
        seq = self._sequences[seq_id]
        if seq.num_staged:
            raise ContractError("nodes are staged")
        seq.stage(tokens, parents)

    def plan(self, rows: Sequence[StepRow]) -> PackedPlan:
        """Stage the rows' tokens as new nodes. Returns where each reads and writes.

        Raises CapacityError, with nothing staged, if the free pages do not suffice.
        """
        columns, table = self.stage(rows)
        return columns.plan(table, self._page_size, self._device)

    def plan_after(self, seq_ids: Sequence[int], tokens: Sequence[int]) -> PackedPlan:
        """The plan of `tokens` that follow the committed texts `seq_ids` and are not stored: each
        sees all rows of its text, from the position behind it."""
        texts = list(dict.fromkeys(seq_ids))
        columns = Columns()
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            seq = self._sequences[seq_id]
            columns.tokens.append(token)
            columns.slots.append(0)
            columns.seq.append(texts.index(seq_id))
            columns.add_node(position=len(seq.tokens), visible=seq.num_rows, extra=())
        tables = self._tables([StepRow.chain(seq_id, (0,)) for seq_id in texts])
        return columns.plan(tables, self._page_size, self._device)

    def stage(self, rows: Sequence[StepRow]) -> tuple[Columns, PageTable]:
        """Stage rows as `plan` does. Returns its columns and its page table, on the host."""
        self.reserve({row.seq_id: len(row.tokens) for row in rows})
        columns = Columns()
        for index, row in enumerate(rows):
            self._stage(columns, index, row)
        return columns, self._tables(rows)

    def by_layer(self, plan: PackedPlan) -> Sequence[PackedPlan]:
        """The plan for each layer: local layers have slots of their own for its rows."""
        plans = [plan] * len(self.layers)
        if self.frames is not None:
            local = self.frames.plan(plan)
            for depth in self._local_layers:
                plans[depth] = local
        return plans

    def _check_alike(self) -> None:
        if len(self.arenas) > 1:
            raise ContractError("layers with keys of several shapes have no one tensor of rows")

    def _missing(self, seq_id: int, count: int) -> int:
        seq = self._sequences[seq_id]
        end = seq.num_rows + seq.num_staged + count
        return max(-(-end // self._page_size) - len(seq.pages), 0)

    def _stage(self, columns: Columns, index: int, row: StepRow) -> None:
        seq = self._sequences[row.seq_id]
        base, first, dropped = seq.num_rows, seq.num_staged, seq.num_dropped
        seq.stage(row.tokens, row.parents)
        slots = self._slots(seq, base + first, len(row.tokens))
        columns.tokens += row.tokens
        columns.slots += slots
        columns.seq += [index] * len(row.tokens)
        if seq.staged_is_chain:
            columns.add_chain(range(base + first, base + seq.num_staged), dropped)
            return
        # An earlier chain is read only now that a node branches off.
        start = len(seq.seen)
        slots = self._slots(seq, base + start, first - start) + slots
        for node, slot in enumerate(slots, start):
            seen = seq.see(seq.parents[node], slot)
            if node >= first:
                position = base + seen.num_nodes - 1 + dropped
                columns.add_node(position=position, visible=base + seen.run, extra=seen.extra)

    def _slots(self, seq: SequencePages, start: int, count: int) -> list[int]:
        size, pages = self._page_size, seq.pages
        return [pages[t // size] * size + t % size for t in range(start, start + count)]

    def _tables(self, rows: Sequence[StepRow]) -> PageTable:
        tables = [self._sequences[row.seq_id].table for row in rows]
        if len(tables) == 1:
            return tables[0][None]
        pages_BP = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
        for index, table in enumerate(tables):
            pages_BP[index, : len(table)] = table
        return pages_BP

    def _commit(self, seq: SequencePages, path: Sequence[int]) -> int:
        moved = [(node, depth) for depth, node in enumerate(path) if node != depth]
        base, filled = seq.num_rows, seq.num_rows // self._page_size
        if moved:
            source = [self._slots(seq, base + node, 1)[0] for node, _ in moved]
            target = [self._slots(seq, base + depth, 1)[0] for _, depth in moved]
            self._moved(source, target)
        seq.tokens += [seq.staged[node] for node in path]
        seq.num_staged = 0
        if seq.num_dropped:
            return len(moved)  # its rows are no other text's
        full = range(filled, len(seq.tokens) // self._page_size)
        if full or self._window:
            with self._lock:
                for index in full:
                    # A page is found through the pages before it.
                    if self.frames is not None or not 0 < index <= seq.num_freed:
                        self._remember(seq, index)
                self._free_unseen(seq)
        return len(moved)

    def _remember(self, seq: SequencePages, index: int) -> None:
        """Make a full page findable, and offer it to the store."""
        page = seq.pages[index]
        self._pool.remember(seq.pages, seq.tokens, index, seq.salt, self._is_whole)
        key, store = self._pool.key_of(page), self.store
        if store is None or key is None:
            return
        name = self._named(store, seq, index + 1)[index]
        self._pool.stored_names[page] = name
        # A frame may be taken long before its page is.
        at_once = self.frames is not None
        store.offer("page", name, partial(self._copied, page, key), at_once=at_once)

    def _copied(self, page: int, key: object) -> list[Part] | None:
        """A copy of the parts of a page; None if its content is not that of `key` any more."""
        with self._lock:
            if self._pool.key_of(page) != key:
                return None
            return [part.copy() for part in self.parts(page)]

    def parts(self, page: int) -> list[Part]:
        """The bytes of all that belongs to a page: rows, those of local layers, hidden states."""

        def rows(arena: Tensor, number: int) -> Tensor:
            return arena[:, :, :, number * self._page_size : (number + 1) * self._page_size]

        found = [rows(arena, page) for arena in self.arenas]
        if self.frames is not None:
            found.append(rows(self.frames.arena, int(self.frames.of_P[page])))
        if self.hidden_SKD.shape[1]:
            found.append(self.hidden_SKD[page * self._page_size : (page + 1) * self._page_size])
        return [bytes_of(part) for part in found]

    def _named(self, store: PageStore, seq: SequencePages, count: int) -> list[PageName]:
        """The names of the first pages of a sequence, at least `count` of them."""
        while len(seq.names) < count:
            seq.names.append(self._next_name(store, seq.names, seq.tokens, seq.salt))
        return seq.names

    def _next_name(
        self, store: PageStore, names: Sequence[PageName], tokens: Sequence[int], salt: str
    ) -> PageName:
        """The name of the page of `tokens` that follows those with `names`."""
        start = len(names) * self._page_size
        own = tokens[start : start + self._page_size]
        return store.name(names[-1] if names else None, own, salt)

    def _names_in_memory(
        self, store: PageStore, pages: Sequence[int], tokens: Sequence[int], salt: str
    ) -> list[PageName]:
        """The names of `pages`, which are findable and have the beginning of `tokens`."""
        names: list[PageName] = []
        for page in pages:
            known = self._pool.stored_names[page]
            names.append(known or self._next_name(store, names, tokens, salt))
        return names

    def findable(self, tokens: Sequence[int], salt: str) -> list[PageName]:
        """The names of the first pages of `tokens`: those in memory, and if the store has the next
        one, all others too."""
        store, count = given(self.store, "store of pages"), len(tokens) // self._page_size
        with self._lock:
            pages = self._pool.find_prefix(tokens, salt)
            names = self._names_in_memory(store, pages, tokens, salt)
        while len(names) < count:
            name = self._next_name(store, names, tokens, salt)
            if len(names) == len(pages) and not store.has("page", name):
                break
            names.append(name)
        return names

    def _restore(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Continue a new sequence with the pages of the store, as a pass would fill them."""
        seq, store = self._sequences[seq_id], given(self.store, "store of pages")
        while len(seq.tokens) + self._page_size <= len(tokens):
            name = self._next_name(store, seq.names, tokens, seq.salt)
            if not store.has("page", name):
                return
            try:
                self.reserve({seq_id: self._page_size})
            except CapacityError:
                return
            page = seq.pages[name.index]
            if not store.read("page", name, self.parts(page)):
                return  # the page stays reserved for what will be read
            with self._lock:
                seq.tokens += name.tokens
                seq.names.append(name)
                self._pool.remember(seq.pages, seq.tokens, name.index, seq.salt, self._is_whole)
                self._pool.stored_names[page] = name
                self._free_unseen(seq)

    def _is_whole(self, page: int) -> bool:
        """True if every layer has the rows that were written to the page."""
        return self.frames is None or self.frames.has(page)

    def _num_unseen(self, length: int) -> int:
        """Number of pages that no token after the first `length` sees."""
        return max(length + 1 - self._window, 0) // self._page_size if self._window else 0

    def _free_unseen(self, seq: SequencePages) -> None:
        start, end = seq.num_freed, self._num_unseen(len(seq.tokens))
        if end > start:
            self._finish_reading()
            seq.num_freed = end
            given_back = self._pool.release if self.frames is None else self.frames.let_go
            given_back(seq.pages[start:end])

    def _seen_by_all(self, pages: list[int]) -> list[int]:
        """The longest beginning of `pages` with all rows that later tokens see, in every layer."""
        while pages and self.frames is not None:
            start = self._num_unseen(len(pages) * self._page_size)
            missing = self.frames.last_missing(pages[start:])
            if missing is None:
                break
            pages = pages[: start + missing]
        return pages

    def _held(self, seq: SequencePages) -> Sequence[int]:
        """Pages that the sequence holds: the visible ones, or all if some layers see all."""
        return seq.in_window if self.frames is None else seq.pages

    def _share(self, seq: SequencePages) -> None:
        for page in self._held(seq):
            self._pool.share(page)
        if self.frames is not None:
            self.frames.hold(seq.in_window)

    def _require(self, num_pages: int) -> None:
        self._pool.require(num_pages)
        if self.frames is not None:
            self.frames.require(num_pages)

    def _take(self, pages: Sequence[int], run: int) -> int:
        """Take a page to follow `pages`, in every arena."""
        page = self._pool.take(pages, run)
        if self.frames is not None:
            self.frames.give(page, pages)
        return page

    def _finish_reading(self) -> None:
        """Wait for readers, before pages are released that another stream may write."""
        if self.arena.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _moved(self, source: list[int], target: list[int]) -> None:
        if self.on_copy is not None:
            self.on_copy(source, target)
        self.copy_slots(source, target)

    def copy_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the contents of slots to other slots."""
        self.copy_rows(*(torch.tensor(slots, device=self._device) for slots in (source, target)))

    def copy_rows(self, origin: Tensor, into: Tensor) -> None:  # of slots on the device, int64
        for arena in self.arenas:
            arena.index_copy_(3, into, arena[:, :, :, origin])
        if self.frames is not None:
            self.frames.copy(into, origin)
        if self.hidden_SKD.shape[1]:
            self.hidden_SKD.index_copy_(0, into, self.hidden_SKD[origin])


def paged_of(state: object) -> PagedKV | None:
    """The keys and values of a model's memory, which may be a part of it, if they lie in pages."""
    kv = getattr(state, "kv", state)
    return kv if isinstance(kv, PagedKV) else None
