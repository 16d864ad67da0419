"""Engines that nobody measured: fake servers whose requests get tokens by a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from doubles.clocks import FakeClock
from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.errors import QueueFullError
from outrider.core.params import SamplingParams
from outrider.metrics import summarise
from outrider_lab.bench.load import Time
from outrider_lab.bench.studies.engines_cells import (
    BareReads,
    EnginesEvidence,
    Taken,
    agreement,
    ahead_predictions,
    cells,
    comparisons,
    lane_bounds,
)
from outrider_lab.bench.studies.engines_plan import Contestant, EnginePlan, Levels, Prompts
from outrider_lab.bench.studies.engines_run import run


@dataclass(slots=True)
class FakeTicket:
    """`arrivals` are seconds since it was handed in."""

    seq_id: int
    prompt: str
    params: SamplingParams
    submitted: float
    arrivals: list[float] = field(default_factory=list[float])
    rounds: list[RoundTrace] = field(default_factory=list[RoundTrace])
    error: Exception | None = None
    drafter: str = "none"

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.arrivals) >= self.params.max_tokens

    def result(self) -> GenerationResult:
        if self.error is not None:
            raise self.error
        total = self.arrivals[-1]
        return GenerationResult(
            text=self.prompt,
            token_ids=tuple(range(len(self.arrivals))),
            finish_reason="length",
            stats=summarise(self.rounds, drafter=self.drafter, k=4, total_seconds=total),
            rounds=tuple(self.rounds),
            token_seconds=tuple(self.arrivals),
        )


@dataclass(slots=True)
class FakeServer:
    """Every step takes `step_seconds` and gives every live request `tokens` tokens, one of them the
    target's own; at most `batch_size` are live and `max_waiting` wait. Where `ahead` is set, steps
    of odd number are hits. Prompts of `broken` end with an error in their first step."""

    clock: FakeClock = field(default_factory=FakeClock)
    step_seconds: float = 0.01
    tokens: int = 1
    batch_size: int = 64
    max_waiting: int = 1000
    ahead: bool = False
    broken: tuple[str, ...] = ()
    on_job: Callable[[JobTrace], object] | None = None
    most_live: int = 0
    num_steps: int = 0
    num_forgotten: int = 0
    seeds: list[int] = field(default_factory=list[int])
    cancelled: list[str] = field(default_factory=list[str])
    tickets: list[FakeTicket] = field(default_factory=list[FakeTicket])
    _num: int = 0

    @property
    def time(self) -> Time:
        return Time(self.clock, self.clock.advance)

    @property
    def has_work(self) -> bool:
        return bool(self.tickets)

    def submit(self, prompt: str, params: SamplingParams, /) -> FakeTicket:
        if len(self.tickets) >= self.batch_size + self.max_waiting:
            raise QueueFullError(self.max_waiting, 1)
        drafter = "model" if self.tokens > 1 else "none"
        ticket = FakeTicket(self._num, prompt, params, self.clock(), drafter=drafter)
        self._num += 1
        self.seeds.append(params.rng_seed)
        self.tickets.append(ticket)
        return ticket

    def advance(self) -> None:
        began = self.clock()
        self.clock.advance(self.step_seconds)
        live = self.tickets[: self.batch_size]
        self.most_live = max(self.most_live, len(live))
        for ticket in live:
            self._step(ticket, len(live))
        self.tickets = [ticket for ticket in self.tickets if not ticket.done]
        self.num_steps += 1
        if self.on_job is not None:
            ids = tuple(ticket.seq_id for ticket in live)
            waiting = len(self.tickets) - len(live)
            job = JobTrace(
                *("main", ("draft", "verify"), ids, len(ids), began, self.clock()),
                *((0, len(ids), 0), max(waiting, 0), len(ids), 0),
            )
            self.on_job(job)

    def cancel(self, ticket: FakeTicket, /) -> None:
        self.cancelled.append(ticket.prompt)
        self.tickets = [one for one in self.tickets if one is not ticket]

    def forget(self) -> None:
        assert not self.tickets
        self.num_forgotten += 1

    def _step(self, ticket: FakeTicket, batch_size: int) -> None:
        if ticket.prompt in self.broken:
            ticket.error = ValueError("broken")
            return
        num = min(self.tokens, ticket.params.max_tokens - len(ticket.arrivals))
        ticket.arrivals += [self.clock() - ticket.submitted] * num
        ticket.rounds.append(
            RoundTrace(
                seq_id=ticket.seq_id,
                pass_index=self.num_steps,
                drafter=ticket.drafter,
                batch_size=batch_size,
                num_target_passes=1,
                num_prompt_tokens=0 if ticket.rounds else 5,
                num_drafted=4 if self.tokens > 1 else 0,
                num_accepted=num - 1,
                num_emitted=num,
                num_rows_copied=0,
                draft_seconds=self.step_seconds / 4,
                verify_seconds=self.step_seconds / 2,
                accept_seconds=0.0,
                hit=bool(self.num_steps % 2) if self.ahead else None,
            )
        )


TEXTS = [f"prompt {i}" for i in range(7)]
PARAMS = SamplingParams(max_tokens=4)


def plan(levels: Sequence[int] = (0, 2), repeats: int = 5, num_requests: int = 3) -> EnginePlan:
    asked = Levels(levels=levels, num_requests=num_requests, gap_seconds=0.5)
    return asked.plan(Prompts(texts=TEXTS, max_tokens=4), PARAMS, repeats)


def contestant(name: str, server: FakeServer) -> Contestant:
    found = Contestant(name, EngineConfig(), server)
    server.on_job = found.jobs.append
    return found


def all_contestants() -> list[Contestant]:
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


def evidence_of(taken: Sequence[Taken]) -> EnginesEvidence:
    """As of a pair whose bare reads take 4 and 0.5 ms."""
    samples = [one.sample for one in taken]
    found = cells(samples)
    return EnginesEvidence(
        cells=found,
        comparisons=comparisons(samples),
        lane_bounds=lane_bounds(samples, BareReads(0.004, 0.0005)),
        ahead_predictions=ahead_predictions(found),
        agreement=agreement(samples),
        foreign_cpu_share=0.2,
    )
