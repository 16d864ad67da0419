"""`outrider bench peers` from words to files, with engines that only pretend."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from doubles.peer_sides import ScriptedSide, SidePeer
from outrider_lab.bench.peers import compare
from outrider_lab.bench.peers import contestants as commands

pytestmark = [pytest.mark.wide, pytest.mark.weights]

RUN = ("bench", "peers", "--output-dir", "out", "--formats", "f32")
SHORT = (*RUN, "--prompts", "1", "--temperatures", "0")
ALONE = (*SHORT, "--max-tokens", "4", "--peers", "", "--drafters", "none,model")
TWO = ("--peers", "transformers,llama.cpp", "--drafters", "none,model")


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ScriptedSide]]:
    """Every peer but OpenVINO is there, and no peer is left running at the end."""
    found = {
        "outrider": ScriptedSide(),
        "transformers": ScriptedSide(),
        "llama.cpp": ScriptedSide(),
        "vllm": ScriptedSide(),
    }
    peers: list[SidePeer] = []

    def started(name: str, command: list[str], log: Path) -> SidePeer:
        assert command == [name]
        assert log == Path("out", "logs", f"{name}.log")
        peers.append(SidePeer(found[name]))
        return peers[-1]

    def command_of(name: str, folder: Path, tokenizer: Path) -> list[str] | None:
        del folder, tokenizer
        return None if name == "openvino" else [name]

    def nobody(*_: object) -> None:
        return None

    monkeypatch.setattr(compare, "Peer", started)
    monkeypatch.setattr(compare, "command_of", command_of)
    monkeypatch.setattr(commands, "command_of", nobody)
    monkeypatch.setattr("outrider_lab.bench.peers.match.SETTLE_SECONDS", 0.0)
    yield found
    assert all(peer.closed for peer in peers)


def record_of(out: str) -> dict[str, Any]:
    record = json.loads(out)
    assert record.pop("folder") == "out"
    assert record == json.loads(Path("out", "results.json").read_text())
    return record


@pytest.mark.slow
@pytest.mark.usefixtures("sides")
def test_a_run_leaves_runs_results_rows_and_a_page(outrider: Command) -> None:
    words = ("--prompts", "1", "--temperatures", "0,0.8", "--max-tokens", "4", "--json")
    shown = outrider(*RUN, *TWO, *words)
    assert shown.code == 0, shown.err
    record = record_of(shown.out)
    assert (record["benchmark"], record["tier"], record["complete"]) == ("peers", "a", True)
    assert {"provenance", "versions", "sessions", "ratios", "cpu_share"} <= record.keys()
    scores = {(s["peer"], s["drafter"], s["temperature"]): s for s in record["scores"]}
    # GGUF files were not made, as nobody is there to read them.
    assert set(scores) == {
        (peer, drafter, temperature)
        for peer in ("outrider", "transformers")
        for drafter in ("none", "model")
        for temperature in (0.0, 0.8)
    }
    assert all(score["prompts"] == 2 for score in scores.values())
    assert scores["transformers", "none", 0.0]["same_text"]["equal"] == 2
    assert scores["transformers", "none", 0.8]["same_text"] is None
    rows = list(csv.DictReader(Path("out", "samples.csv").read_text().splitlines()))
    assert len(rows) == 2 * len(scores)
    assert len(Path("out", "runs.jsonl").read_text().splitlines()) > len(rows)
    assert "best against best" in Path("out", "report.md").read_text()


def test_the_same_command_goes_on_where_it_stopped(
    outrider: Command, sides: dict[str, ScriptedSide]
) -> None:
    tired = {"transformers none f32 dtype=float32": 2}
    sides["transformers"].tired = tired
    shown = outrider(*SHORT, *TWO, "--max-tokens", "4", "--json")
    assert shown.code == 0, shown.err
    before = record_of(shown.out)
    assert "tired" in str(before["refused"])
    for side in sides.values():
        side.runs.clear()
        side.tired = {}
    shown = outrider(*SHORT, *TWO, "--max-tokens", "4", "--json")
    after = record_of(shown.out)
    assert [score["prompts"] for score in after["scores"]] == [2, 2, 2, 2]
    assert "tired" not in str(after["refused"])
    # A warm-up each, and the prompt that one of them had not run.
    assert [len(sides[name].runs) for name in ("outrider", "transformers")] == [4, 4]
    assert len(after["sessions"]) == 2
    other = outrider(*SHORT, *TWO, "--max-tokens", "5")
    assert other.code == 2
    assert "results with max_tokens 4, not 5" in other.err


def test_an_interrupt_keeps_what_was_measured(
    outrider: Command, sides: dict[str, ScriptedSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SidePeer.ask

    def interrupted(peer: SidePeer, do: str, **request: Any) -> dict[str, Any]:
        # Two warm-ups and a run each, then a run of the second prompt.
        if do == "run" and sum(len(side.runs) for side in sides.values()) == 5:
            raise KeyboardInterrupt
        return asked(peer, do, **request)

    monkeypatch.setattr(SidePeer, "ask", interrupted)
    words = ("--max-tokens", "4", "--drafters", "none", "--peers", "transformers", "--json")
    shown = outrider(*SHORT, *words)
    assert shown.code == 130
    assert "goes on from there" in shown.err
    record = record_of(shown.out)
    assert record["complete"] is False
    assert sum(score["prompts"] for score in record["scores"]) == 3


@pytest.mark.usefixtures("sides")
def test_people_get_tables_and_the_command_for_what_is_missing(outrider: Command) -> None:
    peers = "openvino,http,transformers"
    words = ("--peers", peers, "--peers-folder", "there", "--drafters", "none")
    shown = outrider(*SHORT, *words, "--quick")
    assert shown.code == 0, shown.err
    assert "note: openvino was not measured: get it with: " in shown.err
    assert "note: http is skipped" in shown.err
    where = Path("there").resolve()
    assert f"openvino is missing; get it with: scripts/peers {where}" in shown.err
    for title in ("Rates", "Ratios", "What this run shows", "Not measured"):
        assert title in shown.out
    record = json.loads(Path("out", "results.json").read_text())
    assert (record["quick"], record["max_tokens"]) == (True, 32)
    assert record["missing"]["openvino"].startswith(f"scripts/peers {where}")


def test_servers_take_part_by_their_name(outrider: Command, sides: dict[str, ScriptedSide]) -> None:
    servers = "vllm=http://a,vllm+model=http://b"
    shown = outrider(*ALONE, "--servers", servers, "--json")
    assert shown.code == 0, shown.err
    loaded = sides["vllm"].loaded
    assert [setup.target for setup in loaded.values()] == ["http://a", "http://b"]
    record = record_of(shown.out)
    whats = [(ratio["what"], ratio["theirs"]) for ratio in record["ratios"]]
    assert ("plain", "vllm none f32") in whats
    assert ("model", "vllm model f32") in whats
    assert ("speculation over plain", "vllm none f32") in whats


def test_a_dead_server_is_named(outrider: Command, sides: dict[str, ScriptedSide]) -> None:
    """With another engine to compare with the rest is worth having; with none it is a failure."""
    sides["vllm"].broken = ["vllm none f32"]
    words = ("--drafters", "none", "--servers", "vllm=http://a")
    alone = outrider(*SHORT, "--max-tokens", "4", "--peers", "", *words)
    assert alone.code == 1
    assert "note: vllm was not measured: vllm none f32 is broken" in alone.err
    assert "nothing was compared: no engine but ours ran" in alone.err
    assert "Rates" in alone.out
    both = outrider(*SHORT, "--max-tokens", "4", "--peers", "transformers", *words)
    assert both.code == 0, both.err
    assert "note: vllm was not measured" in both.err
    assert "nothing was compared" not in both.err


def test_trials_of_an_earlier_run_are_not_tried_again(
    outrider: Command, sides: dict[str, ScriptedSide]
) -> None:
    name = "outrider model f32 k=8"
    Path("earlier.json").write_text(json.dumps({"trials_seconds_per_token": {name: {"0.0": 0.1}}}))
    shown = outrider(*ALONE, "--trials", "earlier.json", "--json")
    assert shown.code == 0, shown.err
    assert {ask.name for ask in sides["outrider"].runs} == {"outrider none f32", name}


def test_nothing_that_can_run_is_a_failure(
    outrider: Command, sides: dict[str, ScriptedSide]
) -> None:
    sides["outrider"].broken = ["outrider none f32"]
    shown = outrider(*SHORT, "--drafters", "none", "--peers", "")
    assert shown.code == 1
    assert "nothing was measured" in shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--formats", "bf17"), "did you mean 'bf16'"),
        (("--formats", ","), "each need a word"),
        (("--peers", "lama.cpp"), "did you mean 'llama.cpp'"),
        (("--drafters", "eagle"), "no 'eagle' here"),
        (("--temperatures", "warm"), "must be numbers"),
        (("--temperatures", "-1"), "must be numbers"),
        (("--seldom", "transformers"), "PEER=N"),
        (("--seldom", "vllm=2"), "of one that takes part"),
        (("--servers", "there"), "does not name a server"),
        (("--trials", "nowhere.json"), "cannot be read"),
        (("--tier", "b", "--target", "outrider/embedded"), "drop one of them"),
        (("--tier", "c"), "tier"),
        (("--target", "no/such/model"), "no/such/model"),
    ],
)
def test_words_that_cannot_be_meant(
    outrider: Command, sides: dict[str, ScriptedSide], words: tuple[str, ...], said: str
) -> None:
    shown = outrider("bench", "peers", *words)
    assert shown.code in (2, 3)
    assert said in shown.err
    assert not sides["outrider"].runs


def test_a_file_without_trials(outrider: Command) -> None:
    Path("earlier.json").write_text('{"trials_seconds_per_token": {"a": {"0": "fast"}}}')
    shown = outrider(*RUN, "--trials", "earlier.json")
    assert shown.code == 2
    assert "no trials of ours" in shown.err
