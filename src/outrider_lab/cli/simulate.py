"""`outrider bench simulate`: engines on a machine that one does not have, or on measured costs.

Neither weights nor tensors are needed, so torch is not imported. Printed are the machine in a few
numbers and a row for each engine; a sweep is drawn as a line for each engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.cli.call import Call
from outrider.cli.output import check_writable, fitted, json_line, screen_table, write_whole
from outrider_lab.bench import drawing
from outrider_lab.bench.charts import Axis, Chart, Color, Line, Lines, Panel
from outrider_lab.bench.lanes import LanePicture, lane_chart
from outrider_lab.cli.simulate_setup import OF_LOAD, OF_SHEETS, Sweep, study_of, sweep_of, too_large
from outrider_lab.cli.trace import figure_file
from outrider_lab.cli.verb_options import SimulateOptions
from outrider_lab.metrics.chrome_trace import trace_pieces
from outrider_lab.simulator.events import widest_fan_out
from outrider_lab.simulator.study import (
    AHEAD,
    CLOSED,
    PLAIN,
    TOGETHER,
    SimulatedComparison,
    SimulatedNumbers,
    SimulatedStudy,
    compare,
)

# As many as an engine may be told to foresee.
MOST_VERDICTS = 256
HEADER = (
    "engine",
    "speed-up",
    "formula",
    "tokens/s",
    "tokens/round",
    "rounds/pass",
    "p_hit",
    "first p95",
    "token p95",
    "latency p95",
    "overlap",
    "lanes busy",
)
FLEET_HEADER = (
    "engine",
    "first p99",
    "token p99",
    "latency p99",
    "prompt cached",
    "by replica",
    "moved",
    "a million tokens",
)


def page(found: SimulatedComparison) -> str:
    """Of one comparison."""
    rows = [_row(found, engine) for engine in found.numbers]
    parts = [about(found.study), machine(found.study), screen_table(rows, header=HEADER)]
    if found.study.is_fleet:
        rows = [_fleet_row(own) for own in found.numbers.values()]
        parts.append(screen_table(rows, header=FLEET_HEADER))
    return "\n\n".join(parts)


def sweep_page(sweep: Sweep, found: Sequence[SimulatedComparison]) -> str:
    """Speed-ups by value, and then the latencies."""
    engines = found[0].study.engines
    ups = [
        (word, *(_times(one.speedup(engine)) for engine in engines))
        for word, one in zip(sweep.words, found, strict=True)
    ]
    late = [
        (word, *(_ms(one.numbers[engine].latency.p95) for engine in (PLAIN, *engines)))
        for word, one in zip(sweep.words, found, strict=True)
    ]
    parts = [
        f"{about(found[0].study, varies=sweep.name)}; {sweep.name} varies",
        "speed-up over plain decoding\n" + screen_table(ups, header=(sweep.name, *engines)),
        "latency of a request, p95\n" + screen_table(late, header=(sweep.name, PLAIN, *engines)),
    ]
    if any(one.study.is_fleet for one in found):
        parts += _fleet_tables(sweep, found)
    return "\n\n".join(parts)


def _fleet_tables(sweep: Sweep, found: Sequence[SimulatedComparison]) -> Iterator[str]:
    """Throughput, tails and cost by value."""
    told: dict[str, Callable[[SimulatedNumbers], str]] = {
        "tokens a second": lambda own: f"{own.tokens_per_second:.1f}",
        "time to the first token, p99": lambda own: _ms(own.first_token.p99),
        "latency of a request, p99": lambda own: _ms(own.latency.p99),
        "share of prompt tokens that were cached": lambda own: f"{100 * own.fleet.cached:.0f} %",
    }
    if any(one.study.price is not None for one in found):
        told["cost of a million tokens"] = lambda own: _money(own.fleet.price)
    for title, cell in told.items():
        rows = [
            (word, *map(cell, one.numbers.values()))
            for word, one in zip(sweep.words, found, strict=True)
        ]
        yield f"{title}\n{screen_table(rows, header=(sweep.name, *found[0].numbers))}"


def about(study: SimulatedStudy, *, varies: str = "") -> str:
    """What runs, where, and how requests come, but for the option that `varies`."""
    known = study.calibration
    names = f"{known.target_name} with {study.drafter.name} on {known.machine}"
    drafting = _listed(
        varies,
        k=f"K = {study.k}",
        alpha=f"acceptance {_rates(study)}",
        fan_out=f"fan-out {study.fan_out}" if AHEAD in study.engines else "",
    )
    if varies not in ("k", "alpha"):
        drafting += f"; {study.chance.tokens_per_round(study.k):.2f} tokens a round"
    load = _listed(
        varies,
        requests=f"{study.requests} request{'' if study.requests == 1 else 's'}",
        context=f"{study.prompt} tokens to read",
        max_tokens=f"{study.output} to write",
        spread=f"spread {study.spread:g}" if study.spread else "",
        arrivals=_coming(study),
        batch=f"batch {study.batch}",
        replicas=f"{study.replicas} replicas by {study.routing}" if study.replicas > 1 else "",
        shared=f"{study.shared} tokens in common in {study.families} families"
        if study.shared
        else "",
        failures=_failing(study),
    )
    sharing = _listed(varies, contention=_sharing(study))
    lines = ("" if varies in OF_SHEETS else names, drafting, f"{load}; {sharing}".rstrip("; "))
    return "\n".join(line for line in lines if line)


def machine(study: SimulatedStudy) -> str:
    """Times of one round of the batch, alone, and what fits into a verification."""
    times = study.times
    lines = [
        ("plain pass", _ms(times.plain)),
        ("verification", _ms(times.verify)),
        ("draft", f"{_ms(times.draft)} ({times.draft_share:.2f} of a plain pass)"),
    ]
    if AHEAD in study.engines:
        lines += [
            ("drafting ahead", f"{_ms(times.ahead)} for {study.fan_out} verdicts a sequence"),
            ("window", _window(study)),
        ]
    return screen_table(lines)


def _window(study: SimulatedStudy) -> str:
    """What a verification has time for, beside it."""
    steps = study.times.window_steps
    if steps is None:
        return "drafting takes no time"
    widest = widest_fan_out(
        study.costs, batch=study.most_live, context=study.mid_context, k=study.k, most=MOST_VERDICTS
    )
    verdicts = f"{widest or 'no'} verdicts" + (" or more" if widest == MOST_VERDICTS else "")
    return f"{steps:.1f} draft steps fit into a verification; or drafts for {verdicts}"


def _listed(varies: str, **parts: str) -> str:
    return ", ".join(text for name, text in parts.items() if text and name != varies)


def _rates(study: SimulatedStudy) -> str:
    rates = study.chance.rates_of(max(study.k, 1))
    distinct = rates if len(set(rates)) > 1 else rates[:1]
    return ", ".join(f"{rate:.3g}" for rate in distinct)


def _coming(study: SimulatedStudy) -> str:
    if study.arrivals == CLOSED:
        return "closed loop"
    return "all at once" if study.arrivals == TOGETHER else f"{study.arrivals:g} a second"


def _failing(study: SimulatedStudy) -> str:
    return ", ".join(
        f"replica {one.replica} gone from {one.at:g} s to {one.ends:g} s" for one in study.failures
    )


def _sharing(study: SimulatedStudy) -> str:
    if study.contention == 0:
        return "every lane has a device of its own"
    if study.contention == 1:
        return "lanes share one memory"
    return f"contention {study.contention:g}"


def _row(found: SimulatedComparison, engine: str) -> tuple[str, ...]:
    own = found.numbers[engine]
    return (
        engine,
        _times(found.speedup(engine)),
        _times(_formula(found, engine)),
        f"{own.tokens_per_second:.1f}",
        f"{own.stats.tokens_per_round:.2f}",
        f"{own.rounds_per_pass:.1f}",
        "-" if own.p_hit is None else f"{own.p_hit:.2f}",
        _ms(own.first_token.p95),
        _ms(own.between_tokens.p95),
        _ms(own.latency.p95),
        f"{100 * own.timeline.overlap_fraction:.0f} %",
        ", ".join(f"{lane} {100 * share:.0f} %" for lane, share in own.busy.items()),
    )


def _fleet_row(own: SimulatedNumbers) -> tuple[str, ...]:
    return (
        own.engine,
        _ms(own.first_token.p99),
        _ms(own.between_tokens.p99),
        _ms(own.latency.p99),
        f"{100 * own.fleet.cached:.0f} %",
        ", ".join(map(str, own.fleet.served)),
        str(own.fleet.moved),
        _money(own.fleet.price),
    )


def _money(price: float | None) -> str:
    return "-" if price is None else f"{price:.3g}"


def _formula(found: SimulatedComparison, engine: str) -> float | None:
    return 1.0 if engine == PLAIN else found.study.formula(engine)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _ms(seconds: float) -> str:
    """Three digits, in milliseconds or seconds."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def sweep_chart(sweep: Sweep, found: Sequence[SimulatedComparison], *, small_print: str) -> Chart:
    """Values stand at equal distances."""
    engines = found[0].study.engines
    colors: dict[str, Color] = {engine: number for number, engine in enumerate(engines)}

    def panel(
        title: str, values: Mapping[str, Sequence[float]], *levels: tuple[str, float]
    ) -> Panel:
        lines = [
            Line(name=e, points=list(enumerate(y)), color=colors.get(e, "muted"), mark=0)
            for e, y in values.items()
        ]
        return Lines(
            title=title, lines=lines, levels=levels, x=Axis(label=sweep.name, ticks=sweep.words)
        )

    ups = {e: [one.speedup(e) or 0.0 for one in found] for e in engines}
    late = {e: [1e3 * one.numbers[e].latency.p95 for one in found] for e in (PLAIN, *engines)}
    panels = [
        panel("speed-up over plain decoding", ups, ("as plain decoding", 1.0)),
        panel("latency of a request, p95, ms", late),
    ]
    rows = [panels]
    if any(one.study.is_fleet for one in found):
        rate = {e: [one.numbers[e].tokens_per_second for one in found] for e in (PLAIN, *engines)}
        first = {e: [1e3 * one.numbers[e].first_token.p99 for one in found] for e in late}
        rows.append(
            [panel("tokens a second", rate), panel("time to the first token, p99, ms", first)]
        )
    title = f"Simulated engines by {sweep.name}"
    return Chart(title=title, panels=rows, foot=small_print)


def simulate(call: Call[SimulateOptions]) -> int:
    options = call.options
    sweep = sweep_of(options)
    asked = sweep.options(options) if sweep else [options]
    studies = [study_of(one) for one in asked]
    figure = figure_file(options.figure)
    traces = _trace_files(options.trace, studies[0].engines)
    found = [compare(study) for study in studies]
    drawn = [] if figure is None else _draw(sweep, found, figure)
    for engine, path in traces.items():
        run = found[0].runs[engine]
        about_it = {"engine": engine, "simulated": True, **_study_record(studies[0])}
        write_whole(path, trace_pieces(run.jobs, run.rounds, about=about_it))
    written = [*map(str, traces.values()), *map(str, drawn)]
    if options.json:
        print(json_line(_record(sweep, found) | {"files": written}))
        return 0
    print(fitted(sweep_page(sweep, found) if sweep else page(found[0])))
    if (note := too_large(asked[0], studies[0])) is not None:
        print(f"note: {note}", file=sys.stderr)
    for name in written:
        print(f"written: {name}")
    return 0


def _record(sweep: Sweep | None, found: Sequence[SimulatedComparison]) -> dict[str, Any]:
    if sweep is None:
        return {"simulation": _comparison_record(found[0])}
    values = zip(sweep.values, found, strict=True)
    return {
        "sweep": sweep.name,
        "simulations": [{"value": value} | _comparison_record(one) for value, one in values],
    }


def _comparison_record(found: SimulatedComparison) -> dict[str, Any]:
    study = found.study
    return {
        "study": _study_record(study),
        "times": asdict(study.times),
        "engines": [
            own.to_dict() | {"speedup": found.speedup(engine), "formula": _formula(found, engine)}
            for engine, own in found.numbers.items()
        ],
    }


def _study_record(study: SimulatedStudy) -> dict[str, Any]:
    """All that was asked for; of the costs only whose they are."""
    known = study.calibration
    return {
        "machine": known.machine,
        "target": known.target_name,
        "drafter": study.drafter.name,
        "rates": list(study.rates),
        "engines": list(study.engines),
        "p_hit": study.hit_chance,
        **{name: getattr(study, name) for name in OF_LOAD},
        "failures": [asdict(one) for one in study.failures],
    }


def _trace_files(name: str | None, engines: Sequence[str]) -> Mapping[str, Path]:
    """By engine; the file as it was named where there is one engine only."""
    if name is None:
        return {}
    path = Path(name)
    found = {engine: path.with_stem(f"{path.stem}-{engine}") for engine in engines}
    found = found if len(engines) > 1 else {engines[0]: path}
    for one in found.values():
        check_writable(one)
    return found


def _draw(sweep: Sweep | None, found: Sequence[SimulatedComparison], path: Path) -> list[Path]:
    small_print = about(found[0].study, varies=sweep.name if sweep else "")
    if sweep is not None:
        chart = sweep_chart(sweep, found, small_print=small_print)
        return drawing.write(chart, path.parent, path.stem)
    written: list[Path] = []
    for engine in found[0].study.engines:
        run = found[0].runs[engine]
        picture = LanePicture(
            jobs=run.jobs,
            rounds=run.rounds,
            title=f"Simulated lanes of {engine}",
            small_print=small_print,
        )
        written += drawing.write(lane_chart(picture), path.parent, f"{path.stem}-{engine}")
    return written
