"""An arena that several lanes use at once: each its own sequences, all of them one set of pages.

Threads rarely change turns where it hurts. So each gives way, every now and then, between two lines
of the code under test.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

from doubles.stamped import StampedArena
from outrider.cache import paged_kv, pages
from outrider.core.errors import CapacityError
from outrider.core.protocols import StepRow

NUM_LANES = 4
# Few beginnings, so that pages are shared all the time.
BEGINNINGS = ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 1, 2, 3, 1))


@contextmanager
def restless(rng: random.Random) -> Generator[None]:
    """This thread gives way at some of the lines of the arena and its pages."""
    files = {paged_kv.__file__, pages.__file__}

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        del frame, argument
        if event == "line" and rng.random() < 0.4:
            time.sleep(1e-6)
        return at_line

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        return at_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


class Lane:
    """Opens, forks, grows, cuts and closes sequences of its own, as chance will have it."""

    def __init__(self, arena: StampedArena, lane: int) -> None:
        self._arena, self._rng = arena, random.Random(lane)
        self._next_id, self._own = lane, list[int]()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            try:
                self._rng.choice((self._open, self._grow, self._grow, self._fork, self._close))()
            except CapacityError:
                self._close()
        for seq_id in self._own:
            self._arena.close(seq_id)

    def _new(self) -> int:
        self._next_id += NUM_LANES
        return self._next_id

    def _open(self) -> None:
        if len(self._own) < 3:
            seq_id = self._new()
            self._arena.open(seq_id, self._rng.choice(BEGINNINGS))
            self._own.append(seq_id)

    def _grow(self) -> None:
        """Read on, mostly along a beginning that others read too, and keep some of it."""
        if not self._own:
            return
        seq_id = self._rng.choice(self._own)
        done = len(self._arena.texts[seq_id])
        tokens = self._rng.choice(BEGINNINGS)[done : done + 4] or (self._rng.randrange(8),)
        try:
            self._arena.step([StepRow.chain(seq_id, tokens)])
            kept = self._rng.randint(0, len(tokens))
        except CapacityError:
            kept = 0
        self._arena.commit({seq_id: range(kept)})
        self._arena.check(seq_id)
        assert self._arena.state.num_free_tokens >= 0

    def _fork(self) -> None:
        if self._own and len(self._own) < 3:
            seq_id = self._new()
            self._arena.fork(self._rng.choice(self._own), seq_id)
            self._own.append(seq_id)

    def _close(self) -> None:
        if self._own:
            self._arena.close(self._own.pop(self._rng.randrange(len(self._own))))


def check_lanes(arena: StampedArena, *, num_steps: int = 200) -> None:
    """Lanes at once: each finds its own content, and all pages are free at the end."""
    free = arena.state.num_free_tokens
    started = threading.Barrier(NUM_LANES)

    def run(lane: int) -> None:
        started.wait()
        with restless(random.Random(lane)):
            Lane(arena, lane).run(num_steps)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(NUM_LANES) as pool:
            for done in [pool.submit(run, lane) for lane in range(NUM_LANES)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    arena.state.check()
    assert arena.state.num_free_tokens == free
