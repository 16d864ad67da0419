"""What a sweep measures: scenes and ways, cut into pieces of work and put in an order.

A scene is what plain decoding depends on too: models, engine, sampling, prompts, how many run at
once. A way is how is drafted in it, and plain decoding is the first way of all. Every cell is a
scene and a way, and is measured beside the plain decoding of its scene, in the same visit. A sweep
over K alone is one of these, whose ways differ in K.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, ContractError, did_you_mean
from outrider.core.params import SamplingParams
from outrider.core.settings import SETTINGS, Given, typed
from outrider.models.loading import resolve
from outrider.pairs.catalog import get_pair
from outrider_lab.bench.studies.drafters_lineup import available
from outrider_lab.bench.studies.sweep_record import (
    SWEEP,
    BenchmarkConfig,
    Circumstances,
    ResultsFolder,
    Schema,
)
from outrider_lab.measure.machine import in_turns, machine, weights_digest
from outrider_lab.measure.store import Plain

FLAG = "--over"
PAIR, DOMAIN, CONTEXT, CONCURRENCY, ALPHA = "pair", "domain", "context", "concurrency", "alpha"
# Those that are no settings. `context` is prompt tokens here; the setting of that name is not
# swept, since it only bounds memory.
SPECIAL = (PAIR, DOMAIN, CONTEXT, CONCURRENCY)
# Names that papers and other programs use.
ALIASES: Mapping[str, str] = {
    "batch": "batch_size",
    "rule": "sampler",
    "p_hit": "force_hits",
    "engine": "schedule",
}
# Settings that only speculation reads. Plain decoding has them at their defaults, `schedule` too:
# what drafts are worth is told against one lane that drafts nothing.
OF_WAYS = frozenset((
    "drafter", "k", "tree_nodes", "tree_shape", "least_confidence", "lite_alpha", "lite_heads",
    "head_init", "sampler", "leniency", "controller", "min_k", "target_acceptance", "target_ms",
    "self_quantise", "skip_layers", "schedule", "hybrid_threshold", "lane_order", "verify_margin",
    "concurrent_lanes", "lane_threads", "decode_batch", "verify_batch", "prefill_batch",
    "fallback", "fan_out", "fan_policy", "saguaro", "force_hits", "drafter_home",
    "drafter_device", "drafter_timeout", "max_ngram", "min_ngram", "suffix_corpus",
    "suffix_tokens", "watchdog", "batched_verify",
))  # fmt: skip
# Those that make sense only while drafting ahead.
OF_DRAFTING_AHEAD = frozenset(["fallback", "fan_out", "fan_policy", "force_hits", "saguaro"])
_NOT_SWEPT = frozenset([
    "context", "profile", "prediction", "n", "logprobs", "top_logprobs", "round_events",
    "arena_tokens",
])  # fmt: skip
# Fields of a configuration that axes have other names for.
FIELDS: Mapping[str, str] = {
    "pair": "model_pair_name",
    "domain": "prompt_domain",
    "context": "prompt_tokens",
}
_MOST_TOKENS, _MOST_IN_FLIGHT = 1_000_000, 1024


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """A name as results have it, and its values in the order in which they were given."""

    name: str
    values: tuple[Plain, ...]

    @property
    def of_ways(self) -> bool:
        return self.name in OF_WAYS


def axes_of(words: Sequence[str]) -> tuple[SweepAxis, ...]:
    """One for each of `words`. Raises ConfigError for what cannot be meant."""
    found: dict[str, SweepAxis] = {}
    for word in words:
        written, equals, values = word.partition("=")
        name = axis_name(written.strip())
        if not equals or not values.strip(" ,"):
            raise ConfigError(f"{FLAG} {word} gives no values.", hint=f"{FLAG} {written}=A,B")
        if name in found:
            raise ConfigError(
                f"{FLAG} names {name} twice.", hint="put all its values behind one name"
            )
        parts = [part.strip() for part in values.split(",") if part.strip()]
        found[name] = SweepAxis(name, tuple(dict.fromkeys(_value(name, part) for part in parts)))
    if {"batch_size", CONCURRENCY} <= found.keys():
        raise ConfigError(
            f"batch and {CONCURRENCY} both say how many run at once.", hint="keep one of them"
        )
    return tuple(found.values())


def axis_name(written: str) -> str:
    """The name in results of what a user calls an axis. Raises ConfigError."""
    plain = written.lower().replace("-", "_")
    name = ALIASES.get(plain, plain)
    if name == ALPHA:
        raise ConfigError(
            "alpha is what a pair has, and no setting of it.",
            hint="`studies/run.py ssd --alphas 0.6,0.9` sets it, by synthetic acceptance",
        )
    if name not in known_names():
        listed = [*SPECIAL, *ALIASES, *sorted(OF_WAYS - {"force_hits"}), "temperature"]
        raise ConfigError(f"{FLAG}: unknown axis {written!r}.", hint=did_you_mean(name, listed))
    return name


def known_names() -> frozenset[str]:
    """Every axis: the special ones, and settings whose values are words or numbers."""
    of_settings = {
        name
        for name, item in SETTINGS.items()
        if item.group in ("engine", "sampling") and item.kind in (bool, int, float, str)
    }
    return frozenset({*SPECIAL, *of_settings} - (_NOT_SWEPT - {CONTEXT}))


def _value(name: str, word: str) -> Plain:
    """Raises ConfigError for a value that the axis cannot have."""
    if name == PAIR:
        return get_pair(word).pair_name
    if name == DOMAIN:
        # Which there are depends on where prompts come from.
        return word
    if name in (CONTEXT, CONCURRENCY):
        low, high = (16, _MOST_TOKENS) if name == CONTEXT else (0, _MOST_IN_FLIGHT)
        if not word.isdecimal() or not low <= int(word) <= high:
            raise ConfigError(
                f"{FLAG} {name} takes whole numbers from {low} to {high}, got {word!r}.",
                hint=f"{FLAG} {name}={'500,1000' if name == CONTEXT else '0,1,3'}",
            )
        return int(word)
    if name == "drafter" and word not in ("auto", "none"):
        _check_drafter(word)
        return word
    value = typed(SETTINGS[name], Given(word, f"{FLAG} {name}"))
    if not isinstance(value, bool | int | float | str):
        raise ContractError("value is no bool | int | float | str")
    return value


def _check_drafter(word: str) -> None:
    """NAME, or NAME=DRAFT for a model or heads of its own."""
    name, equals, draft = word.partition("=")
    if name not in available():
        hint = did_you_mean(name, available())
        raise ConfigError(f"{FLAG} drafter: unknown drafter {name!r}.", hint=hint)
    if equals and not draft:
        raise ConfigError(
            f"{FLAG} drafter: {word!r} names no draft.", hint=f"{FLAG} drafter={name}=FOLDER"
        )


def named(values: Mapping[str, Plain]) -> str:
    """A cell in words: `k=2, drafter=ngram`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


# Settings that a cell's configuration has a field for, and those that a sweep decides.
_IN_CONFIG = frozenset((
    "drafter", "k", "sampler", "dtype", "device", "batch_size", "profile",
    "max_tokens", "temperature", "seed", "n", "logprobs", "top_logprobs",
    "round_events",
))  # fmt: skip
# Entries of a configuration that differ among the cells of one sweep over K.
_PER_CELL = ("model_pair_name", "prompt_domain", "prompt_set", "k")


@dataclass(frozen=True, slots=True)
class SweptPair:
    """A pair under the name it has in results, with the settings that nothing varies. Without a
    drafter there is only plain decoding."""

    name: str
    target: str
    draft: str | None
    engine: EngineConfig


@dataclass(frozen=True, slots=True)
class Way:
    """How a pair's prompts are decoded: plainly if `engine` drafts nothing. `own` says that the
    draft was named for this way and not for all of the pair's."""

    engine: EngineConfig
    draft: str | None = None
    own: bool = False

    @property
    def k(self) -> int:
        """0 for plain decoding."""
        return self.engine.most_k if self.engine.drafter != "none" else 0

    @property
    def drafter(self) -> str:
        """As results have it."""
        return f"{self.engine.drafter}={self.draft}" if self.own else self.engine.drafter


class Work(NamedTuple):
    """A prompt under its name."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class DomainPrompts:
    """Some prompts under their names. `print` is the fingerprint of all that the domain has, so
    that a later run may take more of them."""

    works: tuple[Work, ...]
    print: str


@dataclass(frozen=True, slots=True)
class SweepPiece:
    """Prompts that run together; one unless the batch size says otherwise. With a `level`, they are
    requests to a closed loop with so many in flight; 0 is one at a time with rests."""

    domain: str
    prompts: tuple[Work, ...]
    level: int | None = None

    @property
    def name(self) -> str:
        first, last = self.prompts[0].prompt_id, self.prompts[-1].prompt_id
        return first if len(self.prompts) == 1 else f"{first}..{last}"


@dataclass(frozen=True, slots=True)
class PlannedVisit:
    """One piece at one repeat, to be decoded in every way; `turn` is its place in the sweep.
    `configs` are what its samples are filed under, one for each way in order."""

    turn: int
    piece: SweepPiece
    repeat: int
    params: SamplingParams
    configs: tuple[BenchmarkConfig, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`context` is how long its prompts are in tokens, None if as they come; `level` how many
    requests are in flight, None if pieces run at once."""

    domain: str
    prompts: DomainPrompts
    params: SamplingParams
    context: int | None = None
    level: int | None = None

    @property
    def prompts_name(self) -> str:
        return self.domain if self.context is None else f"{self.domain} of {self.context} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Scenes that are decoded by the same engines, one for each of `ways`, plain decoding first.
    A piece of work is `piece_size` prompts. With the schema of a sweep over K all runs of a pair
    must have the same settings, which its results then state."""

    pair: str
    target: str
    ways: tuple[Way, ...]
    scenes: tuple[Scene, ...]
    piece_size: int
    iterations: int
    schema: Schema = SWEEP

    def visits(self) -> list[PlannedVisit]:
        """All of them, in the order in which they run: the scenes take turns. A scene's last piece
        may be smaller than the others."""
        rows: list[list[tuple[SweepPiece, SamplingParams, tuple[BenchmarkConfig, ...]]]] = []
        for scene in self.scenes:
            works, size = scene.prompts.works, self.piece_size
            cut = [works[i : i + size] for i in range(0, len(works), size)]
            configs = tuple(self.config(scene, way) for way in self.ways)
            rows.append(
                [(SweepPiece(scene.domain, w, scene.level), scene.params, configs) for w in cut]
            )
        turns = [(i, row) for i in range(self.iterations) for row in in_turns(rows)]
        return [
            PlannedVisit(turn, piece, repeat, params, configs)
            for turn, (repeat, (piece, params, configs)) in enumerate(turns)
        ]

    def config(self, scene: Scene, way: Way) -> BenchmarkConfig:
        engine, params = way.engine, scene.params
        more: dict[str, Plain] = {"prompt_tokens": scene.context, "concurrency": scene.level}
        named = {name: value for name, value in more.items() if value is not None}
        return BenchmarkConfig(
            model_pair_name=self.pair,
            prompt_domain=scene.domain,
            k=way.k,
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            seed=params.rng_seed,
            drafter=way.drafter,
            sampler=engine.sampler,
            dtype=engine.dtype,
            device=engine.device,
            batch_size=engine.most_batch,
            prompt_set=scene.prompts.print,
            others=tuple(sorted({**dict(others_of(engine, params)), **named}.items())),
        )

    def circumstances(self) -> Circumstances:
        """Fetches weights if need be. Raises CheckpointError."""
        drafts = {way.draft: way.engine.drafter for way in self.ways if way.draft}
        one = self.schema.one_setting
        models = {"target": self.target} | {
            "draft" if one else f"{drafter} from {draft}": draft
            for draft, drafter in drafts.items()
        }
        return Circumstances(
            pair=self.pair,
            machine=machine(self.ways[0].engine.device),
            settings=self._settings() if one else {},
            weights={side: weights_digest(resolve(name)) for side, name in models.items()},
            prompt_sets={scene.prompts_name: scene.prompts.print for scene in self.scenes},
        )

    def _settings(self) -> dict[str, Plain]:
        """Those of all cells; plain decoding alone has no drafter."""
        config = self.config(self.scenes[0], self.ways[-1])
        found = {**config.plain(), **dict(config.others)}
        left_out = _PER_CELL if config.is_speculative else (*_PER_CELL, "drafter")
        return {name: value for name, value in found.items() if name not in left_out}


def missing(planned: Sequence[PlannedVisit], folder: ResultsFolder) -> list[PlannedVisit]:
    """Visits of which the folder lacks a sample, or has one that failed: what it failed for may be
    over. They are measured again in every way, because a ratio is only of samples that were
    measured in turns."""
    done = {key for key, sample in folder.current().items() if sample.ok}
    configs = {config for visit in planned for config in visit.configs}
    hashes = {config: config.config_hash() for config in configs}
    return [
        visit
        for visit in planned
        if any(
            (hashes[config], visit.piece.name, visit.repeat) not in done for config in visit.configs
        )
    ]


def others_of(engine: EngineConfig, params: SamplingParams) -> tuple[tuple[str, Plain], ...]:
    """Settings away from their defaults that BenchmarkConfig has no field for, in order of names;
    those that a sweep decides (`profile`, how many completions) are left out."""
    found: dict[str, Plain] = {}
    for ours, default in ((engine, EngineConfig()), (params, SamplingParams())):
        for item in fields(ours):
            value: object = getattr(ours, item.name)
            if item.name not in _IN_CONFIG and value != getattr(default, item.name):
                plain = isinstance(value, str | int | float)
                found[item.name] = value if plain else json.dumps(value, sort_keys=True)
    return tuple(sorted(found.items()))
