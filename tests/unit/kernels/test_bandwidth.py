"""Ceilings are of the sizes that they name, and a faster clock means a faster machine."""

from __future__ import annotations

from itertools import count

import pytest

from outrider.core.errors import MachineError
from outrider.plugins.doctor import ceilings as bandwidth
from outrider.plugins.doctor.ceilings import (
    MAX_MEMORY_BYTES,
    MIN_MEMORY_BYTES,
    ceilings,
    level_sizes,
)

KB, MB = 1 << 10, 1 << 20


def test_sizes_fill_half_a_cache_and_leave_the_last_one() -> None:
    found = level_sizes({1: 32 * KB, 2: 1 * MB, 3: 36 * MB})
    assert found == [("L2", 512 * KB), ("L3", 18 * MB), ("memory", 72 * MB)]
    assert level_sizes({}) == [("memory", MIN_MEMORY_BYTES)]
    assert level_sizes({2: 1 * MB, 3: 1 << 30}) == [
        ("L2", 512 * KB),
        ("memory", MAX_MEMORY_BYTES),
    ]


def test_each_level_is_read_by_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "cache_bytes", lambda: {2: 64 * KB, 3: 1 * MB})
    monkeypatch.setattr(bandwidth, "MIN_MEMORY_BYTES", 2 * MB)
    monkeypatch.setattr(bandwidth, "MIN_TURN_BYTES", 4 * MB)
    ticks = count()
    try:
        found = ceilings((1, 2), clock=lambda: next(ticks) * 1e-3)
    except MachineError as error:
        pytest.skip(str(error))
    assert [(c.level, c.threads, c.num_bytes) for c in found] == [
        ("L2", 1, 32 * KB),
        ("L2", 2, 64 * KB),
        ("L3", 1, 512 * KB),
        ("L3", 2, 512 * KB),
        ("memory", 1, 2 * MB),
        ("memory", 2, 2 * MB),
    ]
    # 4 MB in a tick of a millisecond.
    assert {c.gb_per_second for c in found} == {4.19}
