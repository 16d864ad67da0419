"""Cores, their kinds and NUMA nodes as sysfs tells them; what a team is pinned to; weights on all
nodes in turn."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from outrider.kernels.native import cpu, huge_pages, ops
from outrider.kernels.native.cpu import (
    allowed_cores,
    hardware_threads,
    memory_nodes,
    num_fast_cores,
    num_physical_cores,
    pinned_threads,
)
from outrider.kernels.native.ops import NativeOps
from unit.kernels.implementations import randn

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="cores are not told"
)


def tell(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    cores: Sequence[Sequence[int]],
    *,
    speeds: Mapping[int, int] | None = None,
    speed_file: str = "cpu_capacity",
    nodes: Sequence[str] = (),
) -> None:
    """A machine of these `cores`, each a list of hardware threads, all of them ours."""
    for core in cores:
        for number in core:
            own = folder / f"cpu/cpu{number}"
            for name in ("topology/thread_siblings_list", speed_file):
                (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / "topology/thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
            if speeds is not None:
                (own / speed_file).write_text(f"{speeds[number]}\n")
    for number, cpus in enumerate(nodes):
        (folder / f"node/node{number}").mkdir(parents=True)
        (folder / f"node/node{number}/cpulist").write_text(cpus + "\n")
    everyone = {number for core in cores for number in core}
    monkeypatch.setattr(cpu, "_SYSTEM", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: everyone, raising=False)  # pyright: ignore


def test_a_machine_that_tells_nothing_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_physical_cores() >= 1
    monkeypatch.setattr(cpu, "_SYSTEM", tmp_path)
    assert num_physical_cores() == len(hardware_threads()) >= 1
    assert memory_nodes() == ()


@needs_affinity
@pytest.mark.parametrize(
    ("file", "speeds", "num_fast"),
    [
        ("cpufreq/cpuinfo_max_freq", [5400000, 5400000, 5600000, 5600000, 4200000, 4200000], 2),
        ("cpu_capacity", [1024, 1024, 770, 770, 410, 410], 1),
        ("cpu_capacity", [1024] * 6, 3),
        ("nothing", [0] * 6, 3),
    ],
    ids=["hybrid", "big.LITTLE", "alike", "untold"],
)
def test_fast_cores_are_those_of_the_fastest_kind(
    file: str, speeds: list[int], num_fast: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six hardware threads of three cores."""
    cores = [(0, 1), (2, 3), (4, 5)]
    tell(monkeypatch, tmp_path, cores, speeds=dict(enumerate(speeds)), speed_file=file)
    assert num_physical_cores() == 3
    assert num_fast_cores() == num_fast


@needs_affinity
def test_on_one_node_nobody_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, tmp_path, [(0, 2), (1, 3)], speeds={0: 9, 1: 5, 2: 9, 3: 5}, nodes=["0-3"])
    assert [pinned_threads(number) for number in range(1, 6)] == [()] * 5


@needs_affinity
def test_on_several_nodes_a_team_of_all_cores_is_pinned_a_core_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, tmp_path, [(0, 4), (1, 5), (2, 6), (3, 7)], nodes=["0,2,4,6", "1,3,5,7"])
    assert memory_nodes() == (0, 1)
    assert allowed_cores() == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert pinned_threads(4) == (0, 2, 1, 3)
    assert pinned_threads(8) == (0, 2, 1, 3, 4, 6, 5, 7)
    assert [pinned_threads(number) for number in (1, 2, 3, 5, 7, 9)] == [()] * 6


def allowed_of_tasks() -> dict[str, str]:
    """Where each thread of this process may run, by its number."""
    found: dict[str, str] = {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text("utf-8")
        found[task.name] = status.partition("Cpus_allowed_list:")[2].split(maxsplit=1)[0]
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("num_threads", [4, 8])
def test_workers_run_where_they_are_pinned_and_change_no_bit(
    num_threads: int, native_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than this machine may have cores: they take turns on those."""
    here = hardware_threads()
    pinned = tuple(here[number % len(here)] for number in range(num_threads))
    monkeypatch.setattr(ops, "pinned_threads", lambda _: pinned)  # pyright: ignore
    monkeypatch.setattr(ops, "team", ops.team.__wrapped__)
    before = allowed_of_tasks()
    kernels = NativeOps(native_library, torch.float32, num_threads)
    weight_OI, x_NI = randn(1000, 300, seed=1), randn(40, 300)
    alone = NativeOps(native_library, torch.float32, 1)
    outs: list[torch.Tensor] = []
    for one in (kernels, alone):
        out_NO = torch.empty(40, 1000)
        for _ in range(20):
            one.linear(x_NI, one.pack(weight_OI), out_NO)
        outs.append(out_NO)
    assert torch.equal(outs[0], outs[1])
    after = allowed_of_tasks()
    assert all(after[task] == where for task, where in before.items() if task in after)
    fresh = sorted(int(where) for task, where in after.items() if task not in before)
    assert fresh == sorted(pinned[1:])


@pytest.mark.skipif(huge_pages._ADVICE is None, reason="no such memory on this system")  # pyright: ignore
def test_weights_are_taken_from_all_nodes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, tuple[int, ...]]] = []

    def note(data: torch.Tensor, nodes: Sequence[int]) -> bool:
        asked.append((data.data_ptr() % huge_pages.PAGE_BYTES, data.numel(), tuple(nodes)))
        return True

    monkeypatch.setattr(huge_pages, "spread", note)
    for nodes, wanted in (((0, 1), [(0, 34 << 20, (0, 1))]), ((0,), []), ((), [])):
        monkeypatch.setattr(huge_pages, "memory_nodes", lambda nodes=nodes: nodes)
        asked.clear()
        assert huge_pages.empty(33 << 20, dtype=torch.uint8).numel() == 33 << 20
        assert asked == wanted


@pytest.mark.skipif(huge_pages._ADVICE is None, reason="no such memory on this system")  # pyright: ignore
def test_the_system_knows_how_memory_is_spread() -> None:
    memory = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    nodes = memory_nodes() or (0,)
    done = huge_pages.spread(data, nodes)
    data.fill_(1)
    assert int(data.long().sum()) == 4 << 20
    policies = Path("/proc/self/numa_maps")
    if not done or not policies.exists():
        pytest.skip("memory cannot be spread here, or the system does not tell")
    told = dict(line.split(maxsplit=1) for line in policies.read_text("utf-8").splitlines())
    assert told[f"{data.data_ptr():x}"].startswith("interleave:")


def test_a_node_that_no_mask_holds_is_refused() -> None:
    assert not huge_pages.spread(torch.empty(1, dtype=torch.uint8), (4096,))
