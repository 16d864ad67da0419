"""A gate opens for work done fast enough, on a noisy machine too, and shuts for a slow side."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial

import gate as script
import pytest
from gate import Gate, Side, judge


@dataclass(slots=True)
class Clock:
    """Seconds that pass only when a side works; `turns` is who worked when."""

    now: float = 0.0
    turns: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def __call__(self) -> float:
        return self.now

    def side(self, name: str, seconds: float, *, stalls: tuple[int, ...] = ()) -> Side:
        """Ten tokens a turn; in the turns `stalls` a neighbour makes it fifty times as slow."""

        def work(turn: int) -> int:
            self.turns.append((name, turn))
            self.now += seconds * (50 if turn in stalls else 1)
            return 10

        return work


def half_gate(
    clock: Clock, ours: float, num_turns: int = 5, *, stalls: tuple[int, ...] = ()
) -> Gate:
    side = clock.side("ours", ours, stalls=stalls)
    return Gate("ours / other", 2.0, 20.0, side, clock.side("other", 1.0), num_turns)


@pytest.mark.parametrize(
    ("seconds", "holds"), [(0.1, True), (0.5, True), (0.6, False), (1.0, False), (0.04, False)]
)
def test_the_ratio_of_rates_decides(seconds: float, holds: bool) -> None:
    clock = Clock()
    finding = judge(half_gate(clock, seconds), clock=clock)
    assert finding.ratio == pytest.approx(1 / seconds, abs=1e-3)
    assert finding.holds is holds
    assert finding.num_turns == (5 if holds else 15)
    assert ("OUTSIDE" in finding.line()) is not holds


def test_rates_count_work_and_not_turns() -> None:
    clock = Clock()
    usual = half_gate(clock, 0.25, 3)

    def half(turn: int) -> int:
        return usual.ours(turn) // 2

    assert judge(replace(usual, ours=half), clock=clock).ratio == pytest.approx(2.0)


def test_sides_take_turns_and_the_first_turn_is_not_counted() -> None:
    clock = Clock()
    finding = judge(half_gate(clock, 0.25, 1, stalls=(0,)), num_attempts=1, clock=clock)
    names = [name for name, _ in clock.turns]
    assert names == ["ours", "other", "ours", "other"]
    assert (finding.ratio, finding.num_turns) == (pytest.approx(0.08), 1)
    judge(half_gate(clock, 0.25, 2), clock=clock)
    assert [name for name, _ in clock.turns][-4:] == ["ours", "other", "other", "ours"]


def test_stalls_of_less_than_half_the_turns_do_not_shut_it() -> None:
    clock = Clock()
    finding = judge(half_gate(clock, 0.25, stalls=(1, 3)), clock=clock)
    assert (finding.holds, finding.num_turns) == (True, 5)


def test_a_bad_start_is_made_up_for_by_more_turns() -> None:
    clock = Clock()
    finding = judge(half_gate(clock, 0.25, stalls=(0, 1, 2)), clock=clock)
    assert (finding.ratio, finding.num_turns) == (pytest.approx(4.0), 10)


def test_a_refused_gate_says_why_and_stops_nobody() -> None:
    def never(turn: int) -> int:
        raise AssertionError(turn)

    finding = judge(Gate("a", 1, 2, never, never, 3, refusal="no compiler"))
    assert finding.holds
    assert finding.line() == "a: refused, no compiler"
    assert finding.refusal == "no compiler"


@pytest.mark.parametrize(("seconds", "code"), [(0.25, 0), (1.0, 1)])
def test_the_script_exits_with_1_where_a_side_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, code: int
) -> None:
    clock = Clock()
    gates = [half_gate(clock, seconds), half_gate(clock, 0.25)]
    monkeypatch.setattr(script, "gates", lambda: gates)
    monkeypatch.setattr(script, "judge", partial(judge, clock=clock))
    assert script.gate.main([]) == code
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["OUTSIDE" if code else "ok", "ok"]
    record = json.loads(last)
    assert record["holds"] is (code == 0)
    assert [one["low"] for one in record["gates"]] == [2.0, 2.0]
    assert {"commit", "cpu"} <= record["provenance"].keys()
