from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.tiny_checkpoints import COMMON, VARIANTS, Variant, random_tensors
from outrider.core.errors import CheckpointError
from outrider.models.families import GPT2Config, LlamaConfig
from outrider.models.hf_config import (
    FAMILIES,
    NativeConfig,
    parse_config,
    read_config,
    read_model_type,
)
from outrider.models.json_object import JsonObject


def parse(**values: Any) -> NativeConfig:
    return parse_config(JsonObject("config.json", values))


@pytest.mark.parametrize("item", VARIANTS, ids=lambda item: item.name)
def test_every_family_gets_its_own_config(item: Variant) -> None:
    config = parse(**item.config)
    assert config.family == item.config["model_type"] in FAMILIES
    assert isinstance(config, GPT2Config if config.family == "gpt2" else LlamaConfig)
    tensors = random_tensors(item.config, seed=0).values()
    spec = config.spec("name", bytes_per_weight=2, bytes_per_kv=4)
    assert spec.num_parameters == config.num_parameters == sum(t.numel() for t in tensors)
    assert spec.kv_bytes_per_token == 2 * 2 * spec.num_kv_heads * spec.head_dim * 4


def test_an_unknown_family_is_refused_with_the_nearest_and_the_way_out() -> None:
    with pytest.raises(CheckpointError, match="no decoder for model_type 'mistrall'") as caught:
        parse(model_type="mistrall")
    assert caught.value.hint == (
        f"did you mean 'mistral'? It has {', '.join(FAMILIES)}; others run through transformers: "
        "pip install 'outrider[hf]'"
    )


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON))
    assert read_config(tmp_path).stop_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert read_config(tmp_path).stop_ids == (2, 9)


def test_the_type_alone_is_read_of_any_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert read_model_type(tmp_path) == "mamba"
    assert "mamba" not in FAMILIES
