"""A real model, SmolLM2-135M-Instruct: logits as transformers has them, text that makes sense, and
speculation that changes none of it. `scripts/real_model` makes the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, EngineConfig, SamplingParams, load_wrapper
from outrider.core.env import cache_folder

FOLDER = (cache_folder() or Path()) / "real" / "SmolLM2-135M-Instruct"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.wide,
    pytest.mark.skipif(
        not (FOLDER / "config.json").exists(), reason=f"no {FOLDER}: scripts/real_model makes it"
    ),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
    "Once upon a time, there was a little girl who lived in a village. The little girl",
]
TEXTS = ["x = 12345 + 67\n  don't", "Ümläute, 日本語 and 🙂!", "<|im_start|>user\nhi<|im_end|>\n"]
GREEDY = SamplingParams(max_tokens=24)


def llm_of(drafter: str, **options: Any) -> LLM:
    return LLM(FOLDER, config=EngineConfig(dtype="float32", drafter=drafter, **options))


@pytest.fixture(scope="module")
def plain() -> LLM:
    return llm_of("none")


def test_the_folder_is_a_checkpoint() -> None:
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert (config["hidden_size"], config["num_hidden_layers"]) == (576, 30)
    assert config["tie_word_embeddings"]


def test_ids_and_chats_are_those_of_transformers(plain: LLM) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for text in (*TEXTS, *PROMPTS):
        assert plain.tokenizer.encode(text) == theirs(text).input_ids
        assert plain.tokenizer.decode(theirs(text).input_ids, skip_special=False) == text
    asked = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert plain.tokenizer.chat(QUESTION).text == asked


def test_logits_are_those_of_transformers(plain: LLM) -> None:
    """In float32: far closer than any two likely tokens are."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    wrapper, _ = load_wrapper(str(FOLDER), dtype="float32")
    for prompt in PROMPTS:
        ids = plain.tokenizer.encode(prompt)
        with torch.no_grad():
            theirs_NV = model(torch.tensor([ids])).logits[0]
        ours_NV = wrapper.forward(ids)[0][0]
        assert torch.equal(ours_NV.argmax(-1), theirs_NV.argmax(-1))
        torch.testing.assert_close(ours_NV, theirs_NV, atol=2e-3, rtol=1e-4)


def test_a_chat_makes_sense(plain: LLM) -> None:
    text = "".join(event.text for event in plain.chat(QUESTION, SamplingParams(max_tokens=32)))
    assert "Paris" in text
    assert plain.last_result.finish_reason == "stop"


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_speculation_changes_no_greedy_text(plain: LLM, drafter: str) -> None:
    wanted = plain.generate(PROMPTS, GREEDY)
    llm = llm_of(drafter)
    found = llm.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
    assert sum(result.stats.num_accepted for result in found) > 0
