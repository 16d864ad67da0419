"""What a sweep measures, cut into pieces of work and put in an order; and the plan of a K sweep.

A way is one engine's configuration: plain decoding is the first, and the others draft. A visit has
one piece decoded in every way. The K sweep's ways differ in K alone; those of other sweeps
(sweeps/scenes.py) in anything that only speculation reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from outrider.bench.config import BenchmarkConfig
from outrider.bench.machine import machine, weights_digest
from outrider.bench.store import Plain
from outrider.bench.sweep_results import Circumstances, ResultsFolder
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.models.loading import resolve

T = TypeVar("T")

# Settings that a cell's configuration has a field for, and those that a sweep decides.
_IN_CONFIG = frozenset((
    "drafter", "k", "sampler", "dtype", "device", "batch_size", "profile",
    "max_tokens", "temperature", "seed", "n", "logprobs", "top_logprobs",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class SweepPair:
    """A pair under the name it has in results. Without a drafter there is only plain decoding."""

    name: str
    target: str
    draft: str | None
    engine: EngineConfig

    @property
    def speculates(self) -> bool:
        return self.engine.drafter != "none"


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
        return self.engine.k if self.engine.drafter != "none" else 0

    @property
    def drafter(self) -> str:
        """As results have it."""
        return f"{self.engine.drafter}={self.draft}" if self.own else self.engine.drafter


class Work(NamedTuple):
    """A prompt under its name."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Prompts that run together; one unless the batch size says otherwise. With a `level`, they are
    requests to a closed loop with so many in flight; 0 is one at a time with rests."""

    domain: str
    name: str
    prompts: tuple[Work, ...]
    level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to measure. `ks` leaves out 0, which is always measured. `prompt_sets` are the
    fingerprints of the domains; `others` as in BenchmarkConfig."""

    prompts: Mapping[str, Sequence[Work]]
    prompt_sets: Mapping[str, str]
    ks: Sequence[int]
    iterations: int
    warmup: int
    params: SamplingParams
    others: tuple[tuple[str, Plain], ...] = ()

    def ks_of(self, pair: SweepPair) -> tuple[int, ...]:
        return (0, *self.ks) if pair.speculates else (0,)

    def ways_of(self, pair: SweepPair) -> list[Way]:
        """In order of K."""
        plain = Way(replace(pair.engine, k=0, drafter="none", profile=False))
        drafting = [
            Way(replace(pair.engine, k=k, profile=False), pair.draft) for k in self.ks_of(pair)[1:]
        ]
        return [plain, *drafting]

    def config(self, pair: SweepPair, domain: str, k: int) -> BenchmarkConfig:
        engine = pair.engine
        return BenchmarkConfig(
            model_pair_name=pair.name,
            prompt_domain=domain,
            k=k,
            temperature=self.params.temperature,
            max_tokens=self.params.max_tokens,
            seed=self.params.seed,
            drafter=engine.drafter if k else "none",
            sampler=engine.sampler,
            dtype=engine.dtype,
            device=engine.device,
            batch_size=engine.batch_size,
            prompt_set=self.prompt_sets[domain],
            others=self.others,
        )

    def pieces(self, batch_size: int) -> list[Piece]:
        """The domains take turns; a domain's last piece may be smaller than a batch."""
        return in_turns(cut(domain, p, batch_size) for domain, p in self.prompts.items())


@dataclass(frozen=True, slots=True)
class Visit:
    """One piece at one repetition, to be decoded in every way; `turn` is its place in the sweep.
    `configs` are what its samples are filed under, one for each way in order."""

    turn: int
    piece: Piece
    iteration: int
    params: SamplingParams
    configs: tuple[BenchmarkConfig, ...]


def visits(sweep: Sweep, pair: SweepPair) -> list[Visit]:
    """All of them, in the order in which they run."""
    pieces = sweep.pieces(pair.engine.batch_size)
    ks = sweep.ks_of(pair)
    configs = {d: tuple(sweep.config(pair, d, k) for k in ks) for d in sweep.prompts}
    rows = [(piece, i) for i in range(sweep.iterations) for piece in pieces]
    return [
        Visit(turn, piece, i, sweep.params, configs[piece.domain])
        for turn, (piece, i) in enumerate(rows)
    ]


def circumstances(sweep: Sweep, pair: SweepPair) -> Circumstances:
    """Finds the pair's weights, fetching them if need be. Raises CheckpointError."""
    config = sweep.config(pair, next(iter(sweep.prompts)), k=max(sweep.ks_of(pair)))
    per_cell = ("model_pair_name", "prompt_domain", "prompt_set", "k", "others")
    settings = {name: value for name, value in config.plain().items() if name not in per_cell}
    if not config.is_speculative:
        del settings["drafter"]
    names = {"target": pair.target, **({"draft": pair.draft} if pair.draft else {})}
    return Circumstances(
        pair=pair.name,
        machine=machine(pair.engine.device),
        settings=settings | dict(sweep.others),
        weights={side: weights_digest(resolve(name)) for side, name in names.items()},
        prompt_sets=dict(sweep.prompt_sets),
    )


def outstanding(sweep: Sweep, pair: SweepPair, folder: ResultsFolder) -> list[Visit]:
    return missing(visits(sweep, pair), folder)


def missing(planned: Sequence[Visit], folder: ResultsFolder) -> list[Visit]:
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
            (hashes[config], visit.piece.name, visit.iteration) not in done
            for config in visit.configs
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


def cut(
    domain: str, prompts: Sequence[Work], size: int, *, level: int | None = None
) -> list[Piece]:
    groups = [tuple(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    return [Piece(domain, _name(group), group, level) for group in groups]


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first of every group, then the second of every group, and so on."""
    return [one for row in zip_longest(*groups) for one in row if one is not None]


def _name(group: Sequence[Work]) -> str:
    first, last = group[0].prompt_id, group[-1].prompt_id
    return first if len(group) == 1 else f"{first}..{last}"
