"""Which way of working is kept, and what it costs to find out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from doubles.timelines import job_trace
from outrider.plugins.lanes.overlap import FIRST, LONG_AGO, ModeTrial


@dataclass
class Rounds:
    """`live` sequences that are verified together, with turns of `seconds(way)`."""

    contest: ModeTrial
    seconds: Callable[[int], float]
    live: int = 1
    guess: float | None = None
    now: float = 0.0
    ways: list[int] = field(default_factory=list[int])

    def run(self, num: int) -> list[int]:
        """The way of each of the next rounds."""
        for _ in range(num):
            way = self.contest.mode(self.live)
            self.ways.append(way)
            self.now += self.seconds(way)
            seqs = range(self.live)
            done = job_trace("verify", seqs, 0.5, ended=self.now, num_live=self.live)
            self.contest.observe(done, self.guess)
        return self.ways[-num:]


def test_the_shorter_way_is_kept_and_the_other_tried_ever_more_seldom() -> None:
    ways = Rounds(ModeTrial((2, 1), doubtful=1.3), lambda way: 1.0 + 0.1 * way, live=3).run(
        30 * FIRST
    )
    # A turn to get into it, and one that counts.
    assert ways[: FIRST + 1] == [0] * (FIRST + 1)
    assert ways[FIRST + 1 : FIRST + 4] == [1, 1, 0]
    assert ways.count(1) == 2 * 3


def test_a_way_that_is_better_is_gone_over_to_after_one_trial() -> None:
    ways = Rounds(ModeTrial((2, 1), doubtful=1.3), lambda way: 1.0 - 0.1 * way).run(20 * FIRST)
    assert ways[: FIRST + 1] == [0] * (FIRST + 1)
    # Trials of what was left last two turns, and one to get into it.
    assert ways[FIRST + 1 :].count(0) == 2 * 3


def test_noise_is_no_reason_to_change() -> None:
    ways = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: 1.0 - 0.02 * way).run(3 * FIRST)
    assert ways[-1] == 0


def test_what_is_known_to_be_much_worse_is_not_tried() -> None:
    told = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: 1.0 + way, guess=1.4)
    assert told.run(20 * FIRST).count(1) == 0
    found = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: 1.0 + way, guess=1.2)
    # A turn to get into it, and two before it is given up.
    assert found.run(20 * FIRST).count(1) == 3
    assert found.run(2 * LONG_AGO).count(1) == 3


def test_each_load_has_a_contest_of_its_own() -> None:
    contest = ModeTrial((1, 1), doubtful=1.3)
    few = Rounds(contest, lambda way: 1.0 - 0.5 * way, live=2)
    few.run(2 * FIRST)
    assert (contest.mode(2), contest.mode(3), contest.mode(4)) == (1, 1, 0)
    many = Rounds(contest, lambda way: 1.0 + 0.1 * way, live=4, now=few.now)
    assert many.run(FIRST + 2)[-1] == 1
    # The load falls in the middle of a trial, whose end is never seen.
    few.now = many.now
    few.run(3)
    assert contest.mode(4) == 0


def test_one_slow_turn_does_not_make_a_way_hopeless() -> None:
    # The turn to get into it, and the first that counts; then it is the better one.
    first = iter([1.0, 1.3])
    found = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: next(first, 0.9) if way else 1.0)
    assert found.run(7 * FIRST)[-1] == 1


def test_pauses_are_no_turns() -> None:
    """Nobody asked, or a sequence was pre-empted."""
    kept = iter([*[1.0] * 10, 50.0])
    found = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: 1.1 if way else next(kept, 1.0))
    assert found.run(10 * FIRST).count(1) == 2 * 2
    tried = iter([0.5, 30.0])
    found = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: next(tried, 0.5) if way else 1.0)
    assert found.run(2 * FIRST)[-1] == 1
    # What goes on is no pause.
    kept = iter([1.0] * 8)
    found = Rounds(ModeTrial((1, 1), doubtful=1.3), lambda way: 5.0 if way else next(kept, 10.0))
    assert found.run(4 * FIRST)[-1] == 1


def test_a_trial_that_the_load_ended_has_failed() -> None:
    contest = ModeTrial((1, 1), doubtful=1.3)
    many = Rounds(contest, lambda way: 1.0 + 0.1 * way, live=4)
    assert many.run(FIRST + 2)[-1] == 1
    few = Rounds(contest, lambda way: 1.0, live=2, now=many.now)
    few.run(1)
    many.now = few.now
    assert many.run(3 * FIRST).count(1) == 0
    assert many.run(2 * FIRST).count(1) > 0


def test_only_verdicts_count_and_only_of_those_that_had_one_before() -> None:
    contest = ModeTrial((1, 1), doubtful=1.3)
    for index in range(4 * FIRST):
        contest.observe(job_trace("draft", 1, 1.0, ended=float(index)), None)
        contest.observe(job_trace("verify", [index], 1.0, ended=float(index)), None)
        failed = job_trace("verify", [0], 1.0, ended=float(index), num_failed=1)
        contest.observe(failed, None)
    assert contest.mode(1) == 0
