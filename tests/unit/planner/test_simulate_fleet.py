"""Laws of simulated fleets: no request is lost, no token is written twice, replicas help."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import calibration, drafter, sloped
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.sched.admission import BLOCK_TOKENS
from outrider_lab.simulator.events import Chance, JobCosts, Simulated
from outrider_lab.simulator.load import (
    BY_BEGINNING,
    ROUTINGS,
    Failure,
    Fleet,
    Lengths,
    SimulatedLoad,
    SimulatedRequest,
    poisson,
    requests_of,
)
from outrider_lab.simulator.simulate import simulate
from outrider_lab.simulator.study import PLAIN, SimulatedStudy, compare

COSTS = JobCosts(calibration(1.0, 0.1), drafter(0.1))
# A prompt token takes time, so it matters whether it is read.
READING = JobCosts(sloped(drafter(0.1), per_row=0.05), drafter(0.1))
SHARED = 4 * BLOCK_TOKENS
STUDY = SimulatedStudy(
    calibration=READING.calibration,
    drafter=drafter(0.1),
    rates=(0.8,),
    engines=("single",),
    prompt=SHARED + 8,
    output=20,
    requests=48,
    batch=4,
    spread=0.2,
    arrivals=0.2,
    replicas=3,
    shared=SHARED,
)


def run(load: SimulatedLoad, fleet: Fleet, *, k: int = 4, costs: JobCosts = COSTS) -> Simulated:
    config = EngineConfig(schedule="single", k=k, batch_size=4)
    return simulate(config, load, costs, Chance((0.7,), seed=3), fleet=fleet)


def emitted(found: Simulated) -> Counter[int]:
    counts: Counter[int] = Counter()
    for trace in found.rounds:
        counts[trace.seq_id] += trace.num_emitted
    return counts


SEEDS = st.integers(0, 1000)
FAILURES = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0, 80), st.floats(0.5, 60)), max_size=4
).map(lambda found: tuple(Failure(*one) for one in found))


@examples(8)
@given(
    seed=SEEDS,
    failures=FAILURES,
    routing=st.sampled_from(ROUTINGS),
    schedule=st.sampled_from(["single", "pdv", "ssd"]),
    closed=st.booleans(),
)
def test_whatever_fails_each_request_is_answered_once_and_whole(
    seed: int, failures: tuple[Failure, ...], routing: str, schedule: str, closed: bool
) -> None:
    requests = requests_of(Lengths(40, 12, 0.5, families=2, shared=24), 12, seed=seed)
    load = SimulatedLoad(requests, in_flight=5) if closed else poisson(requests, 0.3, seed=seed)
    config = EngineConfig(schedule=schedule, k=3, batch_size=2)
    chance = Chance((0.7,), p_hit=0.5, seed=seed)
    fleet = Fleet(3, routing, failures)
    found = simulate(config, load, READING, chance, fleet=fleet)
    assert sorted(one.seq_id for one in found.served) == list(range(12))
    wanted = {seq: one.num_output for seq, one in enumerate(requests)}
    assert emitted(found) == wanted
    assert {one.seq_id: len(one.arrivals) for one in found.served} == wanted
    for one in found.served:
        assert list(one.arrivals) == sorted(one.arrivals)
        assert one.arrivals[0] > 0
        assert one.num_moves <= len(failures)
    # Nothing runs on a replica while it is gone.
    for job in found.jobs:
        number = int(job.lane.partition(":")[0])
        for gone in failures:
            if gone.replica == number:
                assert job.ended <= gone.at + 1e-9 or job.began >= gone.ends - 1e-9
    # The same once more.
    assert simulate(config, load, READING, chance, fleet=fleet) == found


@examples(5)
@given(seed=SEEDS, routing=st.sampled_from(ROUTINGS), rate=st.floats(0.05, 2))
def test_work_is_the_same_whoever_does_it(seed: int, routing: str, rate: float) -> None:
    """Verdicts are the request's own, and what is not read is what was read before."""
    requests = requests_of(Lengths(60, 16, 0.3, families=3, shared=48), 20, seed=seed)
    load = poisson(requests, rate, seed=seed)
    rounds: set[tuple[tuple[int, int], ...]] = set()
    for replicas in (1, 2, 4):
        found = run(load, Fleet(replicas, routing))
        kept = sorted((one.seq_id, i) for i, one in enumerate(found.rounds) if one.num_emitted)
        rounds.add(tuple((seq, found.rounds[i].num_accepted) for seq, i in kept))
        read = sum(one.num_prompt_tokens for one in found.rounds)
        cached = sum(one.num_cached for one in found.served)
        # The last prompt token is the pending one of the first round.
        assert read + cached == sum(one.num_prompt - 1 for one in requests)
    assert len(rounds) == 1


@examples(5)
@given(seed=SEEDS, rate=st.one_of(st.none(), st.floats(0.02, 1)), routing=st.sampled_from(ROUTINGS))
def test_more_replicas_never_lower_throughput(seed: int, rate: float | None, routing: str) -> None:
    """Passes take the longer the more they hold, and each replica has fewer to hold. Prompts have
    nothing in common, for each replica would have to read that. How the last ones meet may cost a
    row of a pass."""
    requests = requests_of(Lengths(20, 24, 0.3), 16, seed=seed)
    load = SimulatedLoad(requests) if rate is None else poisson(requests, rate, seed=seed)
    seconds = [run(load, Fleet(n, routing), costs=READING).seconds for n in (1, 2, 4)]
    assert seconds[1] <= 1.01 * seconds[0]
    assert seconds[2] <= 1.01 * seconds[1]


def test_replicas_of_their_own_devices_share_a_load_evenly() -> None:
    """Sixteen alike at once, four in a batch: as many batches one after another as each gets."""
    load = SimulatedLoad(tuple(SimulatedRequest(1, 40) for _ in range(16)))
    for replicas in (1, 2, 4):
        found = run(load, Fleet(replicas, "queue"), k=0)
        assert found.seconds == pytest.approx(40 * 4 / replicas)


def test_a_failure_costs_what_was_read_and_what_was_under_way() -> None:
    """One request on the first of two replicas, which fails in its tenth pass: the other reads
    prompt and text again, in a pass, and goes on at the same place."""
    load = SimulatedLoad((SimulatedRequest(1, 40),))
    found = run(load, Fleet(2, "queue", (Failure(0, 9.5, 100),)), k=0)
    assert found.seconds == pytest.approx(9.5 + 31)
    (one,) = found.served
    assert (one.replica, one.num_moves) == (1, 1)
    # Alone it waits until its replica is back.
    alone = run(load, Fleet(1, "queue", (Failure(0, 9.5, 100),)), k=0)
    assert alone.seconds == pytest.approx(9.5 + 100 + 31)


def test_a_lost_replica_has_to_read_beginnings_again() -> None:
    """Of three alike, the second finds the beginning there, the third comes after the failure."""
    alike = tuple(
        SimulatedRequest(SHARED + 1, 2, moment, num_shared=SHARED) for moment in (0.0, 50.0, 100.0)
    )
    kept = run(SimulatedLoad(alike), Fleet(), costs=READING)
    assert [one.num_cached for one in kept.served] == [0, SHARED, SHARED]
    lost = run(SimulatedLoad(alike), Fleet(failures=(Failure(0, 70, 5),)), costs=READING)
    assert [one.num_cached for one in lost.served] == [0, SHARED, 0]


def test_routing_by_beginning_reads_each_family_once_and_turns_once_a_replica() -> None:
    found = {
        routing: compare(replace(STUDY, routing=routing)).numbers["single"] for routing in ROUTINGS
    }
    assert found[BY_BEGINNING].fleet.cached > found["turns"].fleet.cached + 0.05
    assert found[BY_BEGINNING].first_token.p50 < found["turns"].first_token.p50
    for own in found.values():
        assert sum(own.fleet.served) == STUDY.requests
        assert min(own.fleet.served) > 0
        assert own.fleet.moved == 0
        assert 0 < own.busy["main"] <= 1


def test_cost_is_of_all_replicas_and_of_all_tokens() -> None:
    own = compare(replace(STUDY, price=3.6)).numbers[PLAIN]
    tokens = own.tokens_per_second * own.seconds
    assert own.fleet.price == pytest.approx(1e6 * 3.6 * 3 * own.seconds / 3600 / tokens)
    assert compare(STUDY).numbers[PLAIN].fleet.price is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"replicas": 0}, "0 replicas"),
        ({"routing": "beginings"}, "no routing 'beginings'"),
        ({"failures": (Failure(3, 1, 1),)}, "replica 3 fails, and there are 3"),
        ({"failures": (Failure(0, 1, 0),)}, "takes 0 s"),
        ({"shared": SHARED + 8}, "cannot have"),
    ],
)
def test_what_is_no_fleet_is_refused(changed: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        replace(STUDY, **changed)
    assert caught.value.hint
