"""A batch: every line has its answer, in order, after any stop; prompts that begin alike share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider.core.draft import JobTrace
from outrider.plugins.batches.lines import AnswerFile, Answers, raw_lines
from outrider.plugins.batches.run import Batch

pytestmark = pytest.mark.weights

DEFAULTS = SamplingParams(max_tokens=4)
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def jobs() -> list[JobTrace]:
    return []


@pytest.fixture(scope="module")
def llm(jobs: list[JobTrace]) -> LLM:
    return LLM(config=EngineConfig(k=3, batch_size=4), on_job=jobs.append)


class Batches:
    """Runs batches in one folder."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self.llm, self.source, self.target = llm, folder / "in.jsonl", folder / "out.jsonl"

    def write(self, records: Sequence[object]) -> None:
        lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
        self.source.write_text("\n".join(lines) + "\n", "utf-8")

    def run(self, *, most: int = 10**9, **options: Any) -> list[dict[str, Any]]:
        """At most so many jobs; the answers that are there then."""
        with AnswerFile(self.target) as file:
            answers = Answers("outrider/embedded", self.llm.tokenizer)
            batch = Batch(self.llm, answers, file, DEFAULTS, **options)
            for _, _ in zip(batch.run(raw_lines(self.source)), range(most), strict=False):
                pass
            # What a process that is killed leaves is gone with it.
            for request in batch._running:  # pyright: ignore[reportPrivateUsage]
                if isinstance(request.handle, RequestHandle):
                    self.llm.cancel(request.handle)
        return [json.loads(line) for line in self.target.read_text("utf-8").splitlines()]


@pytest.fixture
def batches(llm: LLM, tmp_path: Path) -> Batches:
    return Batches(llm, tmp_path)


PROMPTS = [f"{head}{number}" for number in range(5) for head in ("def f", "class C", "x = ")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("read_ahead", [1, 4, 100])
def test_every_line_has_the_text_that_it_would_have_alone(
    llm: LLM, batches: Batches, ordered: bool, read_ahead: int
) -> None:
    batches.write([{"prompt": p, "max_tokens": 2 + i % 7} for i, p in enumerate(PROMPTS)])
    told = batches.run(ordered=ordered, read_ahead=read_ahead)
    numbers = [answer["line"] for answer in told]
    assert sorted(numbers) == list(range(1, len(PROMPTS) + 1))
    assert (numbers == sorted(numbers)) or not ordered
    params = [SamplingParams(max_tokens=2 + i % 7) for i in range(len(PROMPTS))]
    wanted = [result.text for result in llm.generate(PROMPTS, params)]
    by_line = {answer["line"]: answer for answer in told}
    assert [by_line[i + 1]["text"] for i in range(len(PROMPTS))] == wanted


def test_sampled_texts_depend_on_no_other_line_and_on_no_restart(batches: Batches) -> None:
    batches.write([{"prompt": "x = ", "temperature": 1} for _ in range(12)])
    whole = [answer["text"] for answer in batches.run()]
    assert len(set(whole)) > 1
    batches.target.unlink()
    for most in (3, 5, 2):
        batches.run(most=most, read_ahead=2, ordered=False)
    told = batches.run(read_ahead=3)
    assert sorted(answer["line"] for answer in told) == list(range(1, 13))
    assert [a["text"] for a in sorted(told, key=lambda a: a["line"])] == whole


def test_openai_lines_have_openais_answers(llm: LLM, batches: Batches) -> None:
    def line(url: str, body: object) -> dict[str, object]:
        return {"custom_id": f"my {url}", "method": "POST", "url": url, "body": body}

    both = {"prompt": ["a = ", "b = "], "n": 2, "max_tokens": 3, "temperature": 1, "logprobs": 2}
    batches.write([line("/v1/chat/completions", BODY), line("/v1/completions", both)])
    chat, completion = batches.run()
    assert chat["custom_id"] == "my /v1/chat/completions"
    assert chat["error"] is None
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    ids = llm.encode_chat("hello")
    (alone,) = llm.generate([ids], SamplingParams(max_tokens=5))
    assert choice["message"]["content"] == alone.text
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["usage"]["completion_tokens"] == alone.num_tokens
    body = completion["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    params = SamplingParams(n=2, max_tokens=3, temperature=1, seed=body["seed"])
    texts = [result.text for result in llm.generate(["a = ", "b = "], params)]
    assert [choice["text"] for choice in body["choices"]] == texts
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 3


def test_a_line_that_fails_is_a_line_with_an_error(batches: Batches) -> None:
    wrong: list[object] = [
        "no json",
        {"prompt": ""},
        {"prompt": "x " * 100_000},
        {"prompt": "x", "zzz": 1},
        {"prompt": [10**8]},
        {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": []}},
    ]
    batches.write([{"prompt": "a"}, *wrong, {"prompt": "b", "id": "last"}])
    told = batches.run()
    assert [bool(answer["error"]) for answer in told] == [False, *[True] * len(wrong), False]
    assert told[-1]["id"] == "last"
    assert "zzz" in told[4]["error"]["message"]
    assert told[6]["custom_id"] == "c"
    assert told[6]["response"]["status_code"] == 400
    with AnswerFile(batches.target) as file:
        assert (file.num_answers, file.num_errors) == (8, 6)


def test_a_defect_ends_one_line_and_leaves_its_stack_in_the_log(
    llm: LLM,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    error, submit = RuntimeError("a defect"), llm.submit

    def fail(ids: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle:
        if params.max_tokens == 3:
            raise error
        return submit(ids, params, **options)

    monkeypatch.setattr(llm, "submit", fail)
    batches.write([{"prompt": "a", "max_tokens": most} for most in (2, 3, 4)])
    assert [answer["error"] is None for answer in batches.run()] == [True, False, True]
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error]


def test_lines_may_say_what_their_text_must_be(batches: Batches) -> None:
    asked = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}
    body = BODY | {"response_format": asked, "max_tokens": 20}
    lines = [
        {"prompt": "x", "choices": ["yes", "no"]},
        {"prompt": "x", "regex": "[0-9]{3}"},
        {"custom_id": "c", "url": "/v1/chat/completions", "body": body},
        {"prompt": "x", "regex": "["},
        {"prompt": "x", "regex": "a", "choices": ["b"]},
        {"prompt": "x"},
    ]
    batches.write([line | {"max_tokens": 20} if "prompt" in line else line for line in lines])
    told = batches.run(structure={"choices": ["maybe"]})
    assert told[0]["text"] in ("yes", "no")
    assert told[1]["text"].isdecimal()
    assert len(told[1]["text"]) == 3
    content = told[2]["response"]["body"]["choices"][0]["message"]["content"]
    assert json.loads(content) in ("a", "b")
    assert told[3]["error"]
    assert told[4]["error"]
    assert told[5]["text"] == "maybe"


def test_prompts_that_begin_alike_are_read_once(
    llm: LLM, batches: Batches, jobs: list[JobTrace]
) -> None:
    """Also those that are far apart in the file, and those that could start together."""
    heads = [f"# Part {number}\n" + "def f(x):\n    return x\n" * 20 for number in range(3)]
    prompts = [f"{heads[i % 3]}y{i} = " for i in range(30)]
    batches.write([{"prompt": prompt, "max_tokens": 2} for prompt in prompts])
    jobs.clear()
    batches.run()
    lengths = [len(llm.encode(prompt)) for prompt in prompts]
    read = sum(job.num_tokens for job in jobs)
    # Each head once, and of each prompt what no whole page holds; rounds read drafts too.
    page = llm.config.page_size
    assert max(lengths) > 4 * page
    assert read < 3 * max(lengths) + 30 * (2 * page + 12)
    assert read < sum(lengths) / 2


def test_memory_is_bounded(llm: LLM, batches: Batches) -> None:
    batches.write([{"prompt": f"x{i} = ", "max_tokens": 1} for i in range(60)])
    with AnswerFile(batches.target) as file:
        batch = Batch(llm, Answers("m", llm.tokenizer), file, DEFAULTS, read_ahead=5)
        for _ in batch.run(raw_lines(batches.source)):
            assert len(batch._open) <= 10  # pyright: ignore[reportPrivateUsage]
    assert file.num_answers == 60
