"""A family without a decoder of ours, as users meet it: by name, with any drafter, same text."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from doubles.hf_checkpoints import write_hf
from outrider import LLM, SamplingParams
from outrider.cli.models import read_notes
from outrider.core.config import EngineConfig
from outrider.models.loading import resolve

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["def add(a, b):\n", "The river", "2 + 2 =", "Once upon a time"]
CPU = EngineConfig(device="cpu", batch_size=3, k=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random models of two families beside the embedded tokenizer."""
    written: dict[str, str] = {}
    for family in ("gpt_bigcode", "gemma"):
        folder = write_hf(tmp_path_factory.mktemp(family), family, {"vocab_size": 8192}, seed=5)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve("outrider/embedded") / name, folder)
        written[family] = str(folder)
    return written


def texts(model: str, draft: str | None, config: EngineConfig) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=12, repetition_penalty=1.4, presence_penalty=0.3),
        SamplingParams(max_tokens=20, temperature=0.7, seed=4),
        SamplingParams(max_tokens=8, logprobs=True),
    ]
    results = LLM(model, draft=draft, config=config).generate(PROMPTS, params)
    assert (sum(r.stats.num_drafted for r in results) > 0) == (config.drafter != "none")
    return [tuple(result.token_ids) for result in results]


@pytest.mark.parametrize("target", ["gpt_bigcode", "gemma"])
def test_any_drafter_leaves_the_text_as_it_is(folders: dict[str, str], target: str) -> None:
    other = folders["gemma" if target == "gpt_bigcode" else "gpt_bigcode"]
    coupled = replace(CPU, sampler="coupled")
    plain = texts(folders[target], None, replace(coupled, drafter="none"))
    assert texts(folders[target], None, replace(coupled, drafter="ngram")) == plain
    assert texts(folders[target], other, coupled) == plain
    # Itself as its draft: all is accepted, and it is the same text still.
    assert texts(folders[target], folders[target], coupled) == plain


def test_the_user_is_told_who_runs_the_model(folders: dict[str, str]) -> None:
    (note,) = read_notes(folders["gpt_bigcode"])
    assert note.startswith("gpt_bigcode runs through transformers")
    assert note in LLM(folders["gpt_bigcode"], config=CPU).notes


@pytest.mark.weights
def test_a_native_target_takes_a_draft_of_any_family(folders: dict[str, str]) -> None:
    coupled = replace(CPU, sampler="coupled")
    plain = texts("outrider/embedded", None, replace(coupled, drafter="none"))
    assert texts("outrider/embedded", folders["gpt_bigcode"], coupled) == plain
