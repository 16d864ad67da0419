"""Sampling features through the API: what is told, what never occurs, and that drafts change none.

Under the match rule a seeded text is the same with any drafter, so every feature can be compared,
ids and log-probabilities, with plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import spellings
from outrider.core.errors import ConfigError

PROMPTS = ("def fibonacci(n):", "Question: Ann has 3 pens and buys 4 more. How many?\nAnswer:")
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=11)
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return LLM(config=EngineConfig(sampler="match", k=3))


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(config=EngineConfig(sampler="match", drafter="none"))


FEATURES = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency and presence": {"frequency_penalty": 0.8, "presence_penalty": 0.6},
    "bias": {"logit_bias": {202: -30.0, 330: 4.0}},
    "bad words": {"bad_words": ("return", "the")},
    "min tokens": {"min_tokens": 20},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
}


@pytest.mark.covering(1)
@pytest.mark.weights
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES.keys())
def test_a_feature_gives_the_same_with_and_without_drafts(
    drafting: LLM, plain: LLM, feature: dict[str, object], params: SamplingParams
) -> None:
    params = replace(params, **feature)
    ours, theirs = drafting.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert [r.logprobs for r in ours] == [r.logprobs for r in theirs]
    assert sum(r.stats.num_accepted for r in ours) > 0


@pytest.mark.weights
def test_a_feature_changes_the_text(plain: LLM) -> None:
    """Else the comparisons above would compare nothing."""
    usual = [r.token_ids for r in plain.generate(PROMPTS, GREEDY)]
    for name in ("repetition", "frequency and presence", "bias", "bad words"):
        params = replace(GREEDY, **FEATURES[name])
        assert [r.token_ids for r in plain.generate(PROMPTS, params)] != usual


@pytest.mark.weights
def test_bad_words_do_not_occur(drafting: LLM) -> None:
    params = replace(SEEDED, bad_words=("return", "self"), max_tokens=60)
    for result in drafting.generate(PROMPTS, params):
        for word in spellings(drafting.tokenizer, params.bad_words):
            ends = range(len(word), len(result.token_ids) + 1)
            assert all(result.token_ids[end - len(word) : end] != word for end in ends)


@pytest.mark.weights
def test_a_spelling_with_and_without_a_space(drafting: LLM) -> None:
    words = spellings(drafting.tokenizer, ("return",))
    assert {drafting.tokenizer.decode(word) for word in words} == {"return", " return"}
    with pytest.raises(ConfigError, match="empty word"):
        spellings(drafting.tokenizer, ("x", ""))


@pytest.mark.weights
def test_a_text_does_not_end_before_min_tokens(drafting: LLM) -> None:
    short = drafting.generate(PROMPTS[1], SamplingParams(max_tokens=200))[0]
    assert short.finish_reason == "stop"
    wanted = len(short.token_ids) + 5
    longer = drafting.generate(PROMPTS[1], SamplingParams(max_tokens=200, min_tokens=wanted))[0]
    assert len(longer.token_ids) > wanted


@pytest.mark.weights
def test_n_completions_are_drawn_apart_and_do_not_depend_on_each_other(drafting: LLM) -> None:
    three = drafting.generate(PROMPTS, replace(SEEDED, n=3))
    assert len(three) == 6
    assert len({r.token_ids for r in three[:3]}) == 3
    one = drafting.generate(PROMPTS, SEEDED)
    assert [three[0].token_ids, three[3].token_ids] == [r.token_ids for r in one]


@pytest.mark.weights
def test_completions_share_the_pages_of_their_prompt() -> None:
    """The second and later ones read only what does not fill a page."""
    llm = LLM(config=EngineConfig(page_size=4, drafter="none", profile=True))
    prompt = list(range(40, 61))
    results = llm.generate([prompt], replace(SEEDED, n=3, max_tokens=6))
    read = [sum(t.num_prompt_tokens for t in result.rounds) for result in results]
    assert read[0] == 20
    assert read[1:] == [0, 0]


@pytest.mark.weights
def test_greedy_completions_are_alike(drafting: LLM) -> None:
    first, second = drafting.generate(PROMPTS[0], replace(GREEDY, n=2))
    assert first.token_ids == second.token_ids


@pytest.mark.weights
def test_a_stream_has_one_completion(drafting: LLM) -> None:
    with pytest.raises(ConfigError, match="one completion"):
        drafting.stream(PROMPTS[0], replace(GREEDY, n=2))


@pytest.mark.weights
def test_log_probabilities_are_told_token_by_token(drafting: LLM) -> None:
    params = replace(GREEDY, logprobs=True, top_logprobs=5)
    events = list(drafting.stream(PROMPTS[0], params))
    result = drafting.last_result
    assert tuple(entry for event in events for entry in event.logprobs) == result.logprobs
    assert tuple(entry.token_id for entry in result.logprobs) == result.token_ids
    for entry in result.logprobs:
        assert entry.logprob == entry.top[0][1] <= 0
        assert all(a >= b for (_, a), (_, b) in pairwise(entry.top))
        assert sum(math.exp(value) for _, value in entry.top) <= 1 + 1e-6


@pytest.mark.weights
def test_log_probabilities_are_of_the_distribution_that_drew(drafting: LLM) -> None:
    """After top-k 2 there are two tokens, and their masses make one."""
    params = replace(SEEDED, top_k=2, logprobs=True, top_logprobs=5)
    for entry in drafting.generate(PROMPTS[0], params)[0].logprobs:
        assert len(entry.top) <= 2
        assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-6)


@pytest.mark.weights
def test_no_log_probabilities_unless_asked(drafting: LLM) -> None:
    assert drafting.generate(PROMPTS[0], GREEDY)[0].logprobs == ()
    with pytest.raises(ConfigError, match="top_logprobs needs logprobs"):
        SamplingParams(top_logprobs=2)


@pytest.mark.weights
def test_a_mask_keeps_the_text_within_what_is_allowed(drafting: LLM, plain: LLM) -> None:
    vocab_size = drafting.spec.vocab_size

    def every_other(text: Sequence[int]) -> Tensor:
        mask_V = torch.zeros(vocab_size, dtype=torch.bool)
        mask_V[len(text) % 2 :: 2] = True
        return mask_V

    for params in (GREEDY, SEEDED):
        ours = drafting.generate(PROMPTS, params, allowed=every_other)
        theirs = plain.generate(PROMPTS, params, allowed=every_other)
        assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
        for result in ours:
            assert all(token % 2 == place % 2 for place, token in enumerate(result.token_ids))


@pytest.mark.weights
def test_a_bias_for_a_foreign_id_is_refused(drafting: LLM) -> None:
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        drafting.generate(PROMPTS[0], replace(GREEDY, logit_bias={10**6: 1.0}))


@pytest.mark.weights
def test_a_lossy_sampler_is_labelled_in_every_result() -> None:
    lossy = LLM(config=EngineConfig(sampler="typical"))
    result = lossy.generate(PROMPTS[0], GREEDY)[0]
    assert not lossy.exact
    assert not result.exact
    assert result.to_dict()["exact"] is False
    assert "LOSSY" in result.summary()
    assert LLM(config=EngineConfig(sampler="typical", drafter="none")).exact
    assert "LOSSY" not in LLM().generate(PROMPTS[0], GREEDY)[0].summary()


@pytest.mark.weights
def test_a_stop_string_waits_for_min_tokens(plain: LLM, drafting: LLM) -> None:
    params = replace(GREEDY, max_tokens=40)
    whole = plain.generate(PROMPTS[0], params)[0]
    stop = next(word for word in whole.text.split() if whole.text.count(word) > 1)
    early = plain.generate(PROMPTS[0], replace(params, stop=(stop,)))[0]
    for llm in (plain, drafting):
        late = llm.generate(
            PROMPTS[0], replace(params, stop=(stop,), min_tokens=early.num_tokens + 1)
        )[0]
        assert late.num_tokens > early.num_tokens
        assert late.text.startswith(early.text + stop)
        assert whole.text.startswith(late.text)


@pytest.mark.weights
def test_without_an_end_nothing_is_held_back_as_one(plain: LLM) -> None:
    """`ignore_eos` makes the end an ordinary token: neither banned early nor left by a mask."""
    (end,) = plain.tokenizer.stop_ids
    liked = replace(GREEDY, max_tokens=6, ignore_eos=True, logit_bias={end: 100.0})
    assert plain.generate("x", liked)[0].token_ids == (end,) * 6
    assert plain.generate("x", replace(liked, min_tokens=4))[0].token_ids == (end,) * 6
    free = replace(GREEDY, max_tokens=6, ignore_eos=True)
    nothing = torch.zeros(plain.spec.vocab_size, dtype=torch.bool)
    masked = plain.generate("x", free, allowed=lambda _: nothing)[0]
    assert masked.token_ids == plain.generate("x", free)[0].token_ids


@pytest.mark.parametrize("changes", [{"stop": (1,)}, {"bad_words": ("a", None)}])
def test_texts_are_texts(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must hold texts"):
        replace(GREEDY, **changes)


@pytest.mark.weights
def test_a_mask_that_is_no_tensor_is_named(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="got a list"):
        plain.generate("x", GREEDY, allowed=lambda _: [True])  # pyright: ignore


@pytest.mark.weights
def test_ids_are_whole_numbers(plain: LLM) -> None:
    with pytest.raises(ConfigError, match=r"1\.5"):
        plain.generate([[3, 1.5]])  # pyright: ignore
