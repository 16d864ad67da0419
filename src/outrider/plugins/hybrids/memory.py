"""Memory of hybrid models: KV pages of the attention layers and states of the recurrent layers.

`cache/paged_kv.py` holds text, pages and nodes, `states.py` knows the held states and their cells.
Both change in one call, so a commit, fork or close never leaves them inconsistent. A new text
reuses the common part of both: whole pages, up to one with a stored state. A sequence whose state
was not stored is read again from an earlier state before its next pass; its keys and values are
already in the arena, so those of the second reading go to a scratch page.

Shapes:  L = attention layers, G = KV heads, S = slots, D = head size, N = packed tokens,
         K = captured layers (then D is the hidden size).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import SALT, Columns, Part, bytes_of, free_bytes
from outrider.core.errors import CapacityError, given
from outrider.core.protocols import StepRow
from outrider.core.spec import RecurrentCapacity, StateShape
from outrider.kernels.plan import PackedPlan
from outrider.kernels.reference.delta import Cells, InputCell, StateCell, TokenRun
from outrider.plugins.hybrids.states import (
    Beginning,
    CellPool,
    Checkpoints,
    Policy,
    RecurrentSequence,
    Wants,
)


@dataclass(frozen=True, slots=True)
class HybridPlan:
    packed: PackedPlan
    runs: tuple[TokenRun, ...]


@dataclass(slots=True)
class Staging:
    """One row's cells, which become the sequence's own once the pass has written them. The state
    after the stored committed inputs goes to `fold`, if there are any."""

    seq: RecurrentSequence
    row: StepRow
    wants: Wants
    states: list[int] = field(default_factory=list[int])
    inputs: list[int] = field(default_factory=list[int])
    fold: int | None = None

    @property
    def folds(self) -> bool:
        return bool(self.seq.kept) and not self.seq.parents

    def stage(self, first: int) -> list[TokenRun]:
        """Add the row's nodes to its sequence; `first` is the packed index of its first token."""
        seq, row = self.seq, self.row
        start = len(seq.parents)
        seq.staged += row.tokens
        seq.parents += row.parents
        seq.states.update(zip(self.wants.states, self.states, strict=True))
        seq.inputs.update(zip(self.wants.inputs, self.inputs, strict=True))
        runs: list[TokenRun] = []
        for nodes in seq.runs(row):
            origin = given(seq.origin(seq.parents[nodes.start]), "origin")
            source, replayed, fold = origin.source, origin.replayed, self.fold
            if runs and fold is not None and origin.num_kept:
                source, replayed, fold = fold, replayed[origin.num_kept :], None
            runs.append(
                TokenRun(
                    first + nodes.start - start,
                    tuple(seq.states.get(node) for node in nodes),
                    tuple(seq.inputs.get(node) for node in nodes),
                    source,
                    replayed,
                    None if runs else fold,
                )
            )
        return runs

    def forget(self) -> None:
        """Undo the held states after a failed pass; the nodes stay staged."""
        for node in self.wants.states:
            del self.seq.states[node]
        for node in self.wants.inputs:
            del self.seq.inputs[node]


# Owner of the scratch page; no request has this id.
_SCRATCH = -1


def _parts(cell: StateCell) -> list[Part]:
    return [bytes_of(cell.conv_LWC), bytes_of(cell.state_LHKV)]


class HybridState:
    """HiddenStore over a PagedKV, which needs one extra page as scratch, and recurrent states."""

    def __init__(
        self, kv: PagedKV, shape: StateShape, capacity: RecurrentCapacity, device: torch.device
    ) -> None:
        self.kv = kv
        self._device = device
        kv.open(_SCRATCH, ())
        kv.reserve({_SCRATCH: 1})
        self._scratch_slot = kv.pages(_SCRATCH)[0] * kv.page_size
        on_device = device.type != "cpu"
        self.capacity = states_that_fit(capacity, shape, device) if on_device else capacity
        self._states: CellPool[StateCell] = CellPool(
            lambda: StateCell.zeros(shape, device), self.capacity.num_states, at_once=on_device
        )
        self._inputs: CellPool[InputCell] = CellPool(
            lambda: InputCell.zeros(shape, device), self.capacity.num_inputs, at_once=on_device
        )
        self.cells = Cells(self._states.cells, self._inputs.cells)
        self._checkpoints = Checkpoints(self._states, capacity.num_checkpoints)
        self._policy = Policy(
            capacity.rollback,
            self.capacity.history,
            self.capacity.num_staged,
            kv.page_size,
            capacity.num_checkpoints > 0,
        )
        self._sequences: dict[int, RecurrentSequence] = {}

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        most = len(tokens)
        salt = salt or SALT.get()
        while True:
            self._recall(tokens[:most], salt)
            length, cell = self._checkpoints.longest(tokens, most)
            reused = self.kv.open(seq_id, tokens[:length], salt)
            if reused == length:
                break
            # Pages before that state are gone: look for a state after the remaining ones.
            self.kv.close(seq_id)
            self._states.release([] if cell is None else [cell])
            most = reused
        self._sequences[seq_id] = RecurrentSequence(
            list(tokens[:length]), announced=len(tokens), base=cell, base_length=length
        )
        return length

    def _recall(self, tokens: Sequence[int], salt: str) -> None:
        """Read the state after the longest beginning of `tokens` from the store, if it has a longer
        one than memory has."""
        store, size = self.kv.store, self.page_size
        if store is None or not self._checkpoints.capacity:
            return
        known, cell = self._checkpoints.longest(tokens, len(tokens))
        self._states.release([] if cell is None else [cell])
        if len(tokens) < known + size:
            return
        names = self.kv.findable(tokens, salt)[known // size :]
        found = next((name for name in reversed(names) if store.has("state", name)), None)
        if found is None:
            return
        try:
            taken = self._take_states(1)
        except CapacityError:
            return
        with self._giving_back(self._states, taken):
            if store.read("state", found, _parts(self._states.cells[taken[0]])):
                self._checkpoints.add(tuple(tokens[: (found.index + 1) * size]), taken[0])
        self._states.release(taken)

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        self.kv.fork(source, new, length)
        old = self._sequences[source]
        tokens = old.tokens[:length]
        seq = RecurrentSequence(tokens, announced=len(tokens))
        seq.base_length, seq.base = self._checkpoints.longest(tokens, len(tokens))
        if seq.base_length < min(old.reach, len(tokens)) and old.base_length <= len(tokens):
            self._states.release(seq.held_states)
            seq.base, seq.base_length = old.base, old.base_length
            seq.kept = old.kept[: len(tokens) - old.base_length]
            self._states.share(seq.held_states)
            self._inputs.share(seq.kept)
        self._sequences[new] = seq

    def length(self, seq_id: int) -> int:
        return self.kv.length(seq_id)

    def num_staged(self, seq_id: int) -> int:
        return self.kv.num_staged(seq_id)

    @property
    def num_free_tokens(self) -> int:
        return self.kv.num_free_tokens

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Reserve pages; cells suffice for as many sequences as `capacity` has."""
        self.kv.reserve(counts)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        num_copied = self.kv.commit(paths)
        for seq_id, path in paths.items():
            self._commit(self._sequences[seq_id], path, seq_id)
        return num_copied

    def close(self, seq_id: int) -> None:
        self.kv.close(seq_id)
        seq = self._sequences.pop(seq_id)
        self._states.release(seq.held_states)
        self._inputs.release(seq.held_inputs)

    def hidden(self, seq_id: int, start: int, stop: int) -> Tensor:
        return self.kv.hidden(seq_id, start, stop)

    def read(self, seq_id: int) -> Tensor:
        """A copy of the attention layers' keys and values, as PagedKV gives it."""
        return self.kv.read(seq_id)

    @property
    def arena(self) -> Tensor:
        """The arena of the attention layers, of shape [L, 2, G, S, D]."""
        return self.kv.arena

    @property
    def history(self) -> int:
        """Nodes of a round, without the pending token, that it can return to."""
        return self.capacity.history

    @property
    def page_size(self) -> int:
        return self.kv.page_size

    def check(self) -> None:
        """Assert that no page and no cell leaked or is counted twice."""
        self.kv.check()
        sequences = self._sequences.values()
        states = [cell for seq in sequences for cell in seq.held_states]
        self._states.check([*states, *self._checkpoints.held])
        self._inputs.check([cell for seq in sequences for cell in seq.held_inputs])

    def overdue(self, rows: Sequence[StepRow], most: int) -> tuple[int, range] | None:
        """A sequence and at most `most` of its positions to read again before `rows`, or None."""
        for row in rows:
            found = self._sequences[row.seq_id].overdue(row)
            if found is not None:
                start, stop = found
                return row.seq_id, range(start, min(stop, start + most))
        return None

    @contextmanager
    def reading_again(self, seq_id: int, positions: range) -> Generator[HybridPlan]:
        """The plan of a pass over text whose keys and values are in the arena; after the pass the
        state after these positions is held."""
        seq = self._sequences[seq_id]
        origin = given(seq.origin_at(positions.start), "origin")
        (cell,) = self._take_states(1)
        columns = Columns()
        columns.tokens += seq.text(positions.start, positions.stop)
        columns.slots += [self._scratch_slot] * len(positions)
        columns.seq += [0] * len(positions)
        columns.add_chain(positions)
        pages_1P = np.array([self.kv.pages(seq_id)], dtype=np.int32)
        packed = columns.plan(pages_1P, self.page_size, self._device)
        states = (*([None] * (len(positions) - 1)), cell)
        run = TokenRun(0, states, (None,) * len(positions), origin.source, origin.replayed)
        with self._giving_back(self._states, [cell]):
            yield HybridPlan(packed, (run,))
        node = positions.stop - len(seq.tokens) - 1
        if node >= 0:
            seq.states[node] = cell
        else:
            self._rebase(seq, cell, positions.stop)

    @contextmanager
    def planning(self, rows: Sequence[StepRow]) -> Generator[HybridPlan]:
        """The plan of a pass over `rows`, none of which is overdue. They are staged, even if the
        pass fails. Raises CapacityError, with nothing staged, if memory does not suffice."""
        stagings = self._stagings(rows)
        folds = [one.fold for one in stagings if one.fold is not None]
        states = [cell for one in stagings for cell in one.states]
        inputs = [cell for one in stagings for cell in one.inputs]
        with (
            self._giving_back(self._states, [*folds, *states]),
            self._giving_back(self._inputs, inputs),
        ):
            packed = self.kv.plan(rows)
            runs: list[TokenRun] = []
            for one in stagings:
                runs += one.stage(runs[-1].stop if runs else 0)
            try:
                yield HybridPlan(packed, tuple(runs))
            except BaseException:
                for one in stagings:
                    one.forget()
                raise
        for one in stagings:
            if one.fold is not None:
                self._rebase(one.seq, one.fold, one.seq.reach)

    def _stagings(self, rows: Sequence[StepRow]) -> list[Staging]:
        """Take the cells that the rows want. Raises CapacityError, having taken none."""
        stagings: list[Staging] = []
        for row in rows:
            seq = self._sequences[row.seq_id]
            wants = self._policy.wants(seq, row)
            self._forget_early(seq, row, len(wants.states))
            stagings.append(Staging(seq, row, wants))
        num_states = sum(len(one.wants.states) + one.folds for one in stagings)
        taken = self._take_states(num_states)
        with self._giving_back(self._states, taken):
            inputs = iter(self._inputs.take(sum(len(one.wants.inputs) for one in stagings)))
        states = iter(taken)
        for one in stagings:
            one.fold = next(states) if one.folds else None
            one.states = list(islice(states, len(one.wants.states)))
            one.inputs = list(islice(inputs, len(one.wants.inputs)))
        return stagings

    def _forget_early(self, seq: RecurrentSequence, row: StepRow, num_more: int) -> None:
        """Release the first states of a long staged chain that continues."""
        parents = [*seq.parents, *row.parents]
        if seq.chain_length(parents) == len(parents):
            while len(seq.states) + num_more > self.capacity.num_staged:
                self._states.release([seq.states.pop(min(seq.states))])

    def _take_states(self, count: int) -> list[int]:
        """Take cells, dropping checkpoints if need be. Raises CapacityError, having taken none."""
        while True:
            self._checkpoints.free_cells(count)
            try:
                return self._states.take(count)
            except CapacityError:
                # Another lane may have been faster; then there are more checkpoints to drop.
                if not self._checkpoints.held:
                    raise

    @contextmanager
    def _giving_back(
        self, pool: CellPool[StateCell] | CellPool[InputCell], cells: Sequence[int]
    ) -> Generator[None]:
        """Release `cells` if the block fails."""
        taken = list(cells)
        try:
            yield
        except BaseException:
            pool.release(taken)
            raise

    def _commit(self, seq: RecurrentSequence, path: Sequence[int], seq_id: int) -> None:
        base, base_length, kept = seq.base, seq.base_length, list(seq.kept)
        length = len(seq.tokens)
        seq.tokens += [seq.staged[node] for node in path]
        for position, node in enumerate(path, length + 1):
            if node in seq.states:
                base, base_length, kept = seq.states[node], position, []
                self._remember(seq, position, base, seq_id)
            elif node in seq.inputs and base_length + len(kept) == position - 1:
                kept.append(seq.inputs[node])
        self._states.share([] if base is None else [base])
        self._inputs.share(kept)
        self._states.release(seq.held_states)
        self._inputs.release(seq.held_inputs)
        seq.base, seq.base_length, seq.kept = base, base_length, kept
        seq.staged, seq.parents, seq.states, seq.inputs = [], [], {}, {}

    def _remember(self, seq: RecurrentSequence, position: int, cell: int, seq_id: int) -> None:
        """Store the state at a page end; of the text that a sequence writes, only the last one."""
        if position % self.page_size:
            return
        beginning = tuple(seq.tokens[:position])
        if position > seq.announced:
            self._checkpoints.drop(seq.written)
            seq.written = beginning
        self._checkpoints.add(beginning, cell)
        if self.kv.store is not None and self._checkpoints.capacity:
            index = position // self.page_size - 1
            name = self.kv.names(seq_id, index + 1)[index]
            self.kv.store.offer("state", name, partial(self._copied, beginning))

    def _copied(self, beginning: Beginning) -> list[Part] | None:
        """A copy of the stored state after `beginning`; None if it was dropped."""

        def copied(cell: int) -> list[Part]:
            return [part.copy() for part in _parts(self._states.cells[cell])]

        return self._checkpoints.read(beginning, copied)

    def _rebase(self, seq: RecurrentSequence, cell: int, length: int) -> None:
        """Make `cell`, the state after the first `length` tokens, the base of the sequence."""
        self._states.release([] if seq.base is None else [seq.base])
        self._inputs.release(seq.kept)
        seq.base, seq.base_length, seq.kept = cell, length, []


def states_that_fit(
    wanted: RecurrentCapacity, shape: StateShape, device: torch.device
) -> RecurrentCapacity:
    """`wanted`, with a shorter history if the device has too little free memory. Raises
    CapacityError if it has none for a history of one."""
    free = free_bytes(device)
    while wanted.num_bytes(shape) > free:
        if wanted.history <= 1:
            raise CapacityError(
                f"the recurrent states of {wanted.num_sequences} sequences take "
                f"{wanted.num_bytes(shape)} bytes; {device} has {free} free.",
                hint="lower --batch-size, or use --state-rollback replay",
            )
        wanted = replace(wanted, history=wanted.history - 1)
    return wanted
