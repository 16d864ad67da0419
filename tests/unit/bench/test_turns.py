"""Contestants take turns, and nobody's warm-up is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider.plugins.measure.turns import provenance, race
from outrider_lab.bench.workload import WORKLOADS, load_prompts
from outrider_lab.measure.machine import attempt, best, different_tokens, in_turns, visit
from outrider_lab.measure.store import write_json


def test_every_contestant_runs_every_piece_in_rotating_order() -> None:
    ran: list[tuple[str, int]] = []

    def contestant(name: str, num_tokens: int):
        def run(piece: int) -> list[list[int]]:
            ran.append((name, piece))
            return [[7] * num_tokens]

        return run

    scores = race({"a": contestant("a", 2), "b": contestant("b", 3)}, [10, 20, 30])
    warm_up, timed = ran[:2], ran[2:]
    assert warm_up == [("a", 10), ("b", 10)]
    assert timed == [("a", 10), ("b", 10), ("b", 20), ("a", 20), ("a", 30), ("b", 30)]
    assert scores["a"].tokens == [2, 2, 2]
    assert scores["b"].to_dict()["tokens"] == 9
    assert best(scores, ["a", "b"]) in ("a", "b")


def test_a_visit_begins_with_its_turn_and_answers_in_the_usual_order() -> None:
    ran: list[str] = []

    def run(name: str) -> str:
        ran.append(name)
        return name.upper()

    found = visit(["a", "b", "c"], 4, run)
    assert ran == ["b", "c", "a"]
    assert found.results == ["A", "B", "C"]
    assert in_turns([[1, 2, 3], [4], [5, 6]]) == [1, 4, 5, 2, 6, 3]


def test_an_error_is_the_reason_of_an_attempt_and_an_interrupt_ends_all() -> None:
    moments = iter([1.0, 1.5, 3.0, 3.25])
    done = attempt(lambda: "text", lambda: next(moments))
    assert (done.value, done.reason, done.seconds) == ("text", None, 0.5)

    def full() -> str:
        raise MemoryError("full")

    def interrupted() -> str:
        raise KeyboardInterrupt

    failed = attempt(full, lambda: next(moments))
    assert (failed.value, failed.reason) == (None, "MemoryError: full")
    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)


def test_the_first_token_that_differs_is_named() -> None:
    assert different_tokens([(1, 2)], [[1, 2]], "off") is None
    said = "DifferentTokens: not those of off from token"
    assert different_tokens([(1, 3)], [(1, 2)], "off") == f"{said} 1 on"
    assert different_tokens([(1,)], [(1, 2)], "off", "; why") == f"{said} 1 on; why"
    assert different_tokens([(1,), (5,)], [(1,), (4,)], "off") == f"{said} 0 of prompt 1 on"


def test_workloads_ship_with_the_package() -> None:
    assert [len(load_prompts(name)) for name in WORKLOADS] == [82, 100]
    assert load_prompts("gsm8k")[0].startswith("Question: ")
    assert load_prompts("gsm8k")[0].endswith("\nAnswer:")
    with pytest.raises(ConfigError, match="humanevil"):
        load_prompts("humanevil")


def test_results_are_written_in_one_piece_with_their_origin(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_json(path, {"provenance": provenance()})
    record = json.loads(path.read_text("utf-8"))["provenance"]
    assert {"commit", "command", "cpu", "packages", "utc"} <= record.keys()
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]
