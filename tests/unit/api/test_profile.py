"""Profiles of real runs: one seed gives the same counts, and timing changes no text."""

from __future__ import annotations

import json

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.plugins.measure.timers import TIMED_OPS, kernel_times

pytestmark = pytest.mark.weights

PROMPT = "def fibonacci(n):"
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, seed=11)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=EngineConfig(profile=True))


def test_one_seed_gives_the_same_bytes_of_counts(llm: LLM) -> None:
    """Also after other requests, and in another LLM."""
    first = llm.generate(PROMPT, DRAWN)[0].profile()
    again = llm.generate(PROMPT, DRAWN)[0].profile()
    fresh = LLM(config=EngineConfig(profile=True)).generate(PROMPT, DRAWN)[0].profile()
    assert json.dumps(first["counts"]) == json.dumps(fresh["counts"])
    drawn = [json.loads(json.dumps(found["counts"])) for found in (first, again)]
    assert drawn[0]["accepted"] == drawn[1]["accepted"]


def test_every_round_has_memory(llm: LLM) -> None:
    result = llm.generate(PROMPT, DRAWN)[0]
    assert result.memory is not None
    assert len(result.memory.pass_bytes) == len(result.rounds)
    assert result.peak_memory_bytes is not None
    held = (result.memory.load_bytes, *result.memory.pass_bytes)
    assert llm.spec.weight_bytes < min(held)
    assert max(held) <= 1.01 * result.peak_memory_bytes


def test_a_batch_shares_what_its_passes_held(llm: LLM) -> None:
    first, second = llm.generate([PROMPT, "x = 1"], SamplingParams(max_tokens=8))
    assert first.memory is not None
    assert second.memory is not None
    held = dict(zip([t.pass_index for t in first.rounds], first.memory.pass_bytes, strict=True))
    for trace, num_bytes in zip(second.rounds, second.memory.pass_bytes, strict=True):
        assert held.get(trace.pass_index, num_bytes) == num_bytes


def test_a_run_that_is_not_profiled_keeps_a_peak_only() -> None:
    result = LLM().generate(PROMPT, SamplingParams(max_tokens=4))[0]
    assert (result.rounds, result.memory) == ((), None)
    assert result.peak_memory_bytes is not None


def test_arrivals_are_one_a_token_and_in_order(llm: LLM) -> None:
    events = list(llm.stream(PROMPT, SamplingParams(max_tokens=24)))
    result = llm.last_result
    assert len(result.token_seconds) == result.num_tokens == 24
    assert list(result.token_seconds) == sorted(result.token_seconds)
    assert result.token_seconds[-1] == result.total_seconds
    assert len(set(result.token_seconds)) == len(events) == result.num_rounds
    assert len(result.round_latencies) == len(events)


def test_kernels_are_timed_and_text_stays(llm: LLM) -> None:
    plain = llm.generate(PROMPT, DRAWN)[0]
    untimed = [model.kernels for model in llm.models.values()]
    with kernel_times(llm) as timers:
        result = llm.generate(PROMPT, DRAWN)[0]
    assert result.token_ids == plain.token_ids
    assert {name.partition(" ")[0] for name in timers.names} == {"target", "draft"}
    assert {name.partition(" ")[2] for name in timers.names} <= set(TIMED_OPS)
    assert min(timers.summary().values()) > 0
    num_layers = llm.spec.num_layers
    assert timers.count("target attention") == num_layers * result.stats.num_target_passes
    assert [model.kernels for model in llm.models.values()] == untimed


def test_kernels_are_put_back_after_an_error(llm: LLM) -> None:
    before = llm.models["target"].kernels
    with pytest.raises(KeyError), kernel_times(llm):
        raise KeyError
    assert llm.models["target"].kernels is before
