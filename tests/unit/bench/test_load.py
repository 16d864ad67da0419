"""The load generator on a fake clock: who is in flight when, what is late, what is counted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.engine_runs import FakeServer
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider_lab.bench.load import ClosedLoop, OpenLoop, Run, drive, tally
from outrider_lab.bench.requests import (
    Request,
    arriving,
    poisson_arrivals,
    replay,
    requests_from,
    texts_of,
)
from outrider_lab.bench.studies.engines_run import row_of

PARAMS = SamplingParams(max_tokens=4, seed=7)


def requests(num: int, max_tokens: int = 4) -> list[Request]:
    return [Request(name=f"r{i}", prompt=f"p{i}", max_tokens=max_tokens) for i in range(num)]


def closed(server: FakeServer, num: int, in_flight: int, **more: float) -> Run:
    loop = ClosedLoop(num_in_flight=in_flight, **more)
    return drive(server, requests(num), loop, PARAMS, time=server.time)


@given(num=st.integers(1, 12), in_flight=st.integers(1, 12), batch=st.integers(1, 12))
def test_a_closed_loop_never_has_more_in_flight(num: int, in_flight: int, batch: int) -> None:
    server = FakeServer(batch_size=batch)
    run = closed(server, num, in_flight)
    assert server.most_live == min(num, in_flight, batch)
    assert [one.number for one in run.served] == list(range(num))
    assert all(one.result is not None and one.arrived == one.submitted for one in run.served)
    # Everybody needs four steps of those that the batch leaves it.
    places = min(in_flight, batch)
    assert server.num_steps == 4 * -(-num // places)
    assert run.seconds == pytest.approx(0.01 * server.num_steps)


def test_what_earlier_runs_left_is_forgotten_first() -> None:
    server = FakeServer()
    for _ in range(2):
        closed(server, 3, 1)
    assert server.num_forgotten == 2


def test_level_0_rests_between_requests_and_leaves_the_rests_out() -> None:
    server = FakeServer()
    run = closed(server, 3, 1, gap_seconds=0.5)
    assert server.clock() == pytest.approx(2 * 0.5 + 12 * 0.01)
    assert run.seconds == pytest.approx(12 * 0.01)
    assert [one.submitted for one in run.served] == pytest.approx([0, 0.54, 1.08])
    assert tally(run).tokens_per_second == pytest.approx(100)


def test_every_request_has_a_seed_of_its_own_and_its_own_limit() -> None:
    server = FakeServer()
    closed(server, 3, 2)
    assert server.seeds == [7, 8, 9]


def test_a_closed_loop_stops_asking_after_its_duration_and_waits_for_the_rest() -> None:
    server = FakeServer()
    loop = ClosedLoop(num_in_flight=2, duration=0.1)
    source = requests_from(["a", "b", "c"], max_tokens=4)
    run = drive(server, source, loop, PARAMS, time=server.time)
    # Pairs begin at 0, 40 and 80 ms; at 120 the time is over.
    assert len(run.served) == 6
    assert run.seconds == pytest.approx(0.12)
    assert [one.request.name for one in run.served[:4]] == [
        *("prompt_000", "prompt_001", "prompt_002", "prompt_000")
    ]


def test_latencies_of_an_open_loop_count_from_the_arrival_on() -> None:
    """Two arrive at once, and one may be in flight: the other has waited when it begins."""
    server = FakeServer()
    both = [
        Request(name=name, prompt=name, max_tokens=4, arrival_seconds=0.005) for name in ("a", "b")
    ]
    run = drive(server, both, OpenLoop(max_in_flight=1), PARAMS, time=server.time)
    first, second = run.served
    assert first.token_seconds == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert second.token_seconds == pytest.approx([0.05, 0.06, 0.07, 0.08])
    assert (second.arrived, second.submitted) == pytest.approx((0.005, 0.045))
    assert server.most_live == 1
    row = row_of(second)
    assert (row["ttft_ms"], row["waited_ms"], row["status"]) == (50, 40, "success")


def test_an_open_loop_sleeps_until_the_next_arrival() -> None:
    server = FakeServer()
    moments = [0.1, 0.1, 3.0]
    late = arriving(["x", "y"], moments, max_tokens=1)
    run = drive(server, late, OpenLoop(max_in_flight=8), PARAMS, time=server.time)
    assert [one.submitted for one in run.served] == pytest.approx(moments)
    assert [one.request.prompt for one in run.served] == ["x", "y", "x"]
    assert run.seconds == pytest.approx(3.01)


def test_a_request_that_fails_ends_alone_and_a_full_queue_is_a_rejection() -> None:
    server = FakeServer(batch_size=1, max_waiting=1, broken=("p0",))
    run = closed(server, 4, 3)
    reasons = [one.reason for one in run.served]
    assert reasons[0] == "ValueError: broken"
    assert [one.rejected for one in run.served] == [False, False, True, False]
    assert (reasons[2] or "").startswith("QueueFullError: 1 requests wait already")
    found = tally(run)
    assert (found.num_requests, found.num_ok, found.num_rejected) == (4, 2, 1)
    assert found.num_tokens == 8
    assert [row_of(one)["status"] for one in run.served] == [
        *("failure", "success", "rejected", "success")
    ]


def test_a_closed_loop_asks_a_full_queue_again_when_something_has_moved() -> None:
    server = FakeServer(batch_size=1, max_waiting=0)
    loop = ClosedLoop(num_in_flight=2, duration=0.1)
    run = drive(server, requests_from(["a"], max_tokens=4), loop, PARAMS, time=server.time)
    # One is served at a time, in four steps; the other place is refused before each step.
    assert sum(not one.rejected for one in run.served) == 3
    assert sum(one.rejected for one in run.served) <= server.num_steps + 3


class Deaf(FakeServer):
    """Forgets what it was asked."""

    def advance(self) -> None:
        self.tickets.clear()


def test_a_server_that_forgets_a_request_does_not_hang_the_run() -> None:
    server = Deaf()
    run = closed(server, 2, 2)
    assert all("has nothing to do" in (one.reason or "") for one in run.served)


class Interrupted(FakeServer):
    """The user gives up during the third step."""

    def advance(self) -> None:
        if self.num_steps == 2:
            raise KeyboardInterrupt
        super().advance()


def test_an_interrupt_cancels_what_is_in_flight() -> None:
    server = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        closed(server, 5, 2)
    assert server.cancelled == ["p0", "p1"]


def test_numbers_of_a_run_are_those_of_its_rounds() -> None:
    server = FakeServer(tokens=2, ahead=True)
    found = tally(closed(server, 2, 2))
    assert (found.num_tokens, found.num_rounds, found.num_passes) == (8, 4, 2)
    assert (found.num_drafted, found.num_accepted) == (16, 4)
    assert found.acceptance == pytest.approx(1 / 4)
    # The pass that read prompts has no say in what a verification takes.
    assert (found.draft_ms, found.verify_ms, found.mean_batch) == (2.5, 5, 2)
    assert (found.num_hits, found.num_misses, found.hit_tokens, found.miss_tokens) == (2, 2, 4, 4)
    assert found.p_hit == pytest.approx(1 / 2)
    assert found.num_draft_steps == 8
    # Each token's share of its round, without the first round's two.
    assert (found.itl_p50_ms, found.itl_p95_ms) == (5, 5)
    assert (found.round_p50_ms, found.ttft_p50_ms, found.total_mean_ms) == (10, 10, 20)
    assert found.cumulative_p95_ms == 20
    assert found.tokens_per_second == pytest.approx(400)


def test_a_run_in_which_nothing_ended_well_has_no_latencies() -> None:
    found = tally(closed(FakeServer(broken=("p0", "p1")), 2, 1))
    assert found.itl_p50_ms is None
    assert found.ttft_p50_ms is None
    assert found.tokens_per_second == 0
    assert found.p_hit is None


@given(rate=st.floats(0.1, 100), num=st.integers(1, 50), seed=st.integers(0, 2**31))
def test_arrivals_are_in_order_and_repeat_with_their_seed(rate: float, num: int, seed: int) -> None:
    found = poisson_arrivals(rate, seed=seed, num=num)
    assert found == poisson_arrivals(rate, seed=seed, num=num)
    assert len(found) == num
    assert all(a < b for a, b in pairwise((0.0, *found)))
    half = poisson_arrivals(rate, seed=seed, duration=found[-1])
    assert half == found[:-1]


def test_gaps_follow_the_exponential_distribution() -> None:
    gaps = [b - a for a, b in pairwise((0.0, *poisson_arrivals(5.0, seed=1, num=20_000)))]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.08)
    # P(gap > t) = exp(-rate t); at the mean it is 1 / e.
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)


def test_a_trace_is_replayed_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(1.5, "later", 3), (0.5, "first", 2)]
    path.write_text(
        "\n".join(
            json.dumps({"arrival_seconds": t, "prompt": p, "max_tokens": n}) for t, p, n in rows
        )
        + "\n\n"
    )
    recorded = replay(path)
    assert [(r.arrival_seconds, r.prompt, r.max_tokens) for r in recorded] == sorted(rows)
    server = FakeServer()
    run = drive(server, recorded, OpenLoop(max_in_flight=4), PARAMS, time=server.time)
    assert [one.result and one.result.num_tokens for one in run.served] == [2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a", "max_tokens": 1}', "line 1: arrival_seconds is missing"),
        ('\n{"arrival_seconds": -1, "prompt": "a", "max_tokens": 1}', "line 2: arrival_seconds"),
        ('{"arrival_seconds": 0, "prompt": "a", "max_tokens": 0}', "max_tokens is below 1"),
        ("nonsense", "not JSON"),
        ("", "no request"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        replay(path)


def test_prompts_come_from_workloads_questions_and_text(tmp_path: Path) -> None:
    assert texts_of("mixed")[1] == texts_of("maths")[0]
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"question_id": 1, "turns": ["one", "two"]}\n{"prompt": "three"}\n')
    assert texts_of(str(questions)) == ["one", "three"]
    plain = tmp_path / "prompts.txt"
    plain.write_text("alpha\n\nbeta\n")
    assert texts_of(str(plain)) == ["alpha", "beta"]
    questions.write_text('{"turns": []}\n')
    with pytest.raises(ConfigError, match="neither turns nor a prompt"):
        texts_of(str(questions))
    with pytest.raises(ConfigError, match="neither a domain nor a file"):
        texts_of("poetry")
    plain.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt") as caught:
        texts_of(str(plain))
    assert caught.value.hint == "write one a line"
