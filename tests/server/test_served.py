"""The real server over the embedded pair: its texts are LLM's, and clients cannot break it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from doubles.served import SECONDS, Served, events, served
from outrider import LLM, SamplingParams

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

PROMPTS = ["def quicksort(items):", "Once upon a time", "import os\n", "class Stack:"]
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 0.8, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(anew=True) as found:
        yield found
        assert found.end() == 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("outrider/embedded", threads=1) as found:
        yield found


def expected(llm: LLM, prompt: str, asked: dict[str, Any]) -> str:
    """Of a seed by the coupled rule, which the server takes for requests that name one."""
    rule = "coupled" if "seed" in asked else None
    return llm.generate([prompt], SamplingParams(**asked, sampler=rule))[0].text


@pytest.mark.parametrize("asked", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_texts_are_those_of_the_library(
    server: Served, llm: LLM, prompt: str, asked: dict[str, Any]
) -> None:
    text = expected(llm, prompt, asked)
    assert server.complete(prompt, **asked)["choices"][0]["text"] == text
    assert server.streamed(prompt, **asked) == text
    ids = llm.encode(prompt)
    assert server.complete(ids, **asked)["choices"][0]["text"] == text


def test_texts_are_the_same_among_many(server: Served, llm: LLM) -> None:
    asked = [(prompt, more) for more in (GREEDY, SEEDED) for prompt in PROMPTS]
    alone = [expected(llm, prompt, more) for prompt, more in asked]

    def streamed(one: tuple[str, dict[str, Any]]) -> str:
        return server.streamed(one[0], **one[1])

    with ThreadPoolExecutor(2 * len(asked)) as pool:
        assert list(pool.map(streamed, asked * 2)) == alone * 2


def test_speculation_may_be_left_out_and_is_told_of(server: Served) -> None:
    drafted = server.complete(PROMPTS[0], **GREEDY)
    plain = server.complete(PROMPTS[0], speculative=False, **GREEDY)
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    told = plain["metrics"]
    assert told is None or told["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_request_chooses_its_drafter_and_its_rule(server: Served) -> None:
    drafted = server.complete(PROMPTS[0], **GREEDY)
    chosen = {"drafter": "ngram", "k": 1, "sampler": "match"}
    found = server.complete(PROMPTS[0], speculative=chosen, **GREEDY)
    assert found["choices"][0]["text"] == drafted["choices"][0]["text"]
    assert found["metrics"]["speculative_decoding"]["num_spec_tokens"] == 1
    body = {"prompt": PROMPTS[0], "speculative": {"drafter": "eagle"}, **GREEDY}
    refused = server.client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "ngram" in refused.json()["error"]["message"]


def test_requests_choose_what_drafts(server: Served) -> None:
    text = server.complete(PROMPTS[0], **GREEDY)["choices"][0]["text"]
    for chosen in ({"drafter": "ngram"}, {"drafter": "none"}, {"k": 1}, {"sampler": "match"}):
        found = server.complete(PROMPTS[0], speculative=chosen, **GREEDY)
        assert found["choices"][0]["text"] == text
    guess = {"type": "content", "content": text}
    found = server.complete(PROMPTS[0], prediction=guess, **GREEDY)
    assert found["choices"][0]["text"] == text
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 4


def test_a_request_names_the_members_that_draft_for_it(server: Served) -> None:
    """Its answer and /metrics have figures of these members, and of no others."""
    prompt, counter = "one two three " * 6, "outrider_spec_decode_member_num_drafted_total"
    text = server.complete(prompt, **GREEDY)["choices"][0]["text"]
    for names in (["model"], ["suffix", "ngram"]):
        before = {name: server.gauge(counter, drafter=name) for name in names}
        found = server.complete(prompt, speculative={"drafters": names}, **GREEDY)
        assert found["choices"][0]["text"] == text
        told = found["metrics"]["speculative_decoding"]
        drafted = {name: one["num_drafted"] for name, one in told["members"].items()}
        assert {*drafted} <= {*names}
        assert sum(drafted.values()) == told["num_draft_tokens"] > 0
        assert drafted == {
            name: grown
            for name, old in before.items()
            if (grown := server.gauge(counter, drafter=name) - old)
        }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ngram", "modle"], "'modle' cannot draft here"),
        (["dflash"], "'dflash' cannot draft here"),
        (["model", "suffix"], "model, suffix together cannot draft here"),
    ],
)
def test_a_member_that_this_server_lacks_is_refused_with_those_that_it_has(
    server: Served, names: list[str], said: str
) -> None:
    body = {"prompt": PROMPTS[0], "speculative": {"drafters": names}, **GREEDY}
    refused = server.client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "drafters"
    assert error["message"].startswith(f"drafters: {said}")
    assert "this engine has model, suffix, ngram, prediction" in error["message"]


def test_a_seed_gives_one_text_whatever_drafts(server: Served) -> None:
    text = server.complete(PROMPTS[1], **SEEDED)["choices"][0]["text"]
    for chosen in (False, {"drafter": "ngram"}, {"k": 2}):
        found = server.complete(PROMPTS[1], speculative=chosen, **SEEDED)
        assert found["choices"][0]["text"] == text
        assert found["seed"] == SEEDED["seed"]


def test_rounds_can_be_watched(server: Served) -> None:
    body = {"prompt": PROMPTS[0], "stream": True, "speculative": {"trace": True}} | GREEDY
    with server.client.stream("POST", "/v1/completions", json=body) as got:
        choices = [choice for event in events(got) for choice in event["choices"]]
    rounds = [one for choice in choices for one in choice.get("outrider.round", ())]
    assert rounds
    nodes = [node for one in rounds for node in one["nodes"]]
    assert {"token_id", "p", "verdict", "token"} <= set(nodes[0])
    text = "".join(node.get("text", "") for node in nodes)
    assert text == "".join(choice["text"] for choice in choices)
    whole = server.complete(PROMPTS[0], speculative={"trace": True}, **GREEDY)["choices"][0]
    assert whole["text"] == "".join(
        node.get("text", "") for one in whole["outrider.round"] for node in one["nodes"]
    )


def test_prompts_are_scored_as_the_library_scores_them(server: Served, llm: LLM) -> None:
    """As scoring tools ask: ids in, log-probabilities of the prompt's own tokens out."""
    ids = llm.encode("def add(a, b):\n    return a + b\n")
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    found = server.complete([ids, ids[:5]], **asked)["choices"]
    wanted = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    told = found[0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(ids) + 1
    assert told["token_logprobs"][0] is None
    own = [None if one is None else one.logprob for one in wanted.prompt_logprobs]
    assert told["token_logprobs"][: len(ids)] == own
    assert found[1]["logprobs"]["token_logprobs"][:5] == own[:5]
    assert all(told["top_logprobs"][1:])


def test_who_leaves_frees_the_place(server: Served) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}
    for _ in range(5):
        with server.client.stream("POST", "/v1/completions", json=body) as got:
            next(got.iter_raw())
    deadline = time.monotonic() + SECONDS
    while server.gauge("outrider_num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


BODIES = [
    b"",
    b"{",
    b"[1]",
    b'"x"',
    b"null",
    b"{}",
    b'{"prompt": null}',
    b'{"prompt": {}}',
    b'{"prompt": ""}',
    b'{"prompt": [9999999]}',
    b'{"prompt": [-1]}',
    b'{"prompt": "x", "max_tokens": 1e99}',
    b'{"prompt": "x", "max_tokens": 99999999999999999999}',
    b'{"prompt": "x", "logit_bias": {"9999999": 1}}',
    b'{"prompt": "x", "logprobs": true}',
    b'{"prompt": "x", "stop": ""}',
    b'{"prompt": "x", "bad_words": [""]}',
    b'{"prompt": "x", "guided_regex": "("}',
    b'{"prompt": "x", "guided_json": {"type": "no such type"}}',
    b'{"prompt": "x", "grammar": "nonsense ::="}',
    b'{"prompt": "x", "guided_choice": []}',
    b'{"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}',
    b'{"prompt": "x", "speculative": {"k": 999}}',
    b'{"prompt": "x", "speculative": {"k": -1}}',
    b'{"prompt": "x", "speculative": []}',
    b'{"prompt": "x", "n": 17}',
    b'{"messages": []}',
    b'{"messages": [5]}',
    b'{"messages": [{}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": {}, "content": "x"}]}',
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_are_errors_of_their_sender(server: Served, path: str, stream: bool) -> None:
    for body in BODIES:
        asked = body.replace(b"{", b'{"stream": true, ', 1).replace(b", }", b"}")
        headers = {"content-type": "application/json"}
        got = server.client.post(path, content=asked if stream else body, headers=headers)
        assert got.status_code in (400, 404, 413, 422), (body, got.status_code, got.text)
        assert got.json()["error"]["message"], body
    assert server.client.get("/ready").status_code == 200


def test_a_server_that_is_told_to_end_ends_what_runs() -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with served() as server:
        with server.client.stream("POST", "/v1/completions", json=body) as got:
            lines = events(got)
            text = [next(lines)["choices"][0]["text"]]
            server.process.terminate()
            last = None
            for event in lines:
                last = event["choices"][0]
                text.append(last["text"])
        assert last is not None
        assert last["finish_reason"] == "length"
        assert server.process.wait(SECONDS) == 0
        with pytest.raises(httpx.TransportError):
            server.client.get("/health")


def test_what_is_not_waited_for_is_told_so() -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 2000, "ignore_eos": True, "n": 2}
    with served("--drain-seconds", "0", "--engine-home", "thread") as server:
        with server.client.stream("POST", "/v1/completions", json=body) as got:
            lines = got.iter_lines()
            next(lines)
            server.process.terminate()
            told = [line for line in lines if line.startswith("data: ")]
        assert told[-1] != "data: [DONE]"
        assert "error" in json.loads(told[-1].removeprefix("data: "))
        assert server.process.wait(SECONDS) == 0


def test_systemd_hears_that_it_is_ready_once_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with served() as started:
            assert heard.recv(99) == b"READY=1"
            assert started.client.get("/ready").status_code == 200


def test_a_port_that_is_taken_is_told_at_once(server: Served) -> None:
    words = ("serve", "outrider/embedded", "--port", server.url.rpartition(":")[2])
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 2
    assert "another program listens there" in done.stderr


def test_headers_that_do_not_come_are_not_waited_for(server: Served) -> None:
    """Who sends half a request is cut off, and others are answered meanwhile."""

    async def stalled() -> bytes:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-half: ")
        await writer.drain()
        assert (await asyncio.to_thread(server.client.get, "/health")).status_code == 200
        rest = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        return rest

    assert b"200 OK" not in asyncio.run(stalled())
