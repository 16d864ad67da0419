"""Where texts of GGUF files end, family by family, and where their chats begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from doubles.gguf_writer import TOKENS, Gguf, small_llama
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.callers import PromptReader
from outrider.api.tokenizer import Tokenizer
from outrider.models.families import read_native_config
from outrider.models.gguf.reader import header_of
from outrider.models.gguf.vocabulary import special_ids

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


class Family(NamedTuple):
    """`tokens` are those that matter, the one that the file names as its end first. A text ends at
    `theirs` by generation_config.json of the family, and at `more` by llama.cpp only."""

    tokens: str
    theirs: str
    more: str = ""
    kind: int = CONTROL


# fmt: off
FAMILIES = {
    "qwen 2.5 and 3": Family(
        "<|im_end|> <|endoftext|> <|im_start|> <|fim_prefix|> <|fim_pad|> <|repo_name|> "
        "<|file_sep|>",
        "<|im_end|> <|endoftext|>", "<|fim_pad|> <|repo_name|> <|file_sep|>",
    ),
    "llama 3": Family(
        "<|eot_id|> <|begin_of_text|> <|end_of_text|> <|start_header_id|>",
        "<|eot_id|> <|end_of_text|>",
    ),
    "llama 3.1": Family(
        "<|eot_id|> <|begin_of_text|> <|end_of_text|> <|eom_id|> <|python_tag|>",
        "<|eot_id|> <|end_of_text|> <|eom_id|>",
    ),
    "gemma 2 and 3": Family("<eos> <bos> <start_of_turn> <end_of_turn>", "<eos> <end_of_turn>"),
    "phi 3": Family(
        "<|endoftext|> <s> <|assistant|> <|system|> <|end|> <|user|>", "<|endoftext|> <|end|>",
    ),
    "phi 4": Family("<|im_end|> <|im_start|> <|im_sep|> <|endoftext|>", "<|im_end|> <|endoftext|>"),
    "phi 4 mini": Family("<|endoftext|> <|end|> <|user|>", "<|endoftext|> <|end|>"),
    "gpt-oss": Family(
        "<|return|> <|startoftext|> <|endoftext|> <|end|> <|call|> <|start|> <|channel|> "
        "<|message|>",
        "<|return|> <|endoftext|> <|call|>",
    ),
    "smollm 2": Family(
        "<|im_end|> <|endoftext|> <|im_start|> <repo_name> <reponame> <file_sep>",
        "<|im_end|>", "<|endoftext|> <reponame>",
    ),
    "smollm 3": Family(
        "<|im_end|> <|begin_of_text|> <|end_of_text|> <|im_start|> <think>",
        "<|im_end|>", "<|end_of_text|>",
    ),
    "mistral": Family("</s> <s> [INST] [/INST]", "</s>"),
    "glm 4": Family(
        "<|endoftext|> [gMASK] <|user|> <|observation|>",
        "<|endoftext|> <|user|> <|observation|>",
    ),
    "deepseek": Family(
        "<\uff5cend▁of▁sentence\uff5c> <\uff5cbegin▁of▁sentence\uff5c> <\uff5cUser\uff5c>",
        "<\uff5cend▁of▁sentence\uff5c>",
    ),
    "olmo 2": Family("<|endoftext|> <|pad|>", "<|endoftext|>"),
    "granite 3": Family(
        "<|end_of_text|> <|start_of_role|> <fim_pad>", "<|end_of_text|>", "<fim_pad>",
    ),
    "command-r": Family(
        "<|END_OF_TURN_TOKEN|> <BOS_TOKEN> <EOS_TOKEN> <PAD>", "<|END_OF_TURN_TOKEN|>", "<PAD>",
    ),
    "kimi k2": Family("<|im_end|> [BOS] [EOS] [EOT] [PAD]", "<|im_end|>", "[EOS] [EOT] [PAD]"),
    "minimax m2": Family("[e~[ ]~b] ]~!b[", "[e~["),
    "solar open": Family(
        "<|flush|> <|begin|> <|end|> <|calls|> <|endoftext|>", "<|flush|> <|calls|> <|endoftext|>",
    ),
    "smoldocling": Family("<end_of_utterance> <|im_start|>", "<end_of_utterance>"),
    "codellama": Family("</s> <s> ▁<EOT> _<EOT>", "</s>", "_<EOT>"),
    "a fine-tune whose ends are user-defined": Family(
        "<|endoftext|> <|im_start|> <|im_end|>", "<|endoftext|> <|im_end|>", kind=USER_DEFINED,
    ),
    "one whose ends are plain": Family(
        "<eos> <start_of_turn> <end_of_turn>", "<eos> <end_of_turn>", kind=NORMAL,
    ),
    "html": Family("<eos> <b> </s>", "<eos>", kind=NORMAL),
    "html that is an end": Family("</s> <b>", "</s>", kind=NORMAL),
}
# Phi 3 names `<|assistant|>` too, at which llama.cpp goes on; GLM's files name ends of turns.
NAMED: dict[str, dict[str, int]] = {"glm 4": {"eot": 2, "eom": 3}}
# fmt: on


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_ends_where_its_family_ends_it(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokens = family.tokens.split(" ")
    ids = {f"tokenizer.ggml.{key}_token_id": place for key, place in NAMED.get(name, {}).items()}
    file = Gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [family.kind] * len(tokens),
            "tokenizer.ggml.eos_token_id": 0,
            **ids,
        }
    )
    found: list[int] = special_ids(header_of(file.write(tmp_path / "a.gguf")))["eos_token_id"]
    ends = [tokens[token_id] for token_id in found]
    assert ends[0] == tokens[0]
    assert set(ends) == {*family.theirs.split(), *family.more.split()}


def llama(tmp_path: Path, changes: dict[str, Any], kinds: dict[str, int]) -> Path:
    """A model whose last tokens are of these kinds."""
    tokens = [*TOKENS[: len(TOKENS) - len(kinds)], *kinds]
    numbers = [3, 3, *([1] * (len(tokens) - len(kinds) - 2)), *kinds.values()]
    words = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": numbers}
    return small_llama({**words, **changes}).write(tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_an_end_is_found_in_a_prompt_and_hidden_whatever_its_kind(
    tmp_path: Path, kind: int
) -> None:
    path = llama(tmp_path, {}, {"<|im_end|>": kind})
    end = len(TOKENS) - 1
    assert read_native_config(path).stop_ids == (1, end)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("ab<|im_end|>") == [4, end]
    assert tokenizer.decode([4, end]) == "ab"


def test_sentence_piece_has_its_usual_ids_where_no_key_names_them(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a"]
    file = Gguf({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
    file.metadata["tokenizer.ggml.eos_token_id"] = 99
    found = special_ids(header_of(file.write(tmp_path / "a.gguf")))
    assert found == {"eos_token_id": [2], "bos_token_id": 1}


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CASES = [
    (True, PLAIN, [0, 4]),
    (True, "{{ bos_token }}" + PLAIN, [0, 4]),
    (True, "{{ bos_token }}{{ bos_token }}" + PLAIN, [0, 4]),
    (False, PLAIN, [4]),
    (False, "{{ bos_token }}" + PLAIN, [0, 4]),
]


@pytest.mark.parametrize(("asks", "template", "ids"), CASES)
def test_a_chat_begins_with_one_bos_where_the_file_asks_for_it(
    tmp_path: Path, asks: bool, template: str, ids: list[int]
) -> None:
    keys = {"tokenizer.ggml.add_bos_token": asks, "tokenizer.chat_template": template}
    tokenizer = Tokenizer.load(small_llama(keys).write(tmp_path / "a.gguf"))
    reader = PromptReader(tokenizer, window=64, vocab_size=32)
    assert reader.ids_of_chat([{"role": "user", "content": "ab"}]).ids == ids


def test_a_prompt_that_writes_bos_itself_has_a_note(tmp_path: Path) -> None:
    path = small_llama({"tokenizer.ggml.add_bos_token": True}).write(tmp_path / "a.gguf")
    with LLM(path, config=EngineConfig(drafter="none")) as llm:
        once, twice = llm.generate(["ab", "<s>ab"], SamplingParams(max_tokens=1))
    assert not [note for note in once.notes if "BOS" in note]
    assert [note for note in twice.notes if "begins with BOS twice" in note]
