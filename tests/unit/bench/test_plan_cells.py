"""The study of predictions: a draw that stays, prompts that differ, a file that goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_study import measure as measuring
from plan_study.draw import Limits, draw, prompts_of
from plan_study.measure import Repeats, Run, measure, run_once, speed_ups
from plan_study.record import (
    Study,
    choice_of,
    choices_in,
    record_of,
    results_in,
)
from plan_study.study import foretold

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, MachineError
from outrider.core.params import SamplingParams
from outrider.estimate.cost import Curve
from outrider.models.loading import resolve
from outrider_lab.bench.calibrate.engines import Dial
from outrider_lab.bench.calibrate.probe import Ahead
from outrider_lab.bench.predictions import accuracy
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PassCosts

DRAFTERS = ("model", "ngram", "suffix", "mtp", "eagle")
HARD = ("text", "size")
LIMITS = Limits(most_context=1900, most_tokens=8192)


def test_the_draw_is_its_seed_and_covers_what_it_should() -> None:
    cells = draw(150, DRAFTERS, LIMITS, seed=7)
    assert cells == draw(150, DRAFTERS, LIMITS, seed=7)
    assert cells[:20] == draw(20, DRAFTERS, LIMITS, seed=7)
    assert cells != draw(150, DRAFTERS, LIMITS, seed=8)
    assert set(Counter(cell.drafter for cell in cells).values()) == {30}
    assert Counter(cell.stratum for cell in cells) == {"easy": 100, "text": 25, "size": 25}
    assert all(1 <= cell.k <= 16 and 1 <= cell.batch <= 16 for cell in cells)
    assert all(100 <= cell.context <= 1900 for cell in cells)
    assert all(cell.batch * cell.context <= 8192 for cell in cells)
    assert all(cell.k >= 8 and cell.batch >= 6 for cell in cells if cell.stratum == "size")
    places = {(c.drafter, c.k, c.batch, c.context, c.domain) for c in cells}
    assert len(places) == 150
    assert {cell.k for cell in cells} >= {1, 2, 4, 8, 16}


@pytest.mark.parametrize("drafters", [("model", "ngram"), ("model", "ngram", "suffix")])
def test_hard_cells_are_drawn_for_every_drafter_where_few_rows_fit(drafters: Sequence[str]) -> None:
    limits = Limits(most_context=2004, most_tokens=1600, most_rows=48)
    cells = draw(120, drafters, limits, seed=7)
    assert set(Counter(cell.drafter for cell in cells).values()) == {120 // len(drafters)}
    assert {(c.stratum, c.drafter) for c in cells} == set(product(("easy", *HARD), drafters))
    assert all(cell.batch * (cell.k + 1) <= 48 for cell in cells)
    assert all(cell.k >= 8 and cell.batch >= 2 for cell in cells if cell.stratum == "size")


def test_limits_that_no_cell_is_within_end_the_draw() -> None:
    with pytest.raises(ConfigError, match="no further cell fits"):
        draw(1, DRAFTERS, Limits(most_context=50, most_tokens=8192), seed=7)


def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    cells = draw(3, DRAFTERS, LIMITS, seed=0)
    study = Study.open(path)
    study.cells_drawn(cells, {"seed": 0, "tier": "a"})
    study.add("measured", {"cell": 0, "speed_up": 1.5})
    with path.open("a") as stream:
        stream.write('{"record": "measured", "ce')
    again = Study.open(path)
    again.cells_drawn(cells, {"seed": 0, "tier": "a"})
    assert again.by_cell("measured") == {0: {"record": "measured", "cell": 0, "speed_up": 1.5}}
    again.add("measured", {"cell": 1, "speed_up": 0.5})
    assert sorted(Study.open(path).by_cell("measured")) == [0, 1]
    with pytest.raises(ConfigError, match="other cells"):
        again.cells_drawn(draw(3, DRAFTERS, LIMITS, seed=1), {"seed": 1, "tier": "a"})


# A pass takes 1 and 0.1 a row, a draft 0.5, a sequence 0.01; contexts cost nothing.
COSTS = Calibration(
    machine="",
    target_name="",
    target=PassCosts(Curve(((1.0, 1.1), (101.0, 11.1)))),
    drafters=(),
    host=0.01,
)
DRAFTER = DrafterCosts("model", ((1, Curve(((1.0, 0.5), (8.0, 0.5)))),))
# But the first token, which the prompt's round brings without a draft.
ALL_KEPT = [Ahead(9, 0), *(Ahead(9 - i, 9 - i) for i in range(1, 9))]
NONE_KEPT = [Ahead(9 - i, 0) for i in range(9)]
NONE_DRAFTED = [Ahead(0, 0)] * 9


def test_a_batch_of_known_texts_is_reckoned_round_by_round() -> None:
    plain = foretold(COSTS, DRAFTER, [ALL_KEPT, NONE_KEPT], k=0, context=100, opening=0)
    # A round reads the prompt, and another is not counted.
    assert (plain.num_rounds, plain.num_tokens) == (7, 14)
    assert plain.seconds == pytest.approx(7 * (1.2 + 0.02))
    own = foretold(COSTS, DRAFTER, [ALL_KEPT, NONE_KEPT], k=2, context=100, opening=1)
    # After a token of each and the opening round the first text goes 3, 6, 9, the second from 2 on
    # 1 by 1.
    assert (own.num_rounds, own.num_tokens) == (7, 6 + 7)
    both = [(6, 2), (6, 2), (3, 1), (3, 1), (3, 1), (2, 1), (1, 1)]
    # The last round of a text has no room for a draft.
    seconds = sum(1 + 0.1 * rows + 0.01 * live for rows, live in both) + 6 * 0.5
    assert own.seconds == pytest.approx(seconds)


def test_drafts_are_charged_with_the_tokens_of_the_round_before() -> None:
    texts = [ALL_KEPT, NONE_KEPT, NONE_DRAFTED]
    reader = replace(DRAFTER, per_emitted=0.1)

    def charged(k: int) -> float:
        own, free = (
            foretold(COSTS, one, texts, k=k, context=100, opening=min(k, 1)).seconds
            for one in (reader, DRAFTER)
        )
        return own - free

    # The first text drafts after an opening round of 2 tokens, then after 3; the second always
    # after 1, six times; the third never.
    assert charged(2) == pytest.approx(0.1 * (2 + 3 + 6 * 1))
    assert charged(0) == 0


class Remembering:
    """Reads a token of each prompt a pass, writes one a pass for each text that it has read, and
    notes whether it was asked to forget, and each pass's K. Fails with so many texts at once as
    `too_many`."""

    def __init__(self, *, too_many: int = 0) -> None:
        self.dial = Dial()
        self.forgot: list[bool] = []
        self.ks: list[int] = []
        self.tickets: list[Any] = []
        self.too_many = too_many

    @property
    def engine(self) -> Any:
        return SimpleNamespace(llm=self, dial=self.dial)

    def forget(self) -> None:
        self.forgot.append(not self.tickets)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        seq = SimpleNamespace(num_emitted=0)
        reader = SimpleNamespace(seq=seq, traces=list[int]())
        text = SimpleNamespace(token_ids=tuple(range(params.max_tokens)))
        ticket = SimpleNamespace(reader=reader, done=False, result=lambda: text)
        ticket.unread, ticket.left = len(prompt), params.max_tokens
        self.tickets.append(ticket)
        return ticket

    def advance(self) -> None:
        if len(self.tickets) == self.too_many:
            raise MachineError("out of memory")
        self.ks.append(self.dial.budgets([0])[0].depth)
        for ticket in self.tickets:
            if not ticket.done:
                self._go_on(ticket)

    def cancel(self, ticket: Any) -> None:
        self.tickets.remove(ticket)

    def _go_on(self, ticket: Any) -> None:
        ticket.reader.traces.append(0)
        ticket.unread = max(ticket.unread - 1, 0)
        if not ticket.unread:
            ticket.reader.seq.num_emitted += 1
        ticket.done = ticket.reader.seq.num_emitted == ticket.left


def ticking() -> Callable[[], float]:
    """Seconds that pass faster than an engine warms up."""
    ticks = count()
    return lambda: float(next(ticks))


@pytest.mark.parametrize(("k", "ks"), [(0, [0] * 6), (4, [0, 0, 1, 4, 4, 4])])
def test_a_run_forgets_texts_of_before_and_counts_no_prompt(k: int, ks: list[int]) -> None:
    """The prompts take two rounds, in which nothing is drafted, and drafters read them in a third.
    By then the first text has 3 tokens of 5, the second 2."""
    llm, clock = Remembering(), ticking()
    params = SamplingParams(max_tokens=5)
    for _ in range(2):
        run = run_once(llm.engine, [[1], [2, 3]], params, k, clock=clock)
        assert (run.num_tokens, run.num_rounds, run.seconds) == (2 + 3, 3, 1.0)
    assert llm.ks == ks * 2
    assert llm.forgot == [True, True]
    assert not llm.tickets


@pytest.mark.parametrize("too_many", [1, 2])
def test_nothing_is_left_in_flight_by_a_run_that_fails(too_many: int) -> None:
    """One text is there while the engine warms up, two after."""
    llm = Remembering(too_many=too_many)
    with pytest.raises(MachineError, match="out of memory"):
        run_once(llm.engine, [[1], [2]], SamplingParams(max_tokens=5), 4, clock=lambda: 0.0)
    assert bool(llm.ks) == (too_many == 2)
    assert not llm.tickets


@dataclass
class Runs:
    """Instead of `run_once`: a plain run takes 1 second for 4 tokens, one with drafts a half."""

    ks: list[int] = field(default_factory=list[int])

    def __call__(self, engine: Any, prompts: object, params: SamplingParams, k: int) -> Run:
        del prompts, params
        assert engine == ("drafting" if k else "plain")
        self.ks.append(k)
        return Run(seconds=0.5 if k else 1.0, num_tokens=4, num_rounds=2, texts=((1,),))


# Engines are only handed on.
PLAIN: Any = "plain"
DRAFTING: Any = "drafting"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setattr(measuring, "run_once", found)
    return found


def test_a_repeat_without_time_has_a_run_and_another_side_goes_first(runs: Runs) -> None:
    repeats = Repeats(3, 0.0)
    found = measure(PLAIN, DRAFTING, [[1]], SamplingParams(), k=4, repeats=repeats)
    assert runs.ks == [0, 4, 4, 0, 0, 4]
    assert (found.num_runs, found.num_tokens, found.num_rounds) == (3, 4, 2)
    assert (found.plain, found.drafted) == ((0.25,) * 3, (0.125,) * 3)


def test_sides_take_turns_until_each_has_had_its_time(runs: Runs) -> None:
    repeats = Repeats(2, 1.5)
    found = measure(PLAIN, DRAFTING, [[1]], SamplingParams(), k=4, repeats=repeats)
    assert runs.ks == [0, 4, 4, 0, 0, 4, 4, 0, 0, 4, 4, 0]
    assert found.num_runs == 6
    assert found.speed_up == 2


def test_of_several_ks_each_goes_first_in_its_turn(runs: Runs) -> None:
    found = speed_ups(PLAIN, DRAFTING, [[1]], SamplingParams(), ks=[2, 4], repeats=Repeats(4, 0.0))
    assert runs.ks == [0, 2, 4, 2, 4, 0, 4, 0, 2, 0, 2, 4]
    assert found == {2: 2.0, 4: 2.0}


def measured_line(cell: int, plain: float, drafted: float) -> dict[str, object]:
    repeats = [1.0, 1.01, 0.99, 1.0, 1.0]
    sides = {"plain": plain, "drafted": drafted}
    times = {side: [value * by for by in repeats] for side, value in sides.items()}
    return {"cell": cell, "speed_up": plain / drafted, "same": True, **times}


def study_of(tmp_path: Path, predicted: list[float], measured: list[float]) -> Study:
    study = Study.open(tmp_path / "study.jsonl")
    study.cells_drawn(draw(len(predicted), DRAFTERS, LIMITS, seed=0), {"seed": 0})
    for cell, (foreseen, found) in enumerate(zip(predicted, measured, strict=True)):
        study.add("prediction", {"cell": cell, "speed_up": foreseen})
        study.add("measured", measured_line(cell, found, 1.0))
    return study


def test_errors_and_signs_are_counted(tmp_path: Path) -> None:
    study = study_of(tmp_path, [1.1, 2.0, 0.9, 1.05], [1.0, 2.0, 1.0, 0.5])
    study.add("ladder", {"cell": 0, "predicted": {"0": 1, "2": 1.5}, "measured": {"0": 1, "2": 2}})
    study.add("ladder", {"cell": 1, "predicted": {"0": 1, "2": 0.5}, "measured": {"0": 1, "2": 2}})
    found = accuracy(results_in(study))
    assert found.count == 4
    assert found.losing == 1
    assert found.median == pytest.approx(0.1)
    # Both at exactly 1 are no gain: one was foreseen as such. Only two intervals leave out 1.
    assert found.right_signs == 0.5
    assert (found.sure, found.right_of_sure) == (2, 0.5)
    assert [choice.lost for choice in choices_in(study)] == [0.0, 0.5]
    record = record_of(study)
    assert record["worst_choice_lost"] == 0.5
    assert record["bars"]["median_error"] is False


def test_predictions_of_texts_like_these_are_judged_apart(tmp_path: Path) -> None:
    study = study_of(tmp_path, [1.0, 1.0], [1.0, 1.0])
    assert record_of(study)["unseen"] == {}
    others = {"by_law": 1.1, "by_places": 0.8}
    study.add("prediction", {"cell": 1, "speed_up": 1.0, **others})
    record = record_of(study)
    assert record["median_error"] == 0
    medians = {name: one["median"] for name, one in record["unseen"].items()}
    assert medians == {"by distribution": pytest.approx(0.1), "by places": pytest.approx(0.2)}


def test_of_equal_choices_the_smallest_k_counts() -> None:
    chosen = choice_of({0: 1.0, 2: 1.2, 4: 1.2}, {0: 1.0, 2: 1.1, 4: 1.3})
    assert (chosen.chosen, chosen.best) == (2, 4)
    assert chosen.lost == pytest.approx(1 - 1.1 / 1.3)


def test_nothing_is_said_of_nothing(tmp_path: Path) -> None:
    study = Study.open(tmp_path / "study.jsonl")
    assert record_of(study) == {"cells": 0}


@pytest.mark.weights
@pytest.mark.parametrize("domain", ["code", "adversarial"])
def test_prompts_have_the_length_of_the_cell_and_differ(domain: str) -> None:
    tokenizer = Tokenizer.load(resolve("outrider/embedded"))
    cell = replace(draw(1, DRAFTERS, LIMITS, seed=0)[0], domain=domain, batch=5, context=300)
    prompts = prompts_of(cell, tokenizer, 8192)
    assert [len(prompt) for prompt in prompts] == [300] * 5
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 5
    assert prompts == prompts_of(cell, tokenizer, 8192)
