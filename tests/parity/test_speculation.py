"""Speculation on equals speculation off: a part of studies/parity_matrix.py."""

from __future__ import annotations

import pytest
from matrices.matrix import Runner, first_difference, num_equal
from matrices.settings import PAIR, pair

from outrider import LLM, EngineConfig, SamplingParams
from outrider_lab.bench.workload import WORKLOADS, load_prompts

PROMPTS = [prompt for name in WORKLOADS for prompt in load_prompts(name)[3:4]]
# Any two of a length of drafts and a batch meet under one drafter or another, and all of them in
# tests/engine/test_drafter_matrix.py.
CELLS = {
    "model": (("1", "1"), ("4", "3"), ("8", "1")),
    "ngram": (("1", "3"), ("4", "1"), ("8", "3")),
}


@pytest.mark.sample(2)
@pytest.mark.weights
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_greedy_tokens_equal_plain_decoding(dtype: str, drafter: str) -> None:
    some = {"dtype": (dtype,), "drafter": (drafter,), "k": ("1", "4", "8")}
    matrix = pair({**PAIR, **some, "batch_size": ("1", "3")})
    rows = [row for row in matrix.all_rows() if (row["k"], row["batch_size"]) in CELLS[drafter]]
    assert len(rows) == 3
    for cell in Runner(matrix, PROMPTS, max_tokens=32).run(rows):
        assert cell.first_difference is None, cell
        assert cell.num_equal == cell.num_tokens > 0
        assert cell.exact_kernels
        assert cell.tokens_per_round > 1


@pytest.mark.weights
def test_verifying_token_by_token_gives_the_same_tokens_in_more_passes() -> None:
    params = SamplingParams(max_tokens=32)
    batched = LLM(config=EngineConfig(k=4)).generate(PROMPTS[0], params)[0]
    stepwise = LLM(config=EngineConfig(k=4, batched_verify=False)).generate(PROMPTS[0], params)[0]
    assert stepwise.token_ids == batched.token_ids
    assert stepwise.stats.num_rounds == batched.stats.num_rounds
    assert stepwise.stats.num_target_passes > batched.stats.num_target_passes


@pytest.mark.weights
def test_reference_kernels_are_exact_too() -> None:
    params = SamplingParams(max_tokens=16)
    off, on = (
        LLM(config=EngineConfig(drafter=drafter, k=3, force_reference=True))
        for drafter in ("none", "model")
    )
    assert on.kernels.exact
    expected = off.generate(PROMPTS[:1], params)[0].token_ids
    assert on.generate(PROMPTS[:1], params)[0].token_ids == expected


@pytest.mark.weights
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_match_rule_gives_the_seed_s_text_with_any_drafter(temperature: float) -> None:
    params = SamplingParams(max_tokens=32, temperature=temperature, top_p=0.9, seed=11)
    texts = {
        drafter: LLM(config=EngineConfig(drafter=drafter, k=4, sampler="match")).generate(
            PROMPTS[:2], params
        )
        for drafter in ("none", "ngram", "model")
    }
    expected = [result.token_ids for result in texts["none"]]
    assert all([r.token_ids for r in results] == expected for results in texts.values())


@pytest.mark.weights
def test_a_seed_s_text_does_not_depend_on_batch_mates() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=50, seed=3)
    together = LLM(config=EngineConfig(k=4, batch_size=4)).generate(PROMPTS, params)
    alone = [LLM(config=EngineConfig(k=4)).generate(prompt, params)[0] for prompt in PROMPTS]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_counting_equal_tokens() -> None:
    assert num_equal([(1, 2, 3)], [(1, 2, 3)]) == 3
    assert num_equal([(1, 2, 3)], [(1, 9, 3)]) == 1
    assert num_equal([(1, 2)], [(1, 2, 3)]) == 1
    assert first_difference([(1, 2), (4, 5)], [(1, 2), (4, 6)]) == (1, 1)
    assert first_difference([(1,)], [(1, 2)]) == (0, 1)
    assert first_difference([(1, 2)], [(1, 2)]) is None
