"""Published studies as sweeps: what each varies, what was printed for it, and what was claimed.

The recipes are data (bench/references/sweeps.json). A recipe fills in what the command line leaves
open; with another pair its shape runs on models that are at hand. Published figures stand beside
ours to be compared with care, and claims are tested on the samples at hand and never taken over. A
claim of gain compares one value of an axis with another within visits, over cells that differ in
that axis alone: it is not borne out if the published figure lies outside of the interval, and
borne out if the figure lies inside and the interval leaves out 1. A tie is borne out if the
interval stays within a few per cent of 1. A wider interval decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, Protocol

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.fields import Value
from outrider.plugins.measure.turns import MIN_PAIRS, Ratio
from outrider_lab.bench.reference import engine_table
from outrider_lab.bench.studies.sweep_plan import CONCURRENCY, FIELDS, named
from outrider_lab.bench.studies.sweep_record import (
    BenchmarkConfig,
    ResultsFolder,
    SweepNumbers,
    SweepSample,
)
from outrider_lab.bench.studies.sweep_summary import value_of
from outrider_lab.measure.frame import good_numbers, grouped, medians, paired_ratio
from outrider_lab.measure.store import Plain

_Place = tuple[object, ...]
Measure = Literal["throughput", "cumulative p95"]
_MEASURES: Mapping[Measure, Callable[[SweepNumbers], float | None]] = {
    "throughput": lambda numbers: numbers.tokens_per_second,
    "cumulative p95": lambda numbers: numbers.cumulative_p95_ms,
}
# An interval within these says that two sides are as good as equal.
_TIE = (0.95, 1.05)
# Rates of the same tokens, counted in other rounds, may differ by that.
_SAME = 1e-9


class PublishedClaim(Protocol):
    """What somebody published."""

    def tested(self, folder: ResultsFolder) -> str | None:
        """A sentence: what was claimed, what was found, and whether they agree. None if what it is
        about was not measured."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GainClaim:
    """`ours` of `axis` over `theirs`, where the cells have the values of `where`. `low` and `high`
    bound what was published."""

    axis: str
    ours: Plain
    theirs: Plain
    where: Mapping[str, Plain]
    measure: Measure
    low: float
    high: float

    def tested(self, folder: ResultsFolder) -> str | None:
        printed = f"{self.low:g}×" + ("" if self.low == self.high else f" to {self.high:g}×")
        says = (
            f"{self.measure} of {self.axis}={self.ours} over {self.theirs} at "
            f"{named(self.where)}: published {printed}; "
        )
        ratio = self._ratio(folder)
        if ratio is None:
            return None
        if ratio.low is None or ratio.high is None:
            found = f"{ratio.value:.3f}× here, without an interval"
            return f"{says}{found} (it needs {MIN_PAIRS} pieces of work)."
        verdict = self._verdict(ratio.low, ratio.high)
        return f"{says}{ratio.value:.3f}× ({ratio.low:.3f} to {ratio.high:.3f}) here: {verdict}."

    def _verdict(self, low: float, high: float) -> str:
        tie = self.low <= 1 <= self.high
        least, most = _TIE if tie else (self.low, self.high)
        if high < least or low > most:
            return "not borne out"
        decided = least <= low and high <= most if tie else low > 1 or high < 1
        return "borne out" if decided else "not decided, the interval is too wide"

    def _ratio(self, folder: ResultsFolder) -> Ratio | None:
        sides: dict[Plain, list[tuple[_Place, float]]] = {self.ours: [], self.theirs: []}
        for sample, value in _values(folder, self.measure):
            side = sides.get(value_of(sample.config, self.axis))
            if side is not None and sample.config.k and self._fits(sample):
                side.append(((_alike(sample.config, self.axis), sample.piece), value))
        over, under = medians(sides[self.ours]), medians(sides[self.theirs])
        return paired_ratio(over, {place: under[place] for place in over if place in under})

    def _fits(self, sample: SweepSample) -> bool:
        return all(value_of(sample.config, name) == value for name, value in self.where.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SameAcceptance:
    """Greedy acceptance cannot depend on `axis`, whatever was published."""

    axis: str
    published: str

    def tested(self, folder: ResultsFolder) -> str | None:
        """None without two cells that differ in the axis alone and have the same texts: a run that
        was interrupted may lack some."""
        greedy = [
            sample
            for sample in folder.current().values()
            if sample.ok and sample.config.k and not sample.config.temperature
        ]
        rates: dict[_Place, list[float]] = {}
        for config, samples in grouped(greedy, lambda sample: sample.config).items():
            texts = frozenset((s.repeat, prompt) for s in samples for prompt in s.prompt_ids)
            good = good_numbers(samples)
            drafted = sum(numbers.num_drafted for numbers in good)
            if drafted:
                accepted = sum(numbers.num_accepted for numbers in good)
                place = _alike(config, self.axis), texts
                rates.setdefault(place, []).append(accepted / drafted)
        apart = [max(found) - min(found) for found in rates.values() if len(found) > 1]
        if not apart:
            return None
        found = f"it differs by up to {100 * max(apart):.2f} points here."
        if max(apart) <= _SAME:
            found = "the same at every value here."
        return f"greedy acceptance by {self.axis}: published {self.published}; {found}"


def _alike(config: BenchmarkConfig, axis: str) -> _Place:
    """All that a cell is but its value of `axis`; a batch holds what is in flight."""
    left_out = {FIELDS.get(axis, axis), *(("batch_size",) if axis == CONCURRENCY else ())}
    values = {**config.plain(), **dict(config.others)}
    return tuple(sorted((name, str(v)) for name, v in values.items() if name not in left_out))


def _values(folder: ResultsFolder, measure: Measure) -> Iterator[tuple[SweepSample, float]]:
    read = _MEASURES[measure]
    for sample in folder.current().values():
        value = None if sample.good is None else read(sample.good)
        if value is not None:
            yield sample, value


@dataclass(frozen=True, slots=True)
class Reference:
    """A published figure; None where nothing was said. Acceptance is a share."""

    pair: str
    device: str
    setting: str
    tokens_per_second: float | None
    acceptance: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`grids` are the words of `--over`, one list for each grid that is run; `settings` what is
    fixed. `remark` says what to know before comparing."""

    text: str
    grids: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Value]
    prompts: int = 10
    iterations: int = 1
    warmup: int = 1
    plots: bool = True
    references: Sequence[Reference] = ()
    claims: Sequence[PublishedClaim] = ()
    remark: str = ""


# Older spellings of names.
ALIASES = {"phase-3d": "gpt2-k", "phase-4a": "llama3-batch"}


def recipe(name: str) -> Recipe:
    """Raises ConfigError for an unknown name."""
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise ConfigError(f"unknown preset {name!r}.", hint=did_you_mean(name, RECIPES))
    return RECIPES[name]


def _recipe(record: Mapping[str, Any]) -> Recipe:
    given = dict(record)
    whose = given.pop("references", None)
    return Recipe(
        grids=tuple(tuple(words) for words in given.pop("grids")),
        references=_engine_references() if whose == "engines" else _references(whose),
        claims=[_claim(claim) for claim in given.pop("claims", ())],
        **given,
    )


def _claim(record: Mapping[str, Any]) -> PublishedClaim:
    given = {name: value for name, value in record.items() if name != "kind"}
    return GainClaim(**given) if record["kind"] == "gain" else SameAcceptance(**given)


def _references(models: str | None) -> list[Reference]:
    """Those of pairs whose name begins with `models`."""
    return [one for one in REFERENCES if models is not None and one.pair.startswith(models)]


def _engine_references() -> list[Reference]:
    return [
        Reference(
            engine_table().names[one.engine],
            "the source's GPU",
            f"concurrency {one.level}",
            one.tokens_per_second,
            one.acceptance,
            f"its Token P95, of cumulative time: {one.cumulative_p95_ms:g} ms",
        )
        for one in engine_table().rows
    ]


_PUBLISHED: Mapping[str, Any] = json.loads(
    files("outrider_lab.bench").joinpath("references", "sweeps.json").read_text("utf-8")
)
REFERENCES = tuple(Reference(**record) for record in _PUBLISHED["references"])
RECIPES: Mapping[str, Recipe] = {
    name: _recipe(record) for name, record in _PUBLISHED["recipes"].items()
}
