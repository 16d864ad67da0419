"""Gemma 4's settings: sizes by layer, shared keys and values, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.gguf_writer import LLAMA, Gguf, small_llama
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.errors import CheckpointError
from outrider.core.protocols import StepRow
from outrider.core.spec import LayerKeys
from outrider.models.families import parse_config, read_native_config
from outrider.models.json_object import JsonObject
from outrider.models.rope import frequencies, turning_order
from outrider.plugins.gemma4.config import GemmaConfig

SLIDING, FULL = "sliding_attention", "full_attention"
# The published sizes that decide how much is stored.
E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
}
LARGE = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def parsed(changes: dict[str, Any], generation: dict[str, Any] | None = None) -> GemmaConfig:
    extra = None if generation is None else JsonObject("generation_config.json", generation)
    raw = JsonObject("config.json", {"model_type": "gemma4_text", **changes})
    config = parse_config(raw, extra)
    assert isinstance(config, GemmaConfig)
    return config


def test_layers_that_share_keys_store_none() -> None:
    config = parsed(E2B)
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    # Of the 15 layers before those that share, 3 see the whole text.
    assert spec.kv_bytes_per_token == 12 * 2 * 256 * 2 + 3 * 2 * 512 * 2
    assert spec.local_bytes_per_token == 12 * 2 * 256 * 2
    assert [config.keys[depth].source for depth in (12, 14, 15, 19, 33, 34)] == [
        12, 14, 13, 14, 13, 14,
    ]  # fmt: skip
    assert (config.ffn_sizes[14], config.ffn_sizes[15]) == (6144, 12288)
    assert (config.at(33).head_dim, config.at(34).head_dim, config.head_dim) == (256, 512, 512)
    assert config.input_size == 256
    # Rows of inputs are looked up, and are never quantised.
    inputs, table = 262144 * 35 * 256, 262144 * 1536
    assert spec.looked_up == inputs
    assert spec.read_bytes == 2 * (spec.num_parameters - inputs)
    matrices = (spec.num_parameters - inputs - table) * 0.625 + table * 1.0625
    assert replace(spec, quantise="int4").weight_bytes == int(matrices + 2 * inputs)


def test_values_may_be_the_product_of_the_keys() -> None:
    config = parsed(LARGE)
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    assert spec.kv_bytes_per_token == 50 * 2 * 16 * 256 * 2 + 10 * 2 * 4 * 512 * 2
    assert config.values_from_keys == frozenset(range(5, 60, 6))
    assert spec.window == 1024
    assert spec.reach == 0
    assert len(spec.local_layers) == 50
    # What transformers counts in its models of these configs.
    assert config.num_parameters == 30_697_345_280
    assert parsed(E2B).num_parameters == 4_628_569_344


def test_a_quarter_of_the_pairs_turns_as_slowly_as_in_a_whole_head() -> None:
    rope = parsed(LARGE).rope
    freqs = frequencies(rope, 512)
    assert freqs.shape == (64,)
    assert freqs[1].item() == pytest.approx(1e6 ** (-2 / 512))
    assert turning_order(rope, 512) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kinds that nobody stores": (
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING] * 3 + [FULL]},
        "num_kv_shared_layers leaves no layer of full_attention",
    ),
    "a small table": ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input 7 is below"),
    "no order": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
    "no positions of a kind": (
        {"rope_parameters": {FULL: {"rope_theta": 1e6}}},
        "rope_parameters has no settings of sliding_attention",
    ),
    "heads": ({"num_attention_heads": 6}, "num_attention_heads 6 is not a multiple"),
    "another size in a kind": (
        {"per_layer_config": {"0": {"head_dim": 64}}},
        "layers of one kind with heads of different sizes",
    ),
    "another setting of a layer": (
        {"per_layer_config": {"0": {"sliding_window": 64}}},
        "per_layer_config with sliding_window",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_contradicts_itself_is_named(name: str) -> None:
    changes, said = WRONG[name]
    with pytest.raises(CheckpointError) as caught:
        parsed(changes)
    assert said in str(caught.value)


def test_tokens_that_are_never_written() -> None:
    assert parsed(LARGE, {"suppress_tokens": [258883, 258882]}).suppressed == (258883, 258882)
    with pytest.raises(CheckpointError, match="suppress_tokens has a token outside"):
        parsed(LARGE, {"suppress_tokens": [262144]})


def small_gemma4(keys: dict[str, Any]) -> Gguf:
    file = small_llama()
    own = {
        "block_count": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.key_length_swa": 8,
        "attention.value_length_swa": 8,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False],
        **keys,
    }
    file.metadata = {key.replace("llama.", "gemma4.", 1): value for key, value in LLAMA.items()}
    file.metadata |= {f"gemma4.{key}": value for key, value in own.items()}
    file.metadata |= {"general.architecture": "gemma4", "tokenizer.ggml.suppress_tokens": [3, 4]}
    return file


def test_a_gguf_file_says_the_same(tmp_path: Path) -> None:
    config = read_native_config(small_gemma4({}).write(tmp_path / "a.gguf"))
    assert isinstance(config, GemmaConfig)
    assert config.keys == (LayerKeys(2, 8, 0), LayerKeys(2, 16, 1))
    assert (config.suppressed, config.rope.partial_rotary_factor) == ((3, 4), 1.0)
    assert config.notes == ()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"feed_forward_length": [64, 96]}, "feed_forward_length [64, 96]"),
        ({"attention.value_length_swa": 4}, "keys and values of different sizes"),
    ],
)
def test_what_no_checkpoint_has_is_named(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_native_config(small_gemma4(keys).write(tmp_path / "a.gguf"))
    assert said in str(caught.value)


def test_rows_of_every_shape_move_with_their_tokens() -> None:
    keys = (LayerKeys(2, 4, 0), LayerKeys(1, 8, 1), LayerKeys(2, 4, 0), LayerKeys(1, 8, 1))
    spec = parsed(LARGE).spec("", bytes_per_weight=4, bytes_per_kv=4)
    spec = replace(spec, kv_layers=keys, local_layers=(), num_layers=4)
    memory = PagedKV(
        spec, dtype=torch.float32, device=torch.device("cpu"), size=ArenaSize(64, 4, 0)
    )
    assert [tuple(rows[0].shape) for rows in memory.layers] == [(2, 64, 4), (1, 64, 8)] * 2
    for depth in (0, 1):
        assert memory.layers[depth][1].data_ptr() == memory.layers[depth + 2][1].data_ptr()
    memory.open(0, ())
    plan = memory.plan([StepRow(0, (1, 2, 3), (-1, -1, 1))])
    for k_GSD, v_GSD in memory.layers[:2]:
        for rows in (k_GSD, v_GSD):
            rows[:, plan.slots_N] = torch.arange(3.0)[None, :, None]
    memory.commit({0: (1, 2)})
    slots = plan.slots_N[:2]
    for k_GSD, v_GSD in memory.layers:
        for rows in (k_GSD, v_GSD):
            assert (rows[:, slots] == torch.tensor([1.0, 2.0])[None, :, None]).all()
