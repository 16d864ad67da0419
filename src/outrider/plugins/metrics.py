"""Observers of a server's requests: metrics, as Prometheus text for /metrics and as an hour of
history for the dashboard; and audits, which run a share of the requests again.

Metrics with the same meaning as vLLM's have the same names except for the prefix, so dashboards for
vLLM are easily adapted. Label values come from closed sets (APIs, models, drafters, statuses,
reasons), never from the content of requests. Only the event loop's thread counts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias, cast, get_args

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider import __version__
from outrider.api.result import GenerationResult
from outrider.core.errors import OutriderError
from outrider.server.port import EngineRequest, EngineState, EngineStatus, is_repeatable
from outrider.server.site import Api, Ended, Site

_LOG = logging.getLogger(__name__)
Outcome: TypeAlias = Literal["same", "different", "dropped", "failed"]
# History of the last hour in steps of two seconds, for the dashboard and `outrider top`.
#
# Percentiles of a step come from counts of durations in bins that grow by 5 %, so memory depends
# neither on the number of requests nor on their length.
STEP_SECONDS = 2.0
NUM_STEPS = 1800
_SHORTEST = 1e-6
_GROWTH = math.log(1.05)
_PERCENTS = (50, 95, 99)


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
            **{f"first_token_p{one}": step.first_token.percentile(one) for one in _PERCENTS},
            **{f"inter_token_p{one}": step.inter_token.percentile(one) for one in _PERCENTS},
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
            "engines": {name: msgspec.to_builtins(one) for name, one in self._statuses().items()},
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
        # By the model, and by the name of the histogram.
        self._histograms: dict[str, dict[str, Histogram]] = {}
        # By the name of the counter, and by its labels.
        self._counts: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None:
        """Count the tokens of a round, at the time when they arrive."""
        self._history.step.num_tokens += num_tokens
        self._counts["generation_tokens"][model, str(engine)] += num_tokens

    def observe(self, ended: Ended) -> None:
        """Count a completion that ended; `wrote` has counted its tokens."""
        result, model, usage = ended.result, ended.model, ended.usage
        step, counts, stats = self._history.step, self._counts, result.stats
        if model not in self._histograms:
            self._histograms[model] = {name: Histogram(one[1]) for name, one in _HISTOGRAMS.items()}
        own = self._histograms[model]
        step.num_requests += 1
        reason = result.finish_reason or "abort"
        counts["request_success"][model, str(ended.engine), reason, ended.api] += 1
        own["e2e_request_latency"].add(result.total_seconds)
        own["request_queue_time"].add(result.queue_seconds)
        if result.token_seconds:
            own["time_to_first_token"].add(result.token_seconds[0])
            step.first_token.add(result.token_seconds[0])
        for seconds in result.inter_token_latencies:
            own["inter_token_latency"].add(seconds)
            step.inter_token.add(seconds)
        if usage is not None:
            step.num_prompt_tokens += usage.prompt_tokens
            counts["prompt_tokens"][model,] += usage.prompt_tokens
            counts["prefix_cache_queries"][model,] += usage.prompt_tokens
            counts["prefix_cache_hits"][model,] += usage.cached_tokens
        if result.drafter_failed:
            counts["spec_decode_num_failures"][model, stats.drafter] += 1
        if stats.num_drafted:
            self._observe_drafts(result, model)

    def _observe_drafts(self, result: GenerationResult, model: str) -> None:
        counts, stats = self._counts, result.stats
        name, histogram = stats.drafter, stats.acceptance_histogram
        of_step = self._history.step.drafters.setdefault(name, [0, 0])
        of_step[0] += stats.num_drafted
        of_step[1] += stats.num_accepted
        counts["spec_decode_num_drafts"][model, name] += sum(histogram)
        counts["spec_decode_num_draft_tokens"][model, name] += stats.num_drafted
        counts["spec_decode_num_accepted_tokens"][model, name] += stats.num_accepted
        for member, one in stats.members.items():
            figures = cast("Mapping[str, int]", one)
            for kind in _OF_MEMBER:
                counts[f"spec_decode_member_{kind}"][model, member] += figures[kind]
        if stats.p_hit is not None:
            counts["spec_decode_num_hits"][model, name] += stats.num_hits
            counts["spec_decode_num_misses"][model, name] += stats.num_misses
        for num in range(1, len(histogram)):
            counts[_PER_POSITION][model, name, str(num - 1)] += sum(histogram[num:])

    def audited(self, outcome: Outcome, model: str) -> None:
        """Count an audit: a request that was run again without speculation, or should have been."""
        self._counts["audits"][outcome, model] += 1

    def observe_refusal(self, status: int, api: Api) -> None:
        """Count an answer of status 400 or more."""
        self._history.step.num_refused += 1
        shown = str(status) if status in STATUSES else "other"
        self._counts["http_refusals"][shown, api] += 1

    def history(self, since: int = 0) -> dict[str, Any]:
        """Return the last hour's steps from number `since` on (`History.since`), and the totals."""
        return self._history.since(since) | {"version": __version__, "totals": self._totals()}

    def _totals(self) -> dict[str, Any]:
        counts = self._counts
        drafters: dict[str, dict[str, Any]] = {}
        for kind in ("drafts", "draft_tokens", "accepted_tokens"):
            for (_, name), count in counts[f"spec_decode_num_{kind}"].items():
                of = drafters.setdefault(name, {"per_pos": []})
                of[kind] = of.get(kind, 0) + count
        for (_, name, position), count in counts[_PER_POSITION].items():
            accepted = drafters[name]["per_pos"]
            accepted += [0] * (int(position) + 1 - len(accepted))
            accepted[int(position)] += count
        audits, engines = Counter[str](), defaultdict[str, dict[str, int]](dict)
        for (outcome, _), count in counts["audits"].items():
            audits[outcome] += count
        for (model, engine), count in counts["generation_tokens"].items():
            engines[model][engine] = count
        names = ("generation_tokens", "prompt_tokens", "request_success", "http_refusals")
        sums: dict[str, Any] = {one.removeprefix("http_"): counts[one].total() for one in names}
        return sums | {"drafters": drafters, "audits": dict(audits), "engines": dict(engines)}

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
        for name, (words, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"outrider_{name}_seconds", words, labels=["model_name"])
            for model, own in self._histograms.items():
                family.add_metric([model], own[name].buckets, own[name].total)
            yield family
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        for name, (words, labels) in _COUNTERS.items():
            family = CounterMetricFamily(f"outrider_{name}", words, labels=labels)
            for key, count in self._counts[name].items():
                family.add_metric(key, count)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        found = [
            ([model, str(number)], status)
            for model, all_of_it in self._statuses().items()
            for number, status in enumerate(all_of_it.each)
        ]
        for name, (kind, words, attribute) in _OF_ENGINES.items():
            family = kind(f"outrider_{name}", words, labels=_ENGINE)
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
_MODEL, _DRAFTER = ["model_name"], ["model_name", "drafter"]
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_OF_MEMBER = ("num_drafted", "num_accepted", "seconds", "trial_tokens", "trial_seconds")
_COUNTERS = {
    "generation_tokens": ("Tokens written.", _ENGINE),
    "prompt_tokens": ("Tokens of prompts.", _MODEL),
    "prefix_cache_queries": ("Prompt tokens that were looked for in the prefix cache.", _MODEL),
    "prefix_cache_hits": ("Prompt tokens that the prefix cache held.", _MODEL),
    "request_success": (
        "Requests that ended, by their reason.",
        [*_ENGINE, "finished_reason", "api"],
    ),
    "http_refusals": ("Answers of status 400 or more.", ["status", "api"]),
    "audits": (
        "Requests run again without speculation, by whether their text was the same.",
        ["outcome", "model_name"],
    ),
    "spec_decode_num_drafts": ("Drafts verified.", _DRAFTER),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", _DRAFTER),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that the target accepted.", _DRAFTER),
    "spec_decode_member_num_drafted": ("Tokens drafted by one member.", _DRAFTER),
    "spec_decode_member_num_accepted": ("Tokens of one member that were accepted.", _DRAFTER),
    "spec_decode_member_seconds": ("Seconds of one member's own passes.", _DRAFTER),
    "spec_decode_member_trial_tokens": ("Tokens of drafts made to learn.", _DRAFTER),
    "spec_decode_member_trial_seconds": ("Seconds of drafts made to learn.", _DRAFTER),
    "spec_decode_num_hits": (
        "Drafts made ahead of the verdict that were ready when asked for.",
        _DRAFTER,
    ),
    "spec_decode_num_misses": ("Drafts that a drafter ahead did not have ready.", _DRAFTER),
    "spec_decode_num_failures": (
        "Requests that went on without drafts, since their drafter failed.",
        _DRAFTER,
    ),
    _PER_POSITION: (
        "Drafts whose token at this position was accepted.",
        [*_DRAFTER, "position"],
    ),
}
_HISTOGRAMS = {
    "time_to_first_token": ("From handing in to the first token.", FIRST_TOKEN),
    "inter_token_latency": (
        "Each later token's share of the time since the round before.",
        INTER_TOKEN,
    ),
    "e2e_request_latency": ("From handing in to the last token.", REQUEST),
    "request_queue_time": ("Waiting before the engine began.", REQUEST),
}
_OF_ENGINES = {
    "num_requests_running": (GaugeMetricFamily, "Requests that are being written.", "num_running"),
    "num_requests_waiting": (GaugeMetricFamily, "Requests that wait.", "num_waiting"),
    "kv_cache_usage_perc": (
        GaugeMetricFamily,
        "Share of the KV cache in use, 1 for all of it.",
        "kv_usage",
    ),
    "num_preemptions": (CounterMetricFamily, "Requests set back for others.", "num_preempted"),
    "engine_restarts": (
        CounterMetricFamily,
        "Engines started again after they died.",
        "num_restarts",
    ),
}


# `--audit`: a share of the requests is run again without speculation; the texts must be equal.
#
# Only requests whose text is promised to be the same are audited: greedy ones, and those whose
# noise is drawn by token position. An audit runs while the server is idle and stops as soon as a
# request arrives, so it delays a request by a round at most. An audit that finds no idle time is
# dropped, and counted as dropped. A difference is reported by the log (without any of the text), by
# `/health`, by the dashboard and by a counter.
# Audits that wait for an idle engine, and how often one gives way before it is dropped.
_MOST_WAITING, _MOST_TRIES = 64, 16
_LOOK_SECONDS = 0.01


def metric_routes(metrics: Metrics) -> list[Route]:
    """Return the routes `/metrics` for Prometheus and `/outrider/v1/history?since=N`."""

    async def exposition(_request: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def history(request: Request) -> Response:
        said = request.query_params.get("since", "0")
        since = int(said) if said.isascii() and said.isdigit() and len(said) < 16 else 0
        body = msgspec.json.encode(metrics.history(since))
        headers = {"cache-control": "no-store"}
        return Response(body, media_type="application/json", headers=headers)

    return [
        Route("/metrics", exposition, methods=["GET"]),
        Route("/outrider/v1/history", history, methods=["GET"]),
    ]


class Auditor:
    """An observer of a `site`'s requests that audits a `share` of them while `run` runs. It calls
    `report` with the outcome of each audit and the model's name."""

    def __init__(
        self,
        site: Site,
        share: float,
        report: Callable[[Outcome, str], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sites = {one.names[0]: one for one in site.all}
        self._traffic, self._share, self._draw = site.traffic, share, draw
        self._report = report
        self._waiting: deque[Ended] = deque()
        self._has_work = asyncio.Event()

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None: ...

    def observe_refusal(self, status: int, api: Api) -> None: ...

    def observe(self, ended: Ended) -> None:
        if not self._is_promised(ended) or self._draw() >= self._share:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._report("dropped", ended.model)
            return
        self._waiting.append(ended)
        self._has_work.set()

    async def run(self) -> None:
        """Audit until cancelled, as long as the server runs."""
        while True:
            if not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
            ended = self._waiting.popleft()
            self._report(await self._outcome(ended), ended.model)

    def _is_promised(self, ended: Ended) -> bool:
        """Return whether the request used drafts and its text must be the same without them."""
        result, card = ended.result, self._sites[ended.model].port.card
        whole = result.finish_reason in ("stop", "length") and not ended.request.written
        return whole and result.stats.num_drafted > 0 and is_repeatable(card, ended.request.params)

    async def _outcome(self, ended: Ended) -> Outcome:
        request = _plain(ended.request)
        for _ in range(_MOST_TRIES):
            while not self._is_idle(ended.model):
                if self._sites[ended.model].port.status.state == "unloaded":
                    return "dropped"
                await asyncio.sleep(_LOOK_SECONDS)
            work = asyncio.ensure_future(self._ids(ended.model, request))
            try:
                while not work.done() and self._is_idle(ended.model):
                    await asyncio.wait({work}, timeout=_LOOK_SECONDS)
                if work.done():
                    return self._compared(ended, work.result())
            except (OutriderError, RuntimeError) as error:
                # The engine may have crashed in the meantime, or its model was unloaded.
                _LOG.info("an audit could not be run: %s", type(error).__name__)
                return "failed"
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        return "dropped"

    def _is_idle(self, model: str) -> bool:
        """Return whether no request of any model is in flight: all models share one machine."""
        ready = self._sites[model].port.status.state == "ready"
        return ready and not self._traffic.num_running and not self._traffic.ending

    async def _ids(self, model: str, request: EngineRequest) -> tuple[int, ...]:
        stream = self._sites[model].port.stream(request)
        try:
            async for _ in stream:
                pass
            return stream.result.token_ids
        finally:
            stream.cancel()

    def _compared(self, ended: Ended, plain: tuple[int, ...]) -> Outcome:
        ids, stats = ended.result.token_ids, ended.result.stats
        if ids == plain:
            return "same"
        pairs = zip(ids, plain, strict=False)
        shorter = min(len(ids), len(plain))
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        params = ended.request.params
        _LOG.error(
            "audit: request %s of %s is another text without speculation, from token %d of %d on "
            "(drafter %s, K %d, rule %s, temperature %g, seed %s)",
            *(ended.request_id, ended.model, first, len(ids), stats.drafter, stats.k),
            *(params.sampler or self._sites[ended.model].port.card.sampler,),
            *(params.temperature, params.seed),
        )
        self._traffic.num_alarms += 1
        return "different"


def _plain(request: EngineRequest) -> EngineRequest:
    """Return the request without speculation, log-probabilities and rounds. It has no key, whose
    share would pay for it, but still finds the key's entries in the prefix cache."""
    params = replace(
        request.params,
        speculative=False,
        drafter=None,
        k=None,
        prediction="",
        logprobs=False,
        top_logprobs=0,
        prompt_logprobs=None,
        round_events=False,
        max_time=0.0,
    )
    return msgspec.structs.replace(request, params=params, key="", weight=1.0)
