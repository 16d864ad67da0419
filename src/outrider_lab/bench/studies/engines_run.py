"""Visits made: every engine in its turn, timed, counted and compared with the others' tokens.

Each engine has its own models in memory. What was measured is written as a record a sample and a
row a request.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from outrider.api.llm import LLM
from outrider.core.clock import HOST_CLOCK
from outrider.core.config import EngineConfig
from outrider.core.errors import MachineError, OutriderError
from outrider.kernels.native.cpu import hardware_threads
from outrider.metrics import inter_token_latencies, percentile
from outrider.models.llama import LlamaModel
from outrider.plugins.doctor.ceilings import BandwidthReader
from outrider_lab.bench.load import Served, Time, drive, tally
from outrider_lab.bench.studies.engines_cells import (
    BareReads,
    EngineSample,
    EnginesEvidence,
    Taken,
    agreement,
    ahead_predictions,
    cells,
    comparisons,
    lane_bounds,
)
from outrider_lab.bench.studies.engines_plan import Case, Contestant, EnginePlan, line_up
from outrider_lab.measure.frame import mean_foreign_share
from outrider_lab.measure.machine import Monitor, facts_of, visit
from outrider_lab.metrics.timeline import timeline

# So that what the engine before has left running, for verdicts that will not come, ends first.
_REST_SECONDS = 0.05
# What lanes could gain is reckoned from the engine that does one thing after the other.
_SYNCHRONOUS = "single"
_READ_TURNS = 7


def run(
    plan: EnginePlan, contestants: Sequence[Contestant], *, time: Time | None = None
) -> Iterator[list[Taken]]:
    """Warm up, then yield what every visit found, in the order of `contestants`."""
    time = time or Time()
    for contestant in contestants:
        if contestant.server is not None:
            # A failure is the timed run's to report.
            with suppress(Exception):
                for loop, requests in plan.warm_ups:
                    drive(contestant.server, requests, loop, plan.params, time=time)
    for turn, (case, repeat) in enumerate(plan.visits()):
        found = visit(contestants, turn, lambda one: _serve(plan, one, case, repeat, time))  # noqa: B023
        shared = found.foreign_cpu_share
        taken = [
            replace(one, sample=replace(one.sample, foreign_cpu_share=shared))
            for one in found.results
        ]
        yield _judged(taken, {c.name for c in contestants if c.exact and plan.params.greedy})


def _serve(plan: EnginePlan, contestant: Contestant, case: Case, repeat: int, time: Time) -> Taken:
    sample = EngineSample(
        level=case.level, engine=contestant.name, repeat=repeat, reason=contestant.reason
    )
    if contestant.server is None:
        return Taken(sample)
    time.sleep(_REST_SECONDS)
    contestant.jobs.clear()
    began = time.clock()
    requests = case.requests(plan.prompts, repeat)
    try:
        with Monitor() as monitor:
            done = drive(contestant.server, requests, case.loop, plan.params, time=time)
    except Exception as error:  # noqa: BLE001 - one engine must not end hours of others
        return Taken(replace(sample, reason=f"{type(error).__name__}: {error}"))
    # A lane may report a job of the visit before, which nobody waited for.
    jobs = tuple(job for job in contestant.jobs if job.began >= began)
    sample = replace(
        sample,
        reason=done.failure,
        numbers=tally(done),
        lanes=timeline(jobs) if jobs else None,
        usage=monitor.usage.summary(),
        digest=done.digest,
    )
    return Taken(sample, done.served, jobs)


def _judged(taken: Sequence[Taken], exact: set[str]) -> list[Taken]:
    """Greedy tokens of exact engines are compared with those of the first that has all of them, for
    requests that both served: within a time, some serve more. What differs has failed."""
    first = next((one for one in taken if one.tokens and one.sample.engine in exact), None)
    found: list[Taken] = []
    for one in taken:
        sample = one.sample
        if first is not None and sample.ok and sample.engine in exact:
            ours, theirs = one.tokens, first.tokens
            if any(ours[number] != theirs[number] for number in ours.keys() & theirs.keys()):
                reason = f"DifferentTokens: not those of {first.sample.engine}"
                sample = replace(sample, reason=reason)
        found.append(replace(one, sample=sample))
    return found


@dataclass(frozen=True, slots=True)
class Models:
    """A pair by name, folder or hub id; without a draft the target's own partner is taken."""

    target: str
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Contestants in order, and the LLMs of those that can run."""

    contestants: Sequence[Contestant]
    llms: dict[str, LLM]

    @property
    def notes(self) -> list[str]:
        """What a user should hear before the run, each once."""
        notes = [note for llm in self.llms.values() for note in llm.notes]
        notes += [f"{c.name} cannot run here: {c.reason}" for c in self.contestants if c.reason]
        return list(dict.fromkeys(notes))

    def close(self) -> None:
        """End their threads and processes."""
        for llm in self.llms.values():
            llm.close()


def load_engines(
    names: Sequence[str], models: Models, base: EngineConfig, *, own_controller: bool = False
) -> Loaded:
    """Raises the first engine's error if none can run."""
    llms: dict[str, LLM] = {}
    errors: list[OutriderError] = []

    def open_one(contestant: Contestant) -> None:
        config = contestant.config
        try:
            draft = models.draft if config.drafter != "none" else None
            llm = LLM(models.target, draft=draft, config=config, on_job=contestant.jobs.append)
        except OutriderError as error:
            errors.append(error)
            raise
        llms[contestant.name] = llm
        contestant.server, contestant.exact = llm, llm.exact and llm.kernels.exact
        contestant.facts = facts_of(llm)

    contestants = line_up(names, base, open_one, own_controller=own_controller)
    if not llms:
        raise errors[0]
    return Loaded(contestants, llms)


def evidence_of(samples: Sequence[EngineSample], loaded: Loaded) -> EnginesEvidence:
    reads = "single was not measured"
    if _SYNCHRONOUS in loaded.llms:
        reads = bare_reads(loaded.llms[_SYNCHRONOUS])
    found = cells(samples)
    return EnginesEvidence(
        cells=found,
        comparisons=comparisons(samples),
        lane_bounds=[] if isinstance(reads, str) else lane_bounds(samples, reads),
        ahead_predictions=ahead_predictions(found),
        agreement=agreement(samples),
        lane_bound_refusal=reads if isinstance(reads, str) else None,
        foreign_cpu_share=mean_foreign_share(samples),
    )


def bare_reads(llm: LLM) -> BareReads | str:
    """How long a bare read of each model's weights takes here, the floor under every round; or a
    sentence that says why that cannot be timed. Only weights in this machine's own memory can be
    read so, by native kernels."""
    if llm.device.type != "cpu":
        return f"bare reads are timed on a CPU, and this runs on {llm.device.type}"
    seconds = {"target": 0.0, "draft": 0.0}
    for role, model in llm.models.items():
        if not isinstance(model, LlamaModel):
            return f"the {role} model is of a family whose weights are not read by themselves"
        try:
            seconds[role] = _read_seconds(model.streamed)
        except MachineError as error:
            return str(error).rstrip(".")
    return BareReads(seconds["target"], seconds["draft"])


def _read_seconds(tensors: Sequence[Tensor]) -> float:
    """The median of a few turns, by one thread or by all, whichever is faster."""
    medians: list[float] = []
    for threads in sorted({1, len(hardware_threads())}):
        reader, times = BandwidthReader(threads), list[float]()
        for _ in range(_READ_TURNS + 1):
            began = HOST_CLOCK()
            reader.read(tensors)
            times.append(HOST_CLOCK() - began)
        medians.append(statistics.median(times[1:]))
    return min(medians)


def sample_record(sample: EngineSample) -> dict[str, object]:
    numbers = sample.numbers
    counted = numbers and {
        **asdict(numbers),
        "tokens_per_second": round(numbers.tokens_per_second, 3),
        "acceptance": numbers.acceptance,
        "p_hit": numbers.p_hit,
    }
    plain = ("level", "engine", "repeat", "reason", "digest", "foreign_cpu_share", "usage")
    return {
        **{name: getattr(sample, name) for name in plain},
        "numbers": counted,
        "lanes": None if sample.lanes is None else sample.lanes.to_dict(),
    }


def request_rows(taken: Sequence[Taken]) -> list[dict[str, object]]:
    """A row a request, for CSV."""
    return [
        {
            "level": one.sample.level,
            "engine": one.sample.engine,
            "repeat": one.sample.repeat,
            **row_of(served),
        }
        for one in taken
        for served in one.served
    ]


def row_of(served: Served) -> dict[str, object]:
    """One request as a row of plain values, for CSV."""
    result, times = served.result, served.token_seconds
    gaps = inter_token_latencies(times) if times else ()
    return {
        "number": served.number,
        "request": served.request.name,
        "arrived_s": round(served.arrived, 6),
        "waited_ms": _ms(served.submitted - served.arrived),
        "status": "rejected" if served.rejected else "failure" if served.reason else "success",
        "reason": served.reason or "",
        "finish_reason": result.finish_reason if result else "",
        "tokens": result.num_tokens if result else 0,
        "ttft_ms": _ms(times[0]) if times else "",
        "itl_p50_ms": _ms(percentile(gaps, 50)) if gaps else "",
        "itl_p95_ms": _ms(percentile(gaps, 95)) if gaps else "",
        "total_ms": _ms(times[-1]) if times else "",
        "rounds": result.stats.num_rounds if result else "",
        "drafted": result.stats.num_drafted if result else "",
        "accepted": result.stats.num_accepted if result else "",
        "notes": "; ".join(result.notes) if result else "",
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)
