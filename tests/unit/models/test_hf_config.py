from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.tiny_checkpoints import COMMON
from outrider.core.errors import CheckpointError
from outrider.models.hf_config import LlamaConfig, Rope, parse_config, read_config
from outrider.models.json_object import JsonObject

ABSENT = object()


def parse(*, generation: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    values = {k: v for k, v in {**COMMON, **changes}.items() if v is not ABSENT}
    extra = JsonObject("generation_config.json", generation) if generation is not None else None
    return parse_config(JsonObject("config.json", values), extra)


def test_sizes_are_read() -> None:
    config = parse(num_key_value_heads=2)
    assert (config.vocab_size, config.hidden_size, config.ffn_size) == (96, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_tokens) == (16, 256)
    assert config.rms_norm_eps == 1e-5
    assert config.dtype == "float32"
    assert config.qkv_size == 128


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    config = parse(
        num_key_value_heads=None, rms_norm_eps=ABSENT, rope_theta=ABSENT, torch_dtype=ABSENT
    )
    assert config.num_kv_heads == config.num_heads
    assert config.rms_norm_eps == 1e-6
    assert config.rope == Rope()
    assert config.dtype == ""


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert parse(head_dim=32).head_dim == 32


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_both_names_of_the_dtype_are_read(key: str, name: str) -> None:
    changes: dict[str, Any] = {"torch_dtype": ABSENT, key: name}
    assert parse(**changes).dtype == "bfloat16"


@pytest.mark.parametrize(
    "key",
    [
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings",
    ],
)  # fmt: skip
def test_a_missing_size_is_named(key: str) -> None:
    changes: dict[str, Any] = {key: ABSENT}
    with pytest.raises(CheckpointError, match=f"config.json: the key {key} is missing"):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be from 1"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert said in str(caught.value)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="model_type 'mistrall'") as caught:
        parse(model_type="mistrall")
    assert caught.value.hint == "did you mean 'mistral'? Known: llama, mistral."


def test_remote_code_in_the_config_is_never_looked_at() -> None:
    assert parse(auto_map={"AutoModelForCausalLM": "evil.Model"}) == parse()


def test_mistral_defaults_are_those_of_transformers() -> None:
    config = parse(
        model_type="mistral",
        num_attention_heads=8,
        num_key_value_heads=ABSENT,
        max_position_embeddings=32768,
        attention_bias=True,
    )
    assert config.num_kv_heads == 8
    assert config.max_tokens == 4096
    assert not config.attention_bias


def test_a_sliding_window_caps_the_window_and_says_so() -> None:
    config = parse(model_type="mistral", sliding_window=128)
    assert config.max_tokens == 128
    assert config.notes == (
        "sliding-window attention is not supported: the window is 128 tokens, not 256",
    )


@pytest.mark.parametrize("window", [None, 256, 4096])
def test_a_window_that_hides_nothing_needs_no_note(window: int | None) -> None:
    config = parse(model_type="mistral", sliding_window=window)
    assert (config.max_tokens, config.notes) == (256, ())


def test_llama_has_no_sliding_window() -> None:
    assert parse(sliding_window=16).max_tokens == 256


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 6], None, (5, 6)),
        (None, {"eos_token_id": 7}, (7,)),
        (0, None, (0,)),
        (2, {"eos_token_id": [3, 2]}, (2, 3)),
        ([2, 96, -1], {}, (2,)),
        (ABSENT, None, ()),
    ],
)
def test_stop_ids_are_merged(
    eos: object, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert parse(eos_token_id=eos, generation=generation).stop_ids == expected


LLAMA3 = {
    "rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_both_generations_of_rope_keys_mean_the_same() -> None:
    old = parse(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = parse(rope_theta=ABSENT, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert old.rope == new.rope == Rope("llama3", 500000.0, 8.0, 64)


def test_the_oldest_key_of_a_rope_type_is_read() -> None:
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope.kind == "linear"


def test_yarn_infers_its_attention_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(rope_scaling=yarn).rope.attention_factor == pytest.approx(1.1386294361)
    given = {**yarn, "attention_factor": 0.7}
    assert parse(rope_scaling=given).rope.attention_factor == 0.7
    both = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert parse(rope_scaling=both).rope.attention_factor == 1.0
    inferred = {**yarn, "factor": None}
    assert parse(rope_scaling=inferred).rope.factor == 4.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "nonsense"])
def test_other_rope_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope type '{kind}' is not supported") as caught:
        parse(rope_scaling={"rope_type": kind, "factor": 2.0})
    assert caught.value.hint is not None
    assert "llama3" in caught.value.hint


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_rope_key_is_named(key: str) -> None:
    part = {name: value for name, value in LLAMA3.items() if name != key}
    with pytest.raises(CheckpointError, match=f"rope_scaling: the key {key} is missing"):
        parse(rope_scaling=part)


def test_yarn_and_linear_need_a_factor() -> None:
    for kind in ("yarn", "linear"):
        with pytest.raises(CheckpointError, match="the key factor is missing"):
            parse(rope_scaling={"rope_type": kind})


def test_rope_per_kind_of_layer_is_refused() -> None:
    nested = {"full_attention": {"rope_type": "default"}}
    with pytest.raises(CheckpointError, match="per kind of layer"):
        parse(rope_parameters=nested)


def test_the_spec_counts_every_weight() -> None:
    spec = parse(num_key_value_heads=2).spec("name", bytes_per_weight=2, bytes_per_kv=4)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert spec.num_parameters == 2 * layer + 2 * 96 * 64 + 64
    assert (spec.name, spec.family, spec.max_tokens) == ("name", "llama", 256)
    assert spec.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    biased = parse(num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    biases = 2 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
    assert biased.num_parameters == spec.num_parameters + biases
    assert parse(tie_word_embeddings=True, num_key_value_heads=2).num_parameters == (
        spec.num_parameters - 96 * 64
    )


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON))
    assert read_config(tmp_path).stop_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert read_config(tmp_path).stop_ids == (2, 9)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
