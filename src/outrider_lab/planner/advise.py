"""Advice of `outrider plan`: the best drafter, K, tree and engine for a job, or none, with reasons.

The candidate (candidates.py) with the largest expected speed-up is chosen; of equals the one that
drafts less. It is advised only if the low end of its interval is above 1. A drafter with an
estimated figure is never advised, and never advised against: the verdict is then that it is not
known. Batch and context at which drafting stops paying are those of the chosen candidate,
everything else as requested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider.core.errors import CapacityError, ConfigError, did_you_mean
from outrider.core.plugins import KINDS, MODEL
from outrider_lab.planner.calibration import PLAIN, Calibration, DrafterCosts, RoundStats
from outrider_lab.planner.candidates import (
    ENGINES,
    DraftOption,
    Ends,
    Engines,
    Option,
    PlannedJob,
    doubt_of,
    expected_stats,
    explain,
    gain,
    memory_bytes,
    options,
)
from outrider_lab.planner.overlap import BestTree, best_tree, sizes_to_try
from outrider_lab.planner.roofline import Energy, joules_a_token
from outrider_lab.planner.rounds import Belief, believe, break_even, plain_times


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Tokens a second: `each` of one sequence, `total` of all that decode together."""

    name: str
    each: float
    total: float


def frontier(points: Iterable[RatePoint]) -> list[RatePoint]:
    """Return the points that no other dominates, by falling `each`; of equal ones the first.

    Pareto: a point stays if no other has more tokens a second for one user and for all.
    """
    kept: list[RatePoint] = []
    for point in sorted(points, key=lambda one: (-one.each, -one.total)):
        if not kept or point.total > kept[-1].total:
            kept.append(point)
    return kept


def must_fit(calibration: Calibration, job: PlannedJob, limit: int | None) -> None:
    """Raise CapacityError for a target that needs more than `limit` bytes."""
    needed = memory_bytes(calibration, None, job)
    if limit is None or needed is None or needed <= limit:
        return
    weights = calibration.memory_bytes
    kv_bytes = needed - weights
    hint = "lower --batch, --context or --max-tokens, or try --quantise int8"
    if weights > limit:
        hint = "try --quantise int8 or int4, a smaller target, or a device with more memory"
    raise CapacityError(
        f"{calibration.target_name} needs {_gb(needed)} ({_gb(weights)} of weights, "
        f"{_gb(kv_bytes)} of keys and values of {job.batch} x {job.context + job.new_tokens} "
        f"tokens), and there are {_gb(limit)}.",
        hint=hint,
    )


def memory_refusal(
    calibration: Calibration, drafter: DrafterCosts, job: PlannedJob, limit: int | None
) -> str | None:
    """Return why `drafter` does not fit into memory together with the target, or None."""
    needed = memory_bytes(calibration, drafter, job)
    if limit is None or needed is None or needed <= limit:
        return None
    return f"{drafter.name}: with it {_gb(needed)} are needed, and there are {_gb(limit)}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


# Chains that are tried when no candidates are given.
USUAL_K = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
MOST_BATCH = 256
MOST_CONTEXT = 131_072
# Speed-ups that agree in so many digits count as equal.
_DIGITS = 9
_FRONTIER_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the planner. Only `candidates` are tried; without any, all drafters with the
    usual K. Memory is checked if `memory_limit` (bytes) is given, joules are computed if `energy`
    is. The break-even is searched up to `most_batch` and `most_context`. `trees` names drafters
    that draft trees, `estimated` those with an estimated figure. `others` is the share of the CPU
    that other processes had while times were measured, if it made them less sure."""

    job: PlannedJob = field(default_factory=PlannedJob)
    candidates: tuple[DraftOption, ...] = ()
    engines: Engines = field(default_factory=Engines)
    memory_limit: int | None = None
    energy: Energy | None = None
    most_batch: int = MOST_BATCH
    most_context: int = MOST_CONTEXT
    trees: tuple[str, ...] = ()
    estimated: frozenset[str] = frozenset()
    others: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedPlan:
    """The planner's answer. `best` is advised if `speculate`; otherwise it is the best that was
    found, if any, measured ones first. Whether to speculate is not `known` if figures are estimates
    or too unsure. `options` has all candidates with their best engines, the best first, and
    `engines` the best candidate for each engine. `break_even_batch` is the smallest at which
    `best`, run in turns, no longer pays, None if it does throughout the range; likewise
    `break_even_context`. `reasons` are sentences; `left_out` names drafters that do not fit or are
    unknown. `frontier` has the batches worth running, by tokens a second of one text and of all.
    `tree` is the best tree of that drafter, if long texts gain more by it."""

    job: PlannedJob
    speculate: bool
    known: bool
    best: Option | None
    options: tuple[Option, ...]
    engines: tuple[Option, ...]
    plain_tokens_per_second: float
    plain_joules: float | None
    memory_bytes: int | None
    break_even_batch: int | None
    break_even_context: int | None
    verdict: str
    reasons: tuple[str, ...]
    left_out: tuple[str, ...]
    frontier: tuple[RatePoint, ...]
    tree: BestTree | None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Known:
    """The data of a forecast; `beliefs` only of drafters that may be advised."""

    calibration: Calibration
    question: Question
    drafters: Mapping[str, DrafterCosts]
    beliefs: Mapping[str, Belief]

    def stats(self, option: DraftOption) -> RoundStats:
        return expected_stats(self.drafters[option.drafter], self.beliefs[option.drafter], option)

    def gain(self, option: DraftOption, job: PlannedJob) -> float:
        return gain(self.calibration, self.drafters[option.drafter], job, self.stats(option))


def advise(calibration: Calibration, question: Question) -> AdvisedPlan:
    """Return a plan. Raises ConfigError for an unknown candidate or engine, CapacityError for a
    target that does not fit into the available memory."""
    job = question.job
    must_fit(calibration, job, question.memory_limit)
    tried = question.candidates or _usual(calibration.drafters, job.batch)
    known, left_out = _known(calibration, question, tried)
    every = [_of(known, one) for one in tried if one.drafter in known.beliefs]
    found = sorted((_best(options) for options in every if options), key=_order)
    sure = [one for one in found if one.drafter not in question.estimated]
    best = next(iter(sure or found), None)
    speculate = bool(sure) and sure[0].low > 1
    doubt = None if speculate else doubt_of(found, sure, question.others)
    option = None if best is None else best.candidate
    ends = _ends(known, option)
    names = {one.drafter for one in sure or found}
    engines = _by_engine(question.engines.names, [one for one in every if one[0].drafter in names])
    tree = _tree(known, best) if best is not None and speculate else None
    verdict, reasons = explain(sure, engines, ends, verdict=doubt or speculate, job=job, tree=tree)
    chosen = known.drafters[best.drafter] if best is not None and speculate else None
    return AdvisedPlan(
        job=job,
        speculate=speculate,
        known=doubt is None,
        best=best,
        options=tuple(found),
        engines=engines,
        plain_tokens_per_second=job.batch / plain_times(calibration, job.load).total,
        plain_joules=_plain_joules(known),
        memory_bytes=memory_bytes(calibration, chosen, job),
        break_even_batch=ends.batch,
        break_even_context=ends.context,
        verdict=verdict,
        reasons=reasons,
        left_out=tuple(left_out),
        frontier=_frontier(known, option),
        tree=tree,
    )


def _best(found: Sequence[Option]) -> Option:
    """Return the best option; of equals the one that drafts less, on the simpler engine."""
    return min(found, key=_order)


def _order(option: Option) -> tuple[float, int, int, int]:
    rank = ENGINES.index(option.engine)
    return -round(option.speed_up, _DIGITS), option.k, option.num_nodes, rank


def _by_engine(names: Sequence[str], every: Sequence[Sequence[Option]]) -> tuple[Option, ...]:
    found = ([one for options in every for one in options if one.engine == name] for name in names)
    return tuple(sorted((_best(options) for options in found if options), key=_order))


def _usual(drafters: Sequence[DrafterCosts], batch: int) -> tuple[DraftOption, ...]:
    """Return chains, and trees of a drafter whose candidates' ranks were counted."""
    chains = [DraftOption(one.name, k) for one in drafters for k in USUAL_K if one.draft]
    trees = [
        DraftOption(one.name, len(one.chances), nodes)
        for one in drafters
        for nodes in (sizes_to_try(batch, least=len(one.chances) + 1) if one.chances else ())
    ]
    return (*chains, *trees)


def _why_not(
    name: str, drafters: Mapping[str, DrafterCosts], calibration: Calibration, question: Question
) -> str | None:
    if name not in drafters:
        raise ConfigError(
            f"the calibration of {calibration.target_name} has no drafter {name!r}.",
            hint=did_you_mean(name, drafters) if drafters else "measure one: outrider plan --fresh",
        )
    if not drafters[name].places:
        rounds = drafters[name].num_rounds
        silent = f"{name}: it drafted nothing in {rounds} rounds"
        return silent if rounds else f"{name}: the acceptance of its drafts was never counted"
    return memory_refusal(calibration, drafters[name], question.job, question.memory_limit)


def _known(
    calibration: Calibration, question: Question, tried: Sequence[DraftOption]
) -> tuple[_Known, list[str]]:
    """Return the data of the forecast, and why drafters were left out."""
    drafters = {one.name: one for one in calibration.drafters}
    beliefs: dict[str, Belief] = {}
    left_out: list[str] = []
    for name in dict.fromkeys(one.drafter for one in tried):
        why = _why_not(name, drafters, calibration, question)
        if why is None:
            beliefs[name] = believe(drafters[name])
        else:
            left_out.append(why)
    return _Known(calibration, question, drafters, beliefs), left_out


def _of(known: _Known, option: DraftOption) -> list[Option]:
    question, drafter = known.question, known.drafters[option.drafter]
    made = options(
        known.calibration,
        drafter,
        known.beliefs[option.drafter],
        option,
        question.job,
        engines=question.engines,
    )
    energy = question.energy
    if energy is None:
        return made
    kind = KINDS.get(option.drafter)
    if kind is None or kind.source != MODEL:
        energy = replace(energy, draft=None)
    stats, job = known.stats(option), question.job

    def joules(option: Option) -> float | None:
        # For work ahead only seconds are computed, not the bytes that it moves.
        if option.engine == "ssd":
            return None
        seconds = stats.tokens * job.batch / option.tokens_per_second
        return joules_a_token(energy, job.load, stats, seconds, depth=len(stats.kept))

    return [replace(option, joules=joules(option)) for option in made]


def _tree(known: _Known, best: Option) -> BestTree | None:
    drafter = known.drafters[best.drafter]
    # Only chains are drafted ahead.
    if drafter.name not in known.question.trees or best.engine == "ssd":
        return None
    rates = known.beliefs[drafter.name].mean
    tree = best_tree(known.calibration, drafter, known.question.job.load, rates, depth=best.k)
    return tree if tree is not None and tree.speed_up > best.steady else None


def _ends(known: _Known, option: DraftOption | None) -> Ends:
    """Return where the best option, run in turns, stops paying."""
    question = known.question
    measured = round(known.calibration.target.rows.points[-1][0])
    most = question.most_batch, question.most_context, measured
    if option is None:
        return Ends(None, None, *most)

    def by_batch(batch: int) -> float:
        return known.gain(option, replace(question.job, batch=batch))

    def by_context(context: int) -> float:
        return known.gain(option, replace(question.job, context=context))

    return Ends(
        break_even(by_batch, least=1, most=most[0]),
        break_even(by_context, least=0, most=most[1]),
        *most,
        in_turns=known.gain(option, question.job),
    )


def _frontier(known: _Known, option: DraftOption | None) -> tuple[RatePoint, ...]:
    """Return plain decoding and the best option, over batches."""
    points: list[RatePoint] = []
    for batch in _FRONTIER_BATCHES:
        job = replace(known.question.job, batch=batch)
        each = 1 / plain_times(known.calibration, job.load).total
        points.append(RatePoint(f"plain, batch {batch}", each, batch * each))
        if option is not None:
            each *= known.gain(option, job)
            points.append(RatePoint(f"{option.words}, batch {batch}", each, batch * each))
    return tuple(frontier(points))


def _plain_joules(known: _Known) -> float | None:
    energy, load = known.question.energy, known.question.job.load
    if energy is None:
        return None
    seconds = plain_times(known.calibration, load).total
    return joules_a_token(energy, load, PLAIN, seconds, depth=0)


# Plans of several replicas: the same texts at once, shared out evenly, on 1, 2, 4, ... devices.
#
# Each replica is planned like one engine with its share of the texts, on a device of its own, so
# rates add up. Queues, common prompts and failures are for the simulator.
@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A plan for replicas with `batch` texts each, together `tokens_per_second`, drafted by
    `words`; `price` is that of a million tokens. None without memory for the texts."""

    replicas: int
    batch: int
    tokens_per_second: float | None
    words: str
    price: float | None

    @property
    def each(self) -> float | None:
        """Tokens a second of one text."""
        if self.tokens_per_second is None:
            return None
        return self.tokens_per_second / (self.replicas * self.batch)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def replica_plans(
    calibration: Calibration, question: Question, *, texts: int, most: int, price: float | None
) -> tuple[ReplicaPlan, ...]:
    """Return plans of 1, 2, 4, ... and `most` replicas for so many `texts` at once; `price` is that
    of an hour of one replica. `question` is that of one replica."""
    counts = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return tuple(_plan(calibration, question, count, texts, price) for count in (*counts, most))


def _plan(
    calibration: Calibration, question: Question, count: int, texts: int, price: float | None
) -> ReplicaPlan:
    batch = math.ceil(texts / count)
    asked = replace(question, job=replace(question.job, batch=batch))
    try:
        made = advise(calibration, asked)
    except CapacityError:
        return ReplicaPlan(count, batch, None, "does not fit", None)
    rate = count * tokens_per_second(made)
    cost = None if price is None else 1e6 * price * count / (3600 * rate)
    best = made.best.words if made.best is not None and made.speculate else "plain decoding"
    return ReplicaPlan(count, batch, rate, best, cost)


def tokens_per_second(plan: AdvisedPlan) -> float:
    """Return the rate of what a plan advises."""
    if plan.best is None or not plan.speculate:
        return plan.plain_tokens_per_second
    return plan.best.tokens_per_second
