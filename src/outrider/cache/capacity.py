"""Memory limits of the machine, and the number of tokens of KV cache that fit.

A process can be limited by the machine (free memory), by its control group (versions 1 and 2, and
every group above its own) or by its own limits (RLIMIT_AS, RLIMIT_DATA). RLIMIT limits count
addresses, the others pages that were written: a KV cache that was never written counts for RLIMIT
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

# Weights, activations and other programs need the remaining memory.
ARENA_SHARE = 0.25
# Sizes from here on are no limit: version 1 uses such a number for "none".
_NO_LIMIT = 1 << 60
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit called `name` that leaves `free` bytes. `of_addresses` says that it counts memory
    when it is reserved, mapped files included, not when it is first written."""

    name: str
    free: int
    of_addresses: bool = False


def limits(device: torch.device, share: float = 1.0) -> tuple[MemoryLimit, ...]:
    """The limits of this process's memory on `device`, of which it may use the `share`."""
    found = list[MemoryLimit]()
    if share < 1:
        name = f"--memory-share {share:.4g} of {size(total_bytes(device))}"
        found.append(MemoryLimit(name, int(share * total_bytes(device))))
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return (*found, MemoryLimit(f"free memory of {device}", free))
    found.append(MemoryLimit("free memory of this machine", _available_bytes()))
    for limit, used in _group_limits():
        found.append(MemoryLimit(f"memory limit of the control group, {size(limit)}", limit - used))
    for resource, command, counted, limit in address_limits():
        used = _own_bytes(counted)
        if used is not None:
            name = f"{resource} ({command}), {size(limit)}"
            found.append(MemoryLimit(name, limit - used, of_addresses=True))
    return tuple(replace(one, free=max(0, one.free)) for one in found)


def free_bytes(device: torch.device) -> int:
    """Memory that `device` can give this process now, in bytes."""
    return min(limit.free for limit in limits(device))


def total_bytes(device: torch.device) -> int:
    """Memory of `device` that this process may use in all, in bytes; for a device that shares the
    host's memory, the host's."""
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
    """`num_slots`, or fewer if a quarter of the memory (or of its `share`) holds fewer next to the
    recurrent `states`, if the model has any. Local layers have `num_local_slots` of their own, if
    that is not 0.

    On a CPU, slots that were never written take no physical memory. Raises CapacityError if not a
    single slot is left.
    """
    most = int(total_bytes(device) * share * ARENA_SHARE)
    taken = 0 if states is None else states.num_bytes(spec)
    affordable = (most - taken) // spec.kv_bytes_per_token
    if 0 < num_local_slots < affordable:
        local = spec.arena_bytes(0, num_local_slots)
        affordable = (most - taken - local) // spec.arena_bytes(1, 0)
    if affordable < 1:
        sizes = f"keys and values of one token take {size(spec.kv_bytes_per_token)}"
        if taken:
            sizes = f"the recurrent states take {size(taken)} and {sizes}"
        raise CapacityError(
            f"{sizes}; a quarter of the memory of {device}, the most for arenas, is {size(most)}.",
            hint="lower --batch-size or --state-history, or use --state-rollback replay"
            if taken
            else "choose a smaller model, or a machine with more memory",
        )
    return min(num_slots, affordable)


def states_that_fit(
    wanted: RecurrentCapacity, sizes: StateSizes, device: torch.device
) -> RecurrentCapacity:
    """`wanted`, with a shorter history if the device has too little free memory. Raises
    CapacityError if it has none for a history of one."""
    free = free_bytes(device)
    while wanted.num_bytes(sizes) > free:
        if wanted.history <= 1:
            raise CapacityError(
                f"the recurrent states of {wanted.num_sequences} sequences take "
                f"{wanted.num_bytes(sizes)} bytes; {device} has {free} free.",
                hint="lower --batch-size, or use --state-rollback replay",
            )
        wanted = replace(wanted, history=wanted.history - 1)
    return wanted


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    """Memory available without swapping; pages that only cache files count as free."""
    kilobytes = _field(_PROC / "meminfo", b"MemAvailable")
    if kilobytes is not None:
        return 1024 * kilobytes
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not report it
        return _physical_bytes()
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_bytes(name: bytes) -> int | None:
    kilobytes = _field(_PROC / "self" / "status", name)
    return None if kilobytes is None else 1024 * kilobytes


def _group_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each group above this process."""
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
    """Limits of the group at `path` and of all groups above it. In a container the path may be the
    host's and missing; then the root is the container's own group."""
    of_limit, of_usage, cached = names
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        limit, usage = _number(folder / of_limit), _number(folder / of_usage)
        if limit is not None and limit < _NO_LIMIT:
            reclaimable = _field(folder / "memory.stat", cached) or 0
            yield limit, max(0, (usage or 0) - reclaimable)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or if it says that there is no limit."""
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
