"""What a plan or a ranking of drafters rests on, measured on this machine within bounds.

The target is loaded once, and every engine has its weights. Rounds are timed, then drafts are
counted on the prompts; what there was no time or memory for stays as it was supposed
(planner/suppose.py), and `Found.origins` says of every figure which of the two it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.bench.calibrate.bounds import Bounds
from outrider.bench.calibrate.counting import Counting
from outrider.bench.calibrate.engines import TimedEngines, open_engines
from outrider.bench.calibrate.extent import Extent
from outrider.bench.calibrate.probe import Probe
from outrider.bench.calibrate.session import (
    Calibrated,
    assembled,
    keep,
    load,
    question_of,
)
from outrider.bench.calibrate.timing import Pace, Timing, Wanted
from outrider.bench.machine import Neighbours
from outrider.bench.studies.drafters_lineup import Contestant, Drafts
from outrider.core.config import EngineConfig
from outrider.core.env import cache_folder, compiler
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.params import SamplingParams
from outrider.core.spec import ModelSpec
from outrider.estimate.calibration import Calibration
from outrider.kernels.native.build import must_compile
from outrider.planner.suppose import Origins, joined

# Tokens of each prompt's text on which acceptance is counted at most.
COUNTED_TOKENS = 96
# Of what is left of the time, what opening engines may take, and then what timing rounds may.
_OPENING_SHARE, _TIMING_SHARE = 0.4, 0.5
# Seconds in which a compiler makes the kernels.
_COMPILING = 60.0
# Of few passes a point no scatter can be told.
_LEAST_SCATTER = 0.03

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`drafts` are what `contestants` draft from that name no draft. `guessed` has the target and
    all of them as they are supposed, `num_bytes` what the weights of each take. Rounds are timed
    for `timing` seconds at most, and texts are compared with plain decoding's if `compares`."""

    target: str
    spec: ModelSpec
    engine: EngineConfig
    contestants: Sequence[Contestant]
    drafts: Drafts
    guessed: Calibration
    num_bytes: Mapping[str, int]
    extent: Extent
    bounds: Bounds
    texts: Sequence[str]
    params: SamplingParams
    timing: float
    compares: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A calibration with the counts of some prompts, and where its figures come from. `same` says
    for each drafter whether it wrote what plain decoding writes; `context` is the mean length of
    the prompts, and `drafts` names what each drafter drafts from, if anything. All of it took
    `seconds`, and the process held `peak_bytes` at most of the `most_bytes` allowed."""

    calibration: Calibration
    origins: Origins
    calibrated: Calibrated | None
    probes: tuple[Probe, ...]
    context: int
    drafts: Mapping[str, str]
    notes: tuple[str, ...]
    seconds: float
    peak_bytes: int
    most_bytes: int | None

    @property
    def same(self) -> dict[str, bool | None]:
        return {one.name: one.same for one in self.probes}


@dataclass(slots=True)
class Answer:
    """What is known so far; `found` may be asked for at any time."""

    asked: Asked
    context: int
    calibrated: Calibrated | None = None
    timing: Timing | None = None
    engines: TimedEngines | None = None
    probes: dict[str, Probe] = field(default_factory=dict[str, Probe])
    notes: list[str] = field(default_factory=list[str])

    def found(self) -> Found:
        asked = self.asked
        measured = self._measured()
        costs = {one.name: one for one in asked.guessed.drafters}
        costs |= {} if measured is None else {one.name: one for one in measured.drafters}
        counted = {name: probe.counted(costs[name]) for name, probe in self.probes.items()}
        pace = None if self.timing is None else self.timing.pace.plain
        calibration, origins = joined(asked.guessed, measured, counted, pass_seconds=pace)
        calibration = replace(calibration, scatter=max(calibration.scatter, _LEAST_SCATTER))
        return Found(
            calibration=calibration,
            origins=origins,
            calibrated=self.calibrated,
            probes=tuple(self.probes.values()),
            context=self.context,
            drafts=self._drafts(),
            notes=tuple(dict.fromkeys(self.notes)),
            seconds=asked.bounds.spent,
            peak_bytes=asked.bounds.peak_bytes,
            most_bytes=asked.bounds.most_bytes,
        )

    def _measured(self) -> Calibration | None:
        """What was timed, of a timing that goes on as well."""
        if self.calibrated is not None:
            return self.calibrated.calibration
        timing, engines = self.timing, self.engines
        if timing is None or engines is None or not timing.timed:
            return None
        return assembled(engines, self.asked.target, timing.costs())

    def _drafts(self) -> dict[str, str]:
        drafting = () if self.engines is None else self.engines.drafting
        return {one.name: str(one.facts["draft"]) for one in drafting if one.facts["draft"]}


@dataclass(slots=True)
class Watch:
    """Who hears what is being done, with the share of it that is done, and from the tenth second on
    what is known so far."""

    tell: Tell = lambda _what, _share: None
    partly: Callable[[Found], None] = lambda _found: None
    so_far: Answer | None = None

    def tick(self) -> None:
        if self.so_far is not None and self.so_far.asked.bounds.answer_is_due():
            self.partly(self.so_far.found())

    def goes_on(self, until: float) -> bool:
        self.tick()
        return self.so_far is None or self.so_far.asked.bounds.clock() < until

    def hear(self, what: str, share: float) -> None:
        self.tell(what, share)
        self.tick()


def answer(asked: Asked, *, cache: Path | None, fresh: bool, watch: Watch | None = None) -> Found:
    """All that there is time and memory for; costs are kept in `cache`, and taken from it unless
    they are to be `fresh`."""
    so_far = Answer(asked, context=0)
    watch = watch or Watch()
    watch.so_far = so_far

    refusal = _refusal(asked)
    if refusal is not None:
        so_far.notes.append(refusal)
        return so_far.found()
    with _opened(asked, watch) as engines:
        so_far.engines = engines
        so_far.notes += engines.notes
        prompts = _prompts(asked, so_far, engines)
        _time(so_far, engines, watch, cache=None if fresh else cache, keep_in=cache)
        _count(so_far, engines, watch, prompts)
        return so_far.found()


def _refusal(asked: Asked) -> str | None:
    """Why nothing can be measured within the bounds, if so."""
    bounds, size = asked.bounds, asked.spec.weight_bytes
    if asked.engine.device in ("auto", "cpu") and must_compile(compiler(), cache_folder()):
        try:
            bounds.check("compiling the kernels", num_bytes=0, seconds=_COMPILING)
        except CapacityError as error:
            return f"nothing was measured: {error} `outrider doctor` compiles them."
    try:
        seconds = bounds.loading_seconds(size)
        bounds.check(f"loading {asked.target}", num_bytes=size, seconds=seconds)
    except CapacityError as error:
        return f"nothing was measured: {error}"
    return None


@contextmanager
def _opened(asked: Asked, watch: Watch) -> Generator[TimedEngines]:
    """Engines with the target's weights, as many as there is time and memory for."""
    bounds, extent = asked.bounds, asked.extent
    watch.hear("loading", 0.0)
    began, until, opened, loading = bounds.clock(), 0.0, 0, asked.spec.weight_bytes

    def admit(one: Contestant) -> None:
        nonlocal began, opened, until, loading
        opened += 1
        if opened == 1:
            return
        bounds.note_loading(loading, bounds.clock() - began)
        if opened == 2:
            until = bounds.part(_OPENING_SHARE)
        watch.hear("loading", opened / len(asked.contestants))
        size = asked.num_bytes.get(one.name, 0)
        seconds = bounds.loading_seconds(size)
        beside = extent.engine_bytes(asked.spec)
        bounds.check(f"drafter {one.name}", num_bytes=size + beside, seconds=seconds)
        if size and opened > 2 and bounds.clock() > until:
            raise CapacityError("time is short.", hint="give more with --seconds")
        began, loading = bounds.clock(), size

    base = replace(
        asked.engine,
        batch_size=extent.batch_size,
        arena_tokens=extent.room,
        # A request without an end asks for a whole window.
        context=min(asked.engine.context or asked.spec.max_tokens, extent.room),
        prefill_chunk=min(asked.engine.prefill_chunk, extent.chunk),
    )
    engines = open_engines(
        asked.contestants, asked.target, asked.drafts, base, most_k=extent.deepest, admit=admit
    )
    try:
        yield engines
    finally:
        engines.close()


def _prompts(asked: Asked, so_far: Answer, engines: TimedEngines) -> list[list[int]]:
    """Raises ConfigError if none of the texts fits the window."""
    llm, extent = engines.plain.llm, asked.extent
    most = llm.spec.max_tokens - extent.deepest - asked.params.max_tokens - 2
    ids = [llm.tokenizer.encode(text) for text in asked.texts]
    prompts = [one for one in ids if 0 < len(one) <= most]
    if not prompts:
        raise ConfigError(
            f"none of {len(ids)} prompts fits a window of {llm.spec.max_tokens} tokens.",
            hint="give shorter prompts, or lower --max-tokens",
        )
    if len(prompts) < len(ids):
        so_far.notes.append(f"{len(ids) - len(prompts)} prompts are too long for the window")
    room = extent.room - extent.deepest - asked.params.max_tokens - 2
    room = min(room, extent.longest or room)
    if max(map(len, prompts)) > room:
        so_far.notes.append(f"of long prompts the last {room} tokens were read, to save time")
        prompts = [one[-room:] for one in prompts]
    so_far.context = round(statistics.fmean(map(len, prompts)))
    return prompts


def _time(
    so_far: Answer,
    engines: TimedEngines,
    watch: Watch,
    *,
    cache: Path | None,
    keep_in: Path | None,
) -> None:
    """Costs of rounds; what `cache` has of the same question is taken as it is."""
    asked = so_far.asked
    extent, bounds = asked.extent, asked.bounds
    if extent.is_large:
        so_far.timing = Timing(engines, (), (), bounds.clock, Pace(0.0, 0.0))
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
    if seconds <= 0:
        return
    with Neighbours() as neighbours:
        timing = so_far.timing = Timing.planned(engines, wanted, clock=bounds.clock)
        timing.run(seconds - timing.seconds, tell=watch.hear, tick=watch.tick)
    if not timing.timed:
        return
    calibration = assembled(engines, asked.target, timing.costs())
    origin = {**calibration.provenance, "foreign_cpu_share": neighbours.share}
    calibration = replace(calibration, provenance=origin)
    path = None
    if _has_all(calibration, engines):
        stored = keep(keep_in, question, calibration)
        so_far.notes += [] if stored.note is None else [stored.note]
        path = stored.path
    so_far.calibrated = Calibrated(calibration, path, False)


def _has_all(calibration: Calibration, engines: TimedEngines) -> bool:
    """Whether there was time for every drafter, so that it is worth keeping."""
    known = {one.name for one in calibration.drafters}
    return all(one.name in known for one in engines.drafting)


def _count(
    so_far: Answer, engines: TimedEngines, watch: Watch, prompts: Sequence[Sequence[int]]
) -> None:
    """How much of drafts is kept, each drafter in its share of the time that is left."""
    asked = so_far.asked
    counting = Counting(
        engines=engines,
        prompts=prompts,
        params=asked.params,
        extent=asked.extent,
        bounds=asked.bounds,
        compares=asked.compares,
        goes_on=watch.goes_on,
    )
    for counted in counting.run(watch.hear):
        if so_far.timing is not None:
            so_far.timing.timed += counted.timed
        if counted.probe is not None:
            so_far.probes[counted.name] = counted.probe
