"""The planner against measurement: cells drawn by a seed, predicted, then measured.

    python studies/plan_cells.py [--tier a|b] [--cells N] [--minutes M] [--rows-of-k N]
                                    [--model FOLDER] [--output FILE] [--quick]

The cells and what is done with each are in plan_study/. What costs are, is measured before, and
again after every so many cells: a prediction goes by all that a run timed up to it, which is rounds
on other texts, and none of a cell. FILE has a line for all that became known, and a study that was
stopped goes on in it. The embedded window is 2,048 tokens, so contexts end where a draft of 16 and
the new tokens still fit; a batch holds fewer tokens in all where rows are slow. After the cells,
some rows of K are measured as a whole, to see what the chosen K costs against the best one.
`outrider report FILE` draws it. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from common import DRAFT, TARGET, TIER_FLAGS, tier_folders
from options import Flag, Options, read
from plan_study.draw import MOST_BATCH, MOST_K, Limits, draw
from plan_study.measure import Repeats
from plan_study.record import Study, record_of
from plan_study.study import HOT, Setup, run_rows_of_k, run_study

from outrider import EngineConfig
from outrider.core.params import SamplingParams
from outrider.plugins.measure.turns import Neighbours, provenance
from outrider_lab.bench.calibrate.engines import TimedEngines, open_engines
from outrider_lab.bench.calibrate.session import assembled
from outrider_lab.bench.calibrate.timing import SECONDS, Timing, Wanted
from outrider_lab.bench.studies.drafters_lineup import Drafts, contestants_named
from outrider_lab.measure.machine import new_run_id
from outrider_lab.planner.calibration import Calibration

# Drawn anew with every digit of it; committed before anything was measured.
SEED = 20261217
KS = (1, 2, 3, 4, 6, 8, 12, 16)
# A plan measures at the batch that will run; here it may be any up to the last of these.
BATCHES = (1, 2, 4, 8, MOST_BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`most_tokens` of a batch's prompts together, `most_rows` of a pass. A repeat takes
    `repeat_seconds` of each side. Costs are measured for `seconds`, so often before the first cell
    and once more after every so many `cells_between`."""

    cells: int = 110
    drafters: str = "model,ngram,suffix,mtp,eagle"
    num_tokens: int = 96
    most_tokens: int = 8192
    most_rows: int = 272
    repeats: int = 5
    repeat_seconds: float = 0.5
    seconds: float = SECONDS
    first: int = 4
    cells_between: int = 22


SIZES = {
    "a": Size(),
    "b": Size(
        cells=40,
        drafters="model,ngram,suffix",
        num_tokens=24,
        most_tokens=1600,
        most_rows=48,
        seconds=3 * SECONDS,
        first=2,
        cells_between=20,
    ),
}
QUICK = Size(
    cells=2,
    drafters="model,ngram",
    num_tokens=12,
    most_tokens=256,
    most_rows=32,
    repeats=1,
    repeat_seconds=0.0,
    seconds=1.0,
    first=1,
    cells_between=1,
)


FLAGS = {
    "tier": ("a", "b"),
    "cells": Flag(kind=int | None, default=None, text="110 of tier A, 40 of tier B"),
    "rows_of_k": 12,
    "minutes": Flag(kind=float | None, default=None, text="start no cell after that"),
}


def main() -> None:
    options = read("plan_cells.py", __doc__, {**TIER_FLAGS, **FLAGS})
    size = QUICK if options.quick else SIZES[options.tier]
    count = options.cells or size.cells
    study = Study.open(options.output or Path(f"plan_cells-{options.tier}.jsonl"))
    until = None if options.minutes is None else perf_counter() + 60 * options.minutes
    with target_of(options) as target:
        drafts = Drafts.of(target, None if target == TARGET else DRAFT)
        with closing(engines_of(size, target, drafts)) as engines:
            run(study, size, engines, target, (options.tier, count, options.rows_of_k), until)
    print(json.dumps({"benchmark": "plan_cells", "file": study.path.name, **record_of(study)}))


@contextmanager
def target_of(options: Options) -> Generator[str]:
    if options.tier == "a":
        yield TARGET
        return
    with tier_folders(options) as folders:
        yield str(folders["b"])


def engines_of(size: Size, target: str, drafts: Drafts) -> TimedEngines:
    config = EngineConfig(
        batch_size=MOST_BATCH,
        # The rule that ties sampled text to the seed, so that both sides write the same.
        sampler="match",
        watchdog="off",
        # All prompts of a batch are read in one or two passes once their pages are known.
        prefill_chunk=1024,
        arena_tokens=MOST_BATCH * 64 + 2 * size.most_tokens + 4096,
    )
    contestants = contestants_named(size.drafters)
    return open_engines(contestants, target, drafts, config, most_k=MOST_K)


def run(
    study: Study,
    size: Size,
    engines: TimedEngines,
    target: str,
    what: tuple[str, int, int],
    until: float | None,
) -> None:
    tier, count, rows_of_k = what
    window = engines.plain.llm.spec.max_tokens
    limits = Limits(
        most_context=window - size.num_tokens - MOST_K - 4,
        most_tokens=size.most_tokens,
        most_rows=size.most_rows,
    )
    cells = draw(count, size.drafters.split(","), limits, seed=SEED)
    facts = {"seed": SEED, "tier": tier, "limits": asdict(limits), "size": asdict(size)}
    study.cells_drawn(cells, facts)
    say(f"{len(study.by_cell('measured'))} of {count} cells are measured; calibrating")
    setups = Setups(size, engines, target, study)
    started, before = perf_counter(), len(study.by_cell("measured"))

    def go_on() -> bool:
        return until is None or perf_counter() < until

    for cell, prediction, found in run_study(setups.now, cells, study, go_on=go_on):
        done = len(study.by_cell("measured"))
        left = (perf_counter() - started) / (done - before) * (count - done)
        say(
            f"{done}/{count}, {left / 60:.0f} minutes left: {cell.name}: "
            f"{prediction.speed_up:.2f} predicted, {found.speed_up:.2f} measured"
        )
    for line in run_rows_of_k(setups.current, cells[:rows_of_k], study, KS, go_on=go_on):
        say(f"row of K of cell {line['cell']}: measured {line['measured']}")


class Setups:
    """What predictions go by, measured again as cells are done."""

    def __init__(self, size: Size, engines: TimedEngines, target: str, study: Study) -> None:
        self._size, self._engines, self._target, self._study = size, engines, target, study
        self._timings = {
            name: Timing.planned(
                engines, Wanted(batches=BATCHES, seconds=size.seconds, params=params)
            )
            for name, params in (("calibration", SamplingParams()), ("sampled", HOT))
        }
        self._num_cells = 0
        self._run_id = new_run_id()
        for _ in range(size.first):
            self.current = self._measured()

    def now(self) -> Setup:
        if self._num_cells and self._num_cells % self._size.cells_between == 0:
            self.current = self._measured()
        self._num_cells += 1
        return self.current

    def _measured(self) -> Setup:
        with Neighbours() as neighbours:
            for timing in self._timings.values():
                timing.run(self._size.seconds)
        found = {
            name: assembled(self._engines, self._target, timing.costs())
            for name, timing in self._timings.items()
        }
        self._write(found, neighbours.share)
        return Setup(
            engines=self._engines,
            calibration=found["calibration"],
            sampled=found["sampled"],
            num_tokens=self._size.num_tokens,
            repeats=Repeats(self._size.repeats, self._size.repeat_seconds),
            most_rows=self._size.most_rows,
        )

    def _write(self, found: Mapping[str, Calibration], share: float | None) -> None:
        origin = {
            "run_id": self._run_id,
            "provenance": provenance(),
            "foreign_cpu_share": share,
        }
        costs = {name: json.loads(one.to_json()) for name, one in found.items()}
        self._study.add("run", {**origin, **costs, "notes": list(self._engines.notes)})


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
