"""Recurrent states of a sequence: the stored ones, their cells, and how others are rebuilt.

A recurrence cannot run backwards, so the states that a verification may return to are stored while
it runs (`Policy`): `ring` stores the state after each token, `replay` the change of the state by
each token, which is far smaller. A state that was not stored is rebuilt by reading the text again
from an earlier one, so a commit may return to any token. Shapes are those of
kernels/reference/delta.py; no function here touches a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outrider.core.errors import CapacityError, ContractError
from outrider.core.process import WholeLock
from outrider.core.protocols import StepRow
from outrider.core.tree import ROOT
from outrider.kernels.reference.delta import StateCell

Cell = TypeVar("Cell")
Copy = TypeVar("Copy")


class CellPool(Generic[Cell]):
    """Numbered cells with their numbers of holders.

    On a host a cell is allocated when it is first needed and never freed. On a device all cells are
    allocated at once, before weights fill it. A cell with several holders is never written: a
    holder that continues from it writes another cell.
    """

    def __init__(self, make: Callable[[], Cell], capacity: int, *, at_once: bool = False) -> None:
        self._make = make
        self.capacity = capacity
        self.cells: list[Cell] = []
        self._holders: list[int] = []
        self._free: list[int] = []
        self._lock = WholeLock()
        if at_once:
            self.release(self.take(capacity))

    @property
    def num_free(self) -> int:
        return len(self._free) + self.capacity - len(self.cells)

    def take(self, count: int) -> list[int]:
        """Take cells for the caller alone. Raises CapacityError, having taken none."""
        with self._lock:
            if count > self.num_free:
                raise CapacityError(
                    f"the recurrent memory is full: {count} more states are needed, and of "
                    f"{self.capacity} {self.num_free} are free.",
                    hint="lower --batch-size, --k or --state-history",
                )
            while len(self._free) < count:
                self.cells.append(self._make())
                self._holders.append(0)
                self._free.append(len(self.cells) - 1)
            taken = [self._free.pop() for _ in range(count)]
            for number in taken:
                self._holders[number] = 1
            return taken

    def share(self, numbers: Sequence[int]) -> None:
        """Add a holder to each."""
        with self._lock:
            for number in numbers:
                if self._holders[number] <= 0:
                    raise ContractError("a free cell is shared")
                self._holders[number] += 1

    def release(self, numbers: Sequence[int]) -> None:
        """Remove a holder of each."""
        with self._lock:
            for number in numbers:
                self._holders[number] -= 1
                if self._holders[number] < 0:
                    raise ContractError("a cell was given back twice")
                if self._holders[number] == 0:
                    self._free.append(number)

    def check(self, held: Sequence[int]) -> None:
        """Assert that every cell has as many holders as times in `held`."""
        with self._lock:
            counts = [0] * len(self.cells)
            for number in held:
                counts[number] += 1
            if counts != self._holders:
                raise ContractError("holders of cells are counted wrong")
            if sorted(self._free) != [n for n, count in enumerate(counts) if not count]:
                raise ContractError("the free cells are not those without holders")


Beginning = tuple[int, ...]


class Checkpoints:
    """States at page ends, each with one holder here.

    Keys and values are shared by whole pages, and a recurrent state is of use only for the very
    token that it follows. So states are stored at page ends, a bounded number of them; the least
    recently used goes first. A key is the whole prefix: two texts cannot be confused.
    """

    def __init__(self, pool: CellPool[StateCell], capacity: int) -> None:
        self._pool = pool
        self.capacity = capacity
        self._cells: OrderedDict[Beginning, int] = OrderedDict()
        self._lock = WholeLock()

    @property
    def held(self) -> list[int]:
        return list(self._cells.values())

    def longest(self, tokens: Sequence[int], most: int) -> tuple[int, int | None]:
        """The longest stored prefix among the first `most` tokens: its length, and its cell, of
        which the caller becomes a holder; (0, None) if there is none."""
        with self._lock:
            fits = [
                key for key in self._cells if len(key) <= most and key == tuple(tokens[: len(key)])
            ]
            if not fits:
                return 0, None
            best = max(fits, key=len)
            self._cells.move_to_end(best)
            cell = self._cells[best]
            self._pool.share([cell])
            return len(best), cell

    def add(self, beginning: Beginning, cell: int) -> None:
        """Store a state. A known prefix keeps its cell: both hold the same bits."""
        with self._lock:
            if not self.capacity:
                return
            if beginning not in self._cells:
                self._pool.share([cell])
                self._cells[beginning] = cell
            self._cells.move_to_end(beginning)
            if len(self._cells) > self.capacity:
                self._drop_oldest()

    def read(self, beginning: Beginning, copied: Callable[[int], Copy]) -> Copy | None:
        """The result of `copied` for the cell of a stored state, which is not written meanwhile;
        None if there is no such state."""
        with self._lock:
            cell = self._cells.get(beginning)
            return None if cell is None else copied(cell)

    def drop(self, beginning: Beginning) -> None:
        with self._lock:
            cell = self._cells.pop(beginning, None)
            if cell is not None:
                self._pool.release([cell])

    def free_cells(self, count: int) -> None:
        """Drop the oldest until `count` cells are free, or none is left."""
        with self._lock:
            while self._cells and self._pool.num_free < count:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, cell = self._cells.popitem(last=False)
        self._pool.release([cell])


@dataclass(frozen=True, slots=True)
class Wants:
    """Nodes of a row after which the state, or the inputs, must be stored."""

    states: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateOrigin:
    """A state: the state in cell `source` (None: nothing read) after `replayed` inputs, the first
    `num_kept` of which belong to committed tokens."""

    source: int | None
    replayed: tuple[int, ...] = ()
    num_kept: int = 0


@dataclass(slots=True)
class RecurrentSequence:
    """Recurrent memory of one sequence. `base` is the state after the first `base_length` of
    `tokens`, which are committed; `kept` are the inputs of later committed tokens. `states` and
    `inputs` are cells of staged nodes. `written` is the beginning of its own text at its newest
    checkpoint, past the `announced` tokens that it was opened with.
    """

    tokens: list[int] = field(default_factory=list[int])
    announced: int = 0
    base: int | None = None
    base_length: int = 0
    kept: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    states: dict[int, int] = field(default_factory=dict[int, int])
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    written: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        """Number of committed tokens whose state is available without reading again."""
        return self.base_length + len(self.kept)

    @property
    def held_states(self) -> list[int]:
        return [*([] if self.base is None else [self.base]), *self.states.values()]

    @property
    def held_inputs(self) -> list[int]:
        return [*self.kept, *self.inputs.values()]

    def origin(self, node: int) -> StateOrigin | None:
        """The state after a staged node, or after the committed tokens; None if not stored."""
        replayed: list[int] = []
        while node != ROOT:
            if node in self.states:
                return StateOrigin(self.states[node], tuple(reversed(replayed)))
            if node not in self.inputs:
                return None
            replayed.append(self.inputs[node])
            node = self.parents[node]
        if self.reach < len(self.tokens):
            return None
        return StateOrigin(self.base, (*self.kept, *reversed(replayed)), len(self.kept))

    def chain_length(self, parents: Sequence[int]) -> int:
        """The number of first nodes that form a chain from the committed state on."""
        length = 0
        while length < len(parents) and parents[length] == length - 1:
            length += 1
        return length

    def overdue(self, row: StepRow) -> tuple[int, int] | None:
        """Positions that must be read again before `row`, as (start, stop), or None.

        Raises CapacityError for a tree node whose state is lost.
        """
        first = len(self.parents)
        for parent in sorted({parent for parent in row.parents if parent < first}):
            if self.origin(parent) is not None:
                continue
            if parent >= self.chain_length(self.parents):
                raise CapacityError(
                    "a node that was staged is gone from the recurrent memory.",
                    hint="raise --state-history",
                )
            known = next((n for n in range(parent, ROOT, -1) if self.origin(n)), ROOT)
            start = self.reach if known == ROOT else len(self.tokens) + known + 1
            return start, len(self.tokens) + parent + 1
        return None

    def text(self, start: int, stop: int) -> list[int]:
        """Tokens at these positions; past the committed ones, from the staged chain."""
        length = len(self.tokens)
        return [*self.tokens[start:stop], *self.staged[max(start - length, 0) : stop - length]][
            : stop - start
        ]

    def origin_at(self, position: int) -> StateOrigin | None:
        """The state after the first `position` tokens of the text, staged chain included."""
        if position > len(self.tokens):
            return self.origin(position - len(self.tokens) - 1)
        if self.base_length <= position <= self.reach:
            return StateOrigin(self.base, tuple(self.kept[: position - self.base_length]))
        return None

    def runs(self, row: StepRow) -> Iterator[range]:
        """Nodes of `row`, which is staged, split where a node does not follow the one before."""
        first = len(self.parents) - len(row.tokens)
        start = first
        for node in range(first + 1, len(self.parents)):
            if self.parents[node] != node - 1:
                yield range(start, node)
                start = node
        yield range(start, len(self.parents))


@dataclass(frozen=True, slots=True)
class Policy:
    """Choice of the states to store of a pass. A round can return to `history` nodes in addition to
    the pending token, and at most `num_staged` whole states are held."""

    rollback: str
    history: int
    num_staged: int
    page_size: int
    checkpoints: bool

    def wants(self, seq: RecurrentSequence, row: StepRow) -> Wants:
        """Wants of `row`, not staged yet. Raises CapacityError for a tree past the history."""
        parents = [*seq.parents, *row.parents]
        if seq.chain_length(parents) == len(parents):
            return self._chain(seq, row)
        return self._tree(seq, row, parents)

    def _chain(self, seq: RecurrentSequence, row: StepRow) -> Wants:
        """Wants of a chain. Tokens before the first logits are committed text: no inner states."""
        first = len(seq.parents)
        stop = first + len(row.tokens)
        open_ends = stop - first - row.logits_from
        if self.rollback == "ring":
            count = max(1, min(open_ends, self._num_unused(seq.states)))
            states, inputs = set(range(stop - count, stop)), ()
        else:
            count = max(0, min(open_ends, self._num_unused(seq.inputs)))
            inputs = tuple(range(stop - count, stop))
            states = {stop - count - 1} if count < stop - first else set[int]()
        if self.checkpoints:
            ends = states | self._page_ends(len(seq.tokens), first, stop, row.logits_from)
            # A chain that is staged token by token meets many of them.
            states = ends if len(ends) + len(seq.states) <= self.num_staged else states
        return Wants(tuple(sorted(states)), inputs)

    def _page_ends(self, length: int, first: int, stop: int, num_text: int) -> set[int]:
        """The last node that fills a page: of the text without its last token, which is read again
        whenever the text is opened, of the whole text, and of all."""
        found: set[int] = set()
        for end in (min(first + num_text, stop), min(first + num_text + 1, stop), stop):
            node = (length + end) // self.page_size * self.page_size - length - 1
            if node >= first:
                found.add(node)
        return found

    def _tree(self, seq: RecurrentSequence, row: StepRow, parents: Sequence[int]) -> Wants:
        """Wants of a tree: every node that may have a child or end the accepted path."""
        first, stop = len(seq.parents), len(parents)
        text = min(first + row.logits_from, seq.chain_length(parents), stop - 1)
        branches = {
            parents[node] for node in range(first, stop) if parents[node] not in (ROOT, node - 1)
        }
        nodes = {*(node for node in branches if node >= first), *range(max(text, first), stop)}
        if self.rollback == "replay":
            # Inputs can be replayed only from a state on, without a gap.
            nodes = set(range(min(nodes), stop))
        held = seq.states if self.rollback == "ring" else seq.inputs
        if len(nodes) > self._num_unused(held):
            raise CapacityError(
                f"{len(nodes) + len(held)} nodes of a tree are more than a recurrent memory with "
                f"a history of {self.history} can return to.",
                hint="raise --state-history or lower --tree-nodes",
            )
        if self.rollback == "ring":
            return Wants(tuple(sorted(nodes)), ())
        before = min(nodes) - 1
        return Wants((before,) if before >= first else (), tuple(sorted(nodes)))

    def _num_unused(self, held: dict[int, int]) -> int:
        return self.history + 1 - len(held)
