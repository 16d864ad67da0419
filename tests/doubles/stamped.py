"""The shipped arena under a model of what it must hold: a number for every text that was read.

A pass writes, into the slot of each token, the number of the text that ends with it. So a slot that
two sequences write, or that is shared and then written, or that a commit moved to the wrong place,
shows when a sequence is read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from doubles.tiny_attention import toy_spec
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.clock import host_ints
from outrider.core.protocols import StepRow
from outrider.core.tree import ROOT

_PRIME = 2**31 - 1


def stamp(before: int, token: int) -> int:
    """The number of a text from that of the text without its last token."""
    return (before * 48271 + token + 1) % _PRIME


class StampedArena:
    """`texts` and `stamps` are the committed tokens of each sequence and their numbers. A token
    sees the last `reach` of them, if that is not 0: in a layer alone, if that has `num_local_slots`
    of its own."""

    def __init__(
        self, *, num_slots: int, page_size: int, reach: int = 0, num_local_slots: int = 0
    ) -> None:
        window = {"window": reach, "local_layers": (1,)} if num_local_slots else {"reach": reach}
        self.state = PagedKV(
            replace(toy_spec("stamped", 8), **window),
            dtype=torch.float64,
            device=torch.device("cpu"),
            size=ArenaSize(num_slots, page_size, num_local_slots),
        )
        self.reach = reach
        self.texts: dict[int, list[int]] = {}
        self.stamps: dict[int, list[int]] = {}
        self._staged: dict[int, list[tuple[int, int]]] = {}

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        reused = self.state.open(seq_id, tokens, salt)
        self._hold(seq_id, list(tokens[:reused]))
        return reused

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        self.state.fork(source, new, length)
        self._hold(new, self.texts[source][:length])

    def step(self, rows: Sequence[StepRow]) -> None:
        """Stage `rows` and write each node's number, into pages that nobody else holds."""
        slots = host_ints(self.state.plan(rows).slots_N)
        holders = self._holders()
        assert all(holders[slot // self.state.page_size] == 1 for slot in slots)
        numbers: list[int] = []
        for row in rows:
            numbers += self._stage(row)
        stamps = torch.tensor(numbers, dtype=torch.float64)[:, None]
        self.state.arena[:, :, :, slots] = stamps
        if (frames := self.state.frames) is not None:
            frames.arena[:, :, :, frames.slots(torch.tensor(slots))] = stamps

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        self.state.commit(paths)
        for seq_id, path in paths.items():
            kept = [self._staged[seq_id][node] for node in path]
            self.texts[seq_id] += [token for token, _ in kept]
            self.stamps[seq_id] += [number for _, number in kept]
            self._staged[seq_id] = []

    def close(self, seq_id: int) -> None:
        del self.texts[seq_id], self.stamps[seq_id], self._staged[seq_id]
        self.state.close(seq_id)

    def check(self, seq_id: int) -> None:
        """The memory of a sequence is that of its text, as far as later tokens see it, whatever
        else goes on."""
        length, pages = len(self.texts[seq_id]), self.state.pages(seq_id)
        assert self.state.length(seq_id) == length
        assert self.state.num_staged(seq_id) == len(self._staged[seq_id])
        size, frames, holders = self.state.page_size, self.state.frames, self._holders()
        seen = range(max(length + 1 - self.reach, 0) if self.reach else 0, length)
        slots = torch.tensor(
            [pages[t // size] * size + t % size for t in range(length)], dtype=torch.int32
        )
        places = slots if frames is None else frames.slots(slots)
        local = (self.state.arena if frames is None else frames.arena, places, seen)
        whole = (self.state.arena, slots, range(length))
        for arena, at, sight in (local, *([] if frames is None else [whole])):
            assert all(holders[pages[t // size]] for t in sight)
            held = arena[:, :, :, at[sight.start :].long()]
            wanted = torch.tensor(self.stamps[seq_id][sight.start :], dtype=torch.float64)
            assert torch.equal(held, wanted[:, None].expand_as(held))

    def _holders(self) -> list[int]:
        """How many hold each page."""
        pool = self.state._pool  # pyright: ignore[reportPrivateUsage]
        return pool._holders  # pyright: ignore[reportPrivateUsage]

    def _hold(self, seq_id: int, text: list[int]) -> None:
        self.texts[seq_id], self.stamps[seq_id], self._staged[seq_id] = text, [], []
        for token in text:
            self.stamps[seq_id].append(stamp(self._last(seq_id), token))

    def _last(self, seq_id: int) -> int:
        return self.stamps[seq_id][-1] if self.stamps[seq_id] else 0

    def _stage(self, row: StepRow) -> list[int]:
        nodes = self._staged[row.seq_id]
        numbers: list[int] = []
        for token, parent in zip(row.tokens, row.parents, strict=True):
            before = self._last(row.seq_id) if parent == ROOT else nodes[parent][1]
            numbers.append(stamp(before, token))
            nodes.append((token, numbers[-1]))
        return numbers
