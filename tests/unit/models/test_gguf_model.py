"""A GGUF file is the checkpoint that it was made from: config, tensors, tokenizer, template."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles.gguf_writer import LLAMA, TOKENS, Gguf, from_checkpoint, small_llama
from doubles.tiny_checkpoints import random_tensors, variant, write_checkpoint
from outrider import LLM
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError
from outrider.models.checkpoint import open_checkpoint
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.gguf.blocks import TYPES, decode
from outrider.models.gguf.splits import RULES
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.models.rope import frequencies
from outrider.models.weights import Weights

PLAIN = (
    "llama2",
    "mistral",
    "mistral_window",
    "one_kv_head",
    "wide_heads",
    "tied",
    "attention_bias",
    "mlp_bias",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "phi3",
    "gpt2",
)


def converted(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint's folder, and the GGUF file that is made of it."""
    item = variant(name)
    folder = write_checkpoint(tmp_path / name, item)
    file = from_checkpoint(item.config, random_tensors(item.config, seed=0))
    return folder, file.write(tmp_path / f"{name}.gguf")


@pytest.mark.parametrize("name", PLAIN)
def test_config_and_tensors_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder, path = converted(tmp_path, name)
    wanted, found = read_native_config(folder), read_native_config(path)
    if isinstance(wanted, LlamaConfig) and wanted.family == "mistral" and not wanted.layers:
        # Without a window it is a Llama.
        wanted = replace(wanted, family="llama")
    assert replace(found, dtype=wanted.dtype) == wanted
    with Weights.at(folder) as theirs, Weights.at(path) as ours:
        prefix = "transformer." if name == "gpt2" else ""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in theirs.each()}
        assert set(ours.names) == tensors.keys()
        for key, tensor in ours.each():
            assert torch.equal(tensor, tensors[key]), key


def test_a_converted_model_loads(tmp_path: Path) -> None:
    folder, path = converted(tmp_path, "qwen3")
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), dtype="float32", device="cpu")
    ours, theirs = load_model(path, options), load_model(folder, options)
    assert ours.spec.num_parameters == theirs.spec.num_parameters
    assert isinstance(ours, LlamaModel)
    assert isinstance(theirs, LlamaModel)
    assert torch.equal(ours.tables.embeddings, theirs.tables.embeddings)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.attention_norm_D is not None
        assert other.attention_norm_D is not None
        assert torch.equal(mine.attention_norm_D, other.attention_norm_D)


def test_llama_3s_factors_become_its_own_formula(tmp_path: Path) -> None:
    item = variant("llama3_rope")
    wanted = read_native_config(write_checkpoint(tmp_path / "folder", item))
    assert isinstance(wanted, LlamaConfig)
    file = from_checkpoint(item.config, random_tensors(item.config, seed=0))
    plain = frequencies(replace(wanted.rope, kind="default"), wanted.head_dim)
    stretched = frequencies(wanted.rope, wanted.head_dim)
    file.add("rope_freqs.weight", (plain / stretched).numpy())
    path = file.write(tmp_path / "a.gguf")
    found = read_native_config(path)
    assert isinstance(found, LlamaConfig)
    assert found.rope == wanted.rope
    with Weights.at(path) as weights:
        assert "rope_freqs.weight" not in weights.names


def test_other_factors_hold_for_the_whole_window(tmp_path: Path) -> None:
    file = small_llama()
    file.add("rope_freqs.weight", np.array([1.0, 3.0, 2.0, 5.0]))
    config = read_native_config(file.write(tmp_path / "a.gguf"))
    assert isinstance(config, LlamaConfig)
    assert (config.max_tokens, config.notes) == (64, ())
    found = frequencies(config.rope, config.head_dim)
    plain = frequencies(replace(config.rope, kind="default"), config.head_dim)
    assert torch.allclose(plain / found, torch.tensor([1.0, 3.0, 2.0, 5.0]))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_are_no_factors_are_refused(tmp_path: Path, bad: float) -> None:
    file = small_llama()
    file.add("rope_freqs.weight", np.array([1.0, bad, 2.0, 5.0]))
    with pytest.raises(CheckpointError, match="not above 0"):
        read_native_config(file.write(tmp_path / "a.gguf"))


def test_phi_3_has_short_factors_and_a_part_that_turns(tmp_path: Path) -> None:
    item = variant("phi3_partial")
    wanted = read_native_config(write_checkpoint(tmp_path / "folder", item))
    file = from_checkpoint(item.config, random_tensors(item.config, seed=0))
    scaling = item.config["rope_scaling"]
    for kind in ("short", "long"):
        file.add(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"]))
    assert isinstance(wanted, LlamaConfig)
    file.metadata["phi3.rope.dimension_count"] = 12
    file.metadata["phi3.rope.scaling.attn_factor"] = wanted.rope.attention_factor
    found = read_native_config(file.write(tmp_path / "a.gguf"))
    assert isinstance(found, LlamaConfig)
    assert found.rope.attention_factor == pytest.approx(wanted.rope.attention_factor, rel=1e-6)
    same = replace(found.rope, attention_factor=wanted.rope.attention_factor)
    assert replace(same, factor=wanted.rope.factor) == wanted.rope
    assert (found.max_tokens, found.notes) == (wanted.max_tokens, wanted.notes)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_positions_that_are_stretched(tmp_path: Path, kind: str) -> None:
    item = variant(f"{kind}_rope")
    wanted = read_native_config(write_checkpoint(tmp_path / "folder", item))
    file = from_checkpoint(item.config, random_tensors(item.config, seed=0))
    more = {"type": kind, "factor": 4.0, "original_context_length": 64}
    file.metadata |= {f"llama.rope.scaling.{key}": value for key, value in more.items()}
    found = read_native_config(file.write(tmp_path / "a.gguf"))
    assert isinstance(found, LlamaConfig)
    assert isinstance(wanted, LlamaConfig)
    assert found.rope == wanted.rope


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "bert"}, "architecture 'bert'"),
    "no architecture": ({"general.architecture": None}, "general.architecture is missing"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
    "a scale": ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
    "no layers": ({"llama.block_count": None}, "llama.block_count is missing"),
    "a layer's own heads": (
        {"llama.attention.head_count": [4, 2], "llama.block_count": 2}, "no one value",
    ),
    "heads of more layers": ({"llama.attention.head_count": [4, 4]}, "no one value"),
    "a list elsewhere": ({"llama.embedding_length": [32, 32]}, "must be an integer"),
    "no causal mask": ({"llama.attention.causal": False}, "llama.attention.causal False"),
    "another size of heads": ({"llama.attention.key_length_swa": 16}, "key_length_swa 16"),
    "a layer to predict with": ({"llama.nextn_predict_layers": 1}, "nextn_predict_layers 1"),
    "groups of experts": ({"llama.expert_group_count": 4}, "expert_group_count 4"),
    "a scale as a list": ({"llama.expert_weights_scale": [2.0]}, "expert_weights_scale"),
    "yarn beside factors": (
        {"llama.rope.scaling.type": "longrope"}, "longrope without its factors",
    ),
    "layers without end": ({"llama.block_count": ("u64", 2**63)}, "must be from 1 to"),
    "other values": ({"llama.attention.value_length": 16}, "keys and values"),
    "a stretch": ({"llama.rope.scaling.type": "odd"}, "rope.scaling.type 'odd'"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "must be above 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["grok", "mamba", "llama4", "gemma3n"])
def test_another_architecture_is_not_taken_for_a_slip(tmp_path: Path, name: str) -> None:
    path = small_llama({"general.architecture": name}).write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=f"architecture '{name}'") as caught:
        read_native_config(path)
    assert str(caught.value.hint).startswith("supported: llama, qwen2,")


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_read_are_told_by_their_key(tmp_path: Path, name: str) -> None:
    changes, said = REFUSED[name]
    path = small_llama(changes).write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError) as caught:
        read_native_config(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_held_is_what_is_stored(tmp_path: Path) -> None:
    path = small_llama().write(tmp_path / "a.gguf")
    assert read_native_config(path).dtype == "bfloat16"
    item = variant("llama2")
    floats = from_checkpoint(item.config, random_tensors(item.config, seed=0))
    assert read_native_config(floats.write(tmp_path / "b.gguf")).dtype == "float32"


def test_texts_become_tokens_as_the_rule_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small_llama().write(tmp_path / "a.gguf"))
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.encode("ab a</s>") == [4, 6, 1]
    assert tokenizer.stop_ids == (1,)
    assert not tokenizer.has_chat_template
    begins = small_llama({"tokenizer.ggml.add_bos_token": None}).write(tmp_path / "b.gguf")
    assert Tokenizer.load(begins).encode("ab") == [0, 4]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_loaded(tmp_path: Path, rule: str) -> None:
    path = small_llama({"tokenizer.ggml.pre": rule}).write(tmp_path / "a.gguf")
    assert Tokenizer.load(path).encode("ab", add_special=False) == [4]


def test_chats_are_written_by_the_files_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    path = small_llama({"tokenizer.chat_template": template}).write(tmp_path / "a.gguf")
    assert Tokenizer.load(path).chat([{"role": "user", "content": "ab"}]).text == "<s>ab</s>"


def test_a_turn_ends_where_the_vocabulary_has_a_token_for_it(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "<|im_end|>"]
    kinds = [3, 3, *([1] * (len(TOKENS) - 3)), 3]
    path = small_llama({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}).write(
        tmp_path / "a.gguf"
    )
    assert read_native_config(path).stop_ids == (1, len(TOKENS) - 1)


WRONG_WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "rule": ({"tokenizer.ggml.pre": "lama-bpe"}, "'lama-bpe'"),
    "kind": ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
    "size": ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "31 tokens, and token_embd.weight has 32"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    "numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "no list of texts"),
    "kinds": ({"tokenizer.ggml.token_type": [1]}, "no number for each"),
    "kinds that are no integers": (
        {"tokenizer.ggml.token_type": [1.0] * len(TOKENS)}, "token_type is no list of integers",
    ),
    "kinds of infinity": (
        {"tokenizer.ggml.token_type": [float("inf")] * len(TOKENS)}, "no list of integers",
    ),
    "scores that are no numbers": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float("nan")] * len(TOKENS)},
        "scores is no list of numbers",
    ),
    "twice": ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "ab"]}, "'ab' has two ids"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, "no pair"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["q r"]}, "no pair that makes a token"),
    "more merges than any vocabulary has": (
        {"tokenizer.ggml.merges": ["a b"] * (8 * len(TOKENS) + 1025)}, "more than any vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_wrong_vocabularies_are_told(tmp_path: Path, name: str) -> None:
    changes, said = WRONG_WORDS[name]
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(small_llama(changes).write(tmp_path / "a.gguf"))
    assert said in str(caught.value)
    assert caught.value.hint
    if name in ("rule", "kind"):
        assert "--tokenizer" in str(caught.value.hint)


def test_merges_that_make_no_token_are_left_out_with_a_note(tmp_path: Path) -> None:
    merges = ["q r", "t a", "a b", "Ġ a", "ab q"]
    path = small_llama({"tokenizer.ggml.merges": merges}).write(tmp_path / "a.gguf")
    assert Tokenizer.load(path).encode("ab a") == [4, 6]
    (note,) = open_checkpoint(path).tokenizer_notes
    assert note.startswith(f"3 merges of {path} name a text that is no token, such as 'q r': ")
    with LLM(path, drafter="none", threads=1) as llm:
        assert note in llm.notes
    # Another tokenizer has none of them.
    other = small_llama({}).write(tmp_path / "b.gguf")
    with LLM(path, drafter="none", threads=1, tokenizer=str(other)) as llm:
        assert llm.notes == ()


def test_merges_of_sentence_piece_are_made_and_not_noted(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": ["q r"]}
    file = small_llama(keys).write(tmp_path / "a.gguf")
    assert open_checkpoint(file).tokenizer_notes == ()


def test_empty_tokens_have_names_of_their_own(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-2], "", ""]
    path = small_llama({"tokenizer.ggml.tokens": tokens}).write(tmp_path / "a.gguf")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("ab a") == [4, 6]
    assert tokenizer.decode([30, 31]) == "[EMPTY_30][EMPTY_31]"


def test_a_vocabulary_whose_cuts_are_too_many_takes_no_memory(tmp_path: Path) -> None:
    """All words of two letters: every cut of every one of them makes two tokens."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *("".join(w) for n in range(1, 12) for w in product("ab", repeat=n)),
    ]
    file = small_llama({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
    file.metadata["tokenizer.ggml.token_type"] = [2, 3, 3, *([1] * (len(tokens) - 3))]
    file.add_blocks("token_embd.weight", (len(tokens), 32), "Q8_0", 1)
    with pytest.raises(CheckpointError, match="ways to cut a token"):
        Tokenizer.load(file.write(tmp_path / "a.gguf"))


SPM = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES = ["▁", "a", "b", "c", "ab", "▁ab", "bc", "▁a"]


def sentence_piece(tmp_path: Path, changes: dict[str, Any] | None = None) -> Tokenizer:
    """`ab` has a higher score than `bc`, and `▁ab` than `▁a`."""
    tokens = [*SPM, *PIECES]
    scores = [*([0.0] * len(SPM)), -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0]
    file = small_llama(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(PIECES))],
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": None,
            "tokenizer.ggml.merges": None,
            **(changes or {}),
        }
    )
    file.tensors.pop("token_embd.weight")
    file.add_blocks("token_embd.weight", (len(tokens), 32), "Q8_0", 1)
    return Tokenizer.load(file.write(tmp_path / "a.gguf"))


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path)
    first = len(SPM)
    place = {piece: first + number for number, piece in enumerate(PIECES)}
    assert tokenizer.encode("abc") == [1, place["▁ab"], place["c"]]
    assert tokenizer.encode("é", add_special=False) == [place["▁"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"
    assert tokenizer.encode("ab</s>ab") == [1, place["▁ab"], 2, place["▁ab"]]


def test_sentence_piece_without_scores_merges_all_the_same(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path, {"tokenizer.ggml.scores": None})
    first = len(SPM)
    ids = {piece: first + number for number, piece in enumerate(PIECES)}
    assert tokenizer.encode("bc ab", add_special=False) == [ids["▁"], ids["bc"], ids["▁ab"]]
    assert tokenizer.decode(tokenizer.encode("bc ab")) == "bc ab"


def test_sentence_piece_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path, {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("ab", add_special=False) == [len(SPM) + PIECES.index("ab")]


def test_blocks_of_experts_are_those_of_their_matrices(tmp_path: Path) -> None:
    keys = {key.replace("llama.", "qwen3moe."): value for key, value in LLAMA.items()}
    keys |= {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 3}
    file = Gguf(keys)
    file.add_blocks("token_embd.weight", (len(TOKENS), 32), "Q8_0", 1)
    file.add_blocks("blk.0.ffn_gate_exps.weight", (3, 4, 64), "Q4_1", 2)
    name = "model.layers.0.mlp.experts.gate_proj.weight"
    with Weights.at(file.write(tmp_path / "a.gguf")) as weights:
        blocks = weights.stacked_blocks(name, 3, 4, 64)
        stack = weights.take(name, 3, 4, 64)
        assert weights.stacked_blocks(name, 3, 64, 4) is None
    assert blocks is not None
    for one, matrix in zip(blocks, stack, strict=True):
        assert (one.num_out, one.num_in) == (4, 64)
        numbers = decode(one.raw, TYPES[one.kind]).reshape(4, 64)
        assert np.array_equal(numbers, matrix.numpy())
