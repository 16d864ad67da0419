"""What a plan or a ranking of drafters rests on, measured on this machine within bounds.

The target is loaded once and a pass of it is timed, whatever that takes; every engine has its
weights. Then drafts are counted on the prompts, which is cheap and differs most between users, and
rounds are timed, of the drafters first that bring most. What there was no time or memory for stays
as it was supposed (planner/suppose.py), and `Found.origins` says of every figure which it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from pathlib import Path

from outrider.core.env import cache_folder, compiler
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.params import SamplingParams
from outrider.kernels.native.build import built_kernels, must_compile
from outrider.plugins.measure.turns import Neighbours
from outrider_lab.bench.calibrate.counting import Counted, Counting
from outrider_lab.bench.calibrate.engines import TimedEngine, TimedEngines, TimedLLM, open_engines
from outrider_lab.bench.calibrate.found import DISTURBED, Answer, Asked, Found, Watch
from outrider_lab.bench.calibrate.session import Calibrated, assembled, keep, load, question_of
from outrider_lab.bench.calibrate.timing import Pace, Timing, Wanted
from outrider_lab.bench.studies.drafters_lineup import Contestant
from outrider_lab.bench.workload import ECHO, builtin_texts
from outrider_lab.planner.calibration import Calibration
from outrider_lab.planner.candidates import DraftOption, PlannedJob, expected_stats, gain
from outrider_lab.planner.rounds import believe

# Of what is left of the time, what opening engines may take.
_OPENING_SHARE = 0.4
# Tokens of a text that is read for the first pass, and the most passes that are timed of it.
_FIRST_TOKENS, _FIRST_PASSES = 8, 8


def refusal_of(asked: Asked) -> str | None:
    """Why nothing is measured at all, if so."""
    if not asked.bounds.seconds:
        return "nothing was measured: --seconds 0 estimates all"
    try:
        asked.bounds.must_fit(f"loading {asked.target}", num_bytes=asked.spec.weight_bytes)
    except CapacityError as error:
        return f"nothing was measured: {error}"
    return None


def compile_kernels(asked: Asked, watch: Watch) -> None:
    """Kernels that are not compiled yet, which happens once and does not count."""
    if asked.engine.device not in ("auto", "cpu"):
        return
    if must_compile(compiler(), cache_folder()):
        bounds = asked.bounds
        watch.warns("kernels are compiled first, once; that takes a minute and does not count")
        began = bounds.clock()
        built_kernels(compiler(), cache_folder())
        bounds.add_time(bounds.clock() - began)


@contextmanager
def opened(so_far: Answer, watch: Watch) -> Generator[TimedEngines]:
    """Engines with the target's weights, as many as there is time and memory for. As soon as the
    target is loaded a pass of it is timed."""
    asked = so_far.asked
    bounds, extent = asked.bounds, asked.extent
    watch.hear("loading", 0.0)
    expected = bounds.loading_seconds(asked.spec.weight_bytes)
    if expected > bounds.left:
        watch.warns(
            f"loading {asked.target} takes about {expected:.0f} s, which is more than is left of "
            f"--seconds {bounds.seconds:g}: the answer comes after it, and little is measured"
        )
    began, until, num_opened, loading = bounds.clock(), 0.0, 0, 0

    def admit(one: Contestant, before: Sequence[TimedLLM]) -> None:
        nonlocal began, until, num_opened, loading
        num_opened += 1
        if num_opened == 1:
            return
        if num_opened == 2:
            _note_target(so_far, before[0], bounds.clock() - began)
            until = bounds.part(_OPENING_SHARE)
        else:
            bounds.note_loading(loading, bounds.clock() - began)
        watch.hear("loading", num_opened / len(asked.contestants))
        size = asked.num_bytes.get(one.name, 0)
        bounds.must_fit("it", num_bytes=size + extent.engine_bytes(asked.spec))
        is_late = size and num_opened > 2 and bounds.clock() > until
        if is_late or bounds.loading_seconds(size) > bounds.left:
            raise CapacityError("too little time is left to load it.", hint="--seconds gives more")
        began, loading = bounds.clock(), size

    base = replace(
        asked.engine,
        batch_size=extent.batch_size,
        arena_tokens=extent.room,
        # A request without an end asks for a whole window.
        context=min(asked.engine.context or asked.spec.max_tokens, extent.room),
        prefill_chunk=min(asked.engine.most_chunk, extent.chunk),
    )
    engines = open_engines(
        asked.contestants, asked.target, asked.drafts, base, most_k=extent.deepest, admit=admit
    )
    try:
        if so_far.pass_seconds is None:
            _note_target(so_far, engines.plain.llm, bounds.clock() - began)
        yield engines
    finally:
        engines.close()


def _note_target(so_far: Answer, llm: TimedLLM, seconds: float) -> None:
    """The target was loaded in so many seconds: a pass of it is timed, whatever that takes."""
    asked, bounds = so_far.asked, so_far.asked.bounds
    bounds.note_loading(asked.spec.weight_bytes, seconds)
    if bounds.left <= 0:
        so_far.notes.append(
            f"the target was loaded after {bounds.spent:.1f} s, and nothing was left of "
            f"--seconds {bounds.seconds:g} but for one pass of it; give more"
        )
    so_far.pass_seconds = first_pass(llm, lambda: bounds.left > 0)


def first_pass(llm: TimedLLM, goes_on: Callable[[], bool]) -> float:
    """Seconds of a pass that goes on from a short text: the median of a few, or as many as there is
    time for, one at the least."""
    ids = llm.tokenizer.encode(builtin_texts(ECHO)[0])[:_FIRST_TOKENS]
    params = SamplingParams(max_tokens=_FIRST_PASSES + 1, ignore_eos=True)
    handle, seconds = llm.submit(ids, params), list[float]()
    try:
        while not handle.done and (not seconds or goes_on()):
            has_read = handle.has_read
            llm.advance()
            seconds += [llm.wall / llm.delay] if has_read else []
    finally:
        llm.cancel(handle)
    return statistics.median(seconds)


# Tokens of each prompt's text on which acceptance is counted at most.
COUNTED_TOKENS = 96
# Of what is left of the time, what counting may take where rounds are timed afterwards, and then
# what timing may.
_COUNTING_SHARE, _TIMING_SHARE = 0.5, 0.9
# Passes below which rounds are not timed: to see how fast they are takes as many.
_LEAST_PASSES = 40
# Tokens of a prompt that a large target may read for each pass that there is time for. A row of
# many takes an eighth of a pass or less.
_READ_OF_PASSES = 0.4
# The K at which drafters are ranked for timing.
_RANKED_K = 4


def answer(asked: Asked, *, cache: Path | None, fresh: bool, watch: Watch | None = None) -> Found:
    """All that there is time and memory for, a pass of the target at the least; 0 seconds measure
    nothing. Costs are kept in `cache`, and taken from it unless they are to be `fresh`."""
    so_far = Answer(asked)
    watch = watch or Watch()
    watch.so_far = so_far

    refusal = refusal_of(asked)
    if refusal is not None:
        so_far.notes.append(refusal)
        return so_far.found()
    compile_kernels(asked, watch)
    with so_far.neighbours, opened(so_far, watch) as engines:
        so_far.engines = engines
        so_far.notes += engines.notes
        prompts = _prompts(asked, so_far, engines)
        counting, counted = _count(so_far, engines, watch, prompts)
        _time(so_far, engines, watch, cache=None if fresh else cache, keep_in=cache)
        so_far.probes |= {one.name: one for one in counting.compared(counted, watch.hear)}
        return so_far.found()


def _prompts(asked: Asked, so_far: Answer, engines: TimedEngines) -> list[list[int]]:
    """Raises ConfigError if none of the texts fits the window."""
    llm, extent = engines.plain.llm, asked.extent
    most = llm.spec.max_tokens - extent.deepest - asked.params.max_tokens - 2
    encode = asked.encoder(llm)
    ids = [encode(text, None) for text in asked.texts]
    fits = [0 < len(one) <= most for one in ids]
    prompts = list(compress(ids, fits))
    so_far.texts = tuple(compress(asked.texts, fits))
    if not prompts:
        raise ConfigError(
            f"none of {len(ids)} prompts fits a window of {llm.spec.max_tokens} tokens.",
            hint="give shorter prompts, or lower --max-tokens",
        )
    if len(prompts) < len(ids):
        so_far.notes.append(f"{len(ids) - len(prompts)} prompts are too long for the window")
    room = extent.room - extent.deepest - asked.params.max_tokens - 2
    if extent.longest is not None:
        passes = max(asked.bounds.left, 0.0) / (so_far.pass_seconds or math.inf)
        room = int(min(room, max(extent.longest, _READ_OF_PASSES * passes)))
    if max(map(len, prompts)) > room:
        so_far.notes.append(f"of long prompts the last {room} tokens were read, to save time")
        prompts = [encode(text, room) for text in so_far.texts]
    so_far.context = round(statistics.fmean(map(len, prompts)))
    return prompts


def _time(
    so_far: Answer, engines: TimedEngines, watch: Watch, *, cache: Path | None, keep_in: Path | None
) -> None:
    """Costs of rounds; what `cache` has of the same question is taken as it is. Those of a large
    target were timed while texts were written."""
    asked = so_far.asked
    extent, bounds = asked.extent, asked.bounds
    if extent.is_large:
        return
    seconds = min(asked.timing, _TIMING_SHARE * max(bounds.left, 0.0))
    wanted = Wanted(
        batches=extent.batches,
        ks=extent.ks,
        seconds=seconds,
        params=asked.params,
        is_glance=True,
        least_ks=extent.least_ks,
        room=extent.room,
        context=so_far.context + asked.params.max_tokens // 2 if extent.alone else 0,
    )
    question = question_of(engines, asked.target, replace(wanted, seconds=bounds.seconds))
    kept = load(cache, question)
    so_far.notes += [] if kept.note is None else [kept.note]
    if kept.calibration is not None and _has_all(kept.calibration, engines):
        so_far.calibrated = Calibrated(kept.calibration, kept.path, True)
        return
    if seconds <= _LEAST_PASSES * (so_far.pass_seconds or 0.0):
        return
    ranked = replace(engines, present=_ranked(so_far, engines))
    with Neighbours() as neighbours:
        timing = so_far.timing = Timing.planned(ranked, wanted, clock=bounds.clock)
        timing.run(seconds - timing.seconds, tell=watch.hear, tick=watch.tick)
    if not timing.timed:
        return
    calibration = assembled(engines, asked.target, timing.costs())
    origin = {**calibration.provenance, "foreign_cpu_share": neighbours.share}
    calibration = replace(calibration, provenance=origin)
    path = None
    # What others disturbed is not for later.
    if _has_all(calibration, engines) and (neighbours.share or 0.0) <= DISTURBED:
        stored = keep(keep_in, question, calibration)
        so_far.notes += [] if stored.note is None else [stored.note]
        path = stored.path
    so_far.calibrated = Calibrated(calibration, path, False)


def _ranked(so_far: Answer, engines: TimedEngines) -> list[TimedEngine]:
    """Plain decoding, then who seems to bring most, since time may be short."""
    known = so_far.found()
    job = PlannedJob(batch=1, context=known.context)

    def brings(engine: TimedEngine) -> float:
        drafter = next(one for one in known.calibration.drafters if one.name == engine.name)
        way = DraftOption(engine.name, _RANKED_K)
        stats = expected_stats(drafter, believe(drafter, num_draws=0), way)
        return gain(known.calibration, drafter, job, stats)

    return [engines.plain, *sorted(engines.drafting, key=brings, reverse=True)]


def _has_all(calibration: Calibration, engines: TimedEngines) -> bool:
    """Whether there was time for every drafter, so that it is worth keeping."""
    known = {one.name for one in calibration.drafters}
    return all(one.name in known for one in engines.drafting)


def _count(
    so_far: Answer, engines: TimedEngines, watch: Watch, prompts: Sequence[Sequence[int]]
) -> tuple[Counting, list[Counted]]:
    """How much of drafts is kept, each drafter in its share of the time."""
    asked = so_far.asked
    if asked.extent.is_large:
        so_far.timing = Timing(engines, (), (), asked.bounds.clock, Pace(0.0, 0.0))
    counting = Counting(
        engines=engines,
        prompts=prompts,
        params=asked.params,
        extent=asked.extent,
        bounds=asked.bounds,
        compares=asked.compares,
        goes_on=watch.goes_on,
        share=1.0 if asked.extent.is_large else _COUNTING_SHARE,
    )
    every: list[Counted] = []
    for counted in counting.run(watch.hear):
        every.append(counted)
        if so_far.timing is not None:
            so_far.timing.timed += counted.timed
        if counted.probe is not None:
            so_far.probes[counted.name] = counted.probe
    return counting, every
