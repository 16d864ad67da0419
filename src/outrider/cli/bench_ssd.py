"""`outrider bench ssd`: AR, SD and SSD on models that are costs alone, with scripted acceptance."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from outrider.bench.gemm.engines import Text
from outrider.bench.gemm.pair import Make, pair_shape
from outrider.bench.gemm.record import RESULTS, SAMPLES
from outrider.bench.gemm.report import sections
from outrider.bench.gemm.results import results_of, study_record
from outrider.bench.gemm.study import QUICK, CostStudy, Grid, Sizes, grid_asked, outstanding, run
from outrider.bench.gemm.units import SamplesFile, Unit
from outrider.bench.machine import new_run_id, provenance
from outrider.bench.pages import Page, write_page
from outrider.bench.store import write_json
from outrider.cache.capacity import free_bytes
from outrider.cli.bench_options import SsdOptions
from outrider.cli.call import Call
from outrider.cli.engine_setup import print_page, say
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import json_line
from outrider.cli.paint import Bar, words
from outrider.core.errors import ConfigError
from outrider.lab.gemm import Costs
from outrider.models.loading import pick_device

T = TypeVar("T", int, float)
NO_STUDIES = "none"
# Of a taste: repeats, tokens, divisors for engines and for passes.
_USUAL, _TASTE = (5, 96, 4, 1), (2, 24, 8, 4)
_LAYER_SHARE = 16
EVERY_COST = Costs(attention=True, norms=True, head=True)


def ssd(call: Call[SsdOptions]) -> int:
    study = study_of(call.options)
    study.check(free_bytes(pick_device(call.options.device)))
    folder = _folder(call.options)
    file = SamplesFile.open(folder, study.circumstances)
    units = study.units()
    left = outstanding(units, file)
    if not left:
        say(f"note: {folder} has all samples already; name another --output-dir to measure again")
    whole = _measure(study, units, left, file)
    _show(call.options, study, file, whole=whole)
    if not whole:
        say(
            f"interrupted: {len(file.samples)} samples are safe in {folder}; the same command with "
            f"--output-dir {folder} goes on from there"
        )
        return INTERRUPTED
    return 1 if any(one.reason is not None for one in file.samples.values()) else 0


def study_of(options: SsdOptions) -> CostStudy:
    """Raises ConfigError for words that mean nothing."""
    repeats, tokens, scale, pass_scale = _TASTE if options.quick else _USUAL
    names = _words(options.pairs)
    if not names:
        raise ConfigError("--pairs names none.", hint="--pairs 8b/1b")
    costs, studies = Costs.named(_words(options.costs or "")), _words(options.studies)
    axes = {
        "ks": _numbers("--ks", options.ks, int),
        "alphas": _numbers("--alphas", options.alphas, float),
        "hits": _numbers("--hits", options.hits, float),
        "fan_outs": _numbers("--fan-outs", options.fan_outs, int),
        "batches": _numbers("--batches", options.batches, int),
    }
    asked = [] if studies == [NO_STUDIES] else studies
    return CostStudy(
        pairs=tuple(pair_shape(name) for name in names),
        make=Make(
            costs=EVERY_COST if options.tensor_parallel > 1 else costs,
            dtype=options.dtype,
            quantise=options.quantise,
            device=options.device,
            threads=options.threads,
            ranks=options.tensor_parallel,
        ),
        grid=grid_asked(QUICK if options.quick else Grid(), asked, axes),
        text=Text(max_tokens=options.max_tokens or tokens),
        sizes=Sizes(
            layer_share=options.layer_share or _LAYER_SHARE,
            divisor=options.scale or scale,
            pass_divisor=options.pass_scale or pass_scale,
        ),
        repeats=options.repeats or repeats,
        seed=options.seed,
        quick=options.quick,
        has_engines=studies != [NO_STUDIES],
    )


def _folder(options: SsdOptions) -> Path:
    if options.output_dir is not None:
        return Path(options.output_dir)
    today, device = datetime.date.today().isoformat(), pick_device(options.device).type
    return Path("results") / f"{today}-{device}-ssd{'-quick' if options.quick else ''}"


def _measure(
    study: CostStudy, units: Sequence[Unit], left: Sequence[Unit], file: SamplesFile
) -> bool:
    """Whether all of it was measured; else an interrupt came."""
    with Bar(
        words(),
        BarColumn(),
        MofNCompleteColumn(),
        words("turns, left:"),
        TimeRemainingColumn(),
    ) as progress:
        task = progress.add_task("", total=len(units), completed=len(units) - len(left))
        try:
            for unit in run(study, left, file):
                progress.update(task, advance=1, description=unit.title)
        except KeyboardInterrupt:
            return False
    return True


def _show(options: SsdOptions, study: CostStudy, file: SamplesFile, *, whole: bool) -> None:
    """Write results and pages; print the tables, or JSON if that was asked for."""
    found = results_of(study, file)
    about = {"run_id": new_run_id(), "complete": whole, "provenance": provenance()}
    record = study_record(study, found, about)
    write_json(file.folder / RESULTS, record)
    page = Page(f"Cost study, run {record['run_id']}", list(sections(found, quick=study.quick)))
    write_page(file.folder, page)
    if options.json:
        print(json_line({"folder": str(file.folder), **record}))
    else:
        print_page(page)
        print(f"results: {file.folder} ({RESULTS}, {SAMPLES}, report.md, report.html)")


def _words(text: str) -> list[str]:
    return [word for word in (word.strip() for word in text.split(",")) if word]


def _numbers(flag: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(kind(word) for word in _words(text or ""))
    except ValueError:
        raise ConfigError(
            f"{flag}: {text!r} is not numbers between commas.", hint=f"{flag} 0,1"
        ) from None
