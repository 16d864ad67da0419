"""Calibration that is assumed of a target and its drafters until they are measured.

Figures are those of `estimate/forecast.py`: a drafter's step by its bytes, acceptance by its KIND.
`Origins` says of every figure whether it was measured here or estimated like that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from outrider.core.plugins import DrafterKind, drafter_named
from outrider.core.spec import ModelSpec
from outrider.estimate.cost import Curve
from outrider.estimate.forecast import (
    PRIOR_DRAFTS,
    SCATTER,
    DeviceSheet,
    PassWork,
    assumed_counts,
    step_bytes,
    step_seconds,
)
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PassCosts, PlaceCount
from outrider_lab.planner.roofline import pass_costs

Origin = Literal["measured", "estimated"]
MEASURED: Origin = "measured"
ESTIMATED: Origin = "estimated"

# With fewer rounds than this, counts say less than the prior.
_LEAST_ROUNDS = 6
_DEEPEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A drafter as it may be named, the bytes of the weights that it adds, and the bytes that a
    step of it reads."""

    name: str
    kind: DrafterKind
    num_bytes: int = 0
    step_bytes: int = 0

    @classmethod
    def of(cls, name: str, drafter: str, target: ModelSpec, num_bytes: int = 0) -> Candidate:
        """Return the candidate of a drafter; `num_bytes` are those of its draft model or heads."""
        kind = drafter_named(drafter)
        read = step_bytes(kind, target, num_bytes)
        if kind.source == "copy":
            num_bytes = read if kind.fewer_bits else 0
        return cls(name=name, kind=kind, num_bytes=num_bytes, step_bytes=read)


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of figures: of the target's pass, and by drafter of the seconds of a draft and of its
    acceptance. `counted` has how many rounds of a drafter were counted."""

    target_pass: Origin = ESTIMATED
    drafts: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    accepted: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    counted: Mapping[str, int] = field(default_factory=dict[str, int])

    def of(self, drafter: str) -> tuple[Origin, Origin]:
        """Return the origins of a drafter's seconds and of its acceptance."""
        return self.drafts.get(drafter, ESTIMATED), self.accepted.get(drafter, ESTIMATED)

    @property
    def is_whole(self) -> bool:
        """True if nothing is estimated."""
        every = (self.target_pass, *self.drafts.values(), *self.accepted.values())
        return ESTIMATED not in every

    @property
    def estimated(self) -> frozenset[str]:
        """Drafters with an estimated figure."""
        return frozenset(name for name in self.drafts if ESTIMATED in self.of(name))

    @property
    def basis(self) -> Origin:
        """The origin of a page as a whole."""
        return MEASURED if self.is_whole else ESTIMATED

    @property
    def sentence(self) -> str:
        """A sentence that says what is measured and what is estimated."""
        if self.is_whole:
            return "All figures are measured here."
        every: dict[str, Mapping[str, Origin]] = {
            "the target's pass": {"": self.target_pass},
            "times": self.drafts,
            "acceptance": self.accepted,
        }
        measured = _listed(every, MEASURED)
        if not measured:
            return "All figures are estimated from sizes and the usual acceptance of such drafters."
        return f"Measured here: {measured}. Estimated: {_listed(every, ESTIMATED)}."

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def _listed(every: Mapping[str, Mapping[str, Origin]], origin: Origin) -> str:
    """Return the figures of `origin`, and of which drafters, unless it is all of them."""
    parts: list[str] = []
    for figure, by_name in every.items():
        names = [name for name, own in by_name.items() if own == origin]
        if len(names) == len(by_name) and names:
            parts.append(f"{figure}{' of all drafters' if names[0] else ''}")
        elif names:
            parts.append(f"{figure} of {', '.join(names)}")
    return "; ".join(parts)


def supposed(
    target: ModelSpec, sheet: DeviceSheet, candidates: Sequence[Candidate], *, machine: str
) -> Calibration:
    """Return the calibration of a target that was never run: its pass as `sheet` says, its drafters
    as their bytes say. Raises ConfigError for a dtype that the sheet does not have."""
    costs = pass_costs(PassWork(target), sheet)
    return Calibration(
        machine=machine,
        target_name=target.name,
        target=costs,
        drafters=tuple(_drafter(one, target, costs.rows.at(1)) for one in candidates),
        scatter=SCATTER,
        memory_bytes=target.weight_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token,
        provenance={"sheet": sheet.name, "measured": False},
    )


def scaled(calibration: Calibration, pass_seconds: float) -> Calibration:
    """Return the calibration with all times scaled by measured over assumed plain pass."""
    factor = pass_seconds / calibration.target.rows.at(1)
    own = calibration.target
    drafters = tuple(
        replace(one, draft=tuple((batch, curve.scaled(factor)) for batch, curve in one.draft))
        for one in calibration.drafters
    )
    rows = PassCosts(own.rows.scaled(factor), own.per_context * factor, own.per_read * factor)
    return replace(calibration, target=rows, drafters=drafters)


def joined(
    estimated: Calibration,
    measured: Calibration | None,
    counted: Mapping[str, DrafterCosts],
    *,
    pass_seconds: float | None = None,
) -> tuple[Calibration, Origins]:
    """Return what is known by now: times of `measured` if it has them, acceptance of `counted` by
    drafter; the rest is estimated, in proportion to the measured pass. The first plain pass took
    `pass_seconds`, if nothing more is known."""
    if measured is not None:
        # If noise put all of a pass on its context, no time of a row is left.
        pass_seconds = measured.target.rows.at(1) or pass_seconds
    if pass_seconds:
        estimated = scaled(estimated, pass_seconds)
    base = estimated if measured is None else measured
    timed = {} if measured is None else {one.name: one for one in measured.drafters}
    drafters: list[DrafterCosts] = []
    origins = Origins(MEASURED if measured is not None or pass_seconds else ESTIMATED)
    drafts, accepted, rounds = dict[str, Origin](), dict[str, Origin](), dict[str, int]()
    for one in estimated.drafters:
        own, counts = _extended(timed.get(one.name, one), one), counted.get(one.name)
        drafts[one.name] = MEASURED if one.name in timed else ESTIMATED
        rounds[one.name] = 0 if counts is None else _num_counted(counts)
        enough = counts is not None and rounds[one.name] >= _LEAST_ROUNDS
        accepted[one.name] = MEASURED if enough else ESTIMATED
        source = one if counts is None or not enough else _seen(one, counts)
        drafters.append(
            replace(
                own,
                places=source.places,
                num_rounds=source.num_rounds,
                requests=source.requests,
                carry=source.carry,
                laws=source.laws,
                miss=source.miss,
                memory_bytes=own.memory_bytes or one.memory_bytes,
            )
        )
    origins = replace(origins, drafts=drafts, accepted=accepted, counted=rounds)
    return replace(base, drafters=tuple(drafters)), origins


def _extended(own: DrafterCosts, estimate: DrafterCosts) -> DrafterCosts:
    """Return `own` with depths beyond the deepest timed one extended in the estimated proportion:
    few points close together make no line."""
    shape = estimate.draft[0][1]
    curves: list[tuple[int, Curve]] = []
    for batch, curve in own.draft:
        last, seconds = curve.points[-1]
        if last < _DEEPEST:
            most = seconds * shape.at(_DEEPEST) / max(shape.at(last), 1e-12)
            curves.append((batch, Curve((*curve.points, (float(_DEEPEST), max(most, seconds))))))
        else:
            curves.append((batch, curve))
    return replace(own, draft=tuple(curves))


def _seen(prior: DrafterCosts, counts: DrafterCosts) -> DrafterCosts:
    """Return `counts`; without a draft in its rounds, the prior with fewer drafts."""
    if counts.places:
        return counts
    num_rounds = (prior.num_rounds or PRIOR_DRAFTS) + counts.num_rounds
    return replace(prior, num_rounds=num_rounds, miss=counts.miss)


def _num_counted(counts: DrafterCosts) -> int:
    return counts.num_rounds or (counts.places[0].drafted if counts.places else 0)


def _drafter(one: Candidate, target: ModelSpec, pass_seconds: float) -> DrafterCosts:
    step = step_seconds(one.step_bytes, target, pass_seconds)
    points = ((1.0, step), (float(_DEEPEST), step if one.kind.at_once else _DEEPEST * step))
    if not one.step_bytes:
        points = ((1.0, step),)
    num_rounds, accepted = assumed_counts(one.kind)
    return DrafterCosts(
        name=one.name,
        draft=((1, Curve(points)),),
        places=(PlaceCount(drafted=PRIOR_DRAFTS, accepted=accepted),),
        num_rounds=num_rounds,
        memory_bytes=one.num_bytes,
    )
