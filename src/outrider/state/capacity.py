"""How many tokens fit: the arena's size from a model's numbers and the machine's memory."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from outrider.core.errors import CapacityError
from outrider.core.spec import ModelSpec
from outrider.core.state_room import StateRoom, StateSizes

# Weights, activations and other programs need the rest.
ARENA_SHARE = 0.25


def free_bytes(device: torch.device) -> int:
    """Memory that `device` could give out now, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not tell
        return total_bytes(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes(device: torch.device) -> int:
    """All memory of `device`, in bytes; a device that shares the host's counts that."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def arena_slots(
    spec: ModelSpec,
    *,
    sequences: int,
    window: int,
    device: torch.device,
    states: StateRoom | None = None,
) -> int:
    """Slots for `sequences` full windows, or for as many as a quarter of the memory holds once it
    holds the recurrent `states`, if the model has any.

    On a CPU, memory of slots that were never written is not resident. Raises CapacityError where
    the states leave no room.
    """
    share = int(total_bytes(device) * ARENA_SHARE)
    taken = 0 if states is None else states.num_bytes(spec)
    affordable = (share - taken) // spec.kv_bytes_per_token
    if affordable < 1:
        raise CapacityError(
            f"the recurrent states take {taken / 2**20:.0f} MiB, and a quarter of the memory of "
            f"{device}, which arenas get, is {share / 2**20:.0f} MiB.",
            hint="lower --batch-size or --state-history, or use --state-rollback replay",
        )
    return min(sequences * window, affordable)


def states_that_fit(room: StateRoom, sizes: StateSizes, device: torch.device) -> StateRoom:
    """`room`, with less history where the device has not so much memory free. Raises CapacityError
    where it has none for a history of one."""
    free = free_bytes(device)
    while room.num_bytes(sizes) > free:
        if room.history <= 1:
            raise CapacityError(
                f"the recurrent states of {room.num_sequences} sequences take "
                f"{room.num_bytes(sizes)} bytes; {device} has {free} free.",
                hint="lower --batch-size, or use --state-rollback replay",
            )
        room = replace(room, history=room.history - 1)
    return room
