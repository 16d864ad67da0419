"""Metrics of a server: Prometheus text for /metrics, and an hour of history for the dashboard.

Metrics with the same meaning as vLLM's have the same names except for the prefix, so dashboards for
vLLM are easily adapted. Label values come from closed sets (APIs, models, drafters, statuses,
reasons), never from the content of requests. Only the event loop's thread counts.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, get_args

from msgspec import to_builtins
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outrider import __version__
from outrider.api.result import GenerationResult
from outrider.server.audit import Outcome
from outrider.server.port import EngineState, EngineStatus
from outrider.server.site import Api, Ended

# History of the last hour in steps of two seconds, for the dashboard and `outrider top`.
#
# Percentiles of a step come from counts of durations in bins that grow by 5 %, so memory depends
# neither on the number of requests nor on their length.
STEP_SECONDS = 2.0
NUM_STEPS = 1800
_SHORTEST = 1e-6
_GROWTH = math.log(1.05)


class Durations:
    """Number of durations in each bin."""

    __slots__ = ("bins", "count")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0

    def add(self, seconds: float) -> None:
        index = int(math.log(max(seconds, _SHORTEST) / _SHORTEST) / _GROWTH)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.count += 1

    def percentile(self, percent: float) -> float | None:
        """Return the middle of the percentile's bin, at most 2.5 % off; None without a duration."""
        left = math.ceil(self.count * percent / 100)
        for index in sorted(self.bins):
            left -= self.bins[index]
            if left <= 0:
                return float(f"{_SHORTEST * math.exp((index + 0.5) * _GROWTH):.4g}")
        return None


@dataclass(slots=True)
class Step:
    """Counts within one step. `drafters` has drafted and accepted tokens of each drafter."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_requests: int = 0
    num_refused: int = 0
    first_token: Durations = field(default_factory=Durations)
    inter_token: Durations = field(default_factory=Durations)
    drafters: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


Row = dict[str, float | None]


class History:
    """Rows of the last hour. `statuses` returns the engines' current status by model."""

    def __init__(
        self,
        statuses: Callable[[], Mapping[str, EngineStatus]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._statuses, self._clock = statuses, clock
        self._began, self._began_wall = clock(), wall()
        self._rows: deque[Row] = deque(maxlen=NUM_STEPS)
        self._drafters: deque[dict[str, list[int]]] = deque(maxlen=NUM_STEPS)
        self._number = 0
        self._step = Step()

    @property
    def step(self) -> Step:
        """The current step; steps that have ended become rows."""
        number = int((self._clock() - self._began) / STEP_SECONDS)
        # If the machine slept for more than an hour, the whole history is empty.
        skipped = number - self._number - NUM_STEPS
        if skipped > 0:
            self._number += skipped
        while self._number < number:
            self._rows.append(self._row(self._step))
            self._drafters.append(self._step.drafters)
            self._step = Step()
            self._number += 1
        return self._step

    def _row(self, step: Step) -> Row:
        """Return the row of an ended step. Its gauges are the current values."""
        gauges = self._statuses().values()
        return {
            "tokens_per_second": step.num_tokens / STEP_SECONDS,
            "prompt_tokens_per_second": step.num_prompt_tokens / STEP_SECONDS,
            "requests_per_second": step.num_requests / STEP_SECONDS,
            "refusals_per_second": step.num_refused / STEP_SECONDS,
            "first_token_p50": step.first_token.percentile(50),
            "first_token_p95": step.first_token.percentile(95),
            "first_token_p99": step.first_token.percentile(99),
            "inter_token_p50": step.inter_token.percentile(50),
            "inter_token_p95": step.inter_token.percentile(95),
            "inter_token_p99": step.inter_token.percentile(99),
            "running": sum(status.num_running for status in gauges),
            "waiting": sum(status.num_waiting for status in gauges),
            "kv_usage": round(max((status.kv_usage for status in gauges), default=0.0), 4),
            "preempted": sum(status.num_preempted for status in gauges),
            "restarts": sum(status.num_restarts for status in gauges),
        }

    def since(self, number: int = 0) -> dict[str, Any]:
        """Return the steps from `number` on, as columns. `first` is the number of the first row,
        `next` that for the next call. Step i began at Unix time `began + i * step_seconds`."""
        _ = self.step
        first = self._number - len(self._rows)
        start = min(max(number, first), self._number)
        rows = list(self._rows)[start - first :]
        drafts = list(self._drafters)[start - first :]
        names = list(rows[0]) if rows else []
        drafters = sorted({name for one in drafts for name in one})
        return {
            "step_seconds": STEP_SECONDS,
            "began": round(self._began_wall, 3),
            "first": start,
            "next": self._number,
            "columns": {name: [row[name] for row in rows] for name in names},
            "drafters": {
                name: {
                    "drafted": [one.get(name, (0, 0))[0] for one in drafts],
                    "accepted": [one.get(name, (0, 0))[1] for one in drafts],
                }
                for name in drafters
            },
            "engines": {name: to_builtins(one) for name, one in self._statuses().items()},
        }


_OF_CLIENTS = (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499)
STATUSES = frozenset((*_OF_CLIENTS, 500, 501, 503, 504))
# Bounds of vLLM's histograms.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
FIRST_TOKEN = (*_FIRST, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
# A CPU writes small models' tokens faster than vLLM's first bound.
INTER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, *_BETWEEN, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
REQUEST = (*WHOLE, 240.0, 480.0, 960.0, 1920.0, 7680.0)


class Histogram:
    """Counts of durations below each bound, for one model."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class _Model:
    """Histograms of one model."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(INTER_TOKEN)
        self.request = Histogram(REQUEST)
        self.queue = Histogram(REQUEST)


class Metrics(Collector):
    """Metrics of one server. `statuses` returns its engines' status by the model's name."""

    def __init__(
        self,
        statuses: Callable[[], Mapping[str, EngineStatus]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._statuses = statuses
        self._history = History(statuses, clock, wall)
        self._models: dict[str, _Model] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None:
        """Count the tokens of a round, at the time when they arrive."""
        self._history.step.num_tokens += num_tokens
        self._counts["generation_tokens", model, str(engine)] += num_tokens

    def observe(self, ended: Ended) -> None:
        """Count a completion that ended; `wrote` has counted its tokens."""
        result, model, usage = ended.result, ended.model, ended.usage
        step, counts, stats = self._history.step, self._counts, result.stats
        own = self._models.setdefault(model, _Model())
        step.num_requests += 1
        reason = result.finish_reason or "abort"
        counts["request_success", model, str(ended.engine), reason, ended.api] += 1
        own.request.add(result.total_seconds)
        own.queue.add(result.queue_seconds)
        if result.token_seconds:
            own.first_token.add(result.token_seconds[0])
            step.first_token.add(result.token_seconds[0])
        for seconds in result.inter_token_latencies:
            own.inter_token.add(seconds)
            step.inter_token.add(seconds)
        if usage is not None:
            step.num_prompt_tokens += usage.prompt_tokens
            counts["prompt_tokens", model] += usage.prompt_tokens
            counts["prefix_cache_queries", model] += usage.prompt_tokens
            counts["prefix_cache_hits", model] += usage.cached_tokens
        if result.drafter_failed:
            counts["failures", model, stats.drafter] += 1
        if stats.num_drafted:
            self._observe_drafts(result, model)

    def _observe_drafts(self, result: GenerationResult, model: str) -> None:
        counts, stats = self._counts, result.stats
        name, histogram = stats.drafter, stats.acceptance_histogram
        of_step = self._history.step.drafters.setdefault(name, [0, 0])
        of_step[0] += stats.num_drafted
        of_step[1] += stats.num_accepted
        counts["drafts", model, name] += sum(histogram)
        counts["draft_tokens", model, name] += stats.num_drafted
        counts["accepted_tokens", model, name] += stats.num_accepted
        if stats.p_hit is not None:
            counts["hits", model, name] += stats.num_hits
            counts["misses", model, name] += stats.num_misses
        for num in range(1, len(histogram)):
            counts["per_pos", model, name, str(num - 1)] += sum(histogram[num:])

    def audited(self, outcome: Outcome, model: str) -> None:
        """Count an audit: a request that was run again without speculation, or should have been."""
        self._counts["audits", outcome, model] += 1

    def observe_refusal(self, status: int, api: Api) -> None:
        """Count an answer of status 400 or more."""
        self._history.step.num_refused += 1
        self._counts["refusals", str(status) if status in STATUSES else "other", api] += 1

    def history(self, since: int = 0) -> dict[str, Any]:
        """Return the last hour's steps from number `since` on (`History.since`), and the totals."""
        return self._history.since(since) | {"version": __version__, "totals": self._totals()}

    def _totals(self) -> dict[str, Any]:
        counts = self._counts
        accepted: dict[str, list[int]] = {}
        for key, count in counts.items():
            if key[0] == "per_pos":
                positions = accepted.setdefault(key[2], [])
                positions += [0] * (int(key[3]) + 1 - len(positions))
                positions[int(key[3])] += count
        drafters: dict[str, dict[str, Any]] = {}
        for kind in ("drafts", "draft_tokens", "accepted_tokens"):
            for key, count in counts.items():
                if key[0] == kind:
                    of = drafters.setdefault(key[2], {"per_pos": accepted.get(key[2], [])})
                    of[kind] = of.get(kind, 0) + count
        names = ("generation_tokens", "prompt_tokens", "request_success", "refusals")
        sums = {name: sum(n for key, n in counts.items() if key[0] == name) for name in names}
        audits = {key[1]: count for key, count in counts.items() if key[0] == "audits"}
        engines: dict[str, dict[str, int]] = {}
        for key, count in counts.items():
            if key[0] == "generation_tokens":
                engines.setdefault(key[1], {})[key[2]] = count
        return sums | {"drafters": drafters, "audits": audits, "engines": engines}

    def exposition(self) -> bytes:
        """Return the metrics in the text format of `prometheus_client.CONTENT_TYPE_LATEST`."""
        return generate_latest(self._registry)

    async def keep(self) -> None:
        """Add a row to the history at each step, as long as the server runs."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            self.history(since=2**62)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; Prometheus' registry calls this."""
        yield from self._counters()
        for name, words in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"outrider_{name}_seconds", words, labels=["model_name"])
            for model, own in self._models.items():
                found: Histogram = getattr(own, _FIELDS[name])
                family.add_metric([model], found.buckets, found.total)
            yield family
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        for kind, (name, words, labels) in _COUNTERS.items():
            family = CounterMetricFamily(f"outrider_{name}", words, labels=labels)
            for key, count in self._counts.items():
                if key[0] == kind:
                    family.add_metric(key[1:], count)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        found = [
            ([model, str(number)], status)
            for model, all_of_it in self._statuses().items()
            for number, status in enumerate(all_of_it.each)
        ]
        for name, (words, attribute) in _GAUGES.items():
            family = GaugeMetricFamily(f"outrider_{name}", words, labels=_ENGINE)
            for labels, status in found:
                family.add_metric(labels, getattr(status, attribute))
            yield family
        for name, (words, attribute) in _ENGINE_COUNTERS.items():
            family = CounterMetricFamily(f"outrider_{name}", words, labels=_ENGINE)
            for labels, status in found:
                family.add_metric(labels, getattr(status, attribute))
            yield family
        states = GaugeMetricFamily(
            "outrider_engine_state",
            "1 for the state that the engine is in.",
            labels=[*_ENGINE, "state"],
        )
        for labels, status in found:
            for state in get_args(EngineState):
                states.add_metric([*labels, state], float(status.state == state))
        yield states


# The engines of a model are numbered; a single engine has number 0.
_ENGINE = ["model_name", "engine"]
_COUNTERS = {
    "generation_tokens": ("generation_tokens", "Tokens written.", _ENGINE),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts.", ["model_name"]),
    "prefix_cache_queries": (
        "prefix_cache_queries",
        "Prompt tokens that were looked for in the prefix cache.",
        ["model_name"],
    ),
    "prefix_cache_hits": (
        "prefix_cache_hits",
        "Prompt tokens that the prefix cache held.",
        ["model_name"],
    ),
    "request_success": (
        "request_success",
        "Requests that ended, by their reason.",
        [*_ENGINE, "finished_reason", "api"],
    ),
    "refusals": ("http_refusals", "Answers of status 400 or more.", ["status", "api"]),
    "audits": (
        "audits",
        "Requests run again without speculation, by whether their text was the same.",
        ["outcome", "model_name"],
    ),
    "drafts": ("spec_decode_num_drafts", "Drafts verified.", ["model_name", "drafter"]),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Tokens drafted.", ["model_name", "drafter"]),
    "accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Drafted tokens that the target accepted.",
        ["model_name", "drafter"],
    ),
    "hits": (
        "spec_decode_num_hits",
        "Drafts made ahead of the verdict that were ready when asked for.",
        ["model_name", "drafter"],
    ),
    "misses": (
        "spec_decode_num_misses",
        "Drafts that a drafter ahead did not have ready.",
        ["model_name", "drafter"],
    ),
    "failures": (
        "spec_decode_num_failures",
        "Requests that went on without drafts, since their drafter failed.",
        ["model_name", "drafter"],
    ),
    "per_pos": (
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts whose token at this position was accepted.",
        ["model_name", "drafter", "position"],
    ),
}
_HISTOGRAMS = {
    "time_to_first_token": "From handing in to the first token.",
    "inter_token_latency": "Each later token's share of the time since the round before.",
    "e2e_request_latency": "From handing in to the last token.",
    "request_queue_time": "Waiting before the engine began.",
}
_FIELDS = {
    "time_to_first_token": "first_token",
    "inter_token_latency": "inter_token",
    "e2e_request_latency": "request",
    "request_queue_time": "queue",
}
_GAUGES = {
    "num_requests_running": ("Requests that are being written.", "num_running"),
    "num_requests_waiting": ("Requests that wait.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 1 for all of it.", "kv_usage"),
}
_ENGINE_COUNTERS = {
    "num_preemptions": ("Requests set back for others.", "num_preempted"),
    "engine_restarts": ("Engines started again after they died.", "num_restarts"),
}
