"""Lines of a batch: what they ask for, what is refused and how answers look; files of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import ConfigError, MachineError
from outrider.core.params import SamplingParams
from outrider.plugins.batches.lines import (
    MAX_LINE_BYTES,
    AnswerFile,
    BadLine,
    BatchLine,
    RawLine,
    answered,
    raw_lines,
    read_line,
)

DEFAULTS = SamplingParams(max_tokens=9, seed=0)
MESSAGES = [{"role": "user", "content": "hello"}]


def good(record: dict[str, Any], number: int = 1) -> BatchLine:
    line = read_line(number, json.dumps(record), DEFAULTS)
    assert isinstance(line, BatchLine), line
    return line


def bad(text: str) -> BadLine:
    line = read_line(1, text, DEFAULTS)
    assert isinstance(line, BadLine), line
    return line


def openai(body: object, url: str = "/v1/chat/completions", **more: object) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **more}


def test_a_plain_line_has_a_prompt_and_settings() -> None:
    line = good({"prompt": "hi", "max_tokens": 3, "stop": "\n", "top_k": 5, "id": 7})
    assert line.kind == "plain"
    assert line.prompts == ["hi"]
    assert line.custom_id == "7"
    assert (line.params.max_tokens, line.params.stop, line.params.top_k) == (3, ("\n",), 5)
    assert good({"messages": MESSAGES}).chat == MESSAGES
    assert good({"prompt": [1, 2]}).prompts == [[1, 2]]


def test_what_a_line_leaves_out_is_as_the_settings_say() -> None:
    assert good({"prompt": "hi", "temperature": None}).params == DEFAULTS


def test_a_line_without_a_seed_has_one_by_its_number() -> None:
    assert good({"prompt": "hi"}, 5).params.seed == 4
    assert good({"prompt": "hi", "seed": 11}, 5).params.seed == 11


def test_a_chat_line_is_read_as_openai_means_it() -> None:
    body = {
        "model": "gpt-9",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "he"}] * 2}],
        "max_completion_tokens": 4,
        "logit_bias": {"3": 5},
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["a", "b"],
        "user": "somebody",
        "stream": False,
    }
    line = good(openai(body))
    assert line.kind == "chat"
    assert line.custom_id == "a"
    assert line.chat == [{"role": "user", "content": "hehe"}]
    assert line.params.max_tokens == 4
    assert line.params.logit_bias == {3: 5}
    assert (line.params.logprobs, line.params.top_logprobs) == (True, 2)
    assert line.params.stop == ("a", "b")


def test_a_completion_line_may_have_several_prompts() -> None:
    url = "/v1/completions"
    assert good(openai({"prompt": ["a", [1]], "n": 2}, url)).prompts == ["a", [1]]
    line = good(openai({"prompt": "a", "logprobs": 3}, url))
    assert (line.params.logprobs, line.params.top_logprobs) == (True, 3)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({}, "prompt is missing"),
        ({"prompt": ["a", "b"]}, "a list of prompts"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        (openai({"messages": MESSAGES}, "/v1/embeddings"), "/v1/embeddings"),
        (openai({"messages": MESSAGES}, method="GET"), "GET"),
        (openai(None), "body"),
        (openai({"messages": MESSAGES}) | {"custom_id": None}, "custom_id"),
        (openai({"messages": MESSAGES, "stream": True}), "stream"),
        (openai({"messages": MESSAGES, "tools": [MESSAGES[0]]}), "tools"),
        (openai({"messages": MESSAGES, "logit_bias": {"x": 1}}), "logit_bias"),
        (openai({"messages": MESSAGES, "stop": [1]}), "stop"),
    ],
)
def test_a_line_without_meaning_says_why(record: dict[str, Any], said: str) -> None:
    assert said in str(bad(json.dumps(record)).error)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"prompt": "a", "prompt": "b"}'])
def test_what_is_no_object_is_a_bad_line(text: str) -> None:
    assert isinstance(bad(text).error, ConfigError)


def test_a_bad_line_keeps_the_id_of_who_asked() -> None:
    line = bad(json.dumps(openai({"messages": MESSAGES, "zzz": 1})))
    assert (line.kind, line.custom_id) == ("chat", "a")


def test_answers_are_known_by_the_line_that_they_answer() -> None:
    assert answered('{"id": "batch_req_12-00ff00ff", "error": null}') == (12, "00ff00ff", False)
    assert answered('{"line": 3, "digest": "01", "error": {}}') == (3, "01", True)
    for other in ("[]", "{}", '{"id": "x"}', '{"id": "batch_req_x-1"}'):
        with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
            answered(other)


def answer_of(line: RawLine) -> str:
    return json.dumps({"text": "é", "error": None, "line": line.number, "digest": line.name})


@pytest.fixture
def lines(tmp_path: Path) -> list[RawLine]:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n  \n{"prompt": "b"}\r\n{"prompt": "c"}')
    return list(raw_lines(source))


def test_blank_lines_ask_for_nothing(lines: list[RawLine]) -> None:
    assert [line.number for line in lines] == [1, 4, 5]


def test_a_line_that_is_too_long_is_not_kept(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x" * (2 * MAX_LINE_BYTES + 5) + b"\n{}\n")
    first, second = raw_lines(source)
    assert first.data is None
    assert (second.number, second.data) == (2, b"{}\n")


def test_answers_outlive_the_process_that_wrote_them(tmp_path: Path, lines: list[RawLine]) -> None:
    target = tmp_path / "out.jsonl"
    with AnswerFile(target) as file:
        file.write(lines[1], answer_of(lines[1]), is_error=True)
    with AnswerFile(target) as file:
        assert [file.has(line) for line in lines] == [False, True, False]
        assert (file.num_answers, file.num_errors) == (1, 0)
        with pytest.raises(ConfigError, match="answers another line 4"):
            file.has(RawLine(4, 77, b""))
    with AnswerFile(target, fresh=True) as file:
        assert file.num_answers == 0
    assert target.read_bytes() == b""


def test_a_line_that_was_cut_off_goes(tmp_path: Path, lines: list[RawLine]) -> None:
    target = tmp_path / "out.jsonl"
    whole = [answer_of(line).encode() + b"\n" for line in lines]
    for size in range(len(whole[1])):
        target.write_bytes(whole[0] + whole[1][:size])
        with AnswerFile(target) as file:
            # Without its end of line the answer is whole.
            is_whole = size == len(whole[1]) - 1
            assert file.num_answers == 1 + is_whole
            file.write(lines[2], answer_of(lines[2]), is_error=False)
        told = [json.loads(line)["line"] for line in target.read_bytes().splitlines()]
        assert told == ([1, 4, 5] if is_whole else [1, 5])


@pytest.mark.parametrize("text", ['{"prompt": "a"}\n', '{"prompt": "a"}', "a text\n", "{}\n{}\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(text)
    with pytest.raises(ConfigError, match="no answer of a batch"):
        AnswerFile(target)
    assert target.read_text() == text


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out.jsonl"), pytest.raises(MachineError, match="another process"):
        AnswerFile(tmp_path / "out.jsonl")
