"""Clocks: the host's goes on by itself, the fake one only when told."""

from __future__ import annotations

import pytest

from doubles.clocks import FakeClock
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ContractError


def test_the_host_clock_never_goes_back() -> None:
    readings = [HOST_CLOCK() for _ in range(100)]
    assert readings == sorted(readings)


def test_a_fake_clock_stands_still_until_told() -> None:
    clock = FakeClock(3.0)
    reading: Clock = clock
    assert reading() == reading() == 3.0
    clock.advance(0.5)
    assert reading() == 3.5


def test_a_fake_clock_does_not_go_back_either() -> None:
    with pytest.raises(ContractError, match="never goes back"):
        FakeClock().advance(-1e-9)
