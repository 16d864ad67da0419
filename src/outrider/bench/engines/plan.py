"""What `bench engines` measures: engines, levels of concurrency, and turns.

An engine is a schedule of the same program over the same pair: `single` is one lane for everything
(what others call a baseline of speculative decoding), `pd` and `pdv` have two and three lanes,
`ssd` drafts ahead of the verdict, `auto` chooses for itself, K included, and `off` is one lane that
drafts nothing. Level n keeps at most n requests in flight; level 0 serves one at a time with a gap
after each, in which the engine rests.

A visit is one level at one repeat. Every engine serves the same requests in it before the next
visit begins, in an order that rotates, so that drift of the machine falls on all alike. Ratios are
taken within visits. Repeats have prompts of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol, TypeAlias

from outrider.bench.load.drive import ClosedLoop, OpenLoop, Server
from outrider.bench.load.requests import Request, requests_from
from outrider.core.budget import JobTrace
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.fields import known_words
from outrider.core.params import SamplingParams

OFF, AUTO, AHEAD = "off", "auto", "ssd"
FIXED = ("single", "pd", "pdv", AHEAD)
ENGINES = (OFF, *FIXED, AUTO)
LEVELS = (0, 1, 3, 5, 7, 9, 10)


@dataclass(frozen=True, slots=True)
class Visit:
    """`turn` is its place in the run, and says who begins."""

    turn: int
    level: int
    repeat: int


WarmUp: TypeAlias = tuple[ClosedLoop, Iterable[Request]]


class Workload(Protocol):
    """What engines are put under, visit by visit."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def most_in_flight(self) -> int: ...
    def visits(self) -> Sequence[Visit]: ...
    def loop(self, level: int) -> ClosedLoop | OpenLoop: ...
    def requests(self, level: int, repeat: int) -> Iterable[Request]: ...
    def warm_ups(self) -> Iterable[WarmUp]:
        """What every engine serves untimed before the first visit, one after the other."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`texts` are the prompts, of which every repeat takes the next ones. `gap_seconds` is the rest
    of level 0 between two requests; `num_warmup` untimed visits of each level come first."""

    levels: Sequence[int]
    repeats: int
    num_requests: int
    max_tokens: int
    gap_seconds: float
    texts: Sequence[str]
    params: SamplingParams
    num_warmup: int = 1

    def visits(self) -> list[Visit]:
        """Levels in turns, so that no level has one part of the run to itself."""
        rows = [(level, repeat) for repeat in range(self.repeats) for level in self.levels]
        return [Visit(turn, level, repeat) for turn, (level, repeat) in enumerate(rows)]

    @property
    def most_in_flight(self) -> int:
        return max(1, *self.levels)

    def loop(self, level: int) -> ClosedLoop:
        gap = 0.0 if level else self.gap_seconds
        return ClosedLoop(num_in_flight=max(level, 1), gap_seconds=gap)

    def requests(self, level: int, repeat: int) -> Iterator[Request]:
        """The same at every level."""
        del level
        start = repeat * self.num_requests
        source = requests_from(self.texts, max_tokens=self.max_tokens, start=start)
        return islice(source, self.num_requests)

    def warm_ups(self) -> Iterator[WarmUp]:
        """Every level so often, without rests, with prompts that come after all others: engines
        that learn what a batch costs have met each of them."""
        for turn in range(self.num_warmup):
            for level in self.levels:
                loop = replace(self.loop(level), gap_seconds=0.0)
                yield loop, self.requests(level, self.repeats + turn)


@dataclass(slots=True)
class Contestant:
    """An engine with its models in memory, or the reason why it has none. What its lanes do is
    appended to `jobs`. `exact` says that its text is the target's own, to the last near-tie."""

    name: str
    config: EngineConfig
    server: Server | None = None
    exact: bool = True
    reason: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    jobs: list[JobTrace] = field(default_factory=list[JobTrace])


# Fills in server, exact and facts; raises OutriderError if the engine cannot run here.
Opener = Callable[[Contestant], None]


def config_of(name: str, base: EngineConfig, *, own_controller: bool) -> EngineConfig:
    """The configuration of an engine. `auto` weighs drafts by what they cost and bring, unless a
    controller was asked for (`own_controller`), and `ssd` always drafts ahead. Rounds are recorded,
    for all alike."""
    base = replace(base, profile=True)
    if name == OFF:
        return replace(base, schedule="single", drafter="none")
    if name == AUTO and not own_controller:
        return replace(base, schedule=AUTO, controller="goodput")
    if name == AHEAD:
        return replace(base, schedule=AHEAD, hybrid_threshold=0)
    return replace(base, schedule=name)


def line_up(
    names: Sequence[str], base: EngineConfig, opener: Opener, *, own_controller: bool = False
) -> list[Contestant]:
    """Load every engine. One that cannot run has its reason, and the others go on."""
    found: list[Contestant] = []
    for name in names:
        contestant = Contestant(name, config_of(name, base, own_controller=own_controller))
        try:
            opener(contestant)
        except OutriderError as error:
            contestant.reason = f"{type(error).__name__}: {error}"
        found.append(contestant)
    return found


def engines_named(text: str) -> tuple[str, ...]:
    """Names between commas, each once. Raises ConfigError."""
    return known_words("--engines", text, ENGINES, kind="engine")


def levels_named(flag: str, text: str, *, lowest: int = 0) -> tuple[int, ...]:
    """Whole numbers between commas, in order and each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(w.isdecimal() and lowest <= int(w) <= 1024 for w in words):
        raise ConfigError(
            f"{flag} must be whole numbers from {lowest} to 1024 between commas, got {text!r}.",
            hint=f"{flag} {','.join(str(level) for level in LEVELS if level >= lowest)}",
        )
    return tuple(sorted({int(word) for word in words}))
