"""Cases of a load run: scenarios, closed loops for a time, and who won."""

from __future__ import annotations

from doubles.engine_runs import PARAMS, TEXTS, FakeServer, contestant
from outrider_lab.bench.load import ClosedLoop, OpenLoop, most_in_flight
from outrider_lab.bench.studies.engines_cells import EngineSample, head_to_head
from outrider_lab.bench.studies.engines_plan import (
    SCENARIOS,
    Case,
    EnginePlan,
    Prompts,
    closed_case,
    load_plan,
    replay_case,
    scenario,
)
from outrider_lab.bench.studies.engines_report import load_record, load_sections
from outrider_lab.bench.studies.engines_run import run


def plan_of(*cases: Case) -> EnginePlan:
    return load_plan(cases, Prompts(texts=TEXTS, max_tokens=4, seed=3), PARAMS, 2)


def test_scenarios_are_the_four() -> None:
    found = [scenario(place, name, 10) for place, name in enumerate(SCENARIOS)]
    assert [most_in_flight(case.loop) for case in found] == [1, 3, 5, 10]
    assert [isinstance(case.loop, OpenLoop) for case in found] == [False, True, True, True]
    assert [case.rate for case in found] == [0, 2, 5, 10]
    load = plan_of(*found)
    assert len(list(found[0].requests(load.prompts, 0))) == 1
    first, again, other = (list(found[2].requests(load.prompts, repeat)) for repeat in (0, 0, 1))
    assert first == again
    assert [r.arrival_seconds for r in first] != [r.arrival_seconds for r in other]
    assert load.most_in_flight == 10


def test_a_trace_of_which_nothing_is_left_asks_nothing() -> None:
    assert list(replay_case([], 2).requests(Prompts(texts=TEXTS, max_tokens=4), 0)) == []


def test_a_closed_case_may_last_for_a_time() -> None:
    case = closed_case(0, 2, duration=0.1)
    assert case.loop == ClosedLoop(num_in_flight=2, duration=0.1)
    server = FakeServer()
    (first, _) = (
        visit[0] for visit in run(plan_of(case), [contestant("pd", server)], time=server.time)
    )
    assert first.sample.numbers is not None
    assert first.sample.numbers.num_requests == 6


def test_wins_are_counted_where_both_served_everything() -> None:
    two = plan_of(scenario(0, "single", 1), closed_case(1, 2, num_requests=4))
    found: list[EngineSample] = []
    for name, step, broken in (("pd", 0.01, ()), ("pdv", 0.02, ()), ("ssd", 0.01, ("prompt 4",))):
        server = FakeServer(step_seconds=step, broken=broken)
        for visit in run(two, [contestant(name, server)], time=server.time):
            found += [t.sample for t in visit]
    rows = {(row.metric, row.first, row.second): row for row in head_to_head(found)}
    row = rows["throughput", "pd", "pdv"]
    assert (row.first_wins, row.second_wins, row.ties) == (4, 0, 0)
    row = rows["end-to-end", "pdv", "ssd"]
    assert (row.first_wins, row.second_wins, row.ties) == (0, 3, 0)
    assert rows["ITL p95", "pd", "ssd"].ties == 3
    shown = list(load_sections(two, found))
    assert [section.title for section in shown] == ["Load", "Head to head", "Failures"]
    assert shown[2].points == [
        "closed-2, ssd: 1 of 2 failed: 1 of 4 requests failed: ValueError: broken"
    ]
    record = load_record(two, found)
    assert [case["name"] for case in record["cases"]] == ["single", "closed-2"]  # pyright: ignore


def test_engines_that_serve_more_within_a_time_have_the_same_tokens_as_others() -> None:
    case = closed_case(0, 1, duration=0.1)
    quick, slow = FakeServer(step_seconds=0.005), FakeServer(step_seconds=0.01)
    slow.clock = quick.clock
    both = [contestant("pd", quick), contestant("pdv", slow)]
    for visit in run(plan_of(case), both, time=quick.time):
        assert [len(t.served) for t in visit] == [5, 3]
        assert [t.sample.reason for t in visit] == [None, None]
