"""What `outrider trace` tells a person: its record, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.bench.pages import percent
from outrider.cli.output import size, table

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
    return table(rows, header=header)


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
    return table(rows, header=("waiting for", "mean", "p95", "max"))


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
