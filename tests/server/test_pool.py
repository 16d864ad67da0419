"""Engines in processes for a program that is no server: the texts are an LLM's, whatever dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError
from outrider.plugins.batches.lines import AnswerFile, Answers, raw_lines
from outrider.plugins.batches.run import Batch, BatchEngine
from outrider.plugins.replicas import EnginePool, PooledRequest

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]
PROMPTS = [f"def function_{number}(items):" for number in range(24)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
# Its rule draws as it comes, so that a text cannot go on: it is written anew.
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool(replicas=2, threads=1, device="cpu", batch_size=4) as found:
        yield found


def test_texts_are_those_of_an_llm_also_when_an_engine_dies(pool: EnginePool) -> None:
    with LLM(threads=1, batch_size=4) as llm:
        expected = {
            params: [result.text for result in llm.generate(PROMPTS, params)]
            for params in (GREEDY, DRAWN)
        }
        assert pool.encode(PROMPTS[0]) == llm.encode(PROMPTS[0])
    results = pool.generate(PROMPTS, GREEDY)
    assert [result.text for result in results] == expected[GREEDY]
    assert all(result.stats.num_drafted for result in results)
    requests = [pool.submit(pool.encode(prompt), DRAWN) for prompt in PROMPTS]
    while not any(request.done for request in requests):
        pool.advance()
    engine = pool.process_ids[0]
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    while not all(request.done for request in requests):
        pool.advance()
    assert [request.result().text for request in requests] == expected[DRAWN]


def test_a_batch_is_answered_line_for_line_as_by_one_engine(
    pool: EnginePool, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        {"prompt": prompt, "temperature": i % 2, "n": 1 + i % 3} for i, prompt in enumerate(PROMPTS)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": 5}]))
    with LLM(threads=1, batch_size=4) as llm:
        one = answered(llm, llm.tokenizer, source, tmp_path / "one.jsonl")
        assert answered(pool, pool.tokenizer, source, tmp_path / "two.jsonl") == one
    assert one.count("\n") == len(PROMPTS) + 1


def answered(engine: BatchEngine, tokenizer: Tokenizer, source: Path, target: Path) -> str:
    with AnswerFile(target) as file:
        defaults = SamplingParams(max_tokens=16, ignore_eos=True)
        batch = Batch(engine, Answers("model", tokenizer), file, defaults, read_ahead=8)
        for _ in batch.run(raw_lines(source)):
            pass
    return target.read_text()


def test_mistakes_are_told_where_the_result_is_asked_for(pool: EnginePool) -> None:
    with pytest.raises(ConfigError, match="not ended"):
        PooledRequest().result()
    request = pool.submit([10**6], GREEDY)
    while not request.done:
        pool.advance()
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        request.result()
    with pytest.raises(ConfigError):
        pool.encode("")
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        pool.generate([[10**6], ""], GREEDY)


def test_generate_is_that_of_an_llm(pool: EnginePool) -> None:
    prompts = [PROMPTS[0], [10**6], PROMPTS[1], ""]
    params = [replace(DRAWN, n=2), GREEDY, GREEDY, GREEDY]
    with LLM(threads=1, batch_size=4) as llm:
        expected = llm.generate(prompts, params, max_tokens=8)
    results = pool.generate(prompts, params, max_tokens=8)
    assert [(one.text, one.error) for one in results] == [(o.text, o.error) for o in expected]
    assert len({one.text for one in results[:2]}) == 2


def test_an_engine_that_cannot_be_started_is_told_and_nothing_runs_on() -> None:
    with pytest.raises(ConfigError, match="names cpu twice"):
        EnginePool(devices=["cpu", "cpu"])
    with EnginePool(replicas=1, threads=1) as found:
        process_ids = found.process_ids
    for process_id in process_ids:
        assert process_id is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
