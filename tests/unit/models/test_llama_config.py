from __future__ import annotations

from typing import Any

import pytest

from outrider.core.errors import CheckpointError
from outrider.models.configs import LlamaConfig
from outrider.models.layer_kinds import LayerKind
from outrider.models.rope_config import Rope
from unit.models.configs import ABSENT, parse


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
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
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
    assert (config.max_tokens, config.whole_tokens) == (32768, 4096)
    assert not config.qkv_bias
    assert not config.out_bias


def test_a_sliding_window_is_that_of_every_layer() -> None:
    config = parse(model_type="mistral", sliding_window=128)
    assert (config.max_tokens, config.whole_tokens, config.notes) == (256, 128, ())
    assert config.layers == (LayerKind(128, config.rope),) * 2
    assert config.attends_otherwise
    assert not config.extras


@pytest.mark.parametrize("window", [None, 256, 4096])
def test_a_window_that_hides_nothing_needs_no_note(window: int | None) -> None:
    config = parse(model_type="mistral", sliding_window=window)
    assert (config.max_tokens, config.whole_tokens, config.notes) == (256, 256, ())
    assert not config.attends_otherwise


def test_llama_has_no_sliding_window() -> None:
    assert parse(sliding_window=16).whole_tokens == 256


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


def qwen(**changes: Any) -> LlamaConfig:
    return parse(model_type="qwen2", **changes)


def test_qwen2_has_biases_on_queries_keys_and_values_alone() -> None:
    config = qwen(attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)
    assert not config.qk_norm
    assert config.head_dim == 16
    plain = parse().num_parameters
    assert config.num_parameters - plain == 2 * config.qkv_size


def test_qwen3_has_norms_of_heads_and_a_head_size_of_its_own() -> None:
    config = parse(model_type="qwen3")
    assert (config.qk_norm, config.qkv_bias, config.out_bias) == (True, False, False)
    assert config.head_dim == 128
    biased = parse(model_type="qwen3", head_dim=16, attention_bias=True)
    assert (biased.head_dim, biased.qkv_bias, biased.out_bias) == (16, True, True)
    plain = parse(model_type="llama", attention_bias=True).num_parameters
    assert biased.num_parameters - plain == 2 * 2 * 16


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_defaults_are_those_of_transformers(family: str) -> None:
    config = parse(
        model_type=family,
        num_attention_heads=64,
        head_dim=16,
        num_key_value_heads=ABSENT,
        rms_norm_eps=ABSENT,
        tie_word_embeddings=ABSENT,
        eos_token_id=ABSENT,
    )
    assert config.num_kv_heads == 32
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.stop_ids) == (1e-6, False, ())
    assert qwen(num_key_value_heads=None).num_kv_heads == 4


def test_phi3_defaults_are_those_of_transformers() -> None:
    config = parse(
        model_type="phi3",
        vocab_size=32064,
        num_key_value_heads=ABSENT,
        rms_norm_eps=ABSENT,
        tie_word_embeddings=ABSENT,
        eos_token_id=ABSENT,
        attention_bias=True,
    )
    assert (config.num_kv_heads, config.rms_norm_eps, config.stop_ids) == (4, 1e-5, (32000,))
    assert (config.qkv_bias, config.out_bias, config.tie_word_embeddings) == (False, False, False)
    assert config.fused_tensors
    assert (config.max_tokens, config.notes) == (256, ())


SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 256),
        ({"sliding_window": 64}, 256),
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, 256),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, 256),
        # transformers' default lets the first 28 layers attend to everything.
        ({"use_sliding_window": True, "sliding_window": 64}, 256),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 256),
        ({"use_sliding_window": True, "max_window_layers": 0}, 256),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, 256),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": SLIDING}, 64),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, 256),
    ],
)
def test_some_layers_of_qwen_may_slide(changes: dict[str, Any], window: int) -> None:
    config = qwen(**changes)
    assert (config.max_tokens, config.whole_tokens, config.notes) == (256, window, ())
    assert bool(config.layers) == (window == 64)


def test_the_layers_that_slide_are_those_that_are_named() -> None:
    changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64}
    windows = [kind.window for kind in qwen(max_window_layers=1, **changes).layers]
    assert windows == [0, 64]
    windows = [kind.window for kind in qwen(layer_types=SLIDING[::-1], **changes).layers]
    assert windows == [64, 0]
    with pytest.raises(CheckpointError, match="layer_types has 1 entries for 2 layers"):
        qwen(layer_types=SLIDING[:1], **changes)


def test_qwen_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(CheckpointError, match="layer_types has 'linear_attention'") as caught:
        qwen(layer_types=["linear_attention", "full_attention"])
    assert caught.value.hint is not None
    assert "outrider models pairs" in caught.value.hint
    with pytest.raises(CheckpointError, match="the key sliding_window is missing"):
        qwen(layer_types=SLIDING, sliding_window=None)


@pytest.mark.parametrize("window", [None, 256, 4096])
def test_phi3_slides_like_mistral(window: int | None) -> None:
    assert parse(model_type="phi3", sliding_window=window).whole_tokens == 256
    sliding = parse(model_type="phi3", sliding_window=128)
    assert (sliding.max_tokens, sliding.whole_tokens, sliding.notes) == (256, 128, ())


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_long_factors_end_the_window() -> None:
    changes: dict[str, Any] = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}
    config = parse(model_type="phi3", **changes)
    assert config.max_tokens == 64
    assert config.notes == (
        "the long factors of longrope take a longer --context: the window is 64 tokens, not 256",
    )
    assert config.for_context(64) == config.for_context(0) == config
    longer = config.for_context(65)
    assert (longer.max_tokens, longer.rope.is_long) == (256, True)
    assert all("any length" in note for note in longer.notes)
    without = {"rope_scaling": {**LONGROPE, "long_factor": None}}
    short = parse(model_type="phi3", **{**changes, **without})
    assert short.for_context(200) == short
    with pytest.raises(CheckpointError, match="long_factor has 3 numbers"):
        parse(
            model_type="phi3", **{**changes, "rope_scaling": {**LONGROPE, "long_factor": [1.0] * 3}}
        )
    sliding = parse(model_type="phi3", sliding_window=32, **changes)
    assert (sliding.max_tokens, sliding.whole_tokens) == (64, 32)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"num_key_value_heads": 3}, "contradicts itself"),
        ({"head_dim": 15}, "contradicts itself"),
        ({"hidden_act": "gelu"}, "outrider models pairs"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
    ],
)
def test_a_refusal_says_what_to_do_next(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert hint in (caught.value.hint or "")
