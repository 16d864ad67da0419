"""The question of an answer, and what of it was found: figures, where they come from, who heard it.

Partial answers are made of the same parts at any time: what was measured by then, and for the rest
what is supposed (planner/suppose.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.spec import ModelSpec
from outrider.estimate.cost import Curve
from outrider.plugins.measure.turns import Neighbours
from outrider_lab.bench.calibrate.engines import TimedEngines, TimedLLM
from outrider_lab.bench.calibrate.extent import Bounds, Extent
from outrider_lab.bench.calibrate.probe import Probe
from outrider_lab.bench.calibrate.session import Calibrated, assembled
from outrider_lab.bench.calibrate.timing import Timing
from outrider_lab.bench.studies.drafters_lineup import Contestant, Drafts
from outrider_lab.planner.calibration import Calibration, DrafterCosts
from outrider_lab.planner.suppose import Origins, joined

# Of few passes a point no scatter can be told.
_LEAST_SCATTER = 0.03
# The share of the CPU from which on other processes disturb, and the deviation of times where they
# have all of it.
DISTURBED, _DISTURBED_SCATTER = 0.1, 0.15

Tell = Callable[[str, float], None]
# The ids of a text as a prompt, of the end of the text if there are more than so many.
Encoder = Callable[[str, int | None], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`drafts` are what `contestants` draft from that name no draft. `estimated` has the target and
    all of them as they are supposed, `num_bytes` what the weights of each take. Rounds are timed
    for `timing` seconds at most, and texts are compared with plain decoding's if `compares`.
    The `encoder` of the target makes prompts of the texts."""

    target: str
    spec: ModelSpec
    engine: EngineConfig
    contestants: Sequence[Contestant]
    drafts: Drafts
    estimated: Calibration
    num_bytes: Mapping[str, int]
    extent: Extent
    bounds: Bounds
    texts: Sequence[str]
    encoder: Callable[[TimedLLM], Encoder]
    params: SamplingParams
    timing: float
    compares: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A calibration with the counts of some prompts, and where its figures come from. `same` says
    for each drafter whether it wrote what plain decoding writes; `context` is the mean length of
    the prompts, and `drafts` names what each drafter drafts from, if anything. `others` is the
    share of the CPU that other processes had while times were measured, None where nobody knows.
    All of it took `seconds`, and the process held `peak_bytes` at most of the `most_bytes`
    allowed."""

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
    others: float | None = None
    # The prompts, in the order of the texts of a probe.
    texts: tuple[str, ...] = ()
    # Whether an instruct model continues them as they are.
    raw: bool = False

    @property
    def is_disturbed(self) -> bool:
        """Whether others used so much of the CPU that times are less sure."""
        return (self.others or 0.0) > DISTURBED

    @property
    def same(self) -> dict[str, bool | None]:
        return {one.name: one.same for one in self.probes}


@dataclass(slots=True)
class Answer:
    """What is known so far; `found` may be asked for at any time. `pass_seconds` are those of a
    plain pass, None before there was one."""

    asked: Asked
    context: int = 0
    texts: tuple[str, ...] = ()
    pass_seconds: float | None = None
    calibrated: Calibrated | None = None
    timing: Timing | None = None
    engines: TimedEngines | None = None
    neighbours: Neighbours = field(default_factory=Neighbours)
    probes: dict[str, Probe] = field(default_factory=dict[str, Probe])
    notes: list[str] = field(default_factory=list[str])

    def found(self) -> Found:
        asked = self.asked
        measured = self._measured()
        costs = {one.name: one for one in asked.estimated.drafters}
        costs |= {} if measured is None else {one.name: one for one in measured.drafters}
        counted = {name: probe.counted(costs[name]) for name, probe in self.probes.items()}
        calibration, origins = joined(
            asked.estimated, measured, counted, pass_seconds=self.pass_seconds
        )
        others = self._others(measured)
        least = max(_LEAST_SCATTER, _DISTURBED_SCATTER * others if others else 0.0)
        calibration = replace(calibration, scatter=max(calibration.scatter, least))
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
            others=others,
            texts=self.texts,
        )

    def _others(self, measured: Calibration | None) -> float | None:
        """A calibration that was kept says itself who disturbed it."""
        known = None if measured is None else measured.provenance.get("foreign_cpu_share")
        return self.neighbours.so_far() if known is None else known

    def _measured(self) -> Calibration | None:
        """What was timed, of a timing that goes on as well. A lookup that was asked in a replay
        needs no rounds of its own, once passes of several rows are known."""
        measured = self._timed()
        if measured is None or measured.target.rows.points[-1][0] == 1:
            return measured
        known = {one.name for one in measured.drafters}
        asked = (one for one in self.probes.values() if one.hit_seconds and one.name not in known)
        lookups = (
            DrafterCosts(one.name, ((1, Curve(((1.0, one.hit_seconds),))),)) for one in asked
        )
        return replace(measured, drafters=(*measured.drafters, *lookups))

    def _timed(self) -> Calibration | None:
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
    """Who hears what is being done, with the share of it that is done, `warns` of what takes longer
    than it may, and from the tenth second on hears what is known so far."""

    tell: Tell = lambda _what, _share: None
    partly: Callable[[Found], None] = lambda _found: None
    warns: Callable[[str], None] = lambda _words: None
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
