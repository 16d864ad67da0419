"""Memory limits of the machine, and how many tokens of KV cache fit.

A process may be stopped by the machine (free memory), by its control group (versions 1 and 2, and
every group above its own) or by its own limits (RLIMIT_AS, RLIMIT_DATA). RLIMIT limits count
addresses, the others pages that were written: a KV cache that nobody wrote to yet counts for RLIMIT
alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.core.errors import CapacityError, address_limits
from outrider.core.fields import size
from outrider.core.files import FileKind, read_bytes, read_text
from outrider.core.spec import ModelSpec, RecurrentCapacity, StateSizes

# Weights, activations and other programs need the rest.
ARENA_SHARE = 0.25
# What a size is not taken for a limit from: version 1 says "none" so.
_NO_LIMIT = 1 << 60
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Of what `name` allows, `free` bytes are left. `of_addresses` says that memory counts when it
    is reserved, files that are mapped included, not when it is first written."""

    name: str
    free: int
    of_addresses: bool = False


def limits(device: torch.device, share: float = 1.0) -> tuple[MemoryLimit, ...]:
    """All that bound what this process can still take of `device`, of which it may have `share`."""
    found = list[MemoryLimit]()
    if share < 1:
        told = f"--memory-share {share:.4g} of {size(total_bytes(device))}"
        found.append(MemoryLimit(told, int(share * total_bytes(device))))
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return (*found, MemoryLimit(f"free memory of {device}", free))
    found.append(MemoryLimit("free memory of this machine", _available_bytes()))
    for limit, used in _group_limits():
        found.append(MemoryLimit(f"memory limit of the control group, {size(limit)}", limit - used))
    for name, command, counted, limit in address_limits():
        used = _own_bytes(counted)
        if used is not None:
            told = f"{name} ({command}), {size(limit)}"
            found.append(MemoryLimit(told, limit - used, of_addresses=True))
    return tuple(replace(one, free=max(0, one.free)) for one in found)


def free_bytes(device: torch.device) -> int:
    """Memory that `device` could give this process now, in bytes."""
    return min(limit.free for limit in limits(device))


def total_bytes(device: torch.device) -> int:
    """All memory of `device` that this process may use, in bytes; a device that shares the host's
    counts that."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min([_physical_bytes(), *(limit for limit, _ in _group_limits())])


def arena_slots(
    spec: ModelSpec,
    *,
    num_slots: int,
    device: torch.device,
    num_local_slots: int = 0,
    states: RecurrentCapacity | None = None,
    share: float = 1.0,
) -> int:
    """`num_slots`, or as many as a quarter of the memory, or of this `share` of it, holds once it
    holds the recurrent `states`, if the model has any. Local layers have `num_local_slots` of their
    own, if that is not 0.

    On a CPU, memory of slots that were never written is not resident. Raises CapacityError where
    not a single slot is left.
    """
    most = int(total_bytes(device) * share * ARENA_SHARE)
    taken = 0 if states is None else states.num_bytes(spec)
    affordable = (most - taken) // spec.kv_bytes_per_token
    if 0 < num_local_slots < affordable:
        local = spec.arena_bytes(0, num_local_slots)
        affordable = (most - taken - local) // spec.arena_bytes(1, 0)
    if affordable < 1:
        told = f"keys and values of one token take {size(spec.kv_bytes_per_token)}"
        if taken:
            told = f"the recurrent states take {size(taken)} and {told}"
        raise CapacityError(
            f"{told}; a quarter of the memory of {device}, which arenas get, is {size(most)}.",
            hint="lower --batch-size or --state-history, or use --state-rollback replay"
            if taken
            else "choose a smaller model, or a machine with more memory",
        )
    return min(num_slots, affordable)


def states_that_fit(
    room: RecurrentCapacity, sizes: StateSizes, device: torch.device
) -> RecurrentCapacity:
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


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    """What can be taken without swapping: pages that only cache files count as free."""
    kilobytes = _field(_PROC / "meminfo", b"MemAvailable")
    if kilobytes is not None:
        return 1024 * kilobytes
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not tell
        return _physical_bytes()
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_bytes(name: bytes) -> int | None:
    kilobytes = _field(_PROC / "self" / "status", name)
    return None if kilobytes is None else 1024 * kilobytes


def _group_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be taken back) of each group above this process."""
    try:
        lines = read_text(_PROC / "self" / "cgroup", FileKind.SYSTEM).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            names = ("memory.max", "memory.current", b"inactive_file")
            yield from _above(_GROUPS, path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")
            yield from _above(_GROUPS / "memory", path, names)


def _above(root: Path, path: str, names: tuple[str, str, bytes]) -> Iterator[tuple[int, int]]:
    """Those of the group at `path` and of all above it. In a container the path may be the host's,
    which is not there; then the root is the container's own group."""
    of_limit, of_usage, cached = names
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        limit, usage = _number(folder / of_limit), _number(folder / of_usage)
        if limit is not None and limit < _NO_LIMIT:
            reclaimable = _field(folder / "memory.stat", cached) or 0
            yield limit, max(0, (usage or 0) - reclaimable)


def _number(path: Path) -> int | None:
    """None where there is no such file, or where it says that there is no limit."""
    try:
        text = read_text(path, FileKind.SYSTEM).strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def _field(path: Path, name: bytes) -> int | None:
    """The number behind `name` in a file of `name: number` or `name number` lines."""
    try:
        data = read_bytes(path, FileKind.SYSTEM)
    except OSError:
        return None
    found = re.search(rb"^" + name + rb":?\s+(\d+)", data, re.MULTILINE)
    return int(found[1]) if found else None
