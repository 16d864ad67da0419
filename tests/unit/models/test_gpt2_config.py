from __future__ import annotations

from typing import Any

import pytest

from outrider.core.errors import CheckpointError
from unit.models.configs import ABSENT, parse_gpt


def test_sizes_are_read_under_gpt2_s_own_names() -> None:
    config = parse_gpt()
    assert (config.vocab_size, config.hidden_size, config.ffn_size) == (96, 64, 96)
    assert (config.num_layers, config.num_heads, config.head_dim) == (2, 4, 16)
    assert (config.max_tokens, config.rms_norm_eps, config.stop_ids) == (256, 1e-5, (2,))
    assert (config.family, config.dtype, config.notes) == ("gpt2", "", ())


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    config = parse_gpt(
        vocab_size=50257,
        n_inner=None,
        layer_norm_epsilon=ABSENT,
        activation_function=ABSENT,
        tie_word_embeddings=ABSENT,
        eos_token_id=ABSENT,
    )
    assert config.ffn_size == 4 * 64
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert config.stop_ids == (50256,)
    assert not parse_gpt(tie_word_embeddings=False).tie_word_embeddings


def test_stop_ids_and_dtype_are_read_as_in_other_families() -> None:
    assert parse_gpt(generation={"eos_token_id": [3, 2]}).stop_ids == (2, 3)
    assert parse_gpt(torch_dtype="float16").dtype == "float16"


def test_the_published_sizes_are_counted() -> None:
    config = parse_gpt(
        vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_inner=None, n_positions=1024
    )
    assert config.num_parameters == 124_439_808
    spec = config.spec("gpt2", bytes_per_weight=4, bytes_per_kv=4)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_tokens) == (12, 64, 1024)


@pytest.mark.parametrize("key", ["vocab_size", "n_embd", "n_layer", "n_head", "n_positions"])
def test_a_missing_size_is_named(key: str) -> None:
    changes: dict[str, Any] = {key: ABSENT}
    with pytest.raises(CheckpointError, match=f"config.json: the key {key} is missing"):
        parse_gpt(**changes)


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        (
            {"activation_function": "gelu"},
            "activation_function 'gelu' is not",
            "outrider models pairs",
        ),
        ({"activation_function": "relu"}, "this decoder has gelu_new", "outrider models pairs"),
        ({"scale_attn_weights": False}, "scale_attn_weights false is not", "outrider models pairs"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "layer_idx true is not",
            "outrider models pairs",
        ),
        ({"reorder_and_upcast_attn": True}, "this decoder has false", "outrider models pairs"),
        ({"add_cross_attention": True}, "add_cross_attention true is not", "outrider models pairs"),
        ({"quantization_config": {"bits": 4}}, "quantised", "unquantised"),
        ({"n_head": 3}, "n_embd 64 does not divide into 3 heads", "contradicts itself"),
        ({"n_head": 64}, "64 heads (n_head) of an even size", "contradicts itself"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be above 0", ""),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_gpt(**changes)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")
