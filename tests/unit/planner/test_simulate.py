"""The simulator against what can be reckoned by hand, and what no schedule may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import calibration, drafter
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace
from outrider.estimate.acceptance import expected_tokens
from outrider_lab.metrics.timeline import seconds, shared_seconds
from outrider_lab.planner.overlap import AheadTimes
from outrider_lab.simulator.events import (
    Chance,
    JobCosts,
    Simulated,
)
from outrider_lab.simulator.load import SimulatedLoad, SimulatedRequest
from outrider_lab.simulator.simulate import simulate

ENGINES = ("single", "pd", "pdv", "ssd")
ALL_KEPT, NONE_KEPT = (1.0,), (0.0,)


def costs(target: float, step: float, *, fan_out: int = 4, sync: float = 0.0) -> JobCosts:
    return JobCosts(calibration(target, step), drafter(step), fan_out, sync)


def run(
    engine: str,
    known: JobCosts,
    chance: Chance,
    *,
    k: int = 4,
    outputs: tuple[int, ...] = (40,),
    contention: float = 0.0,
) -> Simulated:
    """Requests of a single prompt token, all at once."""
    config = EngineConfig(schedule=engine, k=k, batch_size=len(outputs))
    load = SimulatedLoad(tuple(SimulatedRequest(1, count) for count in outputs))
    return simulate(config, load, known, chance, contention=contention)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_drafts_every_engine_takes_a_pass_a_token(engine: str) -> None:
    found = run(engine, costs(0.25, 0.1), Chance(ALL_KEPT), k=0)
    assert found.seconds == pytest.approx(40 * 0.25)
    assert [trace.num_emitted for trace in found.rounds] == [1] * 40


@pytest.mark.parametrize("engine", ["single", "pd", "pdv"])
def test_a_round_takes_its_draft_and_its_verification(engine: str) -> None:
    """One request has nothing to do side by side. Eight whole rounds of five tokens; or, if nothing
    is kept, as many rounds as tokens, whose drafts leave room for one token more."""
    kept = run(engine, costs(1.0, 0.1), Chance(ALL_KEPT))
    assert kept.seconds == pytest.approx(8 * (4 * 0.1 + 1))
    lost = run(engine, costs(1.0, 0.1), Chance(NONE_KEPT))
    assert lost.seconds == pytest.approx(sum(min(4, left - 1) * 0.1 + 1 for left in range(1, 41)))


@pytest.mark.parametrize("step", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("contention", [0.0, 0.5, 1.0])
def test_a_foreseen_round_takes_the_longer_of_its_two_lanes(step: float, contention: float) -> None:
    """And the hand-over. The first draft is foreseen by nobody. Drafting ahead takes a step more
    than a draft; what both lanes run at once goes on slower by the contention."""
    found = run(
        "ssd", costs(1.0, step, sync=0.01), Chance(ALL_KEPT, p_hit=1.0), contention=contention
    )
    ahead = 5 * step
    beside = max(1.0, ahead) + contention * min(1.0, ahead)
    # Nobody waits for what is drafted ahead of the last verdict, but it may slow that down.
    last = 1.0 + contention * min(1.0, ahead)
    assert found.seconds == pytest.approx(0.01 + 4 * step + 7 * (beside + 0.01) + last)
    times = AheadTimes(1.0, 5.0, 5.0, ahead, 4 * step, sync=0.01, contention=contention)
    assert times.round_time == pytest.approx(beside + 0.01)


def test_what_is_never_foreseen_takes_as_long_as_drafting_in_turns() -> None:
    chance = Chance((0.7, 0.6, 0.5))
    outputs = (200,)
    ahead = run("ssd", costs(1.0, 0.15), chance, outputs=outputs)
    turns = run("single", costs(1.0, 0.15), chance, outputs=outputs)
    assert ahead.seconds == pytest.approx(turns.seconds)
    assert not any(trace.hit for trace in ahead.rounds)
    # With one memory it is slower: what is drafted ahead is for nobody. So it soon is given up.
    shared = run("ssd", costs(1.0, 0.15), chance, outputs=outputs, contention=1.0)
    assert turns.seconds < shared.seconds < 1.15 * turns.seconds
    before, after = (
        [job for job in shared.jobs if job.kinds == ("ahead",) and (job.began < 30) == early]
        for early in (True, False)
    )
    assert 10 < len(before) < 25
    assert len(after) < 12


@pytest.mark.parametrize(("p_hit", "batch"), [(0.8, 1), (0.8, 4), (0.9, 8)])
def test_a_batch_that_verifies_together_goes_on_at_once_if_all_were_foreseen(
    p_hit: float, batch: int
) -> None:
    """With probability p ** b (Theorem 7, drafting ahead hidden)."""
    rounds = 200
    found = run(
        "ssd",
        costs(1.0, 0.1),
        Chance(ALL_KEPT, p_hit=p_hit),
        outputs=(5 * rounds,) * batch,
    )
    drafts = [job for job in found.jobs if job.kinds == ("draft",)][1:]
    assert {len(job.seq_ids) for job in drafts} == {batch}
    free = sum(job.seconds < 1e-9 for job in drafts)
    assert free / len(drafts) == pytest.approx(p_hit**batch, abs=0.06)
    # Rounds in turns, which are tried now and then, are one job.
    tried = sum(job.seconds - 1.0 for job in found.jobs if job.kinds == ("draft", "verify"))
    assert found.seconds == pytest.approx(rounds * 1.0 + 0.4 * (1 + len(drafts) - free) + tried)
    theory = AheadTimes(p_hit, 5.0, 5.0, 0.5, 0.4, batch=batch)
    assert batch * 5 * rounds / found.seconds == pytest.approx(batch * theory.speed, rel=0.03)


@pytest.mark.parametrize(
    ("t_sd", "k", "p_hit", "printed"),
    [
        (0.36, 2, 1.0, 2.71),
        (0.69, 4, 0.5, 3.04),
        (0.08, 4, 0.0, 3.79),
        (0.12, 6, 0.7, 5.04),
        (0.23, 12, 1.0, 7.46),
    ],
)
def test_published_predictions_come_out(t_sd: float, k: int, p_hit: float, printed: float) -> None:
    """Acceptance .9, times in units of a verification (docs/theory.md). What a round takes is the
    simulator's, what it emits on the mean the formula's."""
    found = run("ssd", costs(1.0, t_sd / k), Chance((0.9,), p_hit=p_hit), k=k, outputs=(700,))
    speed = expected_tokens(0.9, k) * len(found.rounds) / found.seconds
    assert speed == pytest.approx(printed, rel=0.02)


def test_verdicts_are_those_of_the_seed_whatever_the_engine() -> None:
    chance = Chance((0.8, 0.6), p_hit=0.5, seed=5)
    texts: set[tuple[tuple[int, int], ...]] = set()
    for engine in ENGINES:
        found = run(engine, costs(1.0, 0.2), chance, outputs=(60, 50, 40, 30, 20))
        kept = sorted((trace.seq_id, i) for i, trace in enumerate(found.rounds))
        texts.add(tuple((seq, found.rounds[i].num_accepted) for seq, i in kept))
    assert len(texts) == 1
    mean = expected_tokens(0.8, 4)
    emitted = run("single", costs(1.0, 0.2), Chance((0.8,)), outputs=(2000,))
    assert 2000 / len(emitted.rounds) == pytest.approx(mean, rel=0.03)


def test_only_what_was_drafted_ahead_since_the_last_draft_is_a_hit() -> None:
    """New drafts go first, so with several requests not every verdict is drafted for."""
    config = EngineConfig(schedule="ssd", k=4, batch_size=4)
    load = SimulatedLoad(tuple(SimulatedRequest(1, 41 + i, arrives=1.3 * i) for i in range(4)))
    found = simulate(config, load, costs(1.0, 0.3), Chance((0.8,), p_hit=1.0))
    for seq_id in range(4):
        own = [job for job in found.jobs if seq_id in job.seq_ids]
        drafts = [(job.began, True) for job in own if job.kinds == ("draft",)]
        ahead = [(job.ended, False) for job in own if job.kinds == ("ahead",)]
        foreseen: list[bool] = []
        ready = False
        for _, drafting in sorted([*drafts, *ahead]):
            if drafting:
                foreseen.append(ready)
            ready = not drafting
        hits = [trace.hit for trace in found.rounds if trace.seq_id == seq_id]
        assert [hit for hit in hits if hit is not None] == foreseen[: len(hits) - hits.count(None)]
    assert any(trace.hit for trace in found.rounds)


def test_lanes_of_their_own_overlap_and_raise_throughput() -> None:
    """Two groups of sequences, of which one drafts while the other is verified."""
    config = EngineConfig(
        schedule="pdv", k=4, batch_size=2, hybrid_threshold=0, decode_batch=1, verify_batch=1
    )
    load = SimulatedLoad((SimulatedRequest(1, 50), SimulatedRequest(1, 50)))
    found = simulate(config, load, costs(1.0, 0.25), Chance(ALL_KEPT))
    # One by one 2 x 10 rounds of two seconds; side by side half of that and a start.
    assert found.seconds == pytest.approx(21)
    shared = simulate(config, load, costs(1.0, 0.25), Chance(ALL_KEPT), contention=1.0)
    assert shared.seconds == pytest.approx(40)


def crowd(engine: str, step: float, *, threshold: int = 0, contention: float = 0.0) -> float:
    """Seconds of four users who come one by one and whose texts differ in length."""
    config = EngineConfig(schedule=engine, k=4, batch_size=4, hybrid_threshold=threshold)
    load = SimulatedLoad(
        tuple(SimulatedRequest(1 + i % 3, 90 + 17 * (i % 5)) for i in range(16)), in_flight=4
    )
    chance = Chance((0.8,), p_hit=0.9)
    return simulate(config, load, costs(1.0, step), chance, contention=contention).seconds


@pytest.mark.parametrize("step", [0.05, 0.1])
def test_groups_that_were_parted_go_on_as_one_where_a_pass_takes_the_same_for_all(
    step: float,
) -> None:
    turns = crowd("single", step)
    assert crowd("pdv", step) < 1.15 * turns
    assert crowd("ssd", step, threshold=3) < 1.1 * turns


def test_lanes_are_joined_where_side_by_side_they_only_slow_each_other_down() -> None:
    """Drafts take longer than a pass, so nobody waits for them."""
    turns = crowd("single", 0.3)
    assert crowd("pdv", 0.3, threshold=0, contention=1.0) > 1.5 * turns
    assert crowd("pdv", 0.3, threshold=3, contention=1.0) < 1.25 * turns


def test_a_closed_loop_keeps_its_users_busy() -> None:
    config = EngineConfig(schedule="single", k=0, batch_size=8)
    load = SimulatedLoad(tuple(SimulatedRequest(1, 10) for _ in range(5)), in_flight=2)
    found = simulate(config, load, costs(1.0, 0.1), Chance(ALL_KEPT))
    assert max(job.num_live for job in found.jobs) == 2
    assert found.seconds == pytest.approx(30)
    assert sorted(one.arrived for one in found.served) == [0, 0, 10, 10, 20]
    assert {one.arrivals[-1] for one in found.served} == {10.0}


def test_requests_wait_for_a_place_and_lanes_for_requests() -> None:
    config = EngineConfig(schedule="single", k=0, batch_size=1)
    load = SimulatedLoad(
        (SimulatedRequest(1, 2), SimulatedRequest(1, 2), SimulatedRequest(1, 1, arrives=9.0))
    )
    found = simulate(config, load, costs(1.0, 0.1), Chance(ALL_KEPT))
    ends = {one.seq_id: one.ended for one in found.served}
    assert ends == {0: 2.0, 1: 4.0, 2: 10.0}
    assert found.jobs[0].num_waiting == 1


def test_a_prompt_is_read_in_chunks_beside_others() -> None:
    config = EngineConfig(schedule="pd", k=0, batch_size=2, prefill_chunk=10)
    load = SimulatedLoad((SimulatedRequest(1, 6), SimulatedRequest(31, 1)))
    found = simulate(config, load, costs(1.0, 0.1), Chance(ALL_KEPT))
    read = [trace.num_prompt_tokens for trace in found.rounds if trace.seq_id == 1]
    assert read == [10, 10, 10, 0]
    # Both lanes have a device: three chunks beside three rounds, then one more of both.
    assert found.seconds == pytest.approx(6.0)


def gaps(jobs: tuple[JobTrace, ...]) -> list[tuple[str, float, float]]:
    """Between two jobs of a sequence: the lane of the second, and from when to when."""
    found: list[tuple[str, float, float]] = []
    ended: dict[int, float] = {}
    for job in sorted(jobs, key=lambda job: (job.began, job.ended)):
        if job.kinds == ("ahead",):
            continue
        for seq_id in job.seq_ids:
            before = ended.get(seq_id, 0.0)
            assert job.began >= before - 1e-9, "a sequence is in two jobs at once"
            found.append((job.lane, before, job.began))
            ended[seq_id] = job.ended
    return found


requests = st.builds(SimulatedRequest, st.integers(1, 40), st.integers(1, 25))
seconds_each = st.floats(1e-3, 2.0)


@examples(40)
@given(
    engine=st.sampled_from(ENGINES),
    work=st.lists(requests, min_size=1, max_size=7),
    known=st.builds(costs, seconds_each, seconds_each, sync=st.floats(0, 0.1)),
    chance=st.builds(
        Chance,
        st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple),
        p_hit=st.floats(0, 1),
        seed=st.integers(0, 99),
    ),
    contention=st.floats(0, 1),
    k=st.integers(0, 5),
    chunk=st.integers(1, 20),
    threshold=st.integers(0, 4),
)
def test_every_sequence_ends_and_lanes_wait_only_for_each_other(
    engine: str,
    work: list[SimulatedRequest],
    known: JobCosts,
    chance: Chance,
    contention: float,
    k: int,
    chunk: int,
    threshold: int,
) -> None:
    config = EngineConfig(
        schedule=engine,
        k=k,
        batch_size=len(work),
        prefill_chunk=chunk,
        hybrid_threshold=threshold,
    )
    found = simulate(config, SimulatedLoad(tuple(work)), known, chance, contention=contention)
    told = {one.seq_id: len(one.arrivals) for one in found.served}
    assert told == {seq_id: one.num_output for seq_id, one in enumerate(work)}
    for seq_id, one in enumerate(work):
        own = [trace for trace in found.rounds if trace.seq_id == seq_id]
        assert sum(trace.num_emitted for trace in own) == one.num_output
        # The first round reads the pending token and whatever else is left.
        assert sum(trace.num_prompt_tokens for trace in own) == one.num_prompt - 1
    assert found.seconds == pytest.approx(max(one.ended for one in found.served))
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for job in found.jobs:
        by_lane.setdefault(job.lane, []).append((job.began, job.ended))
    for own in by_lane.values():
        total = sum(ended - began for began, ended in own)
        assert total == pytest.approx(seconds(own)), "a lane runs two jobs at once"
    for lane, began, ended in gaps(found.jobs):
        both = [lane] if lane == "prefill" else ["decode", "verify", "main"]
        own = [span for name in both for span in by_lane.get(name, ())]
        busy = shared_seconds(own, [(began, ended)])
        assert busy == pytest.approx(ended - began, abs=1e-6), "lanes idle beside their work"
