"""Messages through memory, between two ends in one process."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.core.errors import DrafterError
from outrider.plugins.lanes.process.frames import TICK_SECONDS, Frame, Kind, receive, send
from outrider.plugins.lanes.process.shared import MemoryPipe, message_memory

# What one stream of csrc/ranks.h holds.
STREAM_SIZE = 1 << 18

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture
def ends() -> tuple[MemoryPipe, MemoryPipe]:
    """The engine's, and the process's."""
    file = message_memory()
    assert file is not None
    ours, theirs = (MemoryPipe.over(file, rank=rank) for rank in (0, 1))
    os.close(file)
    assert ours is not None
    assert theirs is not None
    return ours, theirs


@pytest.mark.parametrize("size", [0, 1, STREAM_SIZE - 8, STREAM_SIZE, 5 * STREAM_SIZE + 3])
def test_a_message_of_any_size_goes_through_both_ways(
    ends: tuple[MemoryPipe, MemoryPipe], size: int
) -> None:
    frame = Frame(Kind.OPEN, os.urandom(size))
    with ThreadPoolExecutor(1) as pool:
        for source, to in (ends, ends[::-1]):
            for _ in range(2):
                sent = pool.submit(send, source, frame)
                assert receive(to, 30.0) == frame
                sent.result(30.0)


def test_more_than_the_memory_holds_is_late_where_nobody_reads(
    ends: tuple[MemoryPipe, MemoryPipe],
) -> None:
    with pytest.raises(TimeoutError):
        send(ends[0], Frame(Kind.OPEN, bytes(2 * STREAM_SIZE)), 0.1)


def test_the_engine_waits_no_longer_than_it_says(ends: tuple[MemoryPipe, MemoryPipe]) -> None:
    """The shortest of some waits, since other programs may lengthen one."""
    taken: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(ends[0], TICK_SECONDS)
        taken.append(time.monotonic() - began)
    assert TICK_SECONDS <= min(taken) < 1.6 * TICK_SECONDS


def test_half_a_message_is_late_until_the_end_and_damaged_after_it(
    ends: tuple[MemoryPipe, MemoryPipe],
) -> None:
    half = memoryview(Frame(Kind.DRAFTS, bytes(100)).packed())[:50]
    assert ends[1].send(half) == 50
    with pytest.raises(TimeoutError):
        receive(ends[0], 0.1)
    assert ends[1].send(half) == 50
    ends[0].end()
    with pytest.raises(DrafterError, match="middle of a message"):
        receive(ends[0], 30.0)
    with pytest.raises(ConnectionError):
        send(ends[0], Frame(Kind.EXIT), 30.0)
