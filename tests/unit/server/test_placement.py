"""Where engines run: shares of cores by core and NUMA node, devices by name, what cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.core.config import EngineConfig
from outrider.core.env import show_gpu
from outrider.core.errors import ConfigError
from outrider.kernels.native import cpu
from outrider.server.port import Engines, Placement, shares_of, spans

CPU = EngineConfig(device="cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two NUMA nodes of two cores with two hardware threads each, numbered as Linux does: the
    second threads of all cores come behind the first ones. The last core is not ours."""
    node = {0: 0, 1: 1, 2: 0, 3: 1}
    for core, of_node in node.items():
        for thread in (core, core + 4):
            folder = tmp_path / f"cpu/cpu{thread}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{core},{core + 4}\n")
        folder = tmp_path / f"node/node{of_node}"
        folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "node/node0/cpulist").write_text("0,2,4,6\n")
    (tmp_path / "node/node1/cpulist").write_text("1,3,5,7\n")
    (tmp_path / "node/node_of_no_number").mkdir()
    monkeypatch.setattr(cpu, "_SYSTEM", tmp_path)

    def allowed(_: int) -> set[int]:
        return {0, 1, 2, 3, 4, 5, 6}

    monkeypatch.setattr("os.sched_getaffinity", allowed, raising=False)


@pytest.mark.usefixtures("machine")
def test_an_engine_has_whole_cores_of_one_node() -> None:
    assert cpu.allowed_cores() == [(0, 4), (2, 6), (1, 5), (3,)]
    found = Engines.of(2, [], CPU).placements
    assert [one.cores for one in found] == [(0, 2, 4, 6), (1, 3, 5)]
    assert [one.describe("cpu") for one in found] == ["cpu, cores 0,2,4,6", "cpu, cores 1,3,5"]
    assert [one.gpu for one in found] == [None, None]


@pytest.mark.parametrize("num_cores", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_shares_are_as_equal_as_they_can_be(num_cores: int, number: int) -> None:
    shares = shares_of([(core,) for core in range(num_cores)], number)
    assert len(shares) == number
    if num_cores >= number:
        assert sorted(core for share in shares for core in share) == list(range(num_cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {len(share) for share in shares} == {1}


@pytest.mark.usefixtures("machine")
def test_each_engine_has_a_gpu_of_its_own_where_it_may() -> None:
    automatic = EngineConfig(device="auto")
    assert [one.gpu for one in Engines.of(2, [], automatic).placements] == [0, 1]
    found = Engines.of(1, ["cuda:2", "cuda"], automatic).placements
    assert [one.gpu for one in found] == [2, 0]
    assert found[0].describe("cuda") == "cuda:2, cores 0,2,4,6"
    assert Engines.of(1, ["cuda:1"], automatic) == Engines("cuda", (Placement(gpu=1),))
    assert Engines.of(1, [], CPU) == Engines.of(1, ["cpu"], CPU) == Engines("cpu", (Placement(),))
    assert Engines.of(1, ["cuda:1", "cuda:2"], automatic).device == "cuda"
    assert Engines.of(1, [], automatic).device == "auto"


@pytest.mark.parametrize(
    ("replicas", "devices", "problem"),
    [
        (1, ["cpu", "cpu"], "names cpu twice"),
        (1, ["cuda:0", "cuda"], "names cuda twice"),
        (1, ["cuda:1", "cuda:0", "cuda:1"], "names cuda:1 twice"),
        (1, ["gpu:0"], "'gpu:0' is no device"),
        (1, ["cuda:x"], "is no device"),
        (1, ["cuda:-1"], "is no device"),
        (1, ["cpu", "cuda:0"], "different kinds"),
        (2, ["cuda:0", "cuda:1"], "--devices says how many"),
    ],
    ids=str,
)
def test_wishes_that_cannot_be_meant_are_refused(
    replicas: int, devices: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engines.of(replicas, devices, CPU)


def test_ranks_and_replicas_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="2 engines, each of 2 ranks"):
        Engines.of(2, [], EngineConfig(device="cpu", tensor_parallel=2))


def test_memory_is_shared_on_a_cpu() -> None:
    config = Placement(num_engines=4).shared(EngineConfig(device="cpu", memory_share=0.8))
    assert config.memory_share == pytest.approx(0.2)
    assert Placement().shared(CPU) == CPU


@pytest.mark.parametrize(
    ("shown", "number", "expected"),
    [
        (None, 1, "1"),
        ("4,7", 1, "7"),
        ("GPU-a, GPU-b", 1, "GPU-b"),
        ("4,7", 2, "-1"),
        ("", 0, "-1"),
    ],
    ids=str,
)
def test_a_gpu_is_counted_among_those_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, number: int, expected: str
) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(name, "x")
    if shown is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, shown)
    show_gpu(number)
    assert os.environ[name] == expected  # noqa: TID251 - what was set


def test_numbers_are_written_as_linux_writes_them() -> None:
    assert spans([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"
    assert spans([]) == ""
