"""`outrider bench drafters`: small runs from end to end, and words to refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider_lab.bench.studies import drafters as samples
from outrider_lab.cli import bench_peers

pytestmark = pytest.mark.wide

SMALL = ("bench", "drafters", "--prompts", "1", "--max-tokens", "6", "--output-dir", "out")
TWO = (*SMALL, "--domains", "code,adversarial", "--drafters", "ngram,model:2")


def read_csv(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


@pytest.mark.weights
@pytest.mark.slow
def test_a_run_leaves_results_rows_and_a_report(outrider: Command) -> None:
    shown = outrider(*TWO, "--no-plots", "--csv", "rows.csv", "--repeats", "2")
    assert shown.code == 0, shown.err
    record = json.loads(Path("out", "results.json").read_text())
    assert record["benchmark"] == "drafters"
    assert record["complete"] is True
    assert {"run_id", "provenance", "machine", "weights", "plan", "settings"} <= record.keys()
    places = [(cell["domain"], cell["contestant"]) for cell in record["cells"]]
    names = ("off", "ngram", "model:2")
    assert places == [(d, name) for d in ("code", "adversarial", "all") for name in names]
    assert all(cell["status"] == "success" for cell in record["cells"])
    model = record["cells"][2]
    assert model["num_drafted"] > 0
    assert len(model["by_position"]) == 2
    assert model["speedup"]["value"] > 0
    assert 0 < model["draft_share"] < 1
    # Sampled text is not compared: block and token keep its distribution, not its words.
    assert record["agreement"] == {"runs": 4, "same_tokens": 4}
    assert record["plan"]["params_by_domain"]["adversarial"]["temperature"] == 1
    assert record["plan"]["messages"] == []
    rows = read_csv("rows.csv")
    assert len(rows) == 2 * 3 * 2
    assert read_csv("out/samples.csv") == rows
    assert {row["status"] for row in rows} == {"success"}
    for name in ("report.md", "report.html"):
        assert record["run_id"] in Path("out", name).read_text()
    assert record["run_id"] in shown.out
    again = outrider(*TWO)
    assert again.code == 2
    assert "nothing is overwritten" in again.err


@pytest.mark.weights
@pytest.mark.slow
def test_drafters_that_are_not_there_are_skipped_by_name(outrider: Command) -> None:
    words = ("--domains", "code", "--drafters", "block,eagle=nowhere,ngram", "--no-plots", "--json")
    shown = outrider(*SMALL, *words)
    assert shown.code == 0, shown.err
    assert "note: block is skipped: there are no block heads" in shown.err
    record: dict[str, Any] = json.loads(shown.out)
    assert set(record["skipped"]) == {"block", "eagle=nowhere"}
    assert [cell["contestant"] for cell in record["cells"]] == ["off", "ngram"]
    assert "Not measured" in Path("out", "report.md").read_text()


@pytest.mark.weights
@pytest.mark.slow
def test_prompts_may_run_together_and_text_tied_to_the_seed_is_compared(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(*_: object) -> bool:
        return True

    monkeypatch.setattr(bench_peers, "is_instruct", always)
    shown = outrider(
        *("bench", "drafters", "--domains", "maths", "--drafters", "ngram", "--prompts", "4"),
        *("--max-tokens", "6", "--batch-size", "2", "--temperature", "0.7", "--sampler", "match"),
        *("--output-dir", "out", "--no-plots", "--json"),
    )
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["plan"]["num_pieces"] == 2
    assert record["plan"]["messages"] == ["maths"]
    assert "note: an instruct model: prompts are messages" in shown.err
    assert record["agreement"] == {"runs": 2, "same_tokens": 2}


@pytest.mark.weights
@pytest.mark.slow
def test_an_interrupt_keeps_whole_visits(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, taken = vars(samples)["attempt"], [0]

    def interrupted(*words: Any) -> Any:
        taken[0] += 1
        if taken[0] == 6:
            raise KeyboardInterrupt
        return attempt(*words)

    monkeypatch.setattr(samples, "attempt", interrupted)
    words = ("--domains", "code,maths", "--drafters", "ngram", "--no-plots", "--json")
    shown = outrider(*SMALL, *words)
    assert shown.code == 130
    assert "what was measured until then is in out" in shown.err
    record = json.loads(shown.out)
    assert record["complete"] is False
    assert [row["drafter"] for row in record["samples"]] == ["off", "ngram"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--drafters", "ngrm"), "did you mean 'ngram'"),
        (("--drafters", ","), "--drafters names none"),
        (("--domains", "poetry"), "'poetry'"),
        (("--domains", ","), "--domains names nothing"),
        (("--drafter", "ngram"), "unknown option '--drafter'"),
        (("--tree-nodes", "8"), "unknown option '--tree-nodes'"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("bench", "drafters", *words)
    assert shown.code == 2
    assert said in shown.err
    assert not Path("results").exists()
