"""Metadata keys of GGUF files: what each makes of a model, and keys that nobody reads.

Every value here was compared with the logits that llama.cpp computes for the same file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles.gguf_writer import LLAMA, Gguf, small_llama
from outrider.core.errors import CheckpointError
from outrider.models.configs import LlamaConfig
from outrider.models.families import read_native_config
from outrider.models.rope import frequencies
from outrider.models.rope_config import Rope

S = "rope.scaling."


def read(
    tmp_path: Path, keys: dict[str, Any], arch: str = "llama", num_layers: int = 1
) -> LlamaConfig:
    base = small_llama()
    base.metadata = {key.replace("llama.", f"{arch}.", 1): value for key, value in LLAMA.items()}
    base.metadata["general.architecture"] = arch
    base.metadata[f"{arch}.block_count"] = num_layers
    base.metadata |= {f"{arch}.{key}": value for key, value in keys.items()}
    config = read_native_config(base.write(tmp_path / "a.gguf"))
    assert isinstance(config, LlamaConfig)
    return config


PLAIN = Rope()
LINEAR = Rope("linear", factor=4.0)
TIMES: dict[str, tuple[dict[str, Any], Rope]] = {
    "a factor without a type": ({S + "factor": 4.0}, LINEAR),
    "the old key": ({"rope.scale_linear": 4.0}, LINEAR),
    "both keys": ({S + "factor": 4.0, "rope.scale_linear": 8.0}, LINEAR),
    "a type": ({S + "type": "linear", S + "factor": 4.0}, LINEAR),
    "no scaling": ({S + "type": "none", S + "factor": 4.0}, PLAIN),
    "a factor of 0": ({S + "factor": 0.0}, PLAIN),
    "yarn without a factor": ({S + "type": "yarn"}, PLAIN),
    "a factor of attention of 1": ({S + "attn_factor": 1.0}, PLAIN),
}


@pytest.mark.parametrize("name", TIMES)
def test_positions_are_stretched_as_each_spelling_says(tmp_path: Path, name: str) -> None:
    keys, rope = TIMES[name]
    config = read(tmp_path, keys)
    assert (config.rope, config.notes) == (rope, ())


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_the_factor_of_attention_multiplies_without_long_factors(
    tmp_path: Path, factor: float
) -> None:
    config = read(tmp_path, {S + "factor": factor, S + "attn_factor": 2.0})
    assert config.rope.attention_factor == 2.0
    assert config.max_tokens == 64
    wanted = frequencies(PLAIN, 8) / factor
    assert torch.allclose(frequencies(config.rope, 8), wanted, rtol=1e-6)


def test_yarn_has_its_own_factor_of_attention_too(tmp_path: Path) -> None:
    yarn = {S + "type": "yarn", S + "factor": 4.0}
    usual = 0.1 * math.log(4.0) + 1.0
    assert read(tmp_path, yarn).rope.attention_factor == pytest.approx(usual)
    # The window that the model was trained with is that of the file, unless a key says it.
    assert read(tmp_path, yarn).rope.original_tokens == 64
    found = read(tmp_path, {**yarn, S + "attn_factor": 0.5}).rope
    assert found.attention_factor == pytest.approx(usual / 2)
    found = read(tmp_path, {**yarn, S + "attn_factor": 0.5, S + "yarn_attn_factor": 1.0}).rope
    assert found.attention_factor == pytest.approx(0.5)


def test_factors_of_a_tensor_are_stretched_as_well(tmp_path: Path) -> None:
    file = small_llama({"llama.rope.scaling.factor": 2.0})
    file.add("rope_freqs.weight", np.array([1.0, 3.0, 2.0, 5.0]))
    config = read_native_config(file.write(tmp_path / "a.gguf"))
    assert isinstance(config, LlamaConfig)
    assert config.rope.short_factors == (2.0, 6.0, 4.0, 10.0)
    file.metadata["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(CheckpointError, match="yarn with rope_freqs"):
        read_native_config(file.write(tmp_path / "a.gguf"))


PATTERNS: list[tuple[object, list[int]]] = [
    (None, [6, 6, 6, 6, 6, 0, 6]),
    (3, [6, 6, 0, 6, 6, 0, 6]),
    (0, [6] * 7),
    (1, [0] * 7),
    ([1, 0, 0, 1, 0, 1, 1], [6, 0, 0, 6, 0, 6, 6]),
]


@pytest.mark.parametrize(("pattern", "windows"), PATTERNS)
def test_a_pattern_says_which_layers_slide(
    tmp_path: Path, pattern: object, windows: list[int]
) -> None:
    keys = {"attention.sliding_window": 6}
    keys |= {} if pattern is None else {"attention.sliding_window_pattern": pattern}
    config = read(tmp_path, keys, "gemma3", 7)
    assert [config.layer_kind(index).window for index in range(7)] == windows


def test_windows_that_no_key_says_are_those_of_the_architecture(tmp_path: Path) -> None:
    kinds = read(tmp_path, {"context_length": 8192}, "gemma2", 2)
    assert [kinds.layer_kind(index).window for index in range(2)] == [4096, 0]
    kinds = read(tmp_path, {}, "gemma3", 7)
    assert {kinds.layer_kind(index).window for index in range(7)} == {0}
    assert {kinds.layer_kind(index).rope for index in range(7)} == {PLAIN}
    pattern = {"attention.sliding_window_pattern": [1, 0], "attention.sliding_window": 6}
    with pytest.raises(CheckpointError, match="7 layers"):
        read(tmp_path, pattern, "gemma3", 7)


EXPERTS = {
    "attention.sliding_window": 6,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
}


LATENT = {
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 8,
    "rope.dimension_count": 8,
}


@pytest.mark.parametrize("arch", ["deepseek2", "mistral4"])
@pytest.mark.parametrize("key", [S + "factor", "rope.scale_linear", S + "attn_factor"])
def test_latents_are_stretched_by_yarn_alone(tmp_path: Path, arch: str, key: str) -> None:
    yarn = {S + "type": "yarn", S + "factor": 4.0, S + "original_context_length": 16}
    assert read(tmp_path, LATENT | yarn, arch).rope.kind == "yarn"
    with pytest.raises(CheckpointError, match="linear, or a factor of attention"):
        read(tmp_path, LATENT | {key: 4.0}, arch)


def test_queries_that_grow_with_positions_end_the_window(tmp_path: Path) -> None:
    yarn = {S + "type": "yarn", S + "factor": 4.0, S + "original_context_length": 16}
    config = read(tmp_path, {"attention.temperature_scale": 0.1, **yarn}, "mistral3")
    assert config.max_tokens == 16
    assert any("queries that grow" in note for note in config.notes)
    assert read(tmp_path, yarn, "mistral3").max_tokens == 64


def test_layers_of_granite_rotate_and_slide_by_their_lists(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 8, "rope.freq_base": 500.0}
    lists = {
        "attention.sliding_window_pattern": [True, False, True],
        "attention.rope_pattern": [False, True, True],
    }
    config = read(tmp_path, keys | lists, "granite_swa", num_layers=3)
    assert [config.layer_kind(i).window for i in range(3)] == [8, 0, 8]
    turns = [config.layer_kind(i).rope for i in range(3)]
    assert turns == [None, Rope(theta=500.0), Rope(theta=500.0)]
    assert config.traits.sinks


def test_gpt_oss_is_stretched_only_where_its_file_says_so(tmp_path: Path) -> None:
    config = read(tmp_path, {**EXPERTS, "expert_used_count": [2, 2]}, "gpt-oss", 2)
    assert config.rope == PLAIN
    assert config.experts is not None
    assert config.experts.num_chosen == 2
    with pytest.raises(CheckpointError, match="none with a factor"):
        read(tmp_path, {**EXPERTS, S + "type": "none", S + "factor": 2.0}, "gpt-oss", 2)


@pytest.mark.parametrize("arch", ["gpt-oss", "gemma2", "gemma3"])
def test_sliding_layers_have_the_base_of_their_key(tmp_path: Path, arch: str) -> None:
    own = EXPERTS if arch == "gpt-oss" else {"attention.sliding_window": 6}
    keys = {**own, "rope.freq_base_swa": 500.0, S + "factor": 4.0}
    config = read(tmp_path, keys, arch, 6)
    local, whole = config.layer_kind(0), config.layer_kind(5)
    assert (local.window, whole.window) == (6, 0)
    # Gemma 3 stretches whole layers alone.
    assert local.rope == (Rope(theta=500.0) if arch == "gemma3" else Rope("linear", 500.0, 4.0))
    assert whole.rope == LINEAR
    config = read(tmp_path, {**keys, S + "attn_factor": 2.0}, arch, 6)
    ropes = [config.layer_kind(index).rope for index in (0, 5)]
    assert all(rope is not None and rope.attention_factor == 2.0 for rope in ropes)


def test_gemma_2_has_its_caps_where_the_file_says_none(tmp_path: Path) -> None:
    traits = read(tmp_path, {}, "gemma2").traits
    assert (traits.attention_cap, traits.logit_cap) == (50.0, 30.0)
    caps = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 20.0}
    traits = read(tmp_path, caps, "gemma2").traits
    assert (traits.attention_cap, traits.logit_cap) == (0.0, 20.0)
    assert read(tmp_path, {}, "gemma3").traits.logit_cap == 0.0


def test_lists_of_one_value_are_that_value(tmp_path: Path) -> None:
    plain = read(tmp_path, {}, num_layers=2)
    lists = {
        "attention.head_count": [4, 4],
        "attention.head_count_kv": [2, 2],
        "feed_forward_length": [64, 64],
    }
    assert read(tmp_path, lists, num_layers=2) == plain


NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.key_length_swa": 8,
    "attention.scale": 0.0,
    "expert_count": 0,
    "expert_group_count": 1,
    "expert_weights_scale": 1.0,
    "nextn_predict_layers": 0,
    "rope.dimension_count_swa": 8,
    "rope.scaling.finetuned": False,
    "use_parallel_residual": False,
    "vocab_size": 32,
}


def test_values_that_change_nothing_are_taken_without_a_note(tmp_path: Path) -> None:
    assert read(tmp_path, NEUTRAL) == read(tmp_path, {})


def test_other_keys_have_a_note(tmp_path: Path) -> None:
    assert read(tmp_path, {"vision.block_count": 27, "odd": "x"}).notes == (
        "the file has settings that are not read: llama.odd, llama.vision.block_count",
    )
    many = read(tmp_path, {f"key{number}": number for number in range(9)}).notes
    assert many[0].endswith("llama.key4 and 4 more")
    config = read_native_config(Gguf.write(small_llama({"general.odd": 1}), tmp_path / "b.gguf"))
    assert not config.notes
