"""From axes to groups: what a sweep measures of one pair.

Scenes with one engine configuration share engines and take turns. Ways that are too many to be in
memory together are divided, each part with plain decoding of its own beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, cast

from outrider.api.tokenizer import Tokenizer
from outrider.bench.drafters.lineup import Drafts
from outrider.bench.store import Plain
from outrider.bench.sweep_plan import Way
from outrider.bench.sweeps.axes import CONCURRENCY, CONTEXT, DOMAIN, PAIR, Axis
from outrider.bench.sweeps.prompts import Count, PromptSource
from outrider.bench.sweeps.scenes import Group, Scene, plain_of, ways_of
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.models.heads import kind_of
from outrider.models.loading import resolve

_ENGINE = frozenset(item.name for item in fields(EngineConfig))
_SAMPLING = frozenset(item.name for item in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Subject:
    """A pair under the name it has in results, with the settings that no axis has."""

    name: str
    target: str
    draft: str | None
    engine: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all cells have in common. `domain` is that of prompts where no axis names any, and
    `num_requests` how many requests a closed loop has. At most `at_once` ways are in memory
    together."""

    params: SamplingParams
    prompts: PromptSource
    domain: str
    iterations: int
    num_requests: int
    at_once: int


@dataclass(frozen=True, slots=True)
class Grid:
    """What can be measured of a pair, and by name why other ways cannot."""

    groups: tuple[Group, ...]
    refused: Mapping[str, str]

    @property
    def num_cells(self) -> int:
        """Without those of plain decoding."""
        return sum(len(group.scenes) * (len(group.ways) - 1) for group in self.groups)


def grid_of(subject: Subject, axes: Sequence[Axis], terms: Terms) -> Grid:
    """Raises ConfigError for what cannot be, CheckpointError for models that are not there."""
    drafts = Drafts.of(subject.target, subject.draft)
    base = _with_drafter(subject, drafts)
    count = _counter(subject.target)
    by_engine: dict[EngineConfig, list[Scene]] = {}
    for values in _scene_values(axes):
        engine, scene = _scene(values, base, terms, count)
        by_engine.setdefault(engine, []).append(scene)
    groups: list[Group] = []
    refused: dict[str, str] = {}
    for engine, scenes in by_engine.items():
        ways = ways_of(axes, engine, drafts)
        refused |= ways.refused
        in_loop = scenes[0].level is not None
        groups += [
            Group(
                pair=subject.name,
                target=subject.target,
                ways=(plain_of(engine), *part),
                scenes=tuple(scenes),
                piece_size=terms.num_requests if in_loop else engine.batch_size,
                iterations=terms.iterations,
            )
            for part in _parts(ways.found, terms.at_once)
        ]
    return Grid(tuple(groups), refused)


def _scene(
    values: Mapping[str, Plain], base: EngineConfig, terms: Terms, count: Count
) -> tuple[EngineConfig, Scene]:
    level = cast("int | None", values.get(CONCURRENCY))
    context = cast("int | None", values.get(CONTEXT))
    domain = str(values.get(DOMAIN, terms.domain))
    settings: dict[str, Any] = {n: v for n, v in values.items() if n in _ENGINE and n != CONTEXT}
    if level is not None:
        settings["batch_size"] = max(level, 1)
    sampling: dict[str, Any] = {name: v for name, v in values.items() if name in _SAMPLING}
    scene = Scene(
        domain=domain,
        prompts=terms.prompts.of(domain, context, count),
        params=replace(terms.params, **sampling),
        context=context,
        level=level,
    )
    return replace(base, **settings), scene


def _with_drafter(subject: Subject, drafts: Drafts) -> EngineConfig:
    """What `auto` drafts with here: the draft model or heads if there are any, else the text."""
    if subject.engine.drafter != "auto":
        return subject.engine
    drafter = "ngram" if drafts.model is None else "model"
    if subject.draft is not None:
        drafter = kind_of(resolve(subject.draft))
    return replace(subject.engine, drafter=drafter)


def _counter(target: str) -> Count:
    """Tokens by the target's own tokenizer, which is loaded when something is counted."""

    def count(text: str) -> int:
        return len(Tokenizer.load(resolve(target)).encode(text))

    return count


def _parts(ways: Sequence[Way], at_once: int) -> list[tuple[Way, ...]]:
    """One empty part if there are none."""
    return [tuple(ways[i : i + at_once]) for i in range(0, len(ways), at_once)] or [()]


def _scene_values(axes: Sequence[Axis]) -> list[dict[str, Plain]]:
    """Every combination of the scene axes, but for the pair."""
    swept = [axis for axis in axes if not axis.of_ways and axis.name != PAIR]
    names = [axis.name for axis in swept]
    return [dict(zip(names, values, strict=True)) for values in product(*(a.values for a in swept))]
