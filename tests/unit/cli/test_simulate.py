"""`outrider bench simulate`: a page for people, a record for programs, and answers to bad words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outrider.pairs as pairs
from checks.documents import check_trace
from doubles.command_line import Command
from doubles.planned import calibration
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_TARGET, list_pairs
from outrider_lab.bench import drawing
from outrider_lab.bench.charts import Chart, TimelineChart
from outrider_lab.cli.simulate_setup import known_ids, spec_named
from outrider_lab.planner.calibration import Calibration, PlaceCount

TINY = Path(pairs.__path__[0]) / "tiny"
SHORT = ("--requests", "2", "--max-tokens", "20", "--context", "16")


def run_json(outrider: Command, *words: str) -> dict[str, Any]:
    shown = outrider("bench", "simulate", *SHORT, "--json", *words)
    assert shown.code == 0, shown.err
    record: dict[str, Any] = json.loads(shown.out)
    return record


def by_engine(simulation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {own["engine"]: own for own in simulation["engines"]}


def stored(path: Path, places: tuple[PlaceCount, ...] = ()) -> str:
    """A file of round costs: a pass takes 10 ms, a draft token 1 ms."""
    known = calibration(0.01, 0.001)
    record = json.loads(known.to_json())
    counts = [{"drafted": p.drafted, "accepted": p.accepted} for p in places]
    record["drafters"][0]["places"] = counts
    Calibration.of_json(json.dumps(record))
    path.write_text(json.dumps({"plan": {}, "calibration": record}))
    return str(path)


def test_a_row_for_each_engine_and_plain_decoding(outrider: Command) -> None:
    shown = outrider("bench", "simulate", *SHORT, "--batch", "2", "--engines", "single,ssd")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[:2] == [
        "llama-8b with llama-1b on h100",
        "K = 4, acceptance 0.8, fan-out 16; 3.36 tokens a round",
    ]
    assert "closed loop, batch 2; every lane has a device of its own" in lines[2]
    assert [line.split()[0] for line in lines[-3:]] == ["plain", "single", "ssd"]
    assert lines[-3].split()[1:3] == ["1.00x", "1.00x"]
    assert any("draft steps fit into a verification" in line for line in lines)
    assert shown.err == ""


def test_what_does_not_fit_on_the_device_is_said(outrider: Command) -> None:
    shown = outrider("bench", "simulate", *SHORT, "--target", "llama-70b", "--engines", "single")
    assert shown.code == 0
    assert "GB, and h100 has 80 GB" in shown.err


def test_the_record_has_what_was_asked_and_what_came_of_it(outrider: Command) -> None:
    record = run_json(outrider, "--p-hit", "1", "--alpha", "1", "--k", "3", "--seed", "4")
    found = record["simulation"]
    assert found["study"]["target"] == "llama-8b"
    assert (found["study"]["k"], found["study"]["p_hit"], found["study"]["seed"]) == (3, 1.0, 4)
    own = by_engine(found)
    assert list(own) == ["plain", "single", "pd", "pdv", "ssd"]
    assert {engine["stats"]["num_emitted"] for engine in own.values()} == {40}
    assert own["single"]["tokens_per_round"] == 4
    assert own["ssd"]["seconds"] < own["single"]["seconds"] < own["plain"]["seconds"]
    plain = own["plain"]["seconds"]
    assert own["ssd"]["speedup"] == pytest.approx(plain / own["ssd"]["seconds"])
    assert found["times"]["verify"] > 0
    assert record["files"] == []
    assert record == run_json(outrider, "--p-hit", "1", "--alpha", "1", "--k", "3", "--seed", "4")


def test_measured_costs_and_places_come_from_a_file(outrider: Command, tmp_path: Path) -> None:
    path = stored(tmp_path / "costs.json", (PlaceCount(9000, 9000), PlaceCount(9000, 0)))
    record = run_json(outrider, "--calibration", path, "--engines", "single")
    study = record["simulation"]["study"]
    assert (study["machine"], study["target"], study["drafter"]) == ("paper", "target", "model")
    assert study["rates"] == pytest.approx([1.0, 0.0], abs=0.01)
    # Two tokens a round, of a draft of four and a pass.
    single = by_engine(record["simulation"])["single"]
    assert single["tokens_per_round"] == pytest.approx(2.0, abs=0.11)
    assert by_engine(record["simulation"])["plain"]["seconds"] == pytest.approx(0.4)


def test_a_draft_model_may_have_a_device_of_its_own(outrider: Command) -> None:
    slow = run_json(outrider, "--draft-device", "cpu-2core", "--engines", "single")
    fast = run_json(outrider, "--engines", "single")
    assert slow["simulation"]["study"]["machine"] == "h100, drafting on cpu-2core"
    times = [one["simulation"]["times"] for one in (slow, fast)]
    assert times[0]["draft"] > 10 * times[1]["draft"]
    assert times[0]["verify"] == times[1]["verify"]


def test_a_sweep_runs_once_for_each_value(outrider: Command) -> None:
    words = ("--engines", "single,ssd", "--sweep", "p-hit=0,.5,1")
    record = run_json(outrider, *words)
    assert record["sweep"] == "p_hit"
    assert [one["value"] for one in record["simulations"]] == [0, 0.5, 1]
    ups = [by_engine(one)["ssd"]["speedup"] for one in record["simulations"]]
    assert ups == sorted(ups)
    # Its prompts take a pass of their own, which the single lane spares.
    assert ups[0] < by_engine(record["simulations"][0])["single"]["speedup"] < ups[2]
    page = outrider("bench", "simulate", *SHORT, *words).out
    assert "p_hit varies" in page
    rows = [line.split()[0] for line in page.splitlines() if line and line[0] in "0.1"]
    assert rows == ["0", ".5", "1"] * 2


@pytest.mark.parametrize(
    "swept", ["alpha=.5,.9", "k=1,8", "batch=1,2", "contention=0,1", "fan_out=4,64"]
)
def test_what_varies_changes_the_outcome(outrider: Command, swept: str) -> None:
    record = run_json(outrider, "--engines", "ssd", "--sweep", swept)
    seconds = [by_engine(one)["ssd"]["seconds"] for one in record["simulations"]]
    assert len(set(seconds)) == 2


def test_lanes_are_told_in_a_trace_for_each_engine(outrider: Command, tmp_path: Path) -> None:
    record = run_json(outrider, "--engines", "pdv,ssd", "--trace", "lanes.json")
    assert record["files"] == ["lanes-pdv.json", "lanes-ssd.json"]
    events = check_trace((tmp_path / "lanes-ssd.json").read_text())
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"decode", "verify", "prefill"}
    jobs = [event for event in events if event["ph"] == "X" and event["cat"] == "job"]
    rounds = [one for event in jobs for one in event["args"].get("rounds", ())]
    assert sum(one["emitted"] for one in rounds) == 40
    run_json(outrider, "--engines", "pd", "--trace", "one.json")
    assert (tmp_path / "one.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(drawing.why_not() is not None, reason="altair is not installed")
def test_a_sweep_is_drawn(
    outrider: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "THEMES", (drawing.LIGHT,))
    record = run_json(outrider, "--engines", "single", "--sweep", "k=1,4", "--figure", "by-k.svg")
    assert record["files"] == ["by-k.svg", "by-k.png"]
    assert (tmp_path / "by-k.svg").stat().st_size > 1000


def test_lanes_are_drawn_for_each_engine(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures: dict[str, Chart] = {}

    def write(chart: Chart, folder: Path, name: str) -> list[Path]:
        pictures[name] = chart
        return [folder / f"{name}.svg"]

    monkeypatch.setattr(drawing, "write", write)
    record = run_json(outrider, "--engines", "pd,ssd", "--figure", "lanes.svg")
    assert record["files"] == ["lanes-pd.svg", "lanes-ssd.svg"]
    lanes = pictures["lanes-ssd"].panels[0][0]
    assert isinstance(lanes, TimelineChart)
    assert {row.partition("\n")[0] for row in lanes.rows} == {"decode", "verify", "prefill"}
    assert "llama-8b" in pictures["lanes-pd"].foot


@pytest.mark.slow
def test_torch_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from outrider.cli.main import run\n"
        "words = ['simulate', '--requests', '1', '--max-tokens', '4', '--sweep', 'k=1,2']\n"
        "code = run(words)\n"
        "sys.exit(code or 'torch' in sys.modules or 'altair' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=240)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["--device", "h1000"], "'h1000'", "'h100'"),
        (["--target", "llama-7b"], "no model sizes 'llama-7b'", "llama-8b"),
        (["--target", ""], "no model sizes ''", "config.json"),
        (["--alpha", "1.2"], "--alpha must be between 0 and 1", ""),
        (["--alpha", "nan"], "--alpha must be a finite number", ""),
        (["--places", ".8,1.2"], "must be numbers from 0 to 1", "--places .8"),
        (["--places", ".8,much"], "--places must be numbers from 0 to 1", "--places"),
        (["--places", ","], "must be numbers from 0 to 1", "--places .8"),
        (["--alpha", ".5", "--places", ".8"], "say the same thing", "leave one"),
        (["--p-hit", "-1"], "--p-hit must be between 0 and 1", ""),
        (["--batch", "0"], "--batch must be between 1 and 1024", ""),
        (["--k", "0"], "with K = 0 nothing is drafted", "--k 4"),
        (["--engines", "singel"], "no engine 'singel'", "'single'"),
        (["--engines", ""], "no engine is named", "--engines"),
        (["--arrivals", "often"], "no requests a second above 0, closed or together", "--arrivals"),
        (["--arrivals", "0"], "no requests a second above 0", "--arrivals 2.5"),
        (["--arrivals", "inf"], "no requests a second above 0", "--arrivals 2.5"),
        (["--requests", "90000", "--max-tokens", "500"], "takes minutes", "--requests"),
        (["--drafter", "model"], "none is given", "--calibration"),
        (["--calibration", "absent.json"], "absent.json cannot be read", "outrider plan"),
        (["--calibration", "x", "--device", "h100"], "--device and --calibration", "leave one"),
        (["--sweep", "k"], "no values", "--sweep k=1,2,4,8"),
        (["--sweep", "k="], "no values", "--sweep k=1,2,4,8"),
        (["--sweep", "alpah=1"], "no option 'alpah'", "'alpha'"),
        (["--sweep", "json=1"], "no option 'json'", ""),
        (["--sweep", "batch=0,1"], "--sweep batch must be between 1 and 1024", ""),
        (["--sweep", "k=one"], "--sweep k must be an integer", ""),
        (["--sweep", "k=1,2", "--k", "3"], "--k is given too", "leave one"),
        (["--sweep", "k=1,2", "--trace", "t.json"], "one run, not of a sweep", "leave one"),
        (["--sweep", "k=1,0"], "with K = 0 nothing is drafted", "--engines"),
        (["--figure", "lanes.pdf"], "a figure is an SVG file", "lanes.svg"),
        (["--trace", "absent/t.json"], "cannot be written", "folder"),
    ],
    ids=lambda item: str(item)[:30],
)
def test_what_cannot_work_is_said(
    outrider: Command, words: list[str], problem: str, hint: str
) -> None:
    shown = outrider("bench", "simulate", *words)
    assert shown.code in (2, 3)
    assert shown.err.startswith("error: ")
    assert problem in shown.err
    assert hint in shown.err
    assert shown.out == ""


def test_a_calibration_must_have_what_is_asked_of_it(outrider: Command, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    stored(path)
    assert (
        "no drafter 'ngrm'"
        in outrider("bench", "simulate", "--calibration", str(path), "--drafter", "ngrm").err
    )
    record = json.loads(path.read_text())["calibration"]
    record["drafters"] = []
    path.write_text(json.dumps(record))
    assert "no drafter" in outrider("bench", "simulate", "--calibration", str(path)).err
    path.write_bytes(b"\xff\xfe")
    assert "is no JSON" in outrider("bench", "simulate", "--calibration", str(path)).err
    path.write_text("[1]")
    assert outrider("bench", "simulate", "--calibration", str(path)).code == 2
    path.write_text("{}")
    shown = outrider("bench", "simulate", "--calibration", str(path))
    assert shown.code == 2
    assert f"{path}: no calibration: it has no 'schema'." in shown.err
    assert "outrider plan TARGET --save FILE" in shown.err
    path.write_text('{"schema": "outrider-calibration/99"}')
    shown = outrider("bench", "simulate", "--calibration", str(path))
    assert f"{path}: the calibration is of another version.\n" in shown.err


def test_sizes_are_those_of_the_catalogue() -> None:
    """Weights as published, in bytes; that of a tied table counts once here."""
    models = {m.model_id: m for pair in list_pairs() for m in (pair.draft, pair.target)}
    assert set(models) <= set(known_ids())
    for model_id, model in models.items():
        spec = spec_named(model_id)
        if model.kv_bytes_per_token:
            assert spec.kv_bytes_per_token == model.kv_bytes_per_token, model_id
        if model_id != "Qwen/Qwen3-0.6B" and model.dtype not in ("int8", "int4"):
            assert spec.weight_bytes / 1e9 == pytest.approx(model.weights_gb, rel=0.05), model_id
    assert spec_named("llama-70b").num_parameters == pytest.approx(70.6e9, rel=0.005)
    assert spec_named("qwen3-32b").num_parameters == pytest.approx(32.8e9, rel=0.005)


@pytest.mark.weights
def test_a_config_file_is_read_for_its_sizes(tmp_path: Path) -> None:
    for name, folder in ((EMBEDDED_TARGET, "target"), (EMBEDDED_DRAFT, "draft")):
        from_file, known = spec_named(str(TINY / folder)), spec_named(name)
        assert from_file.num_parameters == known.num_parameters
        assert from_file.kv_bytes_per_token == known.kv_bytes_per_token
    copy = tmp_path / "any.json"
    copy.write_bytes((TINY / "target" / "config.json").read_bytes())
    assert spec_named(str(copy)).num_layers == 8


LOADED = ("--requests", "12", "--max-tokens", "20", "--context", "16", "--arrivals", "30")
FLEET = ("bench", "simulate", *LOADED, "--engines", "single", "--batch", "2")


def test_a_fleet_has_tails_and_costs_by_replica(outrider: Command) -> None:
    words = (*FLEET, "--replicas", "2", "--shared", "8", "--failures", "1@0.1+0.2")
    shown = outrider(*words, "--price", "h100=3,a100=2")
    assert shown.code == 0, shown.err
    assert "2 replicas by beginning, 8 tokens in common in 8 families" in shown.out
    assert "replica 1 gone from 0.1 s to 0.3 s" in shown.out
    lines = shown.out.splitlines()
    assert lines[-3].split("  ")[0] == "engine"
    assert float(lines[-1].split()[-1]) > 0
    record = json.loads(outrider(*words, "--price", "3", "--json").out)
    assert record["simulation"]["study"]["failures"] == [{"replica": 1, "at": 0.1, "seconds": 0.2}]
    own = by_engine(record["simulation"])["single"]
    assert sum(own["fleet"]["served"]) == 12
    assert own["fleet"]["moved"] > 0
    hours = 2 * own["seconds"] / 3600
    assert own["fleet"]["price"] == pytest.approx(1e6 * 3 * hours / (12 * 20), rel=1e-6)
    assert set(own["timeline"]["lanes"]) == {"0: main", "1: main"}


def test_replicas_and_devices_are_swept_each_with_its_price(outrider: Command) -> None:
    words = (*FLEET, "--price", "h100=3,a100=2")
    shown = outrider(*words, "--sweep", "replicas=1,2")
    assert shown.code == 0, shown.err
    assert "tokens a second\nreplicas" in shown.out
    assert "cost of a million tokens\nreplicas" in shown.out
    swept = json.loads(outrider(*words, "--sweep", "device=h100,a100", "--json").out)
    for one, price in zip(swept["simulations"], (3, 2), strict=True):
        own = by_engine(one)["single"]
        rate = own["tokens_per_second"]
        assert own["fleet"]["price"] == pytest.approx(1e6 * price / 3600 / rate, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--failures", "0@1"), "no such failure"),
        (("--failures", "2@1+1", "--replicas", "2"), "replica 2 fails"),
        (("--price", "a100=2"), "nothing of h100"),
        (("--price", "-1"), "is no price"),
        (("--shared", "16"), "cannot have 16 in common"),
        (("--routing", "random"), "routing"),
    ],
)
def test_what_is_no_fleet_is_refused(
    outrider: Command, words: tuple[str, ...], problem: str
) -> None:
    shown = outrider("bench", "simulate", *SHORT, *words)
    assert shown.code == 2
    assert problem in shown.err


COST_STUDY = Path(__file__).parents[3] / "studies/pages/cost-study.md"


@pytest.mark.slow
def test_the_table_of_machines_that_are_not_here_is_what_its_commands_say(
    outrider: Command,
) -> None:
    section = COST_STUDY.read_text("utf-8").split("## Machines that are not here")[1]
    section = section.split("\n## ")[0]
    block = section.split("```")[1].replace("\\\n", " ")
    commands = [line.split()[1:] for line in block.strip().splitlines()]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(commands) == len(rows) == 5
    for words, row in zip(commands, rows, strict=True):
        record = json.loads(outrider(*words, "--json").out)["simulation"]
        in_turns, ahead = (by_engine(record)[name]["speedup"] for name in ("single", "ssd"))
        formulas = [by_engine(record)[name]["formula"] for name in ("single", "ssd")]
        times = record["times"]
        told = [
            f"{times['draft'] / times['plain']:.2f}",
            f"{in_turns:.2f}x",
            f"{ahead:.2f}x",
            f"{ahead / in_turns:.2f}",
            f"{formulas[1] / formulas[0]:.2f}",
        ]
        assert row[2:7] == told
