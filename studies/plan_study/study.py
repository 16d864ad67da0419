"""Runs a study: for each cell a probe, a prediction and a measurement.

The calibration knows nothing of the cells: its prompts and its points are its own. It may be
measured again between them. What is counted on a cell's prompts before its prediction is how far
drafts as deep as any are kept there, once, and no time. The prediction is on disk before the first
timed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from plan_study.draw import MOST_BATCH, MOST_K, Cell, prompts_of
from plan_study.measure import (
    OPENING_K,
    Measured,
    Prompts,
    Repeats,
    measure,
    speed_ups,
)
from plan_study.record import Study

from outrider.core.params import SamplingParams
from outrider_lab.bench.calibrate.engines import TimedEngine, TimedEngines
from outrider_lab.bench.calibrate.probe import Ahead, Probe, probe, rounds_at
from outrider_lab.bench.workload import ADVERSARIAL
from outrider_lab.planner.calibration import Calibration, DrafterCosts
from outrider_lab.planner.candidates import DraftOption, PlannedJob, gain, stats_of
from outrider_lab.planner.rounds import believe

# How adversarial text is drawn.
HOT = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`num_tokens` are written of every text. Sampled rounds may take another way than greedy ones:
    `sampled` is what they cost."""

    engines: TimedEngines
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
        return any(engine.name == drafter for engine in self.engines.present)

    def prompts(self, cell: Cell) -> Prompts:
        llm = self.engines.plain.llm
        return prompts_of(cell, llm.tokenizer, llm.spec.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`speed_up` is that of these texts, round by round; `by_law` that of texts whose
    rounds have the same stats, and `by_places` what the planner says of counts by place alone.
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
    for job in _jobs(setup_now, cells, study, "measured", go_on):
        setup, cell, engine, prompts, params = job
        prediction = predicted(setup, cell, probe_cell(*job))
        study.add("prediction", {"cell": cell.number, **asdict(prediction)})
        found = measure(
            setup.engines.plain,
            engine,
            prompts,
            params,
            k=cell.k,
            repeats=setup.repeats,
        )
        study.add("measured", {"cell": cell.number, "speed_up": found.speed_up, **asdict(found)})
        yield cell, prediction, found


# A cell with what it is measured under and on.
Job = tuple[Setup, Cell, TimedEngine, Prompts, SamplingParams]


def _jobs(
    setup_now: Callable[[], Setup],
    cells: Sequence[Cell],
    study: Study,
    kind: str,
    go_on: Callable[[], bool],
) -> Iterator[Job]:
    """Of the cells that have no line of this kind, while `go_on`."""
    done = study.by_cell(kind)
    for cell in cells:
        if cell.number in done:
            continue
        if not go_on():
            return
        setup = setup_now()
        if setup.has(cell.drafter):
            engine = setup.engines.named(cell.drafter)
            yield setup, cell, engine, setup.prompts(cell), setup.params(cell)


def probe_cell(
    setup: Setup, cell: Cell, engine: TimedEngine, prompts: Prompts, params: SamplingParams
) -> Probe:
    """What `engine` drafts on these prompts."""
    del cell
    engines = (setup.engines.plain, engine)
    found = probe(engines, prompts, params, deepest=MOST_K, comparable=lambda one: one.llm.exact)
    return next(iter(found))


def predicted(setup: Setup, cell: Cell, counts: Probe) -> Prediction:
    calibration, drafter = _counted(setup, cell, counts)
    stats = counts.stats(cell.k)
    job = PlannedJob(
        batch=cell.batch,
        context=cell.context,
        new_tokens=setup.num_tokens,
        texts_differ=counts.spread(cell.k),
    )
    by_places = 1.0
    if drafter.places:
        rates = believe(drafter).mean
        stats_by_places = stats_of(drafter, rates, DraftOption(cell.drafter, cell.k))
        by_places = gain(calibration, drafter, job, stats_by_places)
    plain, own = _both(calibration, drafter, counts, cell, cell.k)
    return Prediction(
        speed_up=plain.seconds_per_token / own.seconds_per_token,
        by_law=gain(calibration, drafter, job, stats),
        by_places=by_places,
        tokens=stats.tokens,
        drafting=stats.drafting,
        num_drafted=stats.num_drafted,
        num_rounds=own.num_rounds,
        plain_seconds=plain.seconds_per_token,
        same=counts.same,
    )


def _counted(setup: Setup, cell: Cell, counts: Probe) -> tuple[Calibration, DrafterCosts]:
    costs = setup.sampled if _is_hot(cell) else setup.calibration
    # A lookup may have found nothing in what was sampled while rounds were timed.
    known = [*costs.drafters, *setup.calibration.drafters]
    own = next(one for one in known if one.name == cell.drafter)
    own = counts.counted(own) if counts.name == own.name else own
    return replace(costs, drafters=(own,)), own


def _is_hot(cell: Cell) -> bool:
    return cell.domain == ADVERSARIAL


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
    for job in _jobs(lambda: setup, cells, study, "ladder", go_on):
        _, cell, engine, prompts, params = job
        fitting = [k for k in ks if cell.batch * (k + 1) <= setup.most_rows]
        counts = probe_cell(*job)
        calibration, drafter = _counted(setup, cell, counts)
        foreseen = {"0": 1.0}
        for k in fitting:
            plain, own = _both(calibration, drafter, counts, cell, k)
            foreseen[str(k)] = plain.seconds_per_token / own.seconds_per_token
        found = speed_ups(
            setup.engines.plain,
            engine,
            prompts,
            params,
            ks=fitting,
            repeats=setup.repeats,
        )
        measured = {"0": 1.0} | {str(k): value for k, value in found.items()}
        line = {"cell": cell.number, "predicted": foreseen, "measured": measured}
        study.add("ladder", line)
        yield line


@dataclass(frozen=True, slots=True)
class Foretold:
    """`seconds` in which `num_tokens` are emitted in `num_rounds` passes."""

    seconds: float
    num_tokens: int
    num_rounds: int

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(self.num_tokens, 1)


def foretold(
    calibration: Calibration,
    drafter: DrafterCosts,
    texts: Sequence[Sequence[Ahead]],
    *,
    k: int,
    context: int,
    opening: int,
) -> Foretold:
    """Of texts after prompts of `context` tokens, round by round: in each, the texts that are left
    share a pass, which takes what the calibration says of so many rows, contexts and drafts. Two
    rounds of each are not counted: the first, in which its prompt is read, drafts nothing, and the
    second `opening` tokens."""
    starts = [2 + rounds_at(text, opening, start=1)[0].kept for text in texts]
    rows = [_drawn(text, k, start) for text, start in zip(texts, starts, strict=True)]
    passes = [[one for one in live if one is not None] for live in zip_longest(*rows)]
    return Foretold(
        sum(_pass_seconds(calibration, drafter, live, context) for live in passes),
        sum(len(text) - start for text, start in zip(texts, starts, strict=True)),
        len(passes),
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A round of a text, and how many tokens the one before emitted."""

    start: int
    drafted: int
    kept: int
    before: int


def _drawn(text: Sequence[Ahead], k: int, start: int) -> list[_Drawn]:
    """From `start` on, after an opening round that began behind the first token."""
    found: list[_Drawn] = []
    last = 1
    for one in rounds_at(text, k, start=start):
        found.append(_Drawn(one.start, one.drafted, one.kept, one.start - last))
        last = one.start
    return found


def _pass_seconds(
    calibration: Calibration, drafter: DrafterCosts, live: Sequence[_Drawn], prompt: int
) -> float:
    # The pending token is not in memory.
    lengths = [prompt + one.start - 1 for one in live]
    rows = [1 + one.drafted for one in live]
    drafting = [(one, length) for one, length in zip(live, lengths, strict=True) if one.drafted]
    shared = calibration.overhead + calibration.host * len(live) + calibration.rule * sum(rows)
    shared += calibration.token * sum(1 + one.kept for one in live)
    target = calibration.target.seconds(
        sum(rows), sum(lengths), sum(n * length for n, length in zip(rows, lengths, strict=True))
    )
    if not drafting:
        return shared + target
    depth = max(one.drafted for one, _ in drafting)
    draft = drafter.seconds(
        depth,
        len(drafting),
        sum(length for _, length in drafting),
        sum(one.before for one, _ in drafting),
    )
    return shared + target + draft
