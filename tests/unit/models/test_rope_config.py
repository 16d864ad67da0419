from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.core.errors import CheckpointError
from outrider.models.rope_config import Rope
from unit.models.configs import ABSENT, parse

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


@pytest.mark.parametrize("kind", ["dynamic", "su", "proportional", "nonsense"])
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


SHORT, LONG = [1.0, 1.5, 2.0, 2.5] * 2, [4.0] * 8
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def test_longrope_takes_the_short_factors_and_infers_its_attention_factor() -> None:
    rope = parse(rope_scaling={**LONGROPE, "original_max_position_embeddings": 64}).rope
    assert (rope.kind, rope.short_factors, rope.original_tokens) == ("longrope", tuple(SHORT), 64)
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(64)) ** 0.5)
    told = parse(rope_scaling={**LONGROPE, "attention_factor": 0.9, "factor": 2.0}).rope
    assert (told.attention_factor, told.factor) == (0.9, 2.0)
    assert parse(rope_scaling=LONGROPE).rope.attention_factor == 1.0


def test_longrope_s_original_window_is_read_beside_it_first() -> None:
    inside = {**LONGROPE, "original_max_position_embeddings": 32}
    both = parse(rope_scaling=inside, original_max_position_embeddings=128)
    assert (both.rope.original_tokens, both.max_tokens) == (128, 128)
    phi = parse(model_type="phi3", rope_scaling=inside)
    assert (phi.rope.original_tokens, phi.max_tokens) == (4096, 256)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_has_three_names_for_longrope(name: str) -> None:
    rope = parse(model_type="phi3", rope_scaling={**LONGROPE, "rope_type": name}).rope
    assert rope.kind == "longrope"


@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic"])
def test_phi3_has_no_other_rope_type(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope type '{kind}' is not supported") as caught:
        parse(model_type="phi3", rope_scaling={**LLAMA3, "rope_type": kind})
    assert "longrope" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"short_factor": [1.0] * 7}, "short_factor has 7 numbers, but 16 rotated"),
        ({"short_factor": None}, "the key short_factor is missing"),
        ({"short_factor": "1.0"}, "short_factor must be a list"),
        ({"short_factor": [1.0] * 7 + ["x"]}, "short_factor must be a number"),
        ({"short_factor": [1.0] * 7 + [0.0]}, "short_factor must be above 0"),
        ({"original_max_position_embeddings": 1}, "must be above 1 for longrope"),
    ],
)
def test_a_longrope_that_cannot_work_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(rope_scaling={**LONGROPE, **changes})


def test_a_part_of_a_head_turns_in_phi3() -> None:
    config = parse(model_type="phi3", partial_rotary_factor=0.75)
    assert config.rope.rotary_dim(config.head_dim) == 12
    nested = {"rope_type": "default", "partial_rotary_factor": 0.5}
    config = parse(model_type="phi3", rope_parameters=nested, partial_rotary_factor=0.75)
    assert config.rope.rotary_dim(config.head_dim) == 8


@pytest.mark.parametrize(
    ("family", "factor", "said"),
    [
        ("llama", 0.5, "partial_rotary_factor is not supported for model_type 'llama'"),
        ("qwen2", 0.5, "partial_rotary_factor is not supported for model_type 'qwen2'"),
        ("phi3", 1.5, "partial_rotary_factor must be at most 1"),
        ("phi3", 0.2, "the rotated part of a head must be even for rotary positions, got 3"),
        ("phi3", 0.01, "the rotated part of a head must be even for rotary positions, got 0"),
    ],
)
def test_a_part_that_cannot_turn_is_named(family: str, factor: float, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(model_type=family, partial_rotary_factor=factor)
