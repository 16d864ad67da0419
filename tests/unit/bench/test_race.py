"""Contestants take turns, and nobody's warm-up is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.machine import provenance
from outrider.bench.store import write_json
from outrider.bench.turns import best, race
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.core.errors import ConfigError


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
