"""Runs a study: for each cell a probe, a prediction and a measurement.

The calibration knows nothing of the cells: its prompts and its points are its own. It may be
measured again between them. What is counted on a cell's prompts before its prediction is how far
drafts as deep as any are kept there, once, and no time. The prediction is on disk before the first
timed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.bench.calibrate.probe import Probe, probe
from outrider.bench.calibrate.stands import Stand, Stands
from outrider.bench.calibrate.whole import with_counts
from outrider.bench.plan_cells.draw import MOST_BATCH, MOST_K, Cell
from outrider.bench.plan_cells.foretell import Foretold, foretold
from outrider.bench.plan_cells.measure import (
    OPENING_K,
    Measured,
    Prompts,
    Repeats,
    measure,
    speed_ups,
)
from outrider.bench.plan_cells.record import Study
from outrider.bench.plan_cells.texts import prompts_of
from outrider.bench.workload import ADVERSARIAL
from outrider.core.params import SamplingParams
from outrider.estimate.calibration import Calibration, DrafterCosts
from outrider.planner.candidates import Candidate, Job, gain, law_of
from outrider.planner.places import believe

# How adversarial text is drawn.
HOT = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`num_tokens` are written of every text. Sampled rounds may take another way than greedy ones:
    `sampled` is what they cost."""

    stands: Stands
    calibration: Calibration
    sampled: Calibration
    num_tokens: int
    repeats: Repeats
    most_rows: int = MOST_BATCH * (MOST_K + 1)

    def params(self, cell: Cell) -> SamplingParams:
        """Adversarial text is sampled, for greedily a small model repeats itself. The rule ties it
        to the seed, so that both sides write the same."""
        return SamplingParams(
            max_tokens=self.num_tokens,
            temperature=HOT.temperature if _is_hot(cell) else 0.0,
            seed=cell.number,
            ignore_eos=True,
        )

    def has(self, drafter: str) -> bool:
        return any(stand.name == drafter for stand in self.stands.present)

    def prompts(self, cell: Cell) -> Prompts:
        llm = self.stands.plain.llm
        return prompts_of(cell, llm.tokenizer, llm.spec.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`speed_up` is that of these texts, round by round (foretell.py); `by_law` that of texts whose
    rounds have the same law, and `by_places` what the planner says of counts by place alone.
    `tokens` is E, and `same` says whether the probe wrote plain decoding's text."""

    speed_up: float
    by_law: float
    by_places: float
    tokens: float
    drafting: float
    num_drafted: float
    num_rounds: int
    plain_seconds: float
    same: bool | None


def run_study(
    setup_now: Callable[[], Setup],
    cells: Sequence[Cell],
    study: Study,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[Cell, Prediction, Measured]]:
    """Cells that were not measured before, in the order of the draw, while `go_on`. `setup_now` is
    asked before each."""
    done = study.by_cell("measured")
    for cell in cells:
        if cell.number in done:
            continue
        if not go_on():
            return
        setup = setup_now()
        if not setup.has(cell.drafter):
            continue
        prompts, params = setup.prompts(cell), setup.params(cell)
        stand = setup.stands.named(cell.drafter)
        prediction = predicted(setup, cell, probe_cell(setup, stand, prompts, params))
        study.add("prediction", {"cell": cell.number, **asdict(prediction)})
        found = measure(
            setup.stands.plain,
            stand,
            prompts,
            params,
            k=cell.k,
            repeats=setup.repeats,
        )
        study.add("measured", {"cell": cell.number, "speed_up": found.speed_up, **asdict(found)})
        yield cell, prediction, found


def probe_cell(setup: Setup, stand: Stand, prompts: Prompts, params: SamplingParams) -> Probe:
    """What `stand` drafts on these prompts."""
    stands = (setup.stands.plain, stand)
    found = probe(stands, prompts, params, deepest=MOST_K, comparable=lambda one: one.llm.exact)
    return next(iter(found))


def predicted(setup: Setup, cell: Cell, counts: Probe) -> Prediction:
    calibration, drafter = _counted(setup, cell, counts)
    law = counts.law(cell.k)
    job = _job(setup, cell, counts, cell.k)
    by_places = 1.0
    if drafter.places:
        rates = believe(drafter).mean
        law_by_places = law_of(drafter, rates, Candidate(cell.drafter, cell.k))
        by_places = gain(calibration, drafter, job, law_by_places)
    plain, own = _both(calibration, drafter, counts, cell, cell.k)
    return Prediction(
        speed_up=plain.seconds_per_token / own.seconds_per_token,
        by_law=gain(calibration, drafter, job, law),
        by_places=by_places,
        tokens=law.tokens,
        drafting=law.drafting,
        num_drafted=law.num_drafted,
        num_rounds=own.num_rounds,
        plain_seconds=plain.seconds_per_token,
        same=counts.same,
    )


def _counted(setup: Setup, cell: Cell, counts: Probe) -> tuple[Calibration, DrafterCosts]:
    costs = setup.sampled if _is_hot(cell) else setup.calibration
    # A lookup may have found nothing in what was sampled while rounds were timed.
    known = [*costs.drafters, *setup.calibration.drafters]
    own = next(one for one in known if one.name == cell.drafter)
    calibration = with_counts(replace(costs, drafters=(own,)), [counts])
    return calibration, calibration.drafters[0]


def _is_hot(cell: Cell) -> bool:
    return cell.domain == ADVERSARIAL


def _job(setup: Setup, cell: Cell, counts: Probe, k: int) -> Job:
    return Job(
        batch=cell.batch,
        context=cell.context,
        new_tokens=setup.num_tokens,
        texts_differ=counts.spread(k),
    )


def _both(
    calibration: Calibration, drafter: DrafterCosts, counts: Probe, cell: Cell, k: int
) -> tuple[Foretold, Foretold]:
    """Plain decoding of a cell's texts, and rounds at depth `k`."""

    def of(depth: int) -> Foretold:
        opening = min(depth, OPENING_K)
        context = cell.context
        return foretold(
            calibration, drafter, counts.texts, k=depth, context=context, opening=opening
        )

    return of(0), of(k)


def run_rows_of_k(
    setup: Setup,
    cells: Sequence[Cell],
    study: Study,
    ks: Sequence[int],
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[Mapping[str, Any]]:
    """Speed-ups at each of `ks` on the texts of some cells, whatever K these have themselves: the
    line of each, once it is in the file."""
    done = study.by_cell("ladder")
    for cell in cells:
        if cell.number in done or not setup.has(cell.drafter):
            continue
        if not go_on():
            return
        fitting = [k for k in ks if cell.batch * (k + 1) <= setup.most_rows]
        prompts, params = setup.prompts(cell), setup.params(cell)
        stand = setup.stands.named(cell.drafter)
        counts = probe_cell(setup, stand, prompts, params)
        calibration, drafter = _counted(setup, cell, counts)
        foreseen = {"0": 1.0}
        for k in fitting:
            plain, own = _both(calibration, drafter, counts, cell, k)
            foreseen[str(k)] = plain.seconds_per_token / own.seconds_per_token
        found = speed_ups(
            setup.stands.plain,
            stand,
            prompts,
            params,
            ks=fitting,
            repeats=setup.repeats,
        )
        measured = {"0": 1.0} | {str(k): value for k, value in found.items()}
        line = {"cell": cell.number, "predicted": foreseen, "measured": measured}
        study.add("ladder", line)
        yield line
