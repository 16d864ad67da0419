"""A cost study: the samples that it takes, in order, in units that are measured in turns.

Passes are timed at whole widths over one layer of each model and stand for all of its layers.
Engines need thousands of passes, so their models are smaller: the same share of the layers of
target and draft, and widths divided alike. Both are said with every result. The first pair's
engines go over the whole grid, those of others over K and hits at one alpha. A visit of engines is
one batch at one repeat: plain decoding and every contestant of that batch, over the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from cost_study.engines import Bed, CostEngine, Text, rooms
from cost_study.pair import Make, PairShape, check_fits
from cost_study.units import (
    Held,
    SamplesFile,
    Unit,
    ceilings_unit,
    engines_unit,
    passes_unit,
    products_unit,
)
from outrider.core.errors import ConfigError, did_you_mean
from outrider.plugins.lanes.ahead.fan_out import PRIOR_CURVE, MissCurve
from outrider_lab.bench.cost_record import Study
from outrider_lab.measure.frame import grouped
from outrider_lab.measure.machine import machine
from outrider_lab.models.gemm import GemmShape

STUDIES: tuple[Study, ...] = ("alpha", "hits", "fan_out", "batch")
_ONE_LAYER = Fraction(0)
_SHORT = ("alpha", "hits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What the studies go over. `k`, `alpha` and `fan_out` are those of studies that go over
    something else; `p_hit` is forced in the study of batches."""

    ks: tuple[int, ...] = (2, 4, 6, 8, 10, 12)
    alphas: tuple[float, ...] = (0.5, 0.7, 0.9)
    hits: tuple[float, ...] = (0.0, 0.5, 0.7, 0.9, 1.0)
    fan_outs: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    studies: tuple[Study, ...] = STUDIES
    k: int = 4
    alpha: float = 0.9
    fan_out: int = 8
    p_hit: float = 0.8

    def contestants(self) -> list[CostEngine]:
        ar = partial(CostEngine, method="ar")
        sd = partial(CostEngine, method="sd", k=self.k, alpha=self.alpha)
        ssd = partial(sd, method="ssd", fan_out=self.fan_out)
        rates = [(alpha, k) for alpha in self.alphas for k in self.ks]
        found: dict[Study, list[CostEngine]] = {
            "alpha": [ar(), *(each(k=k, alpha=a) for a, k in rates for each in (sd, ssd))],
            "hits": [ar(), sd(), *(ssd(p_hit=p_hit) for p_hit in self.hits)],
            "fan_out": [ar(), sd(), *(ssd(fan_out=fan_out) for fan_out in self.fan_outs)],
            "batch": [
                each(batch=batch)
                for batch in self.batches
                for each in (ar, sd, partial(ssd, p_hit=self.p_hit))
            ],
        }
        return [replace(one, study=study) for study in self.studies for one in found[study]]


# A taste of all studies, in under a minute with small models.
QUICK = Grid(
    ks=(2, 4, 8), alphas=(0.9,), hits=(0.0, 0.7, 1.0), fan_outs=(2, 8), batches=(1, 4)
)  # fmt: skip
_BOUNDS = {
    "ks": (1, 64),
    "alphas": (0, 1),
    "hits": (0, 1),
    "fan_outs": (1, 256),
    "batches": (1, 1024),
}


def grid_asked(base: Grid, studies: Sequence[str], axes: Mapping[str, Sequence[float]]) -> Grid:
    """`base` with what a user asked for, by field; what is empty is as usual. Raises ConfigError
    for what cannot be."""
    for word in studies:
        if word not in STUDIES:
            raise ConfigError(f"no study {word!r}.", hint=did_you_mean(word, STUDIES))
    for name, values in axes.items():
        low, high = _BOUNDS[name]
        wrong = [value for value in values if not low <= value <= high]
        if wrong:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has {wrong[0]:g}.", hint=f"{flag} takes {low} to {high}")
    given: dict[str, Any] = {name: tuple(values) for name, values in axes.items() if values}
    given["studies"] = tuple(one for one in STUDIES if not studies or one in studies)
    grid = replace(base, **given)
    nearest = min(grid.ks, key=lambda one: (abs(one - base.k), one))
    return replace(grid, k=nearest, alpha=max(grid.alphas))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of the models is there: for engines one of `layer_share` layers and widths over
    `divisor`, for passes and products one layer and widths over `pass_divisor`."""

    layer_share: int = 16
    divisor: int = 4
    pass_divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStudy:
    """All that is decided before anything is measured. `misses` says what drafts foresee where they
    disagree with the target; without engines passes and products are timed alone."""

    pairs: tuple[PairShape, ...]
    make: Make
    grid: Grid
    text: Text
    sizes: Sizes
    repeats: int = 5
    seed: int = 0
    quick: bool = False
    has_engines: bool = True
    misses: MissCurve = PRIOR_CURVE

    @property
    def setting(self) -> dict[str, object]:
        """What was asked for. `costs` are what passes do besides matrix products: attention, norms,
        head; `ranks` share each target."""
        return {
            "pairs": [pair.name for pair in self.pairs],
            "dtype": self.make.dtype_name,
            "quantise": self.make.quantise,
            "costs": list(self.make.costs.names),
            **asdict(self.text),
            "repeats": self.repeats,
            "seed": self.seed,
            "quick": self.quick,
            "ranks": self.make.ranks,
        }

    @property
    def circumstances(self) -> dict[str, object]:
        """What must agree among runs that share a folder. Pairs, cells and repeats may join."""
        setting = self.setting
        del setting["pairs"], setting["repeats"]
        return {
            **setting,
            "machine": dict(machine(self.make.device)),
            "misses": asdict(self.misses),
            "sizes": asdict(self.sizes),
            "threads": self.make.threads,
        }

    @property
    def shapes(self) -> list[GemmShape]:
        """Those whose products are timed."""
        passes = [self.pass_shape(pair) for pair in self.pairs]
        found = [shape for pair in passes for shape in (pair.target, pair.draft)]
        return list({shape.name: shape for shape in found}.values())

    def grid_of(self, pair: PairShape) -> Grid:
        if pair == self.pairs[0]:
            return self.grid
        short = tuple(study for study in self.grid.studies if study in _SHORT)
        return replace(self.grid, alphas=(self.grid.alpha,), studies=short)

    def engine_shape(self, pair: PairShape) -> PairShape:
        return pair.sampled(Fraction(1, self.sizes.layer_share), self.sizes.divisor)

    def pass_shape(self, pair: PairShape) -> PairShape:
        return pair.sampled(_ONE_LAYER, self.sizes.pass_divisor)

    def check(self, free: int) -> None:
        """Raise ConfigError or MachineError for what cannot be measured in `free` bytes."""
        for pair in self.pairs:
            for shape in (self.pass_shape(pair), self.engine_shape(pair)):
                check_fits(shape, self.make, free)

    def units(self) -> list[Unit]:
        """In the order in which they run."""
        repeats, pairs = range(self.repeats), self.pairs if self.has_engines else ()
        return [
            *(ceilings_unit(self.make, n) for n in repeats),
            *(products_unit(self.make, shape, n) for shape in self.shapes for n in repeats),
            *(
                passes_unit(self.make, self.pass_shape(pair), self.grid.ks, n)
                for pair in self.pairs
                for n in repeats
            ),
            *(unit for pair in pairs for unit in self._engines(pair)),
        ]

    def _engines(self, pair: PairShape) -> Iterator[Unit]:
        """Batches take turns."""
        shape, everybody = self.engine_shape(pair), self.grid_of(pair).contestants()

        def bed() -> Bed:
            """Warmed up by an engine of every method."""
            found = Bed(
                pair=self.make.pair(shape, *rooms(everybody, self.text)),
                text=self.text,
                seed=self.seed,
                misses=self.misses,
                threads=self.make.threads,
            )
            for one in {one.method: one for one in everybody}.values():
                found.run(one)
            return found

        rig = ("engines", self.make, shape), bed
        by_batch = sorted(grouped(everybody, key=lambda one: one.batch).items())
        for repeat in range(self.repeats):
            for _, contestants in by_batch:
                yield engines_unit(shape.name, contestants, repeat, rig)


def outstanding(units: Sequence[Unit], file: SamplesFile) -> list[Unit]:
    """Those of which a sample is missing, or failed: what it failed for may be over."""
    return [unit for unit in units if not all(map(file.done, unit.keys))]


def run(study: CostStudy, units: Sequence[Unit], file: SamplesFile) -> Iterator[Unit]:
    """Measure `units`; yields each once its samples are safe."""
    held = Held()
    for unit in units:
        file.add(unit.take(held), study.circumstances)
        yield unit
