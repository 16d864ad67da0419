"""A quantised folder as target: the text of its numbers, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles.gguf_writer import small_llama
from doubles.published import FORMATS, Format, write_published
from doubles.tiny_checkpoints import variant
from outrider import LLM, EngineConfig, SamplingParams

PROMPT = [5, 9, 7, 5, 9, 7, 5, 9]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def written(folder: Path, tokenizer: Path, drafter: str, dtype: str) -> tuple[int, ...]:
    config = EngineConfig(drafter=drafter, tokenizer=str(tokenizer), dtype=dtype, k=3)
    (result,) = LLM(folder, config=config).generate([PROMPT], GREEDY)
    assert result.error is None
    return result.token_ids


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_text_is_that_of_its_numbers(tmp_path: Path, form: Format) -> None:
    words = small_llama().write(tmp_path / "words.gguf")
    quantised, plain = write_published(tmp_path, variant("qwen3"), form)
    wanted = written(plain, words, "none", "bfloat16")
    assert len(wanted) == GREEDY.max_tokens
    for drafter in ("none", "ngram", "quantised-self"):
        assert written(quantised, words, drafter, "bfloat16") == wanted, drafter
