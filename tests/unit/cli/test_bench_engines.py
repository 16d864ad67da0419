"""`outrider bench engines` and `bench load`: small runs from end to end, and words to refuse."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider.pairs.catalog import PAIRS
from outrider_lab.bench.studies import engines_run
from outrider_lab.cli import engine_setup as engine_subjects
from outrider_lab.measure.machine import visit

pytestmark = pytest.mark.wide

SMALL = ("bench", "engines", "--engines", "off,single,pd", "--levels", "0,2", "--requests", "2")
TINY = (*SMALL, "--repeats", "1", "--max-tokens", "6", "--gap", "0", "--output-dir", "out")


def results(folder: str = "out") -> dict[str, Any]:
    return json.loads(Path(folder, "results.json").read_text())


def read_csv(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


@pytest.mark.weights
@pytest.mark.slow
def test_a_run_leaves_results_requests_and_a_report(outrider: Command) -> None:
    shown = outrider(*TINY, "--no-plots", "--csv", "rows.csv")
    assert shown.code == 0, shown.err
    record = results()
    assert record["benchmark"] == "engines"
    assert record["complete"] is True
    assert {"run_id", "provenance", "machine", "weights", "plan", "settings"} <= record.keys()
    places = [(cell["level"], cell["engine"]) for cell in record["cells"]]
    assert places == [(level, name) for level in (0, 2) for name in ("off", "single", "pd")]
    assert all(cell["status"] == "success" for cell in record["cells"])
    assert all(cell["tokens_per_second"] > 0 for cell in record["cells"])
    assert all(cell["busy"] > 0 for cell in record["cells"])
    assert record["agreement"] == {"visits": 2, "same_tokens": 2}
    assert [one["settings"].get("schedule", "single") for one in record["engines"]] == [
        *("single", "single", "pd")
    ]
    rows = read_csv("rows.csv")
    assert len(rows) == 2 * 3 * 2
    assert {row["status"] for row in rows} == {"success"}
    assert [{"pair": "embedded", **row} for row in read_csv("out/requests.csv")] == rows
    assert record["run_id"] in Path("out/report.md").read_text()
    assert record["run_id"] in Path("out/report.html").read_text()
    assert record["run_id"] in shown.out
    assert "All engines wrote the same tokens in 2 of 2 visits." in shown.out
    again = outrider(*TINY)
    assert again.code == 2
    assert "nothing is overwritten" in again.err


@pytest.mark.weights
@pytest.mark.slow
def test_several_pairs_have_a_folder_each(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = replace(PAIRS["embedded"], pair_name="twin")
    gone = replace(
        PAIRS["embedded"], pair_name="gone", target=replace(twin.target, model_id="nobody/has-it")
    )
    known = {"embedded": PAIRS["embedded"], "twin": twin, "gone": gone}
    monkeypatch.setattr(engine_subjects, "get_pair", known.__getitem__)
    shown = outrider(
        *("bench", "engines", "--pairs", "embedded,gone,twin", "--engines", "off,single"),
        *("--levels", "1", "--requests", "1", "--repeats", "1", "--max-tokens", "2"),
        *("--output-dir", "out", "--no-plots", "--csv", "rows.csv", "--json"),
    )
    # A pair that is not here is reported, and the others go on.
    assert shown.code == 3, shown.err
    assert "pair gone:" in shown.err
    assert [one["pair"] for one in json.loads(shown.out)["pairs"]] == ["embedded", "twin"]
    assert results("out/twin")["models"] == results("out/embedded")["models"]
    assert [row["pair"] for row in read_csv("rows.csv")] == [
        *("embedded", "embedded", "twin", "twin")
    ]


@pytest.mark.weights
@pytest.mark.slow
def test_an_interrupt_keeps_whole_visits(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = count()

    def interrupted(contestants: Any, turn: int, serve: Any) -> Any:
        if next(turns) == 1:
            raise KeyboardInterrupt
        return visit(contestants, turn, serve)

    monkeypatch.setattr(engines_run, "visit", interrupted)
    shown = outrider(*TINY, "--no-plots", "--json")
    assert shown.code == 130
    assert "what was measured until then is in out" in shown.err
    record = json.loads(shown.out)
    assert record["complete"] is False
    assert [sample["level"] for sample in record["samples"]] == [0, 0, 0]


@pytest.mark.weights
@pytest.mark.slow
def test_a_load_run_counts_wins_and_may_replay(outrider: Command) -> None:
    rows = [
        {"arrival_seconds": i / 100, "prompt": f"def f{i}(x):", "max_tokens": i + 1}
        for i in range(3)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = outrider(
        *("bench", "load", "--engines", "single,pd", "--replay", "trace.jsonl"),
        *("--max-concurrent", "2", "--output-dir", "out"),
    )
    assert shown.code == 0, shown.err
    record = results()
    assert record["cases"][0]["max_in_flight"] == 2
    assert [cell["case"] for cell in record["cells"]] == ["replay", "replay"]
    assert {row["metric"] for row in record["head_to_head"]} == {
        *("throughput", "ITL p95", "TTFT p95", "end-to-end")
    }
    taken = read_csv("out/requests.csv")
    assert [int(row["tokens"]) for row in taken if row["engine"] == "pd"] == [1, 2, 3]
    assert "Head to head" in shown.out
    assert "3 recorded requests, at most 2 in flight" in shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("engines", "--engines", "pvd"), "'pvd'"),
        (("engines", "--levels", "x"), "whole numbers"),
        (("engines", "--prompts", "poetry"), "neither a domain nor a file"),
        (("engines", "--schedule", "pd"), "unknown option '--schedule'"),
        (("engines", "--pairs", "nobody"), "'nobody'"),
        (("engines", "--pairs", "embedded", "--target", "x"), "--pairs and --target"),
        (("engines", "--pairs", ","), "--pairs names nothing"),
        (("load", "--rate", "1", "--replay", "x"), "--rate and --replay"),
        (("load", "--replay", "none.jsonl"), "none.jsonl"),
        (("load", "--duration", "1"), "says nothing of a scenario"),
        (("load", "--scenarios", "storm"), "'storm'"),
        (("load", "--concurrency", "0"), "from 1"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("bench", *words)
    assert shown.code == 2
    assert said in shown.err
    assert not Path("results").exists()
