"""Two real models by turns: texts are the same after a model was unloaded and loaded again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from doubles.served import Served, served
from outrider import LLM, SamplingParams

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

LARGE, SMALL = "outrider/embedded", "small"
PROMPTS = ("def quicksort(items):", "Once upon a time")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 16}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(f"{SMALL}=outrider/embedded-draft,none") as found:
        yield found
        assert found.end() == 0


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str, bool], str]:
    found: dict[tuple[str, str, bool], str] = {}
    for name, model in ((LARGE, LARGE), (SMALL, "outrider/embedded-draft")):
        with LLM(model, threads=1) as llm:
            for prompt in PROMPTS:
                for asked in (GREEDY, SEEDED):
                    rule = "coupled" if "seed" in asked else None
                    result = llm.generate(prompt, SamplingParams(**asked, sampler=rule))[0]
                    found[name, prompt, "seed" in asked] = result.text
    assert found[LARGE, PROMPTS[0], False] != found[SMALL, PROMPTS[0], False]
    return found


def states(server: Served) -> dict[str, str]:
    told = server.client.get("/v1/models").json()["data"]
    return {one["id"]: one["status"]["value"] for one in told}


def test_texts_are_the_same_after_an_unloading(
    server: Served, expected: dict[tuple[str, str, bool], str]
) -> None:
    assert states(server) == {LARGE: "loaded", SMALL: "unloaded"}
    for name in (SMALL, LARGE):
        for prompt in PROMPTS:
            for asked in (GREEDY, SEEDED):
                text = expected[name, prompt, "seed" in asked]
                told = server.complete(prompt, model=name, **asked)
                assert (told["model"], told["choices"][0]["text"]) == (name, text)
                assert server.streamed(prompt, model=name, **asked) == text
        assert list(states(server).values()).count("loaded") == 1
        assert server.client.get("/ready").status_code == 200
        assert server.gauge("outrider_engine_restarts_total") == 0


def test_many_ask_for_both_at_once(
    server: Served, expected: dict[tuple[str, str, bool], str]
) -> None:
    asked = [(name, prompt) for prompt in PROMPTS for name in (LARGE, SMALL)] * 4

    def text(one: tuple[str, str]) -> str:
        return server.streamed(one[1], model=one[0], **GREEDY)

    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(text, asked))
    assert found == [expected[name, prompt, False] for name, prompt in asked]


def test_metrics_are_told_apart_by_name(server: Served) -> None:
    for name in (LARGE, SMALL):
        server.complete(PROMPTS[0], model=name, **GREEDY)
    lines = server.client.get("/metrics").text.splitlines()
    for metric in ("outrider_generation_tokens_total", "outrider_engine_state"):
        names = {label for line in lines if line.startswith(metric) for label in _names(line)}
        assert names == {LARGE, SMALL}


def _names(line: str) -> list[Any]:
    return [part.split('"')[1] for part in line.split("{")[1].split(",") if "model_name=" in part]


def test_a_name_that_is_not_here_loads_nothing(server: Served) -> None:
    before = states(server)
    for name in ("outrider/embedded-draft", "/etc/passwd", "../x", "small,none"):
        got = server.client.post("/v1/completions", json={"prompt": "x", "model": name})
        assert got.status_code == 404
    assert states(server) == before


def test_a_model_without_requests_gives_its_memory_back(
    expected: dict[tuple[str, str, bool], str],
) -> None:
    with served("--keep-alive", "0") as server:
        while server.engine_ids():
            # Once its process has ended, nothing of it is left.
            time.sleep(0.01)
        assert states(server) == {LARGE: "unloaded"}
        assert server.client.get("/ready").status_code == 200
        text = expected[LARGE, PROMPTS[0], False]
        assert server.streamed(PROMPTS[0], keep_alive=-1, **GREEDY) == text
        engine = server.engine_id()
        assert server.complete(PROMPTS[0], **GREEDY)["choices"][0]["text"] == text
        with suppress(ProcessLookupError):
            while True:
                os.kill(engine, 0)
                time.sleep(0.01)
        assert server.end() == 0
