"""The arena's size: what was asked for, or what the memory affords."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from doubles.tiny_attention import toy_spec
from outrider.cache.pages import (
    ARENA_SHARE,
    arena_slots,
    free_bytes,
    limits,
    total_bytes,
)
from outrider.core.process import own_bytes

CPU = torch.device("cpu")


def test_a_small_wish_is_granted() -> None:
    assert arena_slots(toy_spec("toy", 5), num_slots=300, device=CPU) == 300


def test_local_layers_take_their_windows_alone() -> None:
    """Beyond those, what memory there is holds more of the other layers."""
    spec = replace(toy_spec("toy", 5), window=8, local_layers=(1,))
    asked = partial(arena_slots, spec, num_slots=1 << 50, device=CPU)
    most = int(total_bytes(CPU) * ARENA_SHARE)
    for num_local in (64, 4096):
        slots = asked(num_local_slots=num_local)
        assert 0 <= most - spec.arena_bytes(slots, num_local) < spec.arena_bytes(1, 0)
    assert asked(num_local_slots=asked()) == asked()
    assert arena_slots(spec, num_slots=300, num_local_slots=64, device=CPU) == 300


def test_a_wish_beyond_memory_gets_its_share() -> None:
    spec = toy_spec("toy", 5)
    slots = arena_slots(spec, num_slots=1 << 50, device=CPU)
    assert slots == int(total_bytes(CPU) * ARENA_SHARE) // spec.kv_bytes_per_token


def test_engines_that_share_the_memory_plan_no_more_than_there_is() -> None:
    spec = toy_spec("toy", 5)
    asked = partial(arena_slots, spec, num_slots=1 << 50, device=CPU)
    whole, third = asked(), asked(share=1 / 3)
    assert 0 <= whole - 3 * third < 4
    bounds = limits(CPU, 0.25)
    assert bounds[0].name.startswith("--memory-share 0.25 of")
    assert bounds[0].free == int(0.25 * total_bytes(CPU))
    assert len(limits(CPU)) == len(bounds) - 1


def test_free_memory_is_part_of_all_memory() -> None:
    assert 0 < free_bytes(CPU) <= total_bytes(CPU)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux has files of the system"
)
def test_an_interrupt_leaves_no_file_of_the_system_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open
    read: list[bytes] = []

    def interrupted(self: Path) -> bytes:
        with opened(self, "rb") as file:
            os.kill(os.getpid(), signal.SIGINT)
            read.append(file.read())
        return read[-1]

    monkeypatch.setattr(Path, "read_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own_bytes(b"VmRSS")
    assert b"VmRSS" in read[0]
