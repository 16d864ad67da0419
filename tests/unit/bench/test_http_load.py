"""Load by GuideLLM: what it is asked, and the figures that are made of its report."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import http_load
import pytest
from http_load import Answer, chats, load_of

# Stands for GuideLLM: answers each prompt with as many tokens as it has words, one after the other.
PROGRAM = """\
import json, sys
words = sys.argv[1:]
given = {flag[2:]: json.loads(value) for flag, value in zip(words[2::2], words[3::2])}
assert words[:2] == ["run", "--disable-console"], words
assert given["profile"] == {"kind": "concurrent", "streams": 2}, given
assert given["backend"]["target"] == "http://here", given
assert given["backend"]["extras"]["body"] == {"temperature": 0}, given
assert given["constraint"]["count"] == 2, given
prompts = [json.loads(line)["prompt"] for line in open(given["data"]["path"])]
done = [
    {
        "output_tokens": len(prompt.split()),
        "time_to_first_token_ms": 100.0,
        "request_start_time": 50.0 + number,
        "request_end_time": 51.0 + number,
    }
    for number, prompt in enumerate(prompts)
]
report = {"benchmarks": [{"requests": {"successful": done, "errored": []}}]}
json.dump(report, open(given["output"]["path"], "w"))
"""


def request(tokens: int, first_ms: float, begun: float, ended: float) -> dict[str, Any]:
    return {
        "output_tokens": tokens,
        "time_to_first_token_ms": first_ms,
        "request_start_time": begun,
        "request_end_time": ended,
    }


def report(*good: dict[str, Any], failed: tuple[str, ...] = ()) -> dict[str, Any]:
    errored = [{"info": {"error": reason}} for reason in failed]
    return {"benchmarks": [{"requests": {"successful": list(good), "errored": errored}}]}


def test_a_load_is_from_the_first_request_to_the_end_of_the_last() -> None:
    load = load_of(
        report(request(10, 300, 7, 9), request(20, 100, 5, 6), request(30, 200, 6, 8)), 3
    )
    assert load.seconds == 4
    assert load.per_token == pytest.approx(4 / 60)
    assert load.first_seconds == pytest.approx(0.2)
    assert load.answers[0] == Answer(10, 0.3)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (report(request(3, 1, 1, 2), failed=("HTTP 503",)), "1 of 2 .*HTTP 503"),
        (report(request(3, 1, 1, 2), request(0, 1, 1, 2)), "1 of 2"),
    ],
    ids=["an error", "no tokens"],
)
def test_a_request_without_an_answer_is_no_load(found: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        load_of(found, 2)


@pytest.mark.wide
def test_guidellm_is_asked_for_all_prompts_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "guidellm"
    program.write_text(f"#!{sys.executable} -S\n{PROGRAM}", "utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(http_load, "PROGRAM", program)
    load = chats("http://here", ["one two", "three"], 2, {"temperature": 0})
    assert [answer.num_tokens for answer in load.answers] == [2, 1]
    assert load.seconds == 2


@pytest.mark.wide
def test_where_guidellm_fails_its_words_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "guidellm"
    program.write_text("#!/bin/sh\necho 'error: no network' >&2\nexit 3\n", "utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(http_load, "PROGRAM", program)
    with pytest.raises(RuntimeError, match="no network"):
        chats("http://here", ["one"], 1, {})
