"""What a cost study measures: contestants of each visit, and the room that models need for them.

A visit is one pair and one batch at one repetition: plain decoding and every contestant of that
batch, in an order that rotates from visit to visit, over the same prompts. Speed-ups are ratios
within visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from outrider.bench.gemm.record import Method, Study
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, did_you_mean
from outrider.lab.bare_engine import bare_rooms
from outrider.models.decoder import Room

STUDIES: tuple[Study, ...] = ("alpha", "hits", "fan_out", "batch")
PAGE_SIZE = 32
CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine at one setting, as in `Cell`. Plain decoding has a `k` of 0 and an `alpha` of 0."""

    study: Study
    method: Method
    k: int = 0
    alpha: float = 0.0
    p_hit: float | None = None
    fan_out: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """What tells it from all others."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())

    def config(self, *, threads: int = 0) -> EngineConfig:
        """Drafts of K tokens every round, whatever comes of them. Rounds run by stages, since the
        one call that runs a whole round knows no scripts."""
        return EngineConfig(
            drafter="model" if self.k else "none",
            k=self.k,
            schedule="ssd" if self.method == "ssd" else "single",
            batch_size=self.batch,
            fan_out=max(self.fan_out, 1),
            force_hits=-1.0 if self.p_hit is None else self.p_hit,
            # What is called SSD drafts ahead, whether that pays or not.
            hybrid_threshold=0,
            watchdog="off",
            fused_round=False,
            controller="fixed",
            prefill_chunk=CHUNK,
            page_size=PAGE_SIZE,
            threads=threads,
        )


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

    def contestants(self) -> list[Contestant]:
        found: list[Contestant] = []
        for study in self.studies:
            found += {
                "alpha": self._over_alpha,
                "hits": self._over_hits,
                "fan_out": self._over_fan_out,
                "batch": self._over_batches,
            }[study]()
        return found

    def _over_alpha(self) -> list[Contestant]:
        found = [Contestant(study="alpha", method="ar")]
        for alpha in self.alphas:
            for k in self.ks:
                found.append(Contestant(study="alpha", method="sd", k=k, alpha=alpha))
                found.append(self._ahead("alpha", k=k, alpha=alpha))
        return found

    def _over_hits(self) -> list[Contestant]:
        found = [
            Contestant(study="hits", method="ar"),
            Contestant(study="hits", method="sd", k=self.k, alpha=self.alpha),
        ]
        return found + [self._ahead("hits", p_hit=p_hit) for p_hit in self.hits]

    def _over_fan_out(self) -> list[Contestant]:
        found = [
            Contestant(study="fan_out", method="ar"),
            Contestant(study="fan_out", method="sd", k=self.k, alpha=self.alpha),
        ]
        return found + [self._ahead("fan_out", fan_out=fan_out) for fan_out in self.fan_outs]

    def _over_batches(self) -> list[Contestant]:
        found: list[Contestant] = []
        for batch in self.batches:
            found += [
                Contestant(study="batch", method="ar", batch=batch),
                Contestant(study="batch", method="sd", k=self.k, alpha=self.alpha, batch=batch),
                self._ahead("batch", p_hit=self.p_hit, batch=batch),
            ]
        return found

    def _ahead(
        self,
        study: Study,
        *,
        k: int | None = None,
        alpha: float | None = None,
        p_hit: float | None = None,
        fan_out: int | None = None,
        batch: int = 1,
    ) -> Contestant:
        return Contestant(
            study=study,
            method="ssd",
            k=k or self.k,
            alpha=self.alpha if alpha is None else alpha,
            p_hit=p_hit,
            fan_out=fan_out or self.fan_out,
            batch=batch,
        )


# A taste of all studies, in under a minute with small models.
QUICK = Grid(
    ks=(2, 4, 8), alphas=(0.9,), hits=(0.0, 0.7, 1.0), fan_outs=(2, 8), batches=(1, 4)
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Every sequence begins with `prompt_tokens` and is measured while it emits `max_tokens` more,
    on the mean of its batch."""

    prompt_tokens: int = 16
    max_tokens: int = 96

    def most_tokens(self, k: int) -> int:
        """What a sequence may hold: one whose drafts are all kept is ahead of its batch."""
        return self.prompt_tokens + (k + 2) * self.max_tokens


@dataclass(frozen=True, slots=True)
class Visit:
    batch: int
    repeat: int
    contestants: tuple[Contestant, ...]

    @property
    def order(self) -> tuple[Contestant, ...]:
        """In which they take their turns."""
        first = self.repeat % len(self.contestants)
        return (*self.contestants[first:], *self.contestants[:first])


def visits(contestants: Sequence[Contestant], repeats: int) -> list[Visit]:
    """Batches take turns."""
    by_batch: dict[int, list[Contestant]] = {}
    for one in contestants:
        by_batch.setdefault(one.batch, []).append(one)
    return [
        Visit(batch, repeat, tuple(some))
        for repeat in range(repeats)
        for batch, some in sorted(by_batch.items())
    ]


def rooms(contestants: Sequence[Contestant], text: Text) -> tuple[Room, Room]:
    """For any one of them: of the target and of the draft model."""
    each = [bare_rooms(one.config(), text.most_tokens(one.k)) for one in contestants]
    return _largest([target for target, _ in each]), _largest([draft for _, draft in each])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a user asked studies to go over; what is empty is as usual. Raises ConfigError for what
    cannot be."""

    studies: tuple[str, ...] = ()
    ks: tuple[int, ...] = ()
    alphas: tuple[float, ...] = ()
    hits: tuple[float, ...] = ()
    fan_outs: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for word in self.studies:
            if word not in STUDIES:
                raise ConfigError(f"no study {word!r}.", hint=did_you_mean(word, STUDIES))
        _check("--ks", self.ks, 1, 64)
        _check("--alphas", self.alphas, 0, 1)
        _check("--hits", self.hits, 0, 1)
        _check("--fan-outs", self.fan_outs, 1, 256)
        _check("--batches", self.batches, 1, 1024)

    def grid(self, base: Grid) -> Grid:
        """`base` with all that was asked for."""
        ks, alphas = self.ks or base.ks, self.alphas or base.alphas
        return replace(
            base,
            ks=ks,
            alphas=alphas,
            hits=self.hits or base.hits,
            fan_outs=self.fan_outs or base.fan_outs,
            batches=self.batches or base.batches,
            studies=tuple(one for one in STUDIES if not self.studies or one in self.studies),
            k=min(ks, key=lambda one: (abs(one - base.k), one)),
            alpha=max(alphas),
        )


def _check(flag: str, values: Sequence[float], low: float, high: float) -> None:
    wrong = [value for value in values if not low <= value <= high]
    if wrong:
        raise ConfigError(f"{flag} has {wrong[0]:g}.", hint=f"{flag} takes {low:g} to {high:g}")


def _largest(some: Sequence[Room]) -> Room:
    """Room for what any of them has room for."""
    return Room(
        num_slots=max(one.num_slots for one in some),
        page_size=PAGE_SIZE,
        max_rows=max(one.max_rows for one in some),
        max_logits=max(one.max_logits for one in some),
    )
