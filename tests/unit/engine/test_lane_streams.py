"""Streams of lanes without a device: who waits for what, by the calls that a device would get."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.engine.lanes import LaneTask, LaneWork
from outrider.plugins.lanes.threads import LaneStream, lane_streams

CUDA = torch.device("cuda")
LANES = ("prefill", "decode", "verify")


@dataclass
class Device:
    """Stands for `torch.cuda`; `log` has the calls, where streams and events are numbers."""

    log: list[str] = field(default_factory=list[str])
    made: dict[str, int] = field(default_factory=dict[str, int])

    def new(self, kind: str) -> int:
        self.made[kind] = self.made.get(kind, -1) + 1
        return self.made[kind]

    @contextmanager
    def on(self, stream: FakeStream) -> Generator[None]:
        self.log.append(f"on {stream.number}")
        yield

    def synchronize(self, _: object) -> None:
        self.log.append("barrier")


class FakeStream:
    def __init__(self, device: Device) -> None:
        self.here, self.device, self.number = device, CUDA, device.new("stream")

    def wait_event(self, event: FakeEvent) -> None:
        self.here.log.append(f"{self.number} waits for {event.number}")


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.here, self.number = device, device.new("event")

    def record(self, _: FakeStream) -> None: ...

    def synchronize(self) -> None:
        self.here.log.append(f"host waits for {self.number}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    def stream(_: object) -> FakeStream:
        return FakeStream(made)

    def event() -> FakeEvent:
        return FakeEvent(made)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    return made


@dataclass(frozen=True)
class FakeJob:
    seq_ids: tuple[int, ...]


@dataclass(frozen=True)
class FakeTask:
    job: FakeJob
    chunks: tuple[object, ...] = ()
    num_live: int = 2


def run(stream: LaneStream, device: Device, *seq_ids: int, chunks: tuple[object, ...] = ()) -> None:
    def call(_: LaneTask) -> LaneWork:
        device.log.append(f"task of {list(seq_ids)}")
        return LaneWork()

    stream.run(call, cast("LaneTask", FakeTask(FakeJob(seq_ids), chunks)))


def drafted_then_verified(device: Device, **how: Any) -> list[str]:
    """Sequence 0 is drafted for, then sequence 1, and then 0 is verified."""
    streams = lane_streams(LANES, CUDA, 3, **how)
    run(streams["decode"], device, 0)
    run(streams["decode"], device, 1)
    device.log.clear()
    run(streams["verify"], device, 0)
    return device.log


def test_by_event_a_stream_waits_for_what_its_sequences_need(device: Device) -> None:
    log = drafted_then_verified(device)
    assert log == ["2 waits for 0", "on 2", "task of [0]"]


def test_by_barrier_the_host_waits_for_all_of_the_device(device: Device) -> None:
    log = drafted_then_verified(device, sync="barrier")
    assert log == ["barrier", "on 2", "task of [0]"]


def test_with_one_stream_lanes_share_it(device: Device) -> None:
    streams = lane_streams(LANES, CUDA, 1)
    for lane in LANES:
        run(streams[lane], device, 0)
    assert {line for line in device.log if line.startswith("on")} == {"on 0"}


@pytest.mark.parametrize("sync", ["event", "barrier"])
def test_a_prompt_chunk_is_waited_for(device: Device, sync: str) -> None:
    """Pages of a request that is cancelled must not be written any more."""
    run(lane_streams(LANES, CUDA, 3, sync=sync)["prefill"], device, 0, chunks=("chunk",))
    assert device.log[-1] == "host waits for 0"


def test_a_cpu_has_no_streams() -> None:
    assert lane_streams(LANES, torch.device("cpu"), 3, sync="barrier") == {}


@pytest.mark.weights
def test_an_engine_waits_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []

    def streams(_: object, __: object, count: int, *, sync: str) -> dict[str, LaneStream]:
        told.append((count, sync))
        return {}

    monkeypatch.setattr("outrider.plugins.lanes.build.lane_streams", streams)
    config = EngineConfig(
        schedule="pd", lane_streams=2, lane_sync="barrier", context=64, device="cpu"
    )
    LLM("outrider/embedded", config=config).close()
    assert told == [(2, "barrier")]
