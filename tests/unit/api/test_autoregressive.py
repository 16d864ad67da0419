"""Plain decoding: the engine's own loop without drafts, and transformers' greedy text."""

from __future__ import annotations

import pytest
import torch
from vs_transformers import HfPeer

from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.models.loading import resolve
from outrider.plugins.compat.autoregressive import AutoregressiveDecoder
from outrider.plugins.compat.wrapper import Cache, ModelWrapper, load_wrapper

pytestmark = pytest.mark.weights

CODE = "def quicksort(items):\n"
MATHS = "Question: Tom has 3 apples and buys 4 more. How many apples has Tom?\nAnswer:"
# The pair ends this text by itself after a few tokens.
SHORT = "The quick brown fox"
PROMPTS = [
    CODE,
    MATHS,
    SHORT,
    "import os\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n",
    "Question: A train goes 60 miles in 2 hours. What is its speed?\nAnswer:",
    "for i in range(10):\n    print(",
    "x",
]
CONFIG = EngineConfig(dtype="float32", profile=True)


@pytest.fixture(scope="module")
def decoder() -> AutoregressiveDecoder:
    return AutoregressiveDecoder("outrider/embedded", config=CONFIG)


@pytest.fixture(scope="module")
def wrapper() -> ModelWrapper:
    return load_wrapper("outrider/embedded", "float32")[0]


@pytest.fixture(scope="module")
def peer() -> HfPeer:
    pytest.importorskip("transformers")
    return HfPeer(resolve("outrider/embedded"), torch.float32)


def written(
    decoder: AutoregressiveDecoder, text: str, limit: int, temperature: float = 0.0, seed: int = 0
) -> GenerationResult:
    """The result of a text, which is what was given."""
    given = decoder.generate_text(text, limit, temperature, seed=seed)
    assert given == decoder.last_result.text
    return decoder.last_result


@pytest.mark.sample(2)
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda text: text[:12].strip())
def test_hf_match_greedy(decoder: AutoregressiveDecoder, peer: HfPeer, prompt: str) -> None:
    ids = decoder.tokenizer.encode(prompt)
    assert list(decoder.generate(ids, 32).token_ids) == peer.generate([ids], max_tokens=32)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hf_match_ends_at_the_same_token(decoder: AutoregressiveDecoder, peer: HfPeer) -> None:
    """A text that ends before its limit, the stop token included."""
    ids = decoder.tokenizer.encode(SHORT)
    ours = decoder.generate(ids, 64)
    assert ours.finish_reason == "stop"
    assert list(ours.token_ids) == peer.generate([ids], max_tokens=64)[0]


@pytest.mark.parametrize("prompt", PROMPTS[:4], ids=lambda text: text[:12].strip())
def test_greedy_is_the_first_largest_logit_of_a_growing_cache(
    decoder: AutoregressiveDecoder, wrapper: ModelWrapper, prompt: str
) -> None:
    """The explicit loop, written out: prefill, then one token a pass."""
    ids = decoder.tokenizer.encode(prompt)
    made: Cache | None = None
    text, unread = list[int](), ids
    while len(text) < 12 and wrapper.eos_token_id not in text:
        logits_1NV, made = wrapper.forward(unread, made)
        unread = [int(logits_1NV[0, -1].argmax())]
        text += unread
    assert list(decoder.generate(ids, 12).token_ids) == text


def test_a_pass_writes_one_token_and_the_first_reads_the_prompt(
    decoder: AutoregressiveDecoder,
) -> None:
    ids = decoder.tokenizer.encode(CODE)
    result = decoder.generate(ids, 10)
    assert [trace.num_emitted for trace in result.rounds] == [1] * 10
    assert [trace.num_prompt_tokens for trace in result.rounds] == [len(ids) - 1, *[0] * 9]
    assert result.stats.num_target_passes == 10


@pytest.mark.parametrize("drafter", ["auto", "model", "ngram"])
def test_a_drafter_in_the_configuration_is_not_used(drafter: str) -> None:
    decoder = AutoregressiveDecoder(config=EngineConfig(drafter=drafter))
    assert decoder.llm.drafter == "none"
    assert decoder.llm.config.k == EngineConfig().k


def test_the_stop_token_ends_the_text_and_is_its_last_id(decoder: AutoregressiveDecoder) -> None:
    result = written(decoder, SHORT, 64)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in decoder.tokenizer.stop_ids
    assert not set(result.token_ids[:-1]) & set(decoder.tokenizer.stop_ids)
    assert result.text == decoder.tokenizer.decode(result.token_ids[:-1])


def test_sampling_depends_on_the_seed_alone(decoder: AutoregressiveDecoder) -> None:
    texts = {written(decoder, CODE, 8, 1.0, seed=seed).token_ids for seed in (1, 2, 3, 1, 2, 3)}
    assert len(texts) == 3


def test_sampling_follows_the_softmax_of_the_logits(
    decoder: AutoregressiveDecoder, wrapper: ModelWrapper
) -> None:
    """First tokens against the distribution: the likeliest one's share is within 4 deviations."""
    ids = decoder.tokenizer.encode(MATHS)
    probs_V = torch.softmax(wrapper.forward(ids, use_cache=False)[0][0, -1] / 2.0, dim=-1)
    best, share = int(probs_V.argmax()), float(probs_V.max())
    params = [SamplingParams(max_tokens=1, temperature=2.0, n=16, seed=seed) for seed in range(4)]
    drawn = [r.token_ids[0] for r in decoder.llm.generate([ids] * 4, params)]
    deviation = (share * (1 - share) / len(drawn)) ** 0.5
    assert abs(drawn.count(best) / len(drawn) - share) < 4 * deviation


@pytest.mark.parametrize(
    ("ids", "problem"), [([], "empty"), ([8192], "outside the vocabulary"), ([1] * 4000, "window")]
)
def test_bad_prompts_are_refused(
    decoder: AutoregressiveDecoder, ids: list[int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        decoder.generate(ids, 4)


@pytest.mark.parametrize(("prompt", "limit"), [(CODE, 16), (SHORT, 64), ("x", 1)])
def test_a_wrapper_writes_what_its_model_by_name_writes(
    decoder: AutoregressiveDecoder, wrapper: ModelWrapper, prompt: str, limit: int
) -> None:
    free, plain = wrapper.free_tokens, AutoregressiveDecoder(wrapper)
    ours = written(plain, prompt, limit)
    other = written(decoder, prompt, limit)
    assert (ours.text, ours.token_ids) == (other.text, other.token_ids)
    assert ours.finish_reason == other.finish_reason
    assert ours.stats.num_target_passes == len(ours.token_seconds) == len(ours.token_ids)
    assert not ours.is_speculative
    assert wrapper.free_tokens == free


def test_a_seed_draws_alike_with_and_without_a_wrapper(
    decoder: AutoregressiveDecoder, wrapper: ModelWrapper
) -> None:
    plain = AutoregressiveDecoder(wrapper)
    for seed in range(3):
        ours = written(plain, MATHS, 12, 1.0, seed=seed)
        assert ours.token_ids == written(decoder, MATHS, 12, 1.0, seed=seed).token_ids


def test_ids_may_be_a_tensor(decoder: AutoregressiveDecoder, wrapper: ModelWrapper) -> None:
    ids = decoder.tokenizer.encode(CODE)
    for shape in ((-1,), (1, -1)):
        given = torch.tensor(ids).reshape(shape)
        for either in (decoder, AutoregressiveDecoder(wrapper)):
            assert either.generate(given, 6).token_ids == decoder.generate(ids, 6).token_ids
    with pytest.raises(ConfigError, match="one sequence"):
        decoder.generate(torch.tensor([ids, ids]), 6)


def test_a_wrapper_brings_its_own_configuration(wrapper: ModelWrapper) -> None:
    with pytest.raises(ConfigError, match="loaded already"):
        AutoregressiveDecoder(wrapper, config=CONFIG)
    plain = AutoregressiveDecoder(wrapper)
    with pytest.raises(ConfigError, match="wrapper"):
        _ = plain.llm
    with pytest.raises(ConfigError, match="nothing was written"):
        _ = plain.last_result
    with pytest.raises(ConfigError, match="leaves no token"):
        plain.generate([1] * 4000, 4)
