"""A comparison of engines in simulation: the same requests, costs and verdicts for each.

The speed-up of an engine is the time that plain decoding (the single lane with K = 0) takes for all
requests over its own. It is shown with the formula for rounds of a full batch with full drafts, at
the context in the middle of an output; the formula ignores prompts, queues and last rounds:

    single    E T_plain / (T_draft + T_verify)                      estimate/acceptance.py
    ssd       Theorem 7, with hand-over and contention              planner/overlap.py

An unknown hit rate is computed for the best fan-out with the curve that an engine assumes at first.
Figures derive from the records, by the code that also counts real runs (metrics/).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, did_you_mean
from outrider.estimate.acceptance import measured_speed_up, prefix_products
from outrider.metrics import Stats, inter_token_latencies, percentile, summarise
from outrider.plugins.lanes.ahead.fan_out import Misses, expected_hit_rate, optimal
from outrider_lab.metrics.timeline import Timeline, hit_rate, timeline
from outrider_lab.planner.calibration import Calibration, DrafterCosts
from outrider_lab.planner.overlap import AheadTimes
from outrider_lab.simulator.engine import LABEL_END
from outrider_lab.simulator.events import (
    DRAFTER,
    Chance,
    JobCosts,
    Simulated,
    SimulatedTimes,
    round_times,
)
from outrider_lab.simulator.load import (
    BY_BEGINNING,
    Failure,
    Fleet,
    Lengths,
    SimulatedLoad,
    poisson,
    requests_of,
)
from outrider_lab.simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class FleetNumbers:
    """Numbers of a fleet. `served` counts requests by the replica that ended them, `moved` those
    that moved to another one. `cached` is the share of the prompts' tokens that had been read
    before; `price` is that of a million written tokens, if replicas have one."""

    replicas: int
    served: tuple[int, ...]
    moved: int
    cached: float
    price: float | None


@dataclass(frozen=True, slots=True)
class SimulatedNumbers:
    """Numbers of a simulated run. `first_token`, `between_tokens` and `latency` are seconds of a
    request: to its first token, of each later one (its share of its round's), and to its last.
    `p_hit` is None if nothing was drafted ahead, `rounds_per_pass` counts sequences."""

    engine: str
    k: int
    stats: Stats
    p_hit: float | None
    rounds_per_pass: float
    first_token: Percentiles
    between_tokens: Percentiles
    latency: Percentiles
    timeline: Timeline
    fleet: FleetNumbers

    @property
    def seconds(self) -> float:
        return self.stats.seconds["total"]

    @property
    def tokens_per_second(self) -> float:
        return self.stats.tokens_per_second

    @property
    def busy(self) -> Mapping[str, float]:
        """Share of the time in which each lane ran a job, the mean of all replicas."""
        found: dict[str, float] = {}
        for lane, use in self.timeline.lanes.items():
            name = lane.rpartition(LABEL_END)[2]
            found[name] = found.get(name, 0.0) + use.busy_fraction / self.fleet.replicas
        return found

    def to_dict(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "k": self.k,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_round": self.stats.tokens_per_round,
            "acceptance_rate": self.stats.acceptance_rate if self.stats.num_drafted else None,
            "p_hit": self.p_hit,
            "rounds_per_pass": self.rounds_per_pass,
            "first_token": asdict(self.first_token),
            "between_tokens": asdict(self.between_tokens),
            "latency": asdict(self.latency),
            "fleet": asdict(self.fleet),
            "stats": self.stats.to_dict(),
            "timeline": self.timeline.to_dict(),
        }


def numbers(
    engine: str, k: int, run: Simulated, *, replicas: int = 1, price: float | None = None
) -> SimulatedNumbers:
    """Return the numbers of a run that is called `engine`; `price` is that of a replica's hour.
    There is at least one request."""
    drafter = DRAFTER if k else "none"
    judged = [trace.pass_index for trace in run.rounds if trace.num_emitted]
    return SimulatedNumbers(
        engine=engine,
        k=k,
        stats=summarise(run.rounds, drafter=drafter, k=k, total_seconds=run.seconds),
        p_hit=hit_rate(run.rounds),
        rounds_per_pass=len(judged) / len(set(judged)),
        first_token=_percentiles([one.arrivals[0] for one in run.served]),
        between_tokens=_percentiles(
            list(chain.from_iterable(inter_token_latencies(one.arrivals) for one in run.served))
        ),
        latency=_percentiles([one.arrivals[-1] for one in run.served]),
        timeline=timeline(run.jobs),
        fleet=_fleet_numbers(run, replicas, price),
    )


def _fleet_numbers(run: Simulated, replicas: int, price: float | None) -> FleetNumbers:
    homes = Counter(one.replica for one in run.served)
    cached = sum(one.num_cached for one in run.served)
    read = sum(trace.num_prompt_tokens for trace in run.rounds)
    hours = replicas * run.seconds / 3600
    tokens = sum(len(one.arrivals) for one in run.served)
    return FleetNumbers(
        replicas=replicas,
        served=tuple(homes[number] for number in range(replicas)),
        moved=sum(one.num_moves > 0 for one in run.served),
        cached=cached / (cached + read) if cached else 0.0,
        price=None if price is None else 1e6 * price * hours / tokens,
    )


def _percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(*(percentile(values, percent) for percent in (50, 95, 99)))


PLAIN, SINGLE, AHEAD = "plain", "single", "ssd"
ENGINES = (SINGLE, "pd", "pdv", AHEAD)
CLOSED, TOGETHER = "closed", "together"
# The most tokens of all requests together: more would take minutes to simulate.
MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStudy:
    """One comparison. `rates` are those of `Chance`; with `p_hit` None it follows from `fan_out`.

    `arrivals` is "closed" (`batch` users), "together", or requests a second. `batch` is the most
    that run at once, `prompt` and `output` are mean tokens. `sync` is the seconds of a hand-over
    between lanes, `contention` that of `SharedLanes`. A batch of 0 for a lane is `batch`. All of it
    applies to each replica, except `requests` and the rate. A prompt has its first `shared` tokens
    in common with those of its family; `price` is that of an hour of a replica. Raises ConfigError
    for an engine that does not exist or cannot do anything.
    """

    calibration: Calibration
    drafter: DrafterCosts
    rates: tuple[float, ...]
    engines: tuple[str, ...] = ENGINES
    k: int = 4
    p_hit: float | None = None
    fan_out: int = 16
    batch: int = 1
    prompt: int = 512
    output: int = 128
    requests: int = 16
    spread: float = 0.0
    arrivals: str | float = CLOSED
    contention: float = 0.0
    sync: float = 0.0
    prefill_chunk: int | None = None
    hybrid_threshold: int = 3
    decode_batch: int = 0
    verify_batch: int = 0
    replicas: int = 1
    routing: str = BY_BEGINNING
    families: int = 8
    shared: int = 0
    failures: tuple[Failure, ...] = ()
    price: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in ENGINES:
                raise ConfigError(f"no engine {name!r}.", hint=did_you_mean(name, ENGINES))
        if not self.engines:
            raise ConfigError("no engine is named.", hint=f"--engines {','.join(ENGINES)}")
        if AHEAD in self.engines and self.k == 0:
            raise ConfigError(
                "ssd drafts ahead of the verdict, and with K = 0 nothing is drafted.",
                hint="--k 4, or leave ssd out of --engines",
            )
        if self.shared >= self.prompt:
            raise ConfigError(
                f"prompts of {self.prompt} tokens cannot have {self.shared} in common.",
                hint="raise --context or lower --shared",
            )
        # Raises the error of an invalid fleet.
        _ = self.fleet
        if self.requests * self.output > MOST_TOKENS:
            raise ConfigError(
                f"{self.requests} requests of {self.output} tokens are more than {MOST_TOKENS:,} "
                "tokens, which takes minutes to simulate.",
                hint="lower --requests or --max-tokens",
            )

    @property
    def is_fleet(self) -> bool:
        """True if the study is of more than one engine, or of their price."""
        return bool(self.replicas > 1 or self.shared or self.failures or self.price is not None)

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.replicas, self.routing, self.failures)

    @property
    def chance(self) -> Chance:
        return Chance(self.rates, p_hit=self.hit_chance, seed=self.seed)

    @property
    def hit_chance(self) -> float:
        """The probability that a verdict is among the predicted ones."""
        if self.p_hit is not None:
            return self.p_hit
        if not self.k:
            return 0.0
        likely, misses = self._outcomes(), Misses()
        return expected_hit_rate(optimal(self.fan_out, likely, misses), likely, misses)

    @property
    def costs(self) -> JobCosts:
        return JobCosts(self.calibration, self.drafter, self.fan_out, self.sync)

    @property
    def times(self) -> SimulatedTimes:
        """The times of rounds of a full batch, in the middle of an output."""
        return round_times(self.costs, batch=self.most_live, context=self.mid_context, k=self.k)

    @property
    def most_live(self) -> int:
        """Requests that run at once on a replica, if enough come."""
        return min(self.batch, math.ceil(self.requests / self.replicas))

    @property
    def mid_context(self) -> int:
        return self.prompt + self.output // 2

    @property
    def load(self) -> SimulatedLoad:
        lengths = Lengths(self.prompt, self.output, self.spread, self.families, self.shared)
        found = requests_of(lengths, self.requests, seed=self.seed)
        if isinstance(self.arrivals, float):
            return poisson(found, self.arrivals, seed=self.seed)
        users = self.batch * self.replicas
        return SimulatedLoad(found, in_flight=users if self.arrivals == CLOSED else None)

    def config(self, engine: str) -> EngineConfig:
        """Return the configuration of one of ENGINES, or of PLAIN."""
        return EngineConfig(
            schedule=SINGLE if engine == PLAIN else engine,
            k=0 if engine == PLAIN else self.k,
            batch_size=self.batch,
            prefill_chunk=self.prefill_chunk,
            hybrid_threshold=self.hybrid_threshold,
            decode_batch=self.decode_batch,
            verify_batch=self.verify_batch,
        )

    def formula(self, engine: str) -> float | None:
        """Return the speed-up in closed form; None for an engine without one."""
        times, tokens = self.times, self.chance.tokens_per_round(self.k)
        if times.verify <= 0 or times.draft + times.verify <= 0:
            return None
        if engine == SINGLE:
            return measured_speed_up(
                tokens, plain=times.plain, draft=times.draft, verify=times.verify
            )
        if engine != AHEAD:
            return None
        ahead = AheadTimes(
            p_hit=self.hit_chance,
            tokens_hit=tokens,
            tokens_miss=tokens,
            ahead=times.ahead / times.verify,
            fallback=times.draft / times.verify,
            batch=self.most_live,
            sync=self.sync / times.verify,
            contention=self.contention,
        )
        return ahead.speed * times.plain / times.verify

    def _outcomes(self) -> Sequence[float]:
        """Return P(n) for n = 0..K accepted tokens."""
        reached = [1.0, *prefix_products(Chance(self.rates).rates_of(self.k))]
        return [*(here - further for here, further in pairwise(reached)), reached[-1]]


@dataclass(frozen=True, slots=True)
class SimulatedComparison:
    """The result of a study. `numbers` and `runs` have PLAIN and then each engine, by name."""

    study: SimulatedStudy
    numbers: Mapping[str, SimulatedNumbers]
    runs: Mapping[str, Simulated]

    def speedup(self, engine: str) -> float | None:
        """Return the speed-up over plain decoding; None if nothing takes any time."""
        own = self.numbers[engine].seconds
        return self.numbers[PLAIN].seconds / own if own > 0 else None


def compare(study: SimulatedStudy) -> SimulatedComparison:
    """Run plain decoding first, then every engine, on the same requests."""
    load, costs, chance = study.load, study.costs, study.chance
    runs: dict[str, Simulated] = {}
    by_engine: dict[str, SimulatedNumbers] = {}
    for engine in dict.fromkeys((PLAIN, *study.engines)):
        config = study.config(engine)
        run = simulate(config, load, costs, chance, contention=study.contention, fleet=study.fleet)
        runs[engine] = run
        by_engine[engine] = numbers(
            engine, config.most_k, run, replicas=study.replicas, price=study.price
        )
    return SimulatedComparison(study, by_engine, runs)
