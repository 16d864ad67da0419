"""Calibration: counts by replay, slopes never below 0, drift, and files that may break."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.draft import RoundTrace
from outrider.core.env import CALIBRATIONS
from outrider.estimate.cost import Curve
from outrider_lab.bench.calibrate.engines import Dial, TimedEngine
from outrider_lab.bench.calibrate.fit import (
    Point,
    draft_costs,
    drafting_of,
    levels,
    nonnegative,
    points_of,
    shared_costs,
)
from outrider_lab.bench.calibrate.probe import Ahead, Probe, ProbeRound, ahead_of, rounds_at
from outrider_lab.bench.calibrate.rounds import (
    ALIKE,
    LEAST_TURNS,
    MOST_TURNS,
    Pass,
    Phase,
    Request,
    Span,
    Timed,
    passes_of,
    run_phase,
)
from outrider_lab.bench.calibrate.session import keep, load, path_of
from outrider_lab.bench.calibrate.timing import (
    EDGES,
    Pace,
    Plan,
    Timing,
    Wanted,
    firm_points,
    plans_of,
    prompts_of,
)
from outrider_lab.bench.studies.drafters_lineup import Contestant
from outrider_lab.planner.calibration import (
    Calibration,
    DrafterCosts,
    PassCosts,
    PlaceCount,
    RoundStats,
)
from outrider_lab.planner.rounds import DecodeLoad, plain_times, round_times

DEEPEST = 12
PLACES = [(b, k, s) for b in (1, 4) for k in (0, 1, 3, 7) for s in (60.0, 900.0)]


def trace(drafted: int, kept: int, *, index: int = 0, batch: int = 1, seq: int = 0) -> RoundTrace:
    return RoundTrace(
        seq_id=seq,
        pass_index=index,
        drafter="scripted",
        batch_size=batch,
        num_target_passes=1,
        num_prompt_tokens=0,
        num_drafted=drafted,
        num_accepted=kept,
        num_emitted=kept + 1,
        num_rows_copied=0,
        draft_seconds=0.5,
        verify_seconds=2.0,
        accept_seconds=0.25,
        gap_seconds=0.125,
    )


def rounds_over(agrees: Sequence[bool], k: int) -> list[ProbeRound]:
    """A model that agrees with its target at some positions of a text, at depth `k`."""
    rounds: list[ProbeRound] = []
    start = 0
    while start < len(agrees):
        room = min(k, len(agrees) - start - 1)
        run = next((i for i in range(room) if not agrees[start + i]), room)
        rounds.append(ProbeRound(start, room, room, run))
        start += run + 1
    return rounds


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, DEEPEST))
def test_rounds_at_any_k_follow_from_deep_ones(agrees: list[bool], k: int) -> None:
    # A draft that is kept as a whole hides the token after it: here none is as long as that.
    for start in range(0, len(agrees), DEEPEST):
        agrees[start] = False
    deep = [trace(one.drafted, one.kept) for one in rounds_over(agrees, DEEPEST)]
    ahead = ahead_of(deep, deepest=DEEPEST)
    assert len(ahead) == len(agrees)
    assert rounds_at(ahead, k) == rounds_over(agrees, k)


def test_a_place_is_judged_where_all_before_it_were_kept() -> None:
    # Rounds of two tokens keep none, one and two; the last has no room.
    text = [Ahead(2, 0), Ahead(2, 1), Ahead(2, 0), Ahead(2, 2), *[Ahead(2, 0)] * 3]
    own = DrafterCosts("model", ((1, Curve(((1.0, 0.1),))),))
    probe = Probe("model", 2, (tuple(text), tuple(text)), None)
    found = probe.counted(own)
    assert found.laws == (probe.stats(1), probe.stats(2))
    assert found.places == (PlaceCount(6, 4), PlaceCount(4, 2))
    assert found.requests == ((PlaceCount(3, 2), PlaceCount(2, 1)),) * 2
    assert found.num_rounds == 0


def test_a_drafter_that_ends_its_draft_offers_nothing_there() -> None:
    # 3 tokens of 12 were drafted and kept: the fourth position had no draft.
    ahead = ahead_of([trace(3, 3), trace(0, 0), trace(0, 0)], deepest=DEEPEST)
    # After the last position nothing can be drafted anyway.
    found = [(one.drafted, one.kept) for one in ahead[:-1]]
    assert found == [(3, 3), (2, 2), (1, 1), (0, 0), (0, 0)]
    assert [one.kept for one in rounds_at(ahead, 2)] == [2, 0, 0, 0]


def test_the_dial_gives_each_round_its_next_k() -> None:
    dial = Dial()
    assert [budget.depth for budget in dial.budgets([1, 2])] == [0, 0]
    dial.set([4, 0])
    assert [dial.budgets([1])[0].depth for _ in range(3)] == [4, 0, 4]
    dial.set([5.25])
    assert [budget.depth for budget in dial.budgets([1, 2, 3, 4])] == [6, 5, 5, 5]


def test_a_pass_has_the_seconds_in_which_it_had_a_cpu() -> None:
    (one, *_) = passes_of([Request(11, [trace(2, 1, index=5), trace(0, 0, index=6)])])
    assert (one.draft, one.verify, one.host) == (0.5, 2.0, 0.375)
    assert one.undelayed(4.0).seconds == one.seconds / 4
    assert one.undelayed(1.0) == one


@dataclass
class Writer:
    """An engine's model: each pass takes a second, of which it had the CPU for half."""

    clock: Clock
    delay: float = 2.0
    handles: list[Any] = field(default_factory=list[Any])

    def forget(self) -> None: ...

    def submit(self, prompt: Sequence[int], params: object) -> Any:
        del params
        seq = SimpleNamespace(num_emitted=0, prompt_length=len(prompt))
        self.handles.append(
            SimpleNamespace(done=False, reader=SimpleNamespace(seq=seq, traces=list[RoundTrace]()))
        )
        return self.handles[-1]

    def advance(self) -> None:
        self.clock.now += 1
        for handle in self.handles:
            traces = handle.reader.traces
            traces.append(trace(0, 0, index=len(traces)))
            handle.reader.seq.num_emitted += 1

    def cancel(self, handle: object) -> None: ...


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("stop", [0.5, 7.5, 1000.0])
def test_no_pass_begins_after_the_stop(stop: float) -> None:
    clock = Clock()
    engines = [
        TimedEngine(Contestant(name=name, drafter=name), cast("Any", Writer(clock)), Dial(), {})
        for name in ("off", "ngram")
    ]
    phase = Phase([[1, 2, 3]], {"off": (0,), "ngram": (0, 4)}, most_ks=1)
    found = run_phase(
        engines, phase, number=0, turns=range(3), span=Span(until=stop, clock=clock, stop=stop)
    )
    assert clock.now <= stop + 1
    # Two passes read prompts; a turn of plain decoding has three, one with drafts six.
    assert (clock.now == 2 + 3 * (3 + 6)) == (stop == 1000)
    assert all(one.verify == 1.0 for one in found)
    assert bool(found) == (stop > 1)


def test_passes_are_put_together_and_know_what_they_read() -> None:
    first = [trace(2, 1, index=5, batch=2, seq=0), trace(0, 0, index=6), trace(1, 1, index=7)]
    second = [trace(3, 3, index=5, batch=2, seq=1)]
    first[1] = replace(first[1], gap_seconds=0.5)
    found = passes_of([Request(11, first), Request(21, second)])
    assert [(one.index, one.batch, one.rows, one.depth) for one in found] == [
        (5, 2, 7, 3),
        (6, 1, 1, 0),
    ]
    # The pending token is not in memory: 10 and 20 tokens are; after two were emitted, 12.
    assert [one.context for one in found] == [30, 12]
    assert found[0].reads == 3 * 10 + 4 * 20
    # What the host did after it was counted before the next one.
    assert found[0].seconds == 2.75 + 0.5
    assert found[1].seconds == 2.75 + 0.125
    assert passes_of([Request(11, first)])[0].index == 6


def test_a_pass_knows_what_those_that_draft_got_since_their_last_draft() -> None:
    kept = [[(2, 1), (3, 3), (0, 0), (2, 2), (0, 0)], [(4, 4), (0, 0), (4, 2), (1, 0), (0, 0)]]
    requests = [
        Request(11, [trace(*one, index=5 + i, batch=2, seq=seq) for i, one in enumerate(rounds)])
        for seq, rounds in enumerate(kept)
    ]
    # Nobody had anything, the first drafts after 2 tokens, the second after 5 and 1, then both.
    assert [one.before for one in passes_of(requests)] == [0, 2, 5 + 1, 4 + 1 + 3]


@given(
    st.lists(st.floats(0, 5), min_size=2, max_size=2),
    st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=2, max_size=2).filter(
        lambda rows: abs(rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0]) > 0.1
    ),
)
def test_exact_sums_are_found_again(wanted: list[float], columns: list[list[float]]) -> None:
    values = [
        sum(c * column[i] for c, column in zip(wanted, columns, strict=True)) for i in range(3)
    ]
    found = nonnegative(columns, values, [1.0, 2.0, 1.0])
    again = [sum(c * column[i] for c, column in zip(found, columns, strict=True)) for i in range(3)]
    assert again == pytest.approx(values, abs=1e-5)


def test_a_slope_that_would_be_negative_is_0() -> None:
    assert nonnegative([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0], [1.0] * 3) == [
        pytest.approx(2.0),
        0.0,
    ]


def point(
    name: str, batch: int, k: int, context: float, seconds: Sequence[float], emitted: float = 0.0
) -> Point:
    rows = batch * (k + 1)
    draft, verify, host = seconds
    return Point(
        name=name,
        batch=batch,
        rows=rows,
        depth=k,
        drafting=batch if k else 0,
        context=batch * context,
        reads=rows * context,
        before=batch * (1 + emitted) if k else 0.0,
        emitted=float(batch * (1 + emitted)),
        draft=draft,
        verify=verify,
        host=host,
        count=10,
        scatter=0.01,
    )


def made_of(name: str, batch: int, k: int, context: float, step: float) -> Point:
    """A machine of which all costs are known."""
    rows = batch * (k + 1)
    verify = 1.0 + 0.05 * rows + 0.02 * batch + 1e-4 * batch * context + 2e-5 * rows * context
    emitted = k / 2 if context < 100 else k / 5
    host = 0.2 + 0.03 * batch + 0.001 * rows + 0.007 * batch * (1 + emitted)
    draft = step * k * (1 + 0.1 * batch) + 1e-6 * k * batch * context
    return point(name, batch, k, context, (draft, verify, host), emitted)


def drafting(points: Sequence[Point], per_emitted: float = 0.0) -> list[Timed]:
    """Of two rounds at each K: the first comes after a round without a draft."""
    found: list[Timed] = []
    for one in points:
        known = {name: getattr(one, name) for name in Pass.__slots__ if hasattr(one, name)}
        for first, before in ((False, one.before), (True, float(one.batch))):
            less = per_emitted * (one.before - before)
            own: dict[str, Any] = {**known, "index": 0, "before": before, "draft": one.draft - less}
            found.append(Timed(**own, name=one.name, phase=0, turn=0, first=first))
    return [one for one in found if one.depth]


def test_costs_are_found_again() -> None:
    points = [made_of("model", *place, 0.1) for place in PLACES]
    shared = shared_costs(points, "model")
    assert shared.overhead == pytest.approx(0.2, rel=1e-3)
    # What a sequence costs in the pass is charged with what it costs the host.
    assert shared.host == pytest.approx(0.05, rel=1e-3)
    assert shared.rule == pytest.approx(0.001, rel=1e-2)
    assert shared.token == pytest.approx(0.007, rel=1e-2)
    assert shared.target.per_context == pytest.approx(1e-4, rel=1e-3)
    assert shared.target.per_read == pytest.approx(2e-5, rel=1e-3)
    assert shared.target.rows.at(12) == pytest.approx(1.6, rel=1e-3)
    found = draft_costs(points, drafting(points), shared)
    assert found is not None
    assert found.per_context == pytest.approx(1e-6, rel=1e-2)
    assert found.per_emitted == pytest.approx(0, abs=1e-9)
    assert [count for count, _ in found.draft] == [1, 4]
    assert found.draft[1][1].at(7) == pytest.approx(0.98, rel=1e-3)
    assert draft_costs([one for one in points if not one.depth], [], shared) is None


@pytest.mark.parametrize("late", [1.0, 3.0])
def test_who_reads_what_was_emitted_is_charged_with_it(late: float) -> None:
    """Beside what it takes a token of context, whether or not some drafting was interrupted."""
    points = [made_of("heads", *place, 0.1) for place in PLACES]
    shared = shared_costs(points, "heads")
    readers = [replace(one, draft=one.draft + 0.004 * one.before) for one in points]
    passes = drafting(readers, 0.004)
    # Whatever it is that was interrupted, it is not the median of its kind.
    passes = [*passes * 3, replace(passes[0], draft=late * passes[0].draft)]
    found = draft_costs(readers, passes, shared)
    assert found is not None
    assert found.per_context == pytest.approx(1e-6, rel=1e-2)
    assert found.per_emitted == pytest.approx(0.004, rel=1e-3)
    assert found.draft[0][1].at(3) == pytest.approx(0.33, rel=1e-3)
    assert found.draft[1][1].at(7) == pytest.approx(0.98, rel=1e-3)


def test_who_keeps_the_host_busy_is_charged_with_it() -> None:
    light = [made_of("model", *place, 0.1) for place in PLACES]
    plain = [replace(one, name="off") for one in light if not one.depth]
    heavy = [replace(one, name="heads", host=one.host + 0.5) for one in light]
    alone, beside = (
        shared_costs([*plain, *light], "off"),
        shared_costs([*plain, *light, *heavy], "off"),
    )
    assert beside == alone
    found = draft_costs(heavy, drafting(heavy), beside)
    own = draft_costs(light, drafting(light), beside)
    assert found is not None
    assert own is not None
    # The curve of a draft of one token has the half millisecond that its rounds take more.
    assert found.draft[0][1].at(1) - own.draft[0][1].at(1) == pytest.approx(0.5, rel=1e-2)


def test_noise_does_not_charge_sequences_with_a_pass() -> None:
    """Four rows of one sequence came out too cheap; plain rounds say what a sequence can cost."""
    times = {(1, 0): 1.05, (4, 0): 1.2, (1, 3): 0.9}
    points = [
        point("model", batch, k, 0.0, (0.1 * k, verify, 0.2 + 0.03 * batch))
        for (batch, k), verify in times.items()
    ]
    shared = shared_costs(points, "model")
    # A token a sequence was emitted everywhere: the two cannot be told apart.
    assert shared.host + shared.token == pytest.approx(0.03 + 0.05, rel=1e-3)


def timed(
    turn: int, k: int, pace: float, *, before: int = 1, longest: int = 0, first: bool = False
) -> Timed:
    return Timed(
        name="model",
        phase=0,
        turn=turn,
        first=first,
        index=turn,
        batch=1,
        rows=1 + k,
        context=50,
        reads=50 * (1 + k),
        depth=max(k, longest),
        drafting=min(k, 1),
        before=before,
        emitted=1,
        draft=0.1 * k * pace,
        verify=1.0 * pace,
        host=0.2 * pace,
    )


def test_drift_is_taken_out_by_rounds_without_a_draft() -> None:
    paces = [1.0] * 9 + [2.0] * 8
    found = [timed(turn, k, pace) for turn, pace in enumerate(paces) for k in (0, 4)]
    level = levels(found)
    assert level[0, 0] == pytest.approx(1.0)
    assert level[0, 16] == pytest.approx(2.0)
    by_depth = {one.depth: one for one in points_of(found)}
    assert by_depth[0].verify == pytest.approx(1.0)
    assert by_depth[4].draft == pytest.approx(0.4)
    assert by_depth[4].scatter < 0.01
    assert [one.draft for one in drafting_of(found)] == [pytest.approx(0.4)] * len(paces)


def test_first_rounds_at_a_k_are_good_for_drafting_alone() -> None:
    """They say nothing of drift, and drafts of unlike length in a batch nothing of either."""
    turns = (0, 10, 20)
    later = [timed(turn, k, 1.0) for turn in turns for k in (0, 4)]
    first = [timed(turn, k, 1 + turn / 10, first=True) for turn in turns for k in (0, 4)]
    odd = [timed(turn, 4, 1.0, longest=5, first=True) for turn in turns]
    assert points_of([*later, *first, *odd]) == points_of(later)
    found = drafting_of([*later, *first, *odd])
    assert [(one.depth, one.first) for one in found] == [(4, False)] * 3 + [(4, True)] * 3
    assert [one.draft for one in found] == pytest.approx([0.4] * 3 + [0.4, 0.8, 1.2])


def test_a_point_has_the_mean_of_what_was_emitted_before() -> None:
    (one,) = points_of([timed(turn, 4, 1.0, before=before) for turn, before in enumerate((2, 5))])
    assert one.before == 3.5


def test_few_passes_count_for_who_has_no_others() -> None:
    """A busy machine timed a drafter's drafts once, and so its costs are known nevertheless."""
    plain = [replace(timed(turn, 0, 1.0), name="plain") for turn in range(3)]
    rounds = [timed(turn, 0, 1.0) for turn in range(3)]
    (lonely, more) = (timed(3, 4, 1.0), timed(3, 2, 1.0))
    firm = points_of([*plain, *rounds])
    assert firm_points(points_of([*plain, *rounds, lonely])) == points_of([*plain, *rounds, lonely])
    often = [timed(turn, 4, 1.0) for turn in range(3)]
    kept = firm_points(points_of([*plain, *rounds, *often, more]))
    assert {one.depth for one in kept} == {0, 4}
    assert firm_points(firm) == firm


def test_a_turn_has_some_of_the_ks_and_always_0() -> None:
    phase = Phase([[1]], {"model": (0, 1, 2, 3, 5), "off": (0,)}, most_ks=2)
    turns = range(40)
    draws = [phase.drawn("model", turn) for turn in turns]
    assert all(len(one) == len(set(one)) == 3 and 0 in one for one in draws)
    assert {k for one in draws for k in one} == {0, 1, 2, 3, 5}
    assert {one.index(0) for one in draws} == {0, 1, 2}
    assert draws == [phase.drawn("model", turn) for turn in turns]
    assert phase.drawn("off", 0) == [0]
    assert sorted(replace(phase, most_ks=9).drawn("model", 0)) == [0, 1, 2, 3, 5]


TICK = 1 / 1024


@dataclass
class Watch:
    """Goes on a little whenever it is looked at."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now


@dataclass
class Phased:
    """Instead of `run_phase`: takes as long as it may, but `least` seconds at least."""

    least: float = 0.0
    numbers: list[int] = field(default_factory=list[int])
    turns: list[range] = field(default_factory=list[range])
    ends: list[float] = field(default_factory=list[float])

    def __call__(
        self,
        engines: Sequence[object],
        phase: Phase,
        *,
        number: int,
        turns: range,
        span: Span,
    ) -> list[Timed]:
        clock = span.clock
        assert isinstance(clock, Watch)
        assert not engines
        assert phase.prompts == [[number]]
        self.numbers.append(number)
        self.turns.append(turns)
        self.ends.append(span.until)
        clock.now = max(clock.now + self.least, span.until)
        return [timed(turns[0], 0, 1.0)]


def timing_of(num_phases: int) -> Timing:
    engines: Any = None
    plans = [Plan(1, 66, (), (1,), 1, alike=False)] * num_phases
    return Timing(
        engines, plans, [Phase([[n]], {}, 1) for n in range(num_phases)], Watch(), Pace(0.01, 0.001)
    )


def test_all_phases_are_gone_through_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    phased, timing, shares = Phased(), timing_of(2), list[float]()
    monkeypatch.setattr("outrider_lab.bench.calibrate.timing.run_phase", phased)
    timing.run(60, tell=lambda _, share: shares.append(share))
    assert phased.numbers == [0, 1] * 3
    assert phased.ends == pytest.approx([10, 20, 30, 40, 50, 60], abs=0.1)
    assert shares == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6], abs=0.01)
    assert timing.seconds == pytest.approx(60, abs=0.1)


def test_runs_add_to_what_was_timed_and_no_turn_comes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phased, timing = Phased(), timing_of(2)
    monkeypatch.setattr("outrider_lab.bench.calibrate.timing.run_phase", phased)
    for _ in range(2):
        timing.run(60)
    of_one = [turn for turns in phased.turns[::2] for turn in turns]
    assert len(of_one) == len(set(of_one)) == 6 * MOST_TURNS
    assert phased.turns[::2] == phased.turns[1::2]
    assert len(timing.timed) == 12
    assert timing.seconds == pytest.approx(120, abs=0.1)


def test_a_run_that_is_late_stops_after_a_whole_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    phased, timing = Phased(least=40.0), timing_of(3)
    monkeypatch.setattr("outrider_lab.bench.calibrate.timing.run_phase", phased)
    timing.run(60)
    assert phased.numbers == [0, 1, 2]
    timing.run(180)
    assert phased.numbers == [0, 1, 2] * 3
    assert len({turns.start for turns in phased.turns}) == 3


@pytest.mark.parametrize("seconds", [-5.0, 0.0, 30.0])
def test_shares_of_the_time_are_shares(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    shares: list[float] = []
    monkeypatch.setattr("outrider_lab.bench.calibrate.timing.run_phase", Phased(least=20.0))
    timing_of(3).run(seconds, tell=lambda _, share: shares.append(share))
    assert len(shares) == 3
    assert all(0 <= share <= 1 for share in shares)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_prompts_end_alike_and_begin_differently() -> None:
    prompts = prompts_of([7, 8, 9], length=10, count=3)
    assert [len(prompt) for prompt in prompts] == [10, 10, 10]
    assert all(prompt[1:] == prompts[0][1:] and prompt[-3:] == [7, 8, 9] for prompt in prompts)
    assert all(a[0] != b[0] for a, b in pairwise(prompts))


QUESTION = {"machine": {"cpu": "a", "cores": 2}, "weights": {"target": "0123"}, "ks": [1, 2]}
FOUND = Calibration(
    machine="a", target_name="t", target=PassCosts(Curve(((1.0, 0.5),))), drafters=()
)


def test_a_calibration_is_kept_for_its_question(tmp_path: Path) -> None:
    assert load(tmp_path, QUESTION).calibration is None
    kept = keep(tmp_path, QUESTION, FOUND)
    assert kept.note is None
    assert load(tmp_path, QUESTION).calibration == FOUND
    assert load(tmp_path, {**QUESTION, "ks": [1]}).calibration is None
    assert list((tmp_path / CALIBRATIONS).glob("*.json")) == [kept.path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "question": 0}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = path_of(tmp_path, QUESTION)
    assert path is not None
    path.parent.mkdir()
    path.write_text(text)
    found = load(tmp_path, QUESTION)
    assert found.calibration is None
    assert "measuring anew" in (found.note or "")


def test_a_calibration_of_another_schema_is_measured_anew(tmp_path: Path) -> None:
    path = keep(tmp_path, QUESTION, FOUND).path
    assert path is not None
    record = json.loads(path.read_text())
    record["calibration"]["schema"] = "outrider-calibration/0"
    path.write_text(json.dumps(record))
    found = load(tmp_path, QUESTION)
    assert found.calibration is None
    assert "measuring anew" in (found.note or "")


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = keep(tmp_path / "file", QUESTION, FOUND)
    assert kept.calibration == FOUND
    assert "not kept" in (kept.note or "")
    assert "no cache folder" in (keep(None, QUESTION, FOUND).note or "")


@pytest.mark.parametrize(("window", "plain"), [(2048, 1e-3), (4096, 1e-4)])
def test_long_texts_have_room_for_the_turns_that_are_needed(window: int, plain: float) -> None:
    """Even if all drafts are kept. Fractions of K are for short texts, which are read again."""
    engine: Any = SimpleNamespace(llm=SimpleNamespace(spec=SimpleNamespace(max_tokens=window)))
    engines: Any = SimpleNamespace(present=[engine, engine], plain=engine)
    pace = Pace(plain, row=1e-6)
    plans = plans_of(engines, Wanted(), pace)
    long = [plan for plan in plans if plan.context > 100]
    assert [plan.batch for plan in long] == [4, 1]
    for plan in long:
        deepest = sorted(plan.ks)[-plan.most_ks :]
        emitted = 2 * pace.warm(plan.batch) + ALIKE * sum(k + 1 for k in (0, *deepest))
        assert plan.context > 512
        assert plan.context + LEAST_TURNS * emitted + max(plan.ks) < window
        assert not set(EDGES) & set(plan.ks)
    assert [set(EDGES) <= set(plan.ks) for plan in plans[2:]] == [False, True, False]


@pytest.mark.parametrize(("asked", "found"), [(10, 66), (300, 300), (4000, None)])
def test_one_text_alone_is_timed_at_the_length_that_it_will_have(
    asked: int, found: int | None
) -> None:
    engine: Any = SimpleNamespace(llm=SimpleNamespace(spec=SimpleNamespace(max_tokens=2048)))
    engines: Any = SimpleNamespace(present=[engine, engine], plain=engine)
    wanted = Wanted(batches=(1,), ks=(1, 7), room=1024, context=asked)
    (plan,) = plans_of(engines, wanted, Pace(1e-3, row=1e-6))
    assert (plan.batch, plan.again) == (1, True)
    assert plan.ks == (1, 7)
    assert found is None or plan.context == found
    assert plan.context < 1024


def test_a_round_without_a_draft_takes_what_looking_for_one_takes() -> None:
    calibration = Calibration("", "", PassCosts(Curve(((1.0, 1.0),))), ())
    silent = DrafterCosts("ngram", ((1, Curve(((1.0, 0.5),))),), miss=0.25)
    stats = RoundStats((0.0,), 0.0, 0.0)
    times = round_times(calibration, silent, DecodeLoad(batch=2), stats, depth=1)
    plain = plain_times(calibration, DecodeLoad(batch=2))
    assert times.total == plain.total + 2 * 0.25
