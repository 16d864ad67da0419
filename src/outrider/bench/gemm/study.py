"""A cost study as a whole: what it takes, in order, and what its samples come to.

Passes are timed at whole widths over one layer of each model and stand for all of its layers.
Engines need thousands of passes, so their models are smaller: the same share of the layers of
target and draft, and widths divided alike. Both are said with every result (`ModelFacts.sampled`).
The first pair's engines go over the whole grid, those of others over K and hits at one alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

from outrider.bench.gemm.pair import Make, PairShape, check_fits
from outrider.bench.gemm.plan import Grid, Text, visits
from outrider.bench.gemm.record import Setting
from outrider.bench.gemm.samples import Sample, SamplesFile
from outrider.bench.gemm.units import (
    CeilingUnit,
    EngineUnit,
    Held,
    PassUnit,
    ProductUnit,
    Unit,
    failed,
)
from outrider.bench.machine import Neighbours, machine
from outrider.estimate.theory import PRIOR_CURVE, MissCurve
from outrider.lab.gemm_shape import GemmShape

_ONE_LAYER = Fraction(0)
_SHORT = ("alpha", "hits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of the models is there: for engines one of `layer_share` layers and widths over
    `divisor`, for passes and products one layer and widths over `pass_divisor`."""

    layer_share: int = 16
    divisor: int = 4
    pass_divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStudy:
    """All that is decided before anything is measured. `misses` is the law of what drafts foresee
    where they disagree with the target; without engines passes and products are timed alone."""

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
    def setting(self) -> Setting:
        return Setting(
            pairs=[pair.name for pair in self.pairs],
            dtype="bfloat16" if self.make.dtype == "auto" else self.make.dtype,
            quantise=self.make.quantise,
            costs=list(self.make.costs.names),
            prompt_tokens=self.text.prompt_tokens,
            max_tokens=self.text.max_tokens,
            repeats=self.repeats,
            seed=self.seed,
            quick=self.quick,
            ranks=self.make.ranks,
        )

    @property
    def circumstances(self) -> dict[str, object]:
        """What must agree among runs that share a folder. Pairs, cells and repeats may join."""
        setting = asdict(self.setting)
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
        repeats = range(self.repeats)
        found: list[Unit] = [CeilingUnit(self.make, repeat) for repeat in repeats]
        found += [ProductUnit(self.make, shape, n) for shape in self.shapes for n in repeats]
        found += [
            PassUnit(self.make, self.pass_shape(pair), self.grid.ks, n)
            for pair in self.pairs
            for n in repeats
        ]
        pairs = self.pairs if self.has_engines else ()
        return [*found, *(unit for pair in pairs for unit in self._engines(pair))]

    def _engines(self, pair: PairShape) -> list[Unit]:
        everybody = tuple(self.grid_of(pair).contestants())
        return [
            EngineUnit(
                make=self.make,
                pair=self.engine_shape(pair),
                text=self.text,
                seed=self.seed,
                misses=self.misses,
                everybody=everybody,
                visit=visit,
            )
            for visit in visits(everybody, self.repeats)
        ]


def outstanding(units: Sequence[Unit], file: SamplesFile) -> list[Unit]:
    """Those of which a sample is missing, or failed: what it failed for may be over."""
    return [unit for unit in units if not all(map(file.done, unit.keys))]


def run(study: CostStudy, units: Sequence[Unit], file: SamplesFile) -> Iterator[Unit]:
    """Measure `units`; yields each once its samples are safe."""
    held = Held()
    for unit in units:
        with Neighbours() as neighbours:
            taken = _taken(unit, held)
        samples = [replace(one, foreign_cpu_share=neighbours.share) for one in taken]
        file.add(samples, study.circumstances)
        yield unit


def _taken(unit: Unit, held: Held) -> list[Sample]:
    """What is needed for all of a unit may fail as well."""
    try:
        return unit.take(held)
    except Exception as error:  # noqa: BLE001 - one unit must not end hours of others
        return [failed(key, f"{type(error).__name__}: {error}") for key in unit.keys]
