"""What a server counts: names and labels, an hour of history, percentiles within their bins."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from outrider.api.result import GenerationResult
from outrider.core.params import SamplingParams
from outrider.metrics import MemberStats, Stats
from outrider.plugins.metrics import NUM_STEPS, STEP_SECONDS, Durations, History, Metrics
from outrider.server.port import EngineRequest, EngineStatus
from outrider.server.site import Ended, Usage

SECONDS = {"prefill": 0.1, "draft": 0.1, "verify": 0.2, "accept": 0.1, "total": 1.0}
STATUS = EngineStatus(
    state="ready", num_running=2, num_waiting=1, kv_usage=0.25, num_preempted=3, num_restarts=1
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def result(**changes: Any) -> GenerationResult:
    stats = Stats("model", 4, 3, 3, 12, 6, 9, SECONDS, (1, 0, 1, 0, 1))
    arrivals = (0.2, 0.2, 0.2, 0.5, 1.0)
    fields: dict[str, Any] = {
        "text": "",
        "token_ids": (1,) * 5,
        "finish_reason": "length",
        "stats": stats,
        "token_seconds": arrivals,
    }
    return GenerationResult(**(fields | changes))


def done(result: GenerationResult, usage: Usage | None = None) -> Ended:
    request = EngineRequest(prompt_ids=(1,), params=SamplingParams(), structure={})
    return Ended(result=result, request=request, model="tiny", api="chat", usage=usage)


def made(clock: Clock | None = None) -> Metrics:
    return Metrics(lambda: {"tiny": STATUS}, clock or Clock(), lambda: 1e9)


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for family in families
        for one in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"outrider_{name}{sorted(labels.items())}"]


def test_a_request_is_counted_under_vllms_names() -> None:
    metrics = made()
    metrics.wrote(5, model="tiny", engine=0)
    metrics.observe(done(result(), usage=Usage(7, 5, cached_tokens=4)))
    own = {"model_name": "tiny", "drafter": "model"}
    assert value(metrics, "generation_tokens_total", model_name="tiny", engine="0") == 5
    assert value(metrics, "prompt_tokens_total", model_name="tiny") == 7
    assert value(metrics, "prefix_cache_hits_total", model_name="tiny") == 4
    assert value(metrics, "spec_decode_num_drafts_total", **own) == 3
    assert value(metrics, "spec_decode_num_draft_tokens_total", **own) == 12
    assert value(metrics, "spec_decode_num_accepted_tokens_total", **own) == 6
    of_place = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, of_place, position=str(i), **own) for i in range(4)] == [2, 2, 1, 1]
    ended = {"model_name": "tiny", "engine": "0", "finished_reason": "length", "api": "chat"}
    assert value(metrics, "request_success_total", **ended) == 1
    assert value(metrics, "time_to_first_token_seconds_count", model_name="tiny") == 1
    assert value(metrics, "time_to_first_token_seconds_sum", model_name="tiny") == 0.2
    assert value(metrics, "inter_token_latency_seconds_count", model_name="tiny") == 2
    assert value(metrics, "inter_token_latency_seconds_bucket", model_name="tiny", le="0.4") == 1
    assert value(metrics, "e2e_request_latency_seconds_sum", model_name="tiny") == 1.0


def test_each_member_has_counters_of_its_own() -> None:
    metrics = made()
    model = MemberStats(
        num_rounds=2,
        num_drafted=8,
        num_accepted=5,
        seconds=0.25,
        num_trials=1,
        trial_tokens=4,
        trial_seconds=0.125,
    )
    suffix: MemberStats = {**model, "num_drafted": 4, "num_accepted": 1, "seconds": 0.0}
    members = {"model": model, "suffix": suffix}
    for _ in range(2):
        metrics.observe(done(result(stats=replace(result().stats, members=members))))
    for name, one in members.items():
        own = {"model_name": "tiny", "drafter": name}
        for figure in ("num_drafted", "num_accepted", "seconds", "trial_tokens", "trial_seconds"):
            assert value(metrics, f"spec_decode_member_{figure}_total", **own) == 2 * one[figure]


def test_hits_of_a_drafter_ahead_are_counted() -> None:
    metrics = made()
    metrics.observe(done(result()))
    assert not any("num_hits" in name for name in samples(metrics))
    ahead = replace(result().stats, num_hits=3, num_misses=1)
    for _ in range(2):
        metrics.observe(done(result(stats=ahead)))
    own = {"model_name": "tiny", "drafter": "model"}
    assert value(metrics, "spec_decode_num_hits_total", **own) == 6
    assert value(metrics, "spec_decode_num_misses_total", **own) == 2


def test_a_drafter_that_failed_is_counted() -> None:
    metrics = made()
    metrics.observe(done(result()))
    metrics.observe(done(result(drafter_failed=True, notes=("whatever its words", "cancelled"))))
    own = {"model_name": "tiny", "drafter": "model"}
    assert value(metrics, "spec_decode_num_failures_total", **own) == 1


def test_gauges_are_those_of_the_engine_at_this_moment() -> None:
    metrics = made()
    own = {"model_name": "tiny", "engine": "0"}
    assert value(metrics, "num_requests_running", **own) == 2
    assert value(metrics, "num_requests_waiting", **own) == 1
    assert value(metrics, "kv_cache_usage_perc", **own) == 0.25
    assert value(metrics, "num_preemptions_total", **own) == 3
    assert value(metrics, "engine_restarts_total", **own) == 1
    assert value(metrics, "engine_state", state="ready", **own) == 1
    assert value(metrics, "engine_state", state="failed", **own) == 0


def test_of_several_engines_each_is_counted() -> None:
    lost = EngineStatus(state="restarting", num_restarts=2)
    both = EngineStatus(state="ready", num_running=2, num_restarts=3, engines=(STATUS, lost))
    metrics = Metrics(lambda: {"tiny": both}, Clock(), lambda: 1e9)
    metrics.wrote(5, model="tiny", engine=1)
    names = ("engine_restarts_total", "num_requests_running")
    found = {
        name: [value(metrics, name, model_name="tiny", engine=e) for e in "01"] for name in names
    }
    assert found == {"engine_restarts_total": [1, 2], "num_requests_running": [2, 0]}
    assert value(metrics, "engine_state", model_name="tiny", engine="1", state="restarting") == 1
    assert value(metrics, "generation_tokens_total", model_name="tiny", engine="1") == 5
    told = metrics.history()
    assert told["totals"]["engines"] == {"tiny": {"1": 5}}
    assert [one["state"] for one in told["engines"]["tiny"]["engines"]] == ["ready", "restarting"]


def test_labels_come_from_closed_sets_whatever_is_refused() -> None:
    metrics = made()
    for status in range(400, 1000):
        metrics.observe_refusal(status, "other")
    found = [name for name in samples(metrics) if name.startswith("outrider_http_refusals_total")]
    assert len(found) < 25
    assert value(metrics, "http_refusals_total", status="429", api="other") == 1
    assert value(metrics, "http_refusals_total", status="other", api="other") > 500


def test_a_plain_request_says_nothing_of_drafts() -> None:
    metrics = made()
    plain = Stats("none", 0, 5, 5, 0, 0, 5, SECONDS)
    metrics.observe(done(result(stats=plain, finish_reason=None)))
    assert not [name for name in samples(metrics) if name.startswith("outrider_spec_decode")]
    assert metrics.history()["totals"]["drafters"] == {}


def test_history_has_a_row_a_step_and_gives_only_what_is_new() -> None:
    clock = Clock()
    metrics = made(clock)
    metrics.wrote(8, model="tiny", engine=0)
    metrics.observe(done(result()))
    assert metrics.history()["next"] == 0
    clock.now += 3 * STEP_SECONDS + 0.1
    metrics.wrote(2, model="tiny", engine=0)
    clock.now += STEP_SECONDS
    first = metrics.history()
    assert (first["first"], first["next"]) == (0, 4)
    columns = first["columns"]
    assert columns["tokens_per_second"] == [4, 0, 0, 1]
    assert columns["requests_per_second"] == [0.5, 0, 0, 0]
    assert columns["running"] == [2, 2, 2, 2]
    assert columns["first_token_p50"] == [pytest.approx(0.2, rel=0.03), None, None, None]
    assert first["drafters"] == {"model": {"drafted": [12, 0, 0, 0], "accepted": [6, 0, 0, 0]}}
    assert first["totals"]["drafters"]["model"]["per_pos"] == [2, 2, 1, 1]
    assert first["engines"]["tiny"]["state"] == "ready"
    later = metrics.history(since=3)
    assert (later["first"], later["next"]) == (3, 4)
    assert later["columns"]["tokens_per_second"] == [1]
    assert metrics.history(since=4)["columns"] == {}
    assert metrics.history(since=2**60)["first"] == 4


def test_history_keeps_an_hour_and_no_more() -> None:
    clock = Clock()
    history = History(dict, clock, lambda: 0.0)
    history.step.num_tokens = 2
    for _ in range(3):
        clock.now += NUM_STEPS * STEP_SECONDS
        assert len(history.since()["columns"]["running"]) == NUM_STEPS
    found = history.since()
    assert found["next"] - found["first"] == NUM_STEPS
    assert not any(found["columns"]["tokens_per_second"])
    clock.now += 1e9
    assert len(history.since()["columns"]["running"]) == NUM_STEPS


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200), st.sampled_from([50, 95, 99]))
def test_a_percentile_is_within_its_bin(values: list[float], percent: int) -> None:
    durations = Durations()
    for one in values:
        durations.add(one)
    exact = float(np.percentile(values, percent, method="inverted_cdf"))
    found = durations.percentile(percent)
    assert found is not None
    assert abs(found / exact - 1) < 0.03


def test_durations_hold_few_bins_however_many_there_are() -> None:
    durations, numbers = Durations(), random.Random(1)
    assert durations.percentile(50) is None
    for _ in range(50_000):
        durations.add(numbers.lognormvariate(-4, 2))
    durations.add(0.0)
    assert durations.count == 50_001
    assert len(durations.bins) < 450


def test_the_board_asks_only_for_what_is_told() -> None:
    board = (Path(__file__).parents[3] / "recipes" / "grafana.json").read_text("utf-8")
    queries = [
        target["expr"] for panel in json.loads(board)["panels"] for target in panel["targets"]
    ]
    metrics = made()
    metrics.wrote(1, model="tiny", engine=0)
    metrics.observe_refusal(400, "chat")
    metrics.audited("different", "tiny")
    metrics.audited("different", "other")
    metrics.observe(done(result(queue_seconds=0.1), usage=Usage(7, 5)))
    assert value(metrics, "request_queue_time_seconds_sum", model_name="tiny") == 0.1
    assert value(metrics, "audits_total", model_name="tiny", outcome="different") == 1
    assert metrics.history()["totals"]["audits"] == {"different": 2}
    known = {name.partition("[")[0] for name in samples(metrics)}
    assert len(queries) > 15
    assert {name for query in queries for name in re.findall(r"outrider_\w+", query)} <= known
