"""`outrider trace`: run prompts, record every job of every lane, and write what happened.

What `outrider trace` tells a person: its record, as tables and sentences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import check_writable, fitted, json_line, screen_table, write_whole
from outrider.cli.session import open_llm, run_record
from outrider.core.clock import HOST_CLOCK
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.errors import ConfigError, ContractError, MachineError
from outrider.core.fields import size
from outrider.core.params import SamplingParams
from outrider.metrics import summarise
from outrider_lab.bench.drawing import why_not
from outrider_lab.bench.workload import DOMAINS, builtin_texts
from outrider_lab.cli.verb_options import TraceOptions
from outrider_lab.measure.machine import Monitor, Usage
from outrider_lab.measure.store import percent
from outrider_lab.metrics.chrome_trace import trace_pieces
from outrider_lab.metrics.timeline import (
    Counters,
    hit_rate,
    over_time,
    pass_shapes,
    scheduler_stats,
    timeline,
)

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.request import RequestHandle


def figure_file(name: str | None) -> Path | None:
    """The file of a verb's --figure, checked before anything runs. Raises ConfigError and
    MachineError."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"--figure {name}: a figure is an SVG file.", hint="--figure lanes.svg, for example"
        )
    reason = why_not()
    if reason is not None:
        raise MachineError(reason, hint="leave --figure out")
    check_writable(path)
    return path


VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


def page(record: Mapping[str, Any]) -> str:
    """Of a record with at least one job; without one, only where the file is."""
    where = f"trace: {record['trace']}: open it at {VIEWERS}"
    if record["figures"]:
        where += f"\nfigures: {', '.join(record['figures'])}"
    if not record["num_jobs"]:
        return f"no job ran\n{where}"
    parts = (_headline(record), _lanes(record), _queues(record), "\n".join(_sentences(record)))
    return "\n\n".join((*parts, where))


def _headline(record: Mapping[str, Any]) -> str:
    scheduler = record["scheduler"]
    done = f"{scheduler['completed']} of {scheduler['submitted']} requests"
    speed = f"{record['num_emitted']} tokens in {record['seconds']:.2f} s"
    parts = [
        f"{done}, {speed} ({record['tokens_per_second']:.1f} tok/s)",
        f"schedule {record['schedule']}",
        f"drafter {record['drafter']}, K={record['k']}",
    ]
    return " · ".join(parts)


def _lanes(record: Mapping[str, Any]) -> str:
    header = ("lane", "jobs", "sequences", "tokens", "busy %", "mean ms", "p50", "p95", "max")
    rows = [
        (
            lane,
            use["num_jobs"],
            use["num_works"],
            use["num_tokens"],
            percent(use["busy_fraction"]),
            *(f"{1e3 * use['job_seconds'][key]:.2f}" for key in ("mean", "p50", "p95", "max")),
        )
        for lane, use in record["timeline"]["lanes"].items()
    ]
    return screen_table(rows, header=header)


def _queues(record: Mapping[str, Any]) -> str:
    rows = [
        (
            "not admitted" if name == "waiting" else name,
            f"{use['mean']:.2f}",
            use["p95"],
            use["max"],
        )
        for name, use in record["timeline"]["queues"].items()
    ]
    return screen_table(rows, header=("waiting for", "mean", "p95", "max"))


def _sentences(record: Mapping[str, Any]) -> Iterator[str]:
    time = record["timeline"]
    yield (
        f"busy: some lane ran {percent(time['busy_fraction'])} % of the time; two or more ran in "
        f"{percent(time['overlap_fraction'])} % of that"
    )
    for two in time["overlaps"]:
        first, second = two["lanes"]
        yield f"overlap of {first} and {second}: {percent(two['fraction'])} % of the shorter"
    yield _drafts(record)
    yield _passes(record["passes"])
    window = time["window"]
    if window is not None:
        ratios = window["ahead_over_verify"]
        mean = f"{sum(ratios) / len(ratios):.2f}" if ratios else "-"
        yield (
            f"window: {percent(window['use'])} % of the verifying time was used to draft ahead; "
            f"T_ahead / T_verify {mean}"
        )
    yield from _resources(record)


def _drafts(record: Mapping[str, Any]) -> str:
    parts = [
        f"accepted {percent(record['acceptance_rate'])} % of drafts",
        f"{record['tokens_per_round']:.2f} tokens a round",
    ]
    if record["p_hit"] is not None:
        parts.append(f"p_hit {record['p_hit']:.2f}")
    return f"drafts: {', '.join(parts)}"


def _passes(shapes: Mapping[str, Any]) -> str:
    text = f"passes: {shapes['num_passes']}, of {shapes['mean_sequences']:.2f} sequences each"
    equal = shapes["equal_rows_fraction"]
    if equal is None:
        return text
    return f"{text}; {percent(equal)} % of those with several had as many rows of each"


def _resources(record: Mapping[str, Any]) -> Iterator[str]:
    memory, usage = record["memory"], record["usage"]["summary"]
    held = f"at least {memory['least_free_tokens']} of {memory['arena_tokens']} arena tokens free"
    between = memory["most_drafts_between_lanes"]
    yield (
        f"memory: {held} ({size(memory['most_held_bytes'])} held); "
        f"{size(memory['scratch_bytes'])} of scratch and logits for all lanes; at most {between} "
        f"drafts waited between lanes"
    )
    parts = [
        ("CPU", usage["cpu_percent"], "{:.0f} % of a core"),
        ("resident", usage["peak_rss_bytes"], "{}"),
        ("GPU", usage["gpu_percent"], "{:.0f} %"),
        ("GPU memory", usage["peak_gpu_memory_bytes"], "{}"),
    ]
    told = [
        f"{name} {shape.format(size(value) if shape == '{}' else value)}"
        for name, value, shape in parts
        if value is not None
    ]
    reason = record["usage"]["gpu_why_not"]
    if reason is not None:
        told.append(f"GPU not measured: {reason}")
    yield f"used: {', '.join(told)}"


_PER_DOMAIN = 2


@dataclass(slots=True)
class Recording:
    """What a run left behind, perhaps after an interrupt. `num_slots` is all of the arena."""

    num_slots: int
    jobs: list[JobTrace] = field(default_factory=list[JobTrace])
    rounds: list[RoundTrace] = field(default_factory=list[RoundTrace])
    errors: list[str] = field(default_factory=list[str])
    counters: Counters | None = None
    usage: Usage | None = None
    seconds: float = 0.0
    interrupted: bool = False


def trace(call: Call[TraceOptions]) -> int:
    options = call.options
    output = Path(options.output)
    check_writable(output)
    figure = figure_file(options.figure)
    jobs: list[JobTrace] = []
    llm = open_llm(call.resolved, on_job=jobs.append)
    try:
        recording = record(
            llm, call.arguments or _our_prompts(), call.resolved.repeatable_sampling(), jobs
        )
    finally:
        llm.close()
    about = run_record(llm, call.resolved)
    write_whole(output, trace_pieces(recording.jobs, recording.rounds, about=about))
    figures = _draw(recording, figure, call) if figure is not None and recording.jobs else []
    found = summary(llm, recording)
    found |= {"trace": str(output), "figures": [str(path) for path in figures], "run": about}
    print(json_line(found) if options.json else fitted(page(found)))
    for error in recording.errors:
        print(f"note: a request failed: {error}", file=sys.stderr)
    if recording.interrupted:
        return INTERRUPTED
    return 1 if recording.errors else 0


def record(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, jobs: list[JobTrace]
) -> Recording:
    """Run all prompts at once; `jobs` is where `llm` leaves the records of its jobs.

    A short request comes first and is not kept: the first passes of a process wait for what no
    later one does. An interrupt ends the run, and what was recorded is kept. Raises ConfigError for
    a prompt that does not fit.
    """
    llm.generate(["Warm up."], SamplingParams(max_tokens=8))
    jobs.clear()
    recording, before = Recording(llm.free_tokens, jobs), copy(llm.counts)
    handles: list[RequestHandle] = []
    began = HOST_CLOCK()
    with Monitor(free_tokens=lambda: llm.free_tokens) as monitor:
        try:
            handles += _submitted(llm, prompts, params)
            while llm.has_work:
                llm.advance()
        except KeyboardInterrupt:
            recording.interrupted = True
    recording.seconds = HOST_CLOCK() - began
    recording.usage = monitor.usage
    recording.rounds = list(chain.from_iterable(handle.reader.traces for handle in handles))
    failures = (handle.reader.seq.error for handle in handles)
    recording.errors = [f"{type(error).__name__}: {error}" for error in failures if error]
    done = llm.counts
    ended = done.completed + done.failed + done.cancelled
    ended -= before.completed + before.failed + before.cancelled
    submitted = done.submitted - before.submitted
    waiting = min(jobs[-1].num_waiting if jobs else 0, submitted - ended)
    recording.counters = Counters(
        uptime_seconds=recording.seconds,
        num_submitted=submitted,
        num_completed=done.completed - before.completed,
        num_rejected=done.rejected - before.rejected,
        num_waiting=waiting,
        num_live=submitted - ended - waiting,
        max_waiting=llm.config.max_waiting,
        max_live=llm.requests.plan.settings.most_batch,
    )
    return recording


def summary(llm: LLM, recording: Recording) -> dict[str, Any]:
    """Everything that the records tell, as plain values."""
    jobs, rounds = recording.jobs, recording.rounds
    if recording.counters is None:
        raise ContractError("the recording has no counters")
    if recording.usage is None:
        raise ContractError("the recording has no usage")
    config = llm.config
    k = llm.k
    stats = summarise(rounds, drafter=llm.drafter, k=k, total_seconds=recording.seconds)
    return {
        "schedule": config.schedule,
        "drafter": llm.drafter,
        "k": k,
        "seconds": recording.seconds,
        "num_emitted": stats.num_emitted,
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_rate": stats.acceptance_rate if stats.num_drafted else None,
        "tokens_per_round": stats.tokens_per_round,
        "p_hit": hit_rate(rounds),
        "passes": asdict(pass_shapes(rounds)),
        "num_jobs": len(jobs),
        "errors": recording.errors,
        "timeline": timeline(jobs).to_dict(),
        "over_time": [asdict(stretch) for stretch in over_time(jobs)],
        "scheduler": scheduler_stats(jobs, recording.counters),
        "memory": _memory(llm, recording, k),
        "usage": recording.usage.to_dict(),
    }


def _memory(llm: LLM, recording: Recording, k: int) -> dict[str, int]:
    """What the lanes held: the arena, buffers of their own (scratch and logits), and drafts on
    their way from one lane to another. Whoever samples keeps a distribution (float32) with each
    token that it drafted, the greedy only tokens."""
    per_token = llm.spec.kv_bytes_per_token
    least = min((job.num_free_tokens for job in recording.jobs), default=recording.num_slots)
    handed = max((job.queues[2] for job in recording.jobs), default=0)
    return {
        "arena_tokens": recording.num_slots,
        "least_free_tokens": least,
        "most_held_bytes": (recording.num_slots - least) * per_token,
        "scratch_bytes": sum(
            num for name, num in llm.memory.items() if name.startswith(("scratch", "logits"))
        ),
        "most_drafts_between_lanes": handed,
        "most_law_bytes_between_lanes": handed * k * llm.spec.vocab_size * 4,
    }


def _submitted(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Iterator[RequestHandle]:
    for number, prompt in enumerate(prompts):
        yield llm.submit(prompt, params.numbered(number))


def _our_prompts() -> list[str]:
    """Of every domain in turns, so that short and long prompts come together."""
    found = zip(*(builtin_texts(domain)[:_PER_DOMAIN] for domain in DOMAINS[:4]), strict=True)
    return list(chain.from_iterable(found))


def _draw(recording: Recording, path: Path, call: Call[TraceOptions]) -> list[Path]:
    from outrider_lab.bench.drawing import write
    from outrider_lab.bench.lanes import LanePicture, lane_chart

    engine, params = call.resolved.engine(), call.resolved.repeatable_sampling()
    if recording.counters is None:
        raise ContractError("the recording has no counters")
    how = "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}"
    longest = max((one.num_positions for one in recording.rounds), default=0)
    picture = LanePicture(
        jobs=recording.jobs,
        rounds=recording.rounds,
        title=f"Lanes of {engine.schedule}, {recording.counters.num_submitted} requests",
        small_print=f"{call.resolved.program().target}, {how}, K={longest}",
        seconds=call.options.figure_seconds,
    )
    return write(lane_chart(picture), path.parent, path.stem)
