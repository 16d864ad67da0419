"""What `bench engines` and `bench load` measure: engines, cases, and who serves what when.

An engine is a schedule of the same program over the same pair: `single` is one lane for everything
(what others call a baseline of speculative decoding), `pd` and `pdv` have two and three lanes,
`ssd` drafts ahead of the verdict, `auto` chooses for itself, K included, and `off` is one lane that
drafts nothing. A visit is one case at one repeat: every engine serves the same requests in it, in
turns. Repeats have prompts and arrivals of their own, drawn from the seed and the repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace
from outrider.core.errors import OutriderError
from outrider.core.fields import known_words, numbers_of
from outrider.core.params import SamplingParams
from outrider_lab.bench.load import ClosedLoop, Loop, OpenLoop, Server, most_in_flight
from outrider_lab.bench.requests import Request, arriving, poisson_arrivals, requests_from

OFF, AUTO, AHEAD = "off", "auto", "ssd"
FIXED = ("single", "pd", "pdv", AHEAD)
ENGINES = (OFF, *FIXED, AUTO)
LEVELS = (0, 1, 3, 5, 7, 9, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Where requests come from; `seed` is that of arrivals."""

    texts: Sequence[str]
    max_tokens: int
    seed: int = 0

    def requests(self, start: int, num: int | None) -> Iterable[Request]:
        """From number `start` on; without end if `num` is None."""
        source = requests_from(self.texts, max_tokens=self.max_tokens, start=start)
        return islice(source, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Load of one kind. `level` is its number in results, `text` says it in words. There are
    `num_requests`, or all that arrive or can be handed in within `duration` seconds, or what ends
    first. An open loop has Poisson arrivals of `rate` requests a second, or those `recorded`."""

    level: int
    name: str
    text: str
    loop: Loop
    num_requests: int | None = None
    rate: float = 0.0
    duration: float | None = None
    recorded: Sequence[Request] | None = None

    def requests(self, prompts: Prompts, repeat: int) -> Iterable[Request]:
        if self.recorded is not None:
            return self.recorded
        if not self.rate:
            return prompts.requests(repeat * (self.num_requests or 0), self.num_requests)
        arrivals = poisson_arrivals(
            self.rate, seed=prompts.seed + repeat, num=self.num_requests, duration=self.duration
        )
        start = repeat * (self.num_requests or len(arrivals))
        return arriving(prompts.texts, arrivals, max_tokens=prompts.max_tokens, start=start)


def closed_case(
    level: int,
    num: int,
    *,
    name: str = "",
    num_requests: int | None = None,
    duration: float | None = None,
    gap_seconds: float = 0.0,
) -> Case:
    """At most `num` in flight."""
    return Case(
        level=level,
        name=name or f"closed-{num}",
        text=f"closed loop, {num} in flight",
        loop=ClosedLoop(num_in_flight=num, gap_seconds=gap_seconds, duration=duration),
        num_requests=num_requests,
        duration=duration,
    )


def poisson_case(
    level: int,
    name: str,
    rate: float,
    most: int,
    *,
    num_requests: int | None,
    duration: float | None = None,
) -> Case:
    return Case(
        level=level,
        name=name,
        text=f"Poisson, {rate:g} requests/s, at most {most} in flight",
        loop=OpenLoop(max_in_flight=most),
        num_requests=num_requests,
        rate=rate,
        duration=duration,
    )


def replay_case(recorded: Sequence[Request], most: int) -> Case:
    """A recorded trace; every repeat is the same."""
    return Case(
        level=0,
        name="replay",
        text=f"{len(recorded)} recorded requests, at most {most} in flight",
        loop=OpenLoop(max_in_flight=most),
        recorded=recorded,
    )


# Name, requests a second, most in flight.
_RATES: Mapping[str, tuple[float, int]] = {"low": (2, 3), "medium": (5, 5), "high": (10, 10)}
SINGLE = "single"
SCENARIOS = (SINGLE, *_RATES)


def scenario(level: int, name: str, num_requests: int) -> Case:
    """One of SCENARIOS; `single` has one request."""
    if name == SINGLE:
        return closed_case(level, 1, name=name, num_requests=1)
    rate, most = _RATES[name]
    return poisson_case(level, name, rate, most, num_requests=num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """`warm_ups` are served untimed before the first visit; `record` is the plan as results have
    it."""

    cases: Sequence[Case]
    repeats: int
    prompts: Prompts
    params: SamplingParams
    warm_ups: Sequence[tuple[ClosedLoop, Sequence[Request]]]
    record: Mapping[str, object]

    def visits(self) -> list[tuple[Case, int]]:
        """Cases in turns, so that none has one part of the run to itself."""
        return [(case, repeat) for repeat in range(self.repeats) for case in self.cases]

    @property
    def most_in_flight(self) -> int:
        return max(most_in_flight(case.loop) for case in self.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Closed loops of `levels` requests in flight. Level 0 serves one at a time with a rest of
    `gap_seconds` after each. `num_warmup` untimed visits of each level come first."""

    levels: Sequence[int]
    num_requests: int
    gap_seconds: float
    num_warmup: int = 1

    def plan(self, prompts: Prompts, params: SamplingParams, repeats: int) -> EnginePlan:
        """Warm-ups have no rests, and prompts that come after all others: engines that learn what a
        batch costs have met each of them."""
        num = self.num_requests
        return EnginePlan(
            cases=[
                closed_case(
                    level,
                    max(level, 1),
                    num_requests=num,
                    gap_seconds=0.0 if level else self.gap_seconds,
                )
                for level in self.levels
            ],
            repeats=repeats,
            prompts=prompts,
            params=params,
            warm_ups=[
                (
                    ClosedLoop(num_in_flight=max(level, 1)),
                    list(prompts.requests((repeats + turn) * num, num)),
                )
                for turn in range(self.num_warmup)
                for level in self.levels
            ],
            record={
                **asdict(self),
                "levels": list(self.levels),
                "repeats": repeats,
                "max_tokens": prompts.max_tokens,
                "num_prompts": len(prompts.texts),
                "params": asdict(params),
            },
        )


def load_plan(
    cases: Sequence[Case], prompts: Prompts, params: SamplingParams, repeats: int
) -> EnginePlan:
    """Any cases, after two untimed requests."""
    widest = ClosedLoop(num_in_flight=max(most_in_flight(case.loop) for case in cases))
    return EnginePlan(
        cases=cases,
        repeats=repeats,
        prompts=prompts,
        params=params,
        warm_ups=[(widest, list(prompts.requests(0, 2)))],
        record={
            "cases": [
                {"name": case.name, "text": case.text, **asdict(case.loop)} for case in cases
            ],
            "repeats": repeats,
            "max_tokens": prompts.max_tokens,
            "seed": prompts.seed,
            "num_prompts": len(prompts.texts),
            "params": asdict(params),
        },
    )


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

    @property
    def record(self) -> dict[str, object]:
        """What it was and what was found while loading; settings that are not their default."""
        default = asdict(EngineConfig())
        settings = {k: v for k, v in asdict(self.config).items() if v != default[k]}
        return {"engine": self.name, "settings": settings, "reason": self.reason, **self.facts}


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
    hint = f"{flag} {','.join(str(level) for level in LEVELS if level >= lowest)}"
    return tuple(sorted(set(numbers_of(flag, text, int, lowest, 1024, hint=hint))))
