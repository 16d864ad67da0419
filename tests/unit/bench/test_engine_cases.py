"""Cases of a load run: scenarios, closed loops for a time, and who won."""

from __future__ import annotations

from collections.abc import Sequence

from doubles.engine_runs import PARAMS, TEXTS, contestant
from doubles.fake_server import FakeServer
from outrider.bench.engines.cases import (
    SCENARIOS,
    Case,
    ClosedCase,
    LoadPlan,
    PoissonCase,
    Prompts,
    most_in_flight,
    scenario,
)
from outrider.bench.engines.cells import cells
from outrider.bench.engines.load_report import load_record
from outrider.bench.engines.load_report import sections as load_sections
from outrider.bench.engines.samples import Sample, run
from outrider.bench.engines.wins import head_to_head
from outrider.bench.load.drive import ClosedLoop, OpenLoop


def load_plan(cases: Sequence[Case], repeats: int = 2) -> LoadPlan:
    prompts = Prompts(texts=TEXTS, max_tokens=4, seed=3)
    return LoadPlan(cases=cases, repeats=repeats, prompts=prompts, params=PARAMS)


def test_scenarios_are_the_four() -> None:
    found = [scenario(name, 10) for name in SCENARIOS]
    assert [most_in_flight(case) for case in found] == [1, 3, 5, 10]
    assert [isinstance(case.loop, OpenLoop) for case in found] == [False, True, True, True]
    rates = [case.rate for case in found if isinstance(case, PoissonCase)]
    assert rates == [2, 5, 10]
    load = load_plan(found)
    assert len(list(load.requests(0, 0))) == 1
    first, again, other = (list(load.requests(2, repeat)) for repeat in (0, 0, 1))
    assert first == again
    assert [r.arrival_seconds for r in first] != [r.arrival_seconds for r in other]
    assert load.most_in_flight == 10


def test_a_closed_case_may_last_for_a_time() -> None:
    case = ClosedCase(name="closed-2", num_in_flight=2, duration=0.1)
    assert case.loop == ClosedLoop(num_in_flight=2, duration=0.1)
    server = FakeServer()
    (first, _) = (
        visit[0] for visit in run(load_plan([case]), [contestant("pd", server)], time=server.time)
    )
    assert first.sample.numbers is not None
    assert first.sample.numbers.num_requests == 6


def test_wins_are_counted_where_both_served_everything() -> None:
    plan_of_two = load_plan(
        [scenario("single", 1), ClosedCase(name="closed-2", num_in_flight=2, num_requests=4)]
    )
    found: list[Sample] = []
    for name, step, broken in (("pd", 0.01, ()), ("pdv", 0.02, ()), ("ssd", 0.01, ("prompt 4",))):
        server = FakeServer(step_seconds=step, broken=broken)
        for visit in run(plan_of_two, [contestant(name, server)], time=server.time):
            found += [t.sample for t in visit]
    rows = {(row.metric, row.first, row.second): row for row in head_to_head(found)}
    row = rows["throughput", "pd", "pdv"]
    assert (row.first_wins, row.second_wins, row.ties) == (4, 0, 0)
    row = rows["end-to-end", "pdv", "ssd"]
    assert (row.first_wins, row.second_wins, row.ties) == (0, 3, 0)
    assert rows["ITL p95", "pd", "ssd"].ties == 3
    shown = list(load_sections(plan_of_two.cases, found, cells(found)))
    assert [section.title for section in shown] == ["Load", "Head to head", "Failures"]
    assert shown[2].points == [
        "closed-2, ssd: 1 of 2 failed: 1 of 4 requests failed: ValueError: broken"
    ]
    record = load_record(plan_of_two, found)
    assert [case["name"] for case in record["cases"]] == ["single", "closed-2"]  # pyright: ignore


def test_engines_that_serve_more_within_a_time_have_the_same_tokens_as_others() -> None:
    case = ClosedCase(name="closed-1", num_in_flight=1, duration=0.1)
    quick, slow = FakeServer(step_seconds=0.005), FakeServer(step_seconds=0.01)
    slow.clock = quick.clock
    both = [contestant("pd", quick), contestant("pdv", slow)]
    for visit in run(load_plan([case]), both, time=quick.time):
        assert [len(t.served) for t in visit] == [5, 3]
        assert [t.sample.reason for t in visit] == [None, None]
