"""The grid of a sweep: scenes and ways, in groups whose engines are in memory together.

A scene is what plain decoding depends on too: models, engine, sampling, prompts, how many run at
once. A way is how is drafted in it, and plain decoding is the first way of all. Every cell is a
scene and a way, and is measured beside the plain decoding of its scene, in the same visit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from outrider.bench.config import BenchmarkConfig
from outrider.bench.drafters.lineup import Drafts
from outrider.bench.drafters.table import known
from outrider.bench.machine import machine, weights_digest
from outrider.bench.store import Plain
from outrider.bench.sweep_plan import Piece, Visit, Way, cut, in_turns, others_of
from outrider.bench.sweep_results import Circumstances
from outrider.bench.sweeps.axes import OF_DRAFTING_AHEAD, OF_WAYS, Axis
from outrider.bench.sweeps.prompts import Prompts
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.models.loading import resolve

_AHEAD = ("ssd", "auto")
# Fields of a configuration that axes have other names for.
FIELDS: Mapping[str, str] = {
    "pair": "model_pair_name",
    "domain": "prompt_domain",
    "context": "prompt_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`context` is how long its prompts are in tokens, None if as they come; `level` how many
    requests are in flight, None if pieces run at once."""

    domain: str
    prompts: Prompts
    params: SamplingParams
    context: int | None = None
    level: int | None = None

    @property
    def prompts_name(self) -> str:
        return self.domain if self.context is None else f"{self.domain} of {self.context} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Scenes that are decoded by the same engines, one for each of `ways`, plain decoding first.
    A piece of work is `piece_size` prompts."""

    pair: str
    target: str
    ways: tuple[Way, ...]
    scenes: tuple[Scene, ...]
    piece_size: int
    iterations: int

    def visits(self) -> list[Visit]:
        """All of them, in the order in which they run: scenes take turns."""
        rows: list[list[tuple[Piece, SamplingParams, tuple[BenchmarkConfig, ...]]]] = []
        for scene in self.scenes:
            pieces = cut(scene.domain, scene.prompts.works, self.piece_size, level=scene.level)
            configs = tuple(self.config(scene, way) for way in self.ways)
            rows.append([(piece, scene.params, configs) for piece in pieces])
        turns = [row for _ in range(self.iterations) for row in in_turns(rows)]
        size = len(turns) // self.iterations
        return [
            Visit(turn, piece, turn // size, params, configs)
            for turn, (piece, params, configs) in enumerate(turns)
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
            seed=params.seed,
            drafter=way.drafter,
            sampler=engine.sampler,
            dtype=engine.dtype,
            device=engine.device,
            batch_size=engine.batch_size,
            prompt_set=scene.prompts.print,
            others=tuple(sorted({**dict(others_of(engine, params)), **named}.items())),
        )

    def circumstances(self) -> Circumstances:
        """Fetches weights if need be. Raises CheckpointError."""
        models = {"target": self.target} | {
            f"{way.engine.drafter} from {way.draft}": way.draft for way in self.ways if way.draft
        }
        return Circumstances(
            pair=self.pair,
            machine=machine(self.ways[0].engine.device),
            settings={},
            weights={side: weights_digest(resolve(name)) for side, name in models.items()},
            prompt_sets={scene.prompts_name: scene.prompts.print for scene in self.scenes},
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """Those of one pair, without plain decoding, and why others cannot be had, by their name."""

    found: tuple[Way, ...]
    refused: Mapping[str, str]


def ways_of(axes: Sequence[Axis], base: EngineConfig, drafts: Drafts) -> Ways:
    """Every combination of the way axes once. Settings of drafting ahead are dropped where nothing
    is drafted ahead. Raises ConfigError if that is everywhere, though they are an axis."""
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
    return Ways(tuple(found), refused)


def named(values: Mapping[str, Plain]) -> str:
    """A cell in words: `k=2, drafter=ngram`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


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
    return Way(engine, drafts.of_drafter(drafter, known(drafter).source))


def plain_of(base: EngineConfig) -> Way:
    """Without anything that only speculation reads."""
    default = EngineConfig()
    settings: dict[str, Any] = {name: getattr(default, name) for name in OF_WAYS}
    return Way(replace(base, **settings | {"drafter": "none", "k": 0}, profile=False))
