"""Engines that nobody measured: a field of fake servers, and what runs of it come to."""

from __future__ import annotations

from collections.abc import Sequence

from doubles.fake_server import FakeServer
from outrider.bench.studies.engines_cells import (
    BareReads,
    Evidence,
    Taken,
    agreement,
    ahead_predictions,
    cells,
    comparisons,
    lane_bounds,
)
from outrider.bench.studies.engines_plan import Contestant, EnginePlan, Levels, Prompts
from outrider.bench.studies.engines_run import run
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

TEXTS = [f"prompt {i}" for i in range(7)]
PARAMS = SamplingParams(max_tokens=4)


def plan(levels: Sequence[int] = (0, 2), repeats: int = 5, num_requests: int = 3) -> EnginePlan:
    asked = Levels(levels=levels, num_requests=num_requests, gap_seconds=0.5)
    return asked.plan(Prompts(texts=TEXTS, max_tokens=4), PARAMS, repeats)


def contestant(name: str, server: FakeServer) -> Contestant:
    found = Contestant(name, EngineConfig(), server)
    server.on_job = found.jobs.append
    return found


def field() -> list[Contestant]:
    """PDV is a tenth faster than PD; drafting ahead costs more than it brings."""
    servers = {
        "off": FakeServer(step_seconds=0.010),
        "single": FakeServer(step_seconds=0.012, tokens=2),
        "pd": FakeServer(step_seconds=0.011, tokens=2),
        "pdv": FakeServer(step_seconds=0.010, tokens=2),
        "ssd": FakeServer(step_seconds=0.016, tokens=2, ahead=True),
        "auto": FakeServer(step_seconds=0.010, tokens=2),
    }
    return [contestant(name, server) for name, server in servers.items()]


def measured(plan: EnginePlan, contestants: Sequence[Contestant]) -> list[Taken]:
    """Each server has a clock of its own, so each is driven by its own."""
    taken: dict[str, list[Taken]] = {}
    for one in contestants:
        assert isinstance(one.server, FakeServer)
        for visit in run(plan, [one], time=one.server.time):
            taken.setdefault(one.name, []).extend(visit)
    return [t for row in zip(*taken.values(), strict=True) for t in row]


def evidence_of(taken: Sequence[Taken]) -> Evidence:
    """As of a pair whose bare reads take 4 and 0.5 ms."""
    samples = [one.sample for one in taken]
    found = cells(samples)
    return Evidence(
        cells=found,
        comparisons=comparisons(samples),
        bounds=lane_bounds(samples, BareReads(0.004, 0.0005)),
        predictions=ahead_predictions(found),
        agreement=agreement(samples),
        foreign_cpu_share=0.2,
    )
