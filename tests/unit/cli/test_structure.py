"""`--schema`, `--json-object`, `--regex`, `--choice` and `--grammar` of `generate`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from doubles.command_line import Command

pytestmark = [pytest.mark.wide, pytest.mark.weights]

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


SHORT = ("--max-tokens", "60", "--context", "128")


def text_of(outrider: Command, *words: str) -> str:
    shown = outrider("generate", "--json", "As asked: ", *SHORT, *words)
    assert shown.code == 0, shown.err
    return json.loads(shown.out.splitlines()[-1])["text"]


def test_a_schema_from_a_file_or_from_the_line(outrider: Command, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(SCHEMA))
    for given in (str(path), json.dumps(SCHEMA)):
        assert json.loads(text_of(outrider, "--schema", given)) in ({"ok": True}, {"ok": False})


def test_the_other_flags(outrider: Command, tmp_path: Path) -> None:
    path = tmp_path / "answer.gbnf"
    path.write_text('root ::= "yes" | "no"')
    assert text_of(outrider, "--grammar", str(path)) in ("yes", "no")
    assert text_of(outrider, "--grammar", 'start: "yes" | "no"') in ("yes", "no")
    assert re.fullmatch("[0-9]{2}", text_of(outrider, "--regex", "[0-9]{2}"))
    assert text_of(outrider, "--choice", "red, dark", "--choice", "blue") in ("red, dark", "blue")
    assert text_of(outrider, "--json-object", "--n", "1").startswith("{")


def test_several_and_a_comparison_follow_it_too(outrider: Command) -> None:
    shown = outrider("generate", "x: ", *SHORT, "--regex", "[0-9]{2}", "--n", "2", "--quiet")
    assert all(re.fullmatch("[0-9]{2}", text) for text in shown.out.split())
    shown = outrider("generate", "x: ", *SHORT, "--regex", "[0-9]{2}", "--compare")
    assert "identical text" in shown.out


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--schema", "nowhere.json"), "--schema nowhere.json: cannot be read"),
        (("--grammar", "nowhere"), "--grammar nowhere: cannot be read"),
        (("--schema", "{"), "schema: it is no JSON"),
        (("--regex", "("), "regex: it cannot be followed"),
        (("--regex", "a", "--choice", "b"), "regex and choices: a text follows one structure"),
        (("--regex", "a", "--ignore-eos"), "ignore_eos: a text of a regex"),
    ],
)
def test_what_is_wrong_is_said(outrider: Command, words: tuple[str, ...], told: str) -> None:
    shown = outrider("generate", "x", *words)
    assert shown.code == 2
    assert told in shown.err
    assert "Traceback" not in shown.err
