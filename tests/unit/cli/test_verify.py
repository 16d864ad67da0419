"""`outrider verify` as a user meets it: what is printed, written, refused, and with which code.

Most tests put scripted parts in place of the real ones, which tests/unit/proof covers. Two run all
four for real with little to do. The full certificate is deep, in test_front_page.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command, Finished
from outrider.cli.output import duration
from outrider.core.config import EXACT_SAMPLERS, LOSSY_SAMPLERS
from outrider.core.errors import MachineError
from outrider.plugins.proof import algebra, check
from outrider.plugins.proof.cases import FIXED
from outrider.plugins.proof.check import DEEP, PROMPTS, Check, Effort, Part
from outrider_lab.cli import verify
from outrider_lab.proof import certificate, mutants, parity
from outrider_lab.proof.certificate import ProofStep
from outrider_lab.proof.mutants import DECISIONS, ROUNDS, planted

pytestmark = [pytest.mark.wide, pytest.mark.weights]

LITTLE = Effort(
    num_generated=2,
    num_texts=400,
    num_walked=5,
    num_walked_own=10,
    num_races=20,
    num_engine=10,
    greedy_tokens=4,
)
TITLES = {
    "algebra": "exact algebra",
    "ensemble": "chi-square ensemble",
    "parity": "same text",
    "mutants": "planted bugs",
}
TOKEN_BUG, BLOCK_BUG = (
    next(bug for bug in DECISIONS if bug.name == name)
    for name in ("token: residual is p", "residual is p")
)


def found(name: str, **changed: Any) -> Check:
    """What the part would say if all were well, but for what is `changed`."""
    good = Check(
        name=name,
        title=TITLES[name],
        holds=True,
        summary=f"what {name} found",
        facts={"num_tokens": 4321, "num_differences": 0},
    )
    return replace(good, **changed)


@dataclass(slots=True)
class Script:
    """What each part will find, and what the parts that began were called with."""

    checks: dict[str, Check] = field(default_factory=lambda: {name: found(name) for name in TITLES})
    calls: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def part(self, name: str) -> Callable[..., Part]:
        def scripted(*words: object, **named: object) -> Part:
            self.calls[name] = {**{type(word).__name__: word for word in words}, **named}
            yield f"{name} at work"
            return (self.checks[name],)

        return scripted


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Scripted parts in place of the real ones."""
    script = Script()
    for name in TITLES:
        monkeypatch.setattr(certificate, name, script.part(name))
    return script


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parts, with little to do."""
    monkeypatch.setattr(check, "Effort", lambda: LITTLE)
    monkeypatch.setattr(algebra, "FIXED", FIXED[:6])
    monkeypatch.setattr(parity, "PROMPTS", PROMPTS[:2])
    monkeypatch.setattr(mutants, "DECISIONS", [BLOCK_BUG])
    monkeypatch.setattr(mutants, "KEYS", [])
    monkeypatch.setattr(mutants, "ROUNDS", ROUNDS[:1])


def conclusion(shown: Finished) -> str:
    """The verdict that the result begins with, and what to do next, on one line."""
    return " ".join(re.split(r"\n  (?! )", shown.out)[0].split())


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_a_certificate_says_what_was_tested_and_what_was_found(outrider: Command) -> None:
    shown = outrider("verify", "outrider/embedded", "--seed", "1", "--output", "proof.json")
    assert shown.code == 0
    assert "\n\nWhat was checked\n" in shown.out
    record = json.loads(Path("proof.json").read_text())
    about = record["about"]
    for role, name in (("target", "outrider/embedded"), ("draft", "outrider/embedded-draft")):
        assert about[role]["name"] == name
        assert re.fullmatch("[0-9a-f]{12}", about[role]["fingerprint"])
        assert f"{name} (config and tensor headers {about[role]['fingerprint']})" in shown.out
    for words in (about["machine"], f"torch {about['versions']['torch']}", "seed=1", about["utc"]):
        assert words in shown.out
    marks = re.findall(r"^  ok {6}(\S.*?)  ", shown.out, flags=re.MULTILINE)
    assert marks == [*list(TITLES.values())[:3], "same acceptance", "planted bugs"]
    readme = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
    lines = readme.partition("<!--verify-->\n```text\n")[2].splitlines()[1:6]
    assert [line[:31] for line in lines] == [line[:31] for line in shown.out.splitlines()[1:6]]
    facts = {one["name"]: one["facts"] for one in record["checks"]}
    assert facts["algebra"]["rules"] == list(EXACT_SAMPLERS)
    num_tokens = facts["parity"]["num_tokens"]
    assert facts["parity"]["num_equal"] == num_tokens > 0
    assert facts["mutants"]["num_caught"] == facts["mutants"]["num_planted"] == 2
    assert conclusion(shown) == record["verdict"]
    assert f"the same {num_tokens} tokens with it and without it" in record["verdict"]


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_a_wrong_rule_is_not_certified(outrider: Command) -> None:
    with planted(TOKEN_BUG):
        shown = outrider("verify")
    assert shown.code == 1
    assert "  FAILED  exact algebra" in shown.out
    assert "problem: token, " in shown.out
    assert "  ok      same text" in shown.out
    assert conclusion(shown).startswith("NOT CERTIFIED: exact algebra")
    assert "next: " in conclusion(shown)


@pytest.mark.covering(1)
@pytest.mark.parametrize("part", TITLES)
@pytest.mark.parametrize(
    ("holds", "mark", "verdict"),
    [
        (False, "FAILED", "NOT CERTIFIED: {} failed. next: "),
        (None, "not checked", "Nothing failed, but not everything could be checked here: {}. next"),
    ],
)
def test_one_part_that_does_not_hold_decides_verdict_and_code(
    outrider: Command, script: Script, part: str, holds: bool | None, mark: str, verdict: str
) -> None:
    script.checks[part] = found(part, holds=holds, problems=("the third token is wrong",))
    shown = outrider("verify")
    assert shown.code == 1
    assert f"  {mark}  {TITLES[part]}" in shown.out
    assert shown.out.count("  ok      ") == 3
    assert "problem: the third token is wrong" in shown.out
    assert conclusion(shown).startswith(verdict.format(TITLES[part]))


def test_near_ties_are_named_and_do_not_fail(outrider: Command, script: Script) -> None:
    facts = {"num_tokens": 4321, "num_differences": 7, "num_near_ties": 5}
    note = "greedy, model K=4: prompt 2, token 9: near-tie"
    script.checks["parity"] = found("parity", facts=facts, warnings=(note,))
    shown = outrider("verify")
    assert shown.code == 0
    assert f"warning: {note}" in shown.out
    assert "changes nothing here but rounding" in conclusion(shown)
    assert "7 texts differ" in conclusion(shown)
    assert "5 were looked into" in conclusion(shown)


@pytest.mark.parametrize("holds", [True, False])
def test_json_is_one_object_with_everything(outrider: Command, script: Script, holds: bool) -> None:
    script.checks["ensemble"] = found("ensemble", holds=holds, problems=() if holds else ("p = 0",))
    shown = outrider("verify", "--json", "--output", "proof.json")
    assert shown.code == (0 if holds else 1)
    record = json.loads(shown.out)
    assert shown.out.count("\n") == 1
    assert Path("proof.json").read_text() == shown.out
    assert list(record) == ["holds", "verdict", "next", "about", "checks"]
    assert record["holds"] is holds
    assert (record["next"] is None) is holds
    assert [one["name"] for one in record["checks"]] == list(TITLES)
    assert all(
        list(one) == ["name", "holds", "summary", "problems", "warnings", "facts"]
        for one in record["checks"]
    )
    assert record["about"]["drafters"] == ["model", "ngram"]
    assert (record["about"]["settings"], record["about"]["seed"]) == ({}, 0)


@pytest.mark.parametrize(
    ("path", "said"), [("no/folder/proof.json", "cannot be written"), ("taken", "is a folder")]
)
def test_an_unwritable_place_is_refused_before_the_work(
    outrider: Command, script: Script, path: str, said: str
) -> None:
    Path("taken").mkdir()
    shown = outrider("verify", "--output", path)
    assert (shown.code, shown.out) == (3, "")
    assert path in shown.err
    assert said in shown.err
    assert script.calls == {}


def test_an_error_half_way_leaves_an_older_file_as_it_was(
    outrider: Command, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(**_: object) -> Part:
        yield "a bug"
        raise MachineError("no memory is left")

    monkeypatch.setattr(certificate, "mutants", broken)
    Path("proof.json").write_text("old")
    shown = outrider("verify", "--output", "proof.json")
    assert (shown.code, shown.out) == (3, "")
    assert shown.err.endswith("error: no memory is left\n")
    assert list(script.calls) == ["algebra", "ensemble", "parity"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("proof.json", "old")]


@pytest.mark.parametrize("sampler", LOSSY_SAMPLERS)
def test_a_lossy_sampler_is_refused(outrider: Command, script: Script, sampler: str) -> None:
    shown = outrider("verify", "--sampler", sampler)
    assert (shown.code, shown.out) == (2, "")
    assert f"{sampler} is lossy" in shown.err
    assert all(name in shown.err for name in EXACT_SAMPLERS)
    assert script.calls == {}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--drafter", "none"), 2, "nothing to certify"),
        (("--k", "0"), 2, "nothing to certify"),
        (("--draft", "none", "--drafter", "model"), 2, "needs a draft model"),
        (("no-such-model",), 3, "no model 'no-such-model'"),
        (("outrider/embedded", "no-such-draft"), 3, "no model 'no-such-draft'"),
        (("outrider/embedded", "--target", "outrider/embedded"), 2, "two models"),
        (("outrider/embedded", "none", "--draft", "none"), 2, "--draft 'none'"),
        (("--drafter", "prediction"), 2, "--prediction TEXT"),
        (("--depp",), 2, "'--deep'"),
    ],
)
def test_words_that_cannot_be_meant_are_refused_before_the_work(
    outrider: Command, script: Script, words: tuple[str, ...], code: int, said: str
) -> None:
    shown = outrider("verify", *words)
    assert (shown.code, shown.out) == (code, "")
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert script.calls == {}


def test_users_settings_reach_the_parts(outrider: Command, script: Script) -> None:
    words = ("--sampler", "match", "--seed", "7", "--k", "2", "--temperature", "0.5")
    shown = outrider("verify", *words, "--max-tokens", "5")
    assert shown.code == 0
    effort = replace(Effort(), greedy_tokens=5)
    assert script.calls["algebra"] == {"Effort": effort, "seed": 7, "own": "match"}
    assert script.calls["ensemble"] == {"Effort": effort, "seed": 7, "own": "match"}
    assert script.calls["mutants"] == {"seed": 7}
    subject = script.calls["parity"]["ParityTask"].subject
    assert (subject.config.k, subject.params.temperature) == (2, 0.5)
    assert "sampler=match, " in shown.out
    assert outrider("verify", "--deep").code == 0
    assert script.calls["algebra"]["Effort"] == DEEP
    assert script.calls["parity"]["ParityTask"].greedy.max_tokens == DEEP.greedy_tokens


def test_models_are_words_or_flags(outrider: Command, script: Script) -> None:
    pair = ("outrider/embedded-draft", "outrider/embedded")
    for words in (pair, ("--target", pair[0], "--draft", pair[1])):
        assert outrider("verify", *words).code == 0
        subject = script.calls["parity"]["ParityTask"].subject
        assert (subject.target, subject.draft) == pair
    shown = outrider("verify", "outrider/embedded", "none")
    assert script.calls["parity"]["ParityTask"].subject.drafters == ("ngram",)
    assert re.search(r"^  draft +none$", shown.out, flags=re.MULTILINE)


def test_each_part_says_where_it_is_and_how_long_it_takes(
    outrider: Command, script: Script
) -> None:
    script.checks["ensemble"] = found("ensemble", holds=False)
    first, *lines = outrider("verify").err.splitlines()
    assert first == "verify outrider/embedded: 4 checks, one to several minutes"
    titles = ["exact algebra", "chi-square ensemble", "same text, run 1 of 11", "planted bugs"]
    assert len(lines) == len(titles)
    for number, (title, name, line) in enumerate(zip(titles, TITLES, lines, strict=True), start=1):
        assert f" s  check {number} of 4, {title}, about " in line
        assert line.endswith(f": {name} at work")
        assert ("left and the model's texts" in line) is (number < 4)
        assert ("; FAILED: chi-square ensemble: " in line) is (number > 2)


def test_the_time_left_is_that_of_steps_on_this_machine() -> None:
    forecast = verify.Forecast(most=100)
    algebra, ensemble, mutants = (verify.SECONDS_OF_PARTS[part] for part in (1, 2, 4))
    half = algebra / 2
    both = " and the model's texts"

    def left(seconds: float, words: str = "") -> str:
        return f"about {duration(seconds)} left{words}"

    assert forecast.left(ProofStep(1, ""), 5) == left(algebra + ensemble + mutants, both)
    # The first part takes half of the time, so the others will too.
    assert forecast.left(ProofStep(2, ""), 5 + half) == left((ensemble + mutants) / 2, both)
    at = 5 + half + ensemble / 2
    assert forecast.left(ProofStep(3, "", 1, 5), at) == left(mutants / 2, both)
    assert forecast.left(ProofStep(3, "", 3, 5), at + 8) == left(3 * 4 + mutants / 2)
    # --seconds ends the texts.
    assert forecast.left(ProofStep(3, "", 4, 5), at + 90) == left(10 + mutants / 2)
    assert forecast.left(ProofStep(4, "", 1), at + 95) == left(mutants / 2)
