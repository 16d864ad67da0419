"""`outrider simulate`: engines on a machine that one does not have, or on measured costs.

Neither weights nor tensors are needed, so torch is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.cli.call import Call
from outrider.cli.output import check_writable, figure_file, json_line, write_whole
from outrider.cli.plan_options import SimulateOptions
from outrider.cli.simulate_page import about, page, sweep_page
from outrider.cli.simulate_setup import Sweep, study_of, sweep_of, too_large
from outrider.metrics.chrome_trace import trace_pieces
from outrider.planner.simulate_study import PLAIN, Comparison, Study, compare


def simulate(call: Call[SimulateOptions]) -> int:
    options = call.options
    sweep = sweep_of(options)
    asked = sweep.options(options) if sweep else [options]
    studies = [study_of(one) for one in asked]
    figure = figure_file(options.figure)
    traces = _trace_files(options.trace, studies[0])
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
    print(sweep_page(sweep, found) if sweep else page(found[0]))
    if (note := too_large(asked[0], studies[0])) is not None:
        print(f"note: {note}", file=sys.stderr)
    for name in written:
        print(f"written: {name}")
    return 0


def _record(sweep: Sweep | None, found: Sequence[Comparison]) -> dict[str, Any]:
    if sweep is None:
        return {"simulation": _comparison_record(found[0])}
    values = zip(sweep.values, found, strict=True)
    return {
        "sweep": sweep.name,
        "simulations": [{"value": value} | _comparison_record(one) for value, one in values],
    }


def _comparison_record(found: Comparison) -> dict[str, Any]:
    study = found.study
    return {
        "study": _study_record(study),
        "times": asdict(study.times),
        "engines": [
            own.to_dict()
            | {
                "speedup": found.speedup(engine),
                "formula": 1.0 if engine == PLAIN else study.formula(engine),
            }
            for engine, own in found.numbers.items()
        ],
    }


def _study_record(study: Study) -> dict[str, Any]:
    """All that was asked for; of the costs only whose they are."""
    known = study.calibration
    return {
        "machine": known.machine,
        "target": known.target_name,
        "drafter": study.drafter.name,
        "rates": list(study.rates),
        "engines": list(study.engines),
        "p_hit": study.hit_chance,
        **{
            name: getattr(study, name)
            for name in (
                "k",
                "fan_out",
                "batch",
                "prompt",
                "output",
                "requests",
                "spread",
                "arrivals",
                "contention",
                "sync",
                "prefill_chunk",
                "hybrid_threshold",
                "decode_batch",
                "verify_batch",
                "seed",
            )
        },
    }


def _trace_files(name: str | None, study: Study) -> Mapping[str, Path]:
    """By engine; the file as it was named where there is one engine only."""
    if name is None:
        return {}
    path = Path(name)
    several = len(study.engines) > 1
    found = {
        engine: path.with_stem(f"{path.stem}-{engine}") if several else path
        for engine in study.engines
    }
    for one in found.values():
        check_writable(one)
    return found


def _draw(sweep: Sweep | None, found: Sequence[Comparison], path: Path) -> list[Path]:
    small_print = about(found[0].study, varies=sweep.name if sweep else "")
    if sweep is not None:
        from outrider.cli.simulate_page import draw_sweep

        return draw_sweep(sweep, found, path, small_print=small_print)
    from outrider.bench.figure_lanes import LanePicture, draw_lanes

    written: list[Path] = []
    for engine in found[0].study.engines:
        run = found[0].runs[engine]
        picture = LanePicture(
            jobs=run.jobs,
            rounds=run.rounds,
            title=f"Simulated lanes of {engine}",
            small_print=small_print,
        )
        written += draw_lanes(picture, path.parent, f"{path.stem}-{engine}")
    return written
