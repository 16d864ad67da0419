"""What a K sweep measures: pairs x domains x K, cut into pieces of work and put in an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from outrider.bench.config import BenchmarkConfig, Plain
from outrider.bench.fingerprint import machine, weights_digest
from outrider.bench.sweep_results import Circumstances, ResultsFolder
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.models.loading import resolve


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


class Work(NamedTuple):
    """A prompt under its name."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Prompts that run together; one unless the batch size says otherwise."""

    domain: str
    name: str
    prompts: tuple[Work, ...]


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
        by_domain = [_cut(domain, p, batch_size) for domain, p in self.prompts.items()]
        return [piece for row in zip_longest(*by_domain) for piece in row if piece is not None]


@dataclass(frozen=True, slots=True)
class Visit:
    """One piece at one repetition, to be measured at every K; `turn` is its place in the sweep."""

    turn: int
    piece: Piece
    iteration: int


def visits(sweep: Sweep, pair: SweepPair) -> list[Visit]:
    """All of them, in the order in which they run."""
    pieces = sweep.pieces(pair.engine.batch_size)
    rows = [(piece, i) for i in range(sweep.iterations) for piece in pieces]
    return [Visit(turn, piece, i) for turn, (piece, i) in enumerate(rows)]


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
    """Visits of which the folder lacks a sample, or has one that failed: what it failed for may be
    over. They are measured again at every K, because a ratio is only of samples that were measured
    in turns."""
    done = {key for key, sample in folder.current().items() if sample.ok}
    hashes = {
        (domain, k): sweep.config(pair, domain, k).config_hash()
        for domain in sweep.prompts
        for k in sweep.ks_of(pair)
    }
    return [
        visit
        for visit in visits(sweep, pair)
        if any(
            (hashes[visit.piece.domain, k], visit.piece.name, visit.iteration) not in done
            for k in sweep.ks_of(pair)
        )
    ]


def _cut(domain: str, prompts: Sequence[Work], size: int) -> list[Piece]:
    groups = [tuple(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    return [Piece(domain, _name(group), group) for group in groups]


def _name(group: Sequence[Work]) -> str:
    first, last = group[0].prompt_id, group[-1].prompt_id
    return first if len(group) == 1 else f"{first}..{last}"
