"""From axes to groups: what a sweep measures of one pair, and the prompts of each scene.

Scenes with one engine configuration share engines and take turns. Ways that are too many to be in
memory together are divided, each part with plain decoding of its own beside it. A long prompt ends
as the domain's prompts do, and other texts of the domain stand before it; the beginning is cut so
that a given number of tokens is left. Where a domain has too little text it begins again, which
drafters that copy will notice.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, cast

from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.settings import SETTINGS
from outrider.models.heads import kind_of
from outrider.models.loading import resolve
from outrider_lab.bench.studies.drafters_lineup import Drafts
from outrider_lab.bench.studies.sweep_plan import (
    CONCURRENCY,
    CONTEXT,
    DOMAIN,
    OF_DRAFTING_AHEAD,
    OF_WAYS,
    PAIR,
    DomainPrompts,
    Group,
    Scene,
    SweepAxis,
    SweptPair,
    Way,
    Work,
    named,
)
from outrider_lab.bench.studies.sweep_record import SWEEP, Schema
from outrider_lab.bench.workload import (
    MOST_NOTES,
    PromptDataset,
    builtin_texts,
    fingerprint,
    retrieval_prompt,
)
from outrider_lab.measure.store import Plain

Count = Callable[[str], int]
_WORD = re.compile(r"(?<=\s)\S")
_AHEAD = ("ssd", "auto")
_ENGINE = frozenset(item.name for item in fields(EngineConfig))
_SAMPLING = frozenset(item.name for item in SETTINGS.values() if item.group == "sampling")


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
    schema: Schema = SWEEP


@dataclass(frozen=True, slots=True)
class SweepGrid:
    """What can be measured of a pair, and by name why other ways cannot."""

    groups: tuple[Group, ...]
    refused: Mapping[str, str]

    @property
    def num_cells(self) -> int:
        """Without those of plain decoding."""
        return sum(len(group.scenes) * (len(group.ways) - 1) for group in self.groups)


def grid_of(pair: SweptPair, axes: Sequence[SweepAxis], terms: Terms) -> SweepGrid:
    """Raises ConfigError for what cannot be, CheckpointError for models that are not there."""
    drafts = Drafts.of(pair.target, pair.draft)
    base = _with_drafter(pair, drafts)
    count = _counter(pair.target)
    by_engine: dict[EngineConfig, list[Scene]] = {}
    for values in _scene_values(axes):
        engine, scene = _scene(values, base, terms, count)
        by_engine.setdefault(engine, []).append(scene)
    groups: list[Group] = []
    refused: dict[str, str] = {}
    for engine, scenes in by_engine.items():
        ways, absent = ways_of(axes, engine, drafts)
        refused |= absent
        in_loop = scenes[0].level is not None
        groups += [
            Group(
                pair=pair.name,
                target=pair.target,
                ways=(plain_of(engine), *part),
                scenes=tuple(scenes),
                piece_size=terms.num_requests if in_loop else engine.most_batch,
                iterations=terms.iterations,
                schema=terms.schema,
            )
            for part in _parts(ways, terms.at_once)
        ]
    return SweepGrid(tuple(groups), refused)


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


def _with_drafter(pair: SweptPair, drafts: Drafts) -> EngineConfig:
    """What `auto` drafts with here: the draft model or heads if there are any, else the text."""
    if pair.engine.drafter != "auto":
        return pair.engine
    drafter = "ngram" if drafts.model is None else "model"
    if pair.draft is not None:
        drafter = kind_of(resolve(pair.draft))
    return replace(pair.engine, drafter=drafter)


def _counter(target: str) -> Count:
    """Tokens by the target's own tokenizer, which is loaded when something is counted."""

    def count(text: str) -> int:
        return len(Tokenizer.load(resolve(target)).encode(text))

    return count


def _parts(ways: Sequence[Way], at_once: int) -> list[tuple[Way, ...]]:
    """One empty part if there are none."""
    return [tuple(ways[i : i + at_once]) for i in range(0, len(ways), at_once)] or [()]


def _scene_values(axes: Sequence[SweepAxis]) -> list[dict[str, Plain]]:
    """Every combination of the scene axes, but for the pair."""
    swept = [axis for axis in axes if not axis.of_ways and axis.name != PAIR]
    names = [axis.name for axis in swept]
    return [dict(zip(names, values, strict=True)) for values in product(*(a.values for a in swept))]


def ways_of(
    axes: Sequence[SweepAxis], base: EngineConfig, drafts: Drafts
) -> tuple[list[Way], dict[str, str]]:
    """Every combination of the way axes once, without plain decoding, and by name why others cannot
    be had. Settings of drafting ahead are dropped where nothing is drafted ahead. Raises
    ConfigError if that is everywhere, though they are an axis."""
    swept = [axis for axis in axes if axis.of_ways]
    found: dict[Way, None] = {}
    refused: dict[str, str] = {}
    ahead = False
    for values in product(*(axis.values for axis in swept)):
        changes = dict(zip((axis.name for axis in swept), values, strict=True))
        schedule = changes.get("schedule", base.schedule)
        ahead = ahead or schedule in _AHEAD
        if schedule not in _AHEAD:
            changes = {n: v for n, v in changes.items() if n not in OF_DRAFTING_AHEAD}
        try:
            way = _way(changes, base, drafts)
        except ConfigError as error:
            refused[named(changes)] = str(error)
            continue
        if way.k:
            found[way] = None
    idle = [axis.name for axis in swept if axis.name in OF_DRAFTING_AHEAD]
    if idle and not ahead:
        raise ConfigError(
            f"{idle[0]} matters only where drafts are made ahead of the verdict.",
            hint="add --schedule ssd, or --over schedule=single,ssd",
        )
    return list(found), refused


def _way(changes: Mapping[str, Plain], base: EngineConfig, drafts: Drafts) -> Way:
    """Raises ConfigError for settings that cannot be, or a drafter that lacks its draft."""
    settings: dict[str, Any] = dict(changes)
    drafter, _, draft = str(settings.get("drafter", base.drafter)).partition("=")
    settings["drafter"] = drafter
    engine = replace(base, **settings, profile=False)
    if drafter == "none" or engine.k == 0:
        return Way(replace(engine, drafter="none", k=0))
    if draft:
        return Way(engine, draft, own=True)
    return Way(engine, drafts.of_drafter(drafter))


def plain_of(base: EngineConfig) -> Way:
    """Without anything that only speculation reads."""
    default = EngineConfig()
    settings: dict[str, Any] = {name: getattr(default, name) for name in OF_WAYS}
    return Way(replace(base, **settings | {"drafter": "none", "k": 0}, profile=False))


@dataclass(frozen=True, slots=True)
class PromptSource:
    """`saved` takes the place of the shipped prompts; `num` are taken of each domain."""

    num: int
    saved: PromptDataset | None = None

    def of(self, domain: str, num_tokens: int | None = None, count: Count = len) -> DomainPrompts:
        """With `num_tokens`, so long by `count`. Raises ConfigError for a domain that is not there,
        or prompts that cannot be had that long."""
        if self.saved is not None:
            named = [Work(p.prompt_id, p.raw_text) for p in self.saved.get_by_domain(domain)]
        else:
            named = [
                Work(f"{domain}_{i:03d}", text) for i, text in enumerate(builtin_texts(domain))
            ]
        texts = [work.text for work in named]
        # Long prompts are made of these, so theirs is enough to tell them apart.
        mark = fingerprint(texts)
        chosen = named[: self.num]
        if num_tokens is not None:
            make = _retrieval if domain == "retrieval" and self.saved is None else _in_context
            chosen = [
                Work(f"{work.prompt_id}@{num_tokens}", make(texts, i, num_tokens, count))
                for i, work in enumerate(chosen)
            ]
        return DomainPrompts(tuple(chosen), mark)


def _in_context(texts: Sequence[str], place: int, num_tokens: int, count: Count) -> str:
    """Text number `place` behind as many others as are needed, those before it last."""
    parts = [texts[place]]
    before = place
    while count(whole := "\n\n".join(reversed(parts))) < num_tokens:
        # Twice as much each time, so that long prompts are not counted over and over.
        for _ in range(len(parts)):
            before -= 1
            parts.append(texts[before % len(texts)])
    starts = [0, *(match.start() for match in _WORD.finditer(whole))]
    cut = bisect_left(starts, -num_tokens, key=lambda start: -count(whole[start:]))
    return whole[starts[min(cut, len(starts) - 1)] :]


def _retrieval(_: Sequence[str], place: int, num_tokens: int, count: Count) -> str:
    """With the most notes that fit."""

    def length(num_notes: int) -> int:
        return count(retrieval_prompt(place, num_notes))

    # Twice as many each time, so that short prompts are not made of long ones.
    most = 1
    while most < MOST_NOTES and length(most) <= num_tokens:
        most = min(2 * most, MOST_NOTES)
    fitting = bisect_right(range(1, most + 1), num_tokens, key=length)
    if fitting in (0, MOST_NOTES):
        raise ConfigError(
            f"no retrieval prompt of {num_tokens} tokens: they have {length(1)} to "
            f"{length(MOST_NOTES)}.",
            hint="choose another length, or another domain",
        )
    return retrieval_prompt(place, fitting)
