"""`outrider plan`: advice from a small calibration, for devices elsewhere, and words to refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from doubles.planned import costs, flat
from doubles.tiny_hybrids import HYBRIDS
from outrider.api.request import RequestMaker
from outrider.core.config import EngineConfig
from outrider.core.settings import ProgramConfig
from outrider_lab.bench.calibrate import answer
from outrider_lab.bench.calibrate.found import Found
from outrider_lab.bench.calibrate.probe import Ahead, Probe
from outrider_lab.bench.workload import MESSAGES, builtin_texts, messages_in
from outrider_lab.cli import advice
from outrider_lab.cli import plan as verb
from outrider_lab.cli.plan_page import by_prompt, command_of, with_carrier
from outrider_lab.planner.advise import Question, advise
from outrider_lab.planner.candidates import DraftOption, PlannedJob
from outrider_lab.planner.suppose import Origins

pytestmark = pytest.mark.wide

SMALL = (
    *("plan", "--drafters", "ngram", "--domains", "code", "--seconds", "600"),
    *("--max-tokens", "6", "--batch", "2"),
)


SO_LONG = ("--context", "100000000")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(verb, "cache_folder", lambda: folder)
    # Rounds are timed for a moment, of more seconds than any machine needs for the rest. The limit
    # of memory is for a process that did nothing else before.
    monkeypatch.setattr(verb, "_TIMING_SHARE", 0.002)
    monkeypatch.setattr(advice, "BESIDE_WEIGHTS", 1 << 40)
    # What others disturbed is not kept, and tests run on machines that do something else.
    monkeypatch.setattr(answer, "DISTURBED", 2.0)
    return folder


@pytest.mark.weights
@pytest.mark.slow
def test_a_plan_is_measured_once_and_said_in_words(outrider: Command, cache: Path) -> None:
    shown = outrider(*SMALL, "--json", "--save", "plan.json")
    assert shown.code == 0, shown.err
    said = ("loading the target", "counting what is accepted", "timing rounds", "comparing texts")
    lines = shown.err.splitlines()
    # A slow machine tells in between what it knows so far.
    found = [words for line in lines for words in said if line.startswith(words)]
    assert found == list(said), shown.err
    record: dict[str, Any] = json.loads(shown.out)
    assert json.loads(Path("plan.json").read_text()) == record
    assert record["measured_before"] is False
    assert record["same_texts"] == {"ngram": True}
    assert [Path(record["stored"])] == list(cache.rglob("*.json"))
    found = record["calibration"]
    assert found["memory_bytes"] > 0
    assert found["provenance"]["clocks"].keys() >= {"cpu_mhz", "cpu_limit"}
    (drafter,) = found["drafters"]
    assert drafter["name"] == "ngram"
    assert drafter["num_rounds"] > 0
    assert (record["partial"], record["basis"]) == (False, "measured")
    assert record["figures"]["accepted"] == {"ngram": "measured"}
    assert record["peak_memory_bytes"] > 0
    plan = record["plan"]
    assert plan["job"]["batch"] == 2
    assert {option["k"] for option in plan["options"]} >= {1, 4, 16}
    assert all(option["low"] <= option["speed_up"] <= option["high"] for option in plan["options"])
    again = outrider(*SMALL)
    assert again.code == 0, again.err
    assert "\n\nMeasured: outrider/embedded on " in again.out
    assert "Plain decoding writes" in " ".join(again.out.split())
    assert "measured before in" in again.out
    assert "All figures are measured here." in again.out
    assert "It took" in again.out
    assert "Every drafter wrote the text of plain decoding." in again.out
    verdicts = ("Speculate: ngram", "Do not speculate, because", "Whether to speculate is not")
    assert again.out.startswith(verdicts)
    assert sum(verdict in again.out for verdict in verdicts) == 1
    assert "Run it:\n    outrider generate" in again.out.split("Measured: ")[0]
    assert len(re.findall("^ngram ", again.out, re.MULTILINE)) == 1


def test_an_estimate_says_so_first_and_names_what_decides(outrider: Command) -> None:
    words = ("plan", "--drafters", "ngram,suffix", "--domains", "code", "--seconds", "0")
    words = (*words, "--max-tokens", "6", "--batch", "2", "--temperature", "0.5")
    shown = outrider(*words, "--json")
    record = json.loads(shown.out)
    assert (record["partial"], record["basis"], record["stored"]) == (True, "estimated", None)
    assert record["figures"]["target_pass"] == "estimated"
    gains = [one["speed_up"] for one in record["plan"]["options"]]
    assert gains == sorted(gains, reverse=True)
    assert (record["plan"]["known"], record["plan"]["speculate"]) == (False, False)
    page = outrider(*words).out
    prose = " ".join(page.split())
    assert prose.startswith("Whether to speculate is not known: ")
    assert prose.index("Run it: outrider generate") < prose.index("Estimated: outrider/embedded on")
    assert len(re.findall("^(ngram|suffix) ", page, re.MULTILINE)) == 2
    assert "Plain decoding would write" in prose
    assert "tokens a second. All figures are estimated from sizes" in prose
    assert "Whether to speculate is not known: figures of suffix, ngram are estimates" in prose
    assert "Do not speculate" not in page
    assert "--drafter none" not in page
    asked = "outrider plan outrider/embedded --domains code --drafters ngram,suffix --batch 2 "
    assert record["decides"] == f"{asked}--max-tokens 6 --temperature 0.5 --seconds 120"
    assert f"Decide it:\n    {record['decides']}" in page
    assert "note: nothing was measured: --seconds 0 estimates all" in prose


@pytest.mark.weights
def test_a_pass_is_measured_however_short_the_time(outrider: Command, cache: Path) -> None:
    del cache
    record = json.loads(outrider(*SMALL[:-5], "0.01", *SMALL[-4:], "--json").out)
    assert record["figures"]["target_pass"] == "measured"
    assert record["basis"] == "estimated"
    assert "was loaded after" in record["notes"][0]


def test_a_device_that_is_not_here_is_planned_for(outrider: Command) -> None:
    words = ("--drafters", "model,ngram", "--device", "h100", "--alpha", "0.8,0.7")
    shown = outrider("plan", "outrider/embedded", *words)
    assert shown.code == 0, shown.err
    assert "\n\nEstimated: outrider/embedded on h100" in shown.out
    assert "decoding would write" in " ".join(shown.out.split())
    assert "nothing was measured" in shown.out
    assert "prompts of 512 tokens" in shown.out
    assert "e+0" not in shown.out
    lines = shown.out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("    outrider ")) <= 80
    record: dict[str, Any] = json.loads(outrider("plan", *words, "--json").out)
    assert {option["drafter"] for option in record["plan"]["options"]} == {"model", "ngram"}
    assert record["stored"] is None


def test_a_sheet_says_where_passes_turn_and_what_a_token_spends(outrider: Command) -> None:
    words = ("plan", "--drafters", "ngram", "--device", "h200", "--alpha", "0.8", "--batch", "4")
    prose = " ".join(outrider(*words).out.split())
    record: dict[str, Any] = json.loads(outrider(*words, "--json").out)
    limits, plan = record["limits"], record["plan"]
    assert limits["mixture"] is None
    assert f"Up to {limits['ridge_rows']:.0f} rows a pass waits for memory" in prose
    rows = 4 * (1 + plan["best"]["k"])
    assert f"passes of this plan have {rows}." in prose
    assert f"from {limits['critical_context']:,.0f} tokens of context on in a batch of 4" in prose
    spent = plan["plain_joules"], plan["best"]["joules"]
    assert 0 < spent[1] < spent[0]
    assert f"rated watts: {spent[0]:.3g} J a token of plain decoding, {spent[1]:.3g} J" in prose


def test_a_sheet_without_watts_says_nothing_of_energy(outrider: Command) -> None:
    Path("mine.json").write_text(
        json.dumps(
            {"bandwidth": 1e12, "flops": {"float32": 1e13, "bfloat16": 1e14}}
            | {"memory_bytes": 10**10}
        )
    )
    words = ("plan", "--alpha", "0.8", "--drafters", "model")
    for devices in (("mine.json",), ("h100", "--draft-device", "mine.json")):
        shown = outrider(*words, "--device", *devices)
        assert shown.code == 0, shown.err
        assert "Energy" not in shown.out


def test_a_draft_model_may_have_a_device_of_its_own(outrider: Command) -> None:
    """Its lane then hides what drafting in turns takes."""
    words = ("plan", "--drafters", "model", "--alpha", "0.9", "--device", "cpu-2core", "--json")
    records = [
        json.loads(outrider(*words, *more).out) for more in ((), ("--draft-device", "m2-max"))
    ]
    one, two = (record["plan"] for record in records)
    assert records[1]["calibration"]["machine"] == "cpu-2core, drafting on m2-max"
    assert (one["best"]["engine"], two["best"]["engine"]) == ("single", "ssd")
    assert two["best"]["speed_up"] > one["best"]["speed_up"]
    assert two["memory_bytes"] < one["memory_bytes"]
    assert one["best"]["joules"] > 0
    # What work ahead spends is not reckoned.
    assert two["best"]["joules"] is None
    page = outrider(*words[:-1], "--draft-device", "m2-max").out
    assert "Drafting ahead predicts" in page


def test_experts_of_a_config_are_planned_with(outrider: Command) -> None:
    """A folder with the config alone: nothing is loaded."""
    Path("mixture").mkdir()
    Path("mixture", "config.json").write_text(json.dumps(HYBRIDS["qwen3_5_moe"]))
    words = ("plan", "mixture", "--drafters", "ngram", "--device", "h100", "--alpha", "0.9")
    shown = outrider(*words)
    assert shown.code == 0, shown.err
    experts = HYBRIDS["qwen3_5_moe"]
    used, there = experts["num_experts_per_tok"], experts["num_experts"]
    assert f"A row uses {used} of {there} experts" in shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "h100"), "--alpha 0.8"),
        (("--alpha", "0.8"), "here it is counted"),
        (("--save", "."), "name a file with --save"),
        (("--prompts", "."), "name a text file"),
        (("--device", "h1000", "--alpha", "0.8"), "h1000"),
        (("--draft-device", "h100"), "for plans of data sheets"),
        (("--device", "h100", "--alpha", "0.8", "--draft-device", "h1000"), "h1000"),
        (
            ("--device", "h100", "--alpha", "0.8", "--draft-device", "a100", "--drafters", "ngram"),
            "no draft model would run on a100",
        ),
        (
            ("--device", "h100", "--alpha", "0.8", "--draft-device", "cpu-2core", *SO_LONG),
            "cpu-2core has 16.0 GB",
        ),
        (("--device", "h100", "--alpha", "often"), "numbers from 0 to 1"),
        (("--device", "h100", "--alpha", "1.5"), "numbers from 0 to 1"),
        (("--device", "h100", "--alpha", "0.8", "--drafters", "mtp"), "drafter 'mtp'"),
        (
            ("--device", "h100", "--alpha", "0.8", "--drafters", "model,ngrm"),
            "did you mean 'ngram'",
        ),
        (("--domains", ","), "--domains names nothing"),
        (("--domains", "poetry"), "'poetry'"),
        (("--drafters", "ngrm"), "did you mean 'ngram'"),
        (("--prompts", "nowhere.txt"), "neither a domain nor a file"),
        (("outrider/embedded", "--target", "other"), "two models"),
        (("--drafter", "ngram"), "unknown option '--drafter'"),
        (("--batch", "1024", "--max-tokens", "1000000000"), "--batch"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("plan", *words)
    # What does not fit into memory is the machine's fault, not the words'.
    assert shown.code in (2, 3), shown.out
    assert said in shown.err


def test_the_command_has_all_that_was_planned_for() -> None:
    plan = advise(flat(costs(0.1, [0.9] * 4)), Question(candidates=(DraftOption("model", 4),)))
    assert plan.best is not None
    program = ProgramConfig(target="a b", draft="small")
    engine = EngineConfig(
        dtype="bfloat16",
        quantise="int8",
        device="cuda",
        drafter_device="cpu",
        fallback="ngram",
        fused_round=False,
        # A plan decides on these itself.
        k=9,
        watchdog="off",
        schedule="pd",
    )
    start = "outrider generate \"...\" --target 'a b' "
    turns = f"{start}--draft small --drafter model --k 4 --batch-size 1"
    kept = "--dtype bfloat16 --quantise int8 --device cuda"
    rest = "--drafter-device cpu --no-fused-round"
    assert command_of(plan, program, EngineConfig(), None) == turns
    wanted = f"{turns} {kept} --fallback ngram {rest}"
    assert command_of(plan, program, engine, None) == wanted
    ahead = replace(plan, best=replace(plan.best, engine="ssd", fallback="none"))
    lanes = turns.replace("--batch", "--schedule ssd --batch")
    wanted = f"{lanes} {kept} --fallback none {rest}"
    assert command_of(ahead, program, engine, None) == wanted
    unknown = replace(plan, known=False)
    assert command_of(unknown, program, EngineConfig(quantise="int4"), None) == (
        f"{start}--quantise int4"
    )
    plain = replace(plan, speculate=False)
    wanted = f"{start}--drafter none --quantise int4"
    assert command_of(plain, program, EngineConfig(quantise="int4"), None) == wanted


def test_replicas_share_the_texts_and_have_their_price(outrider: Command) -> None:
    words = ("plan", "--drafters", "ngram", "--device", "h100", "--alpha", "0.9", "--batch", "12")
    words = (*words, "--replicas", "3", "--price", "2")
    record = json.loads(outrider(*words, "--json").out)
    assert record["plan"]["job"]["batch"] == 4
    found = record["replicas"]
    assert [(one["replicas"], one["batch"]) for one in found] == [(1, 12), (2, 6), (3, 4)]
    rates = [one["tokens_per_second"] for one in found]
    assert rates == sorted(rates)
    assert rates[2] == pytest.approx(3 * record["plan"]["best"]["tokens_per_second"])
    assert found[2]["price"] == pytest.approx(1e6 * 2 * 3 / 3600 / rates[2])
    shown = outrider(*words).out
    assert "replicas  texts each" in shown
    assert [line.split()[0] for line in shown.splitlines()[-5:-2]] == [*"123"]
    alone = json.loads(outrider(*words[:-4], "--json").out)
    assert alone["replicas"] == []
    refused = outrider(*words[:-5], "2", "--replicas", "3")
    assert refused.code == 2
    assert "3 replicas have 2 texts" in refused.err


def test_replicas_that_have_no_room_for_their_texts_are_told_apart(outrider: Command) -> None:
    """Keys and values of all texts do not fit on one device, and those of an eighth do."""
    words = ("plan", "--drafters", "ngram", "--device", "rtx4090", "--alpha", "0.9")
    words = (*words, "--context", "2000000", "--batch", "8", "--replicas", "8")
    record = json.loads(outrider(*words, "--json").out)
    rates = [one["tokens_per_second"] for one in record["replicas"]]
    assert rates[0] is None
    assert rates[-1] > 0


def test_each_of_your_prompts_has_a_row_of_the_best_drafter() -> None:
    calibration = flat(costs(0.1, [0.8] * 8))
    kept, refused = (Ahead(8, 8),) * 40, (Ahead(8, 0),) * 40
    found = Found(
        calibration=calibration,
        origins=Origins(),
        calibrated=None,
        probes=(Probe("model", 8, (kept, (), refused), True),),
        context=0,
        drafts={},
        notes=(),
        seconds=1.0,
        peak_bytes=0,
        most_bytes=None,
        texts=("all", "nothing written", "none of it, in a line of many words"),
    )
    job = PlannedJob(1, 0, 1_000)
    made = advise(calibration, Question(job=job, candidates=(DraftOption("model", 4),)))
    (table,) = by_prompt(made, found)
    header, *rows, _, last = table.splitlines()
    assert header.split() == ["prompt", "speed-up", "tok/round", "begins", "with"]
    # A round takes 1.4 passes and writes five tokens or one.
    assert rows[0].split() == ["1", "3.57", "5.00", '"all"']
    assert rows[1].split()[:3] == ["2", "-", "-"]
    assert rows[2].split(maxsplit=3) == ["3", "0.71", "1.00", '"none of it, in a line of many wo"']
    assert last.startswith("-: the model ended its text at once")
    assert "of model K=4, by what was accepted on each prompt" in table
    made = with_carrier(made, found)
    assert made.verdict.endswith("; prompt 1 carries this, and without it the mean is 0.71.")


@pytest.fixture
def read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that are read, by an instruct model."""
    del cache

    def always(*_: object) -> bool:
        return True

    for module in ("outrider.cli.conversation", "outrider_lab.cli.advice"):
        monkeypatch.setattr(f"{module}.is_instruct", always)
    found: list[list[int]] = []
    reader = RequestMaker.reader

    def noted(self: RequestMaker, ids: Sequence[int], *rest: Any, **more: Any) -> Any:
        found.append(list(ids))
        return reader(self, ids, *rest, **more)

    monkeypatch.setattr(RequestMaker, "reader", noted)
    return found


@pytest.mark.weights
@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_a_plan_reads_the_tokens_that_generate_sends(
    outrider: Command, read: list[list[int]], raw: tuple[str, ...]
) -> None:
    """Those of the chat template of an instruct model, or of the text alone."""
    question = "What is 3 plus 4?"
    Path("mine.txt").write_text(f"{question}\n")
    words = (*SMALL[:3], "--prompts", "mine.txt", *SMALL[5:], *raw)
    shown = outrider(*words, "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    said = [note for note in record["notes"] if "prompts are messages, by its chat" in note]
    assert len(said) == (0 if raw else 1)
    planned = list(read)
    assert outrider("generate", question, "--max-tokens", "6", *raw).code == 0
    sent = read[-1]
    assert sent in planned
    assert record["plan"]["job"]["context"] == len(sent)
    assert ("--raw" in record["command"]) is bool(raw)


@pytest.mark.weights
def test_of_shipped_prompts_those_are_messages_that_users_send(
    outrider: Command, read: list[list[int]]
) -> None:
    shown = outrider(*SMALL[:3], "--domains", "maths,code", *SMALL[5:], "--json")
    assert shown.code == 0, shown.err
    (note,) = [one for one in json.loads(shown.out)["notes"] if "prompts are messages" in one]
    assert note.endswith(
        "but shipped ones of code, echo and adversarial; --raw gives the texts alone"
    )
    planned = list(read)
    for domain, flag in (("maths", "--chat"), ("code", "--raw")):
        text = builtin_texts(domain)[0]
        assert outrider("generate", "--max-tokens", "1", flag, "--", text).code == 0
        assert read[-1] in planned


def test_messages_of_a_mixture_are_those_of_its_domains() -> None:
    mixed = messages_in(["mixed"])
    assert mixed == messages_in(MESSAGES)
    assert messages_in(["code", "echo", "adversarial"]) == frozenset()
    assert {text in mixed for text in builtin_texts("mixed")[1::3]} == {True}
    assert {text in mixed for text in builtin_texts("code")} == {False}
