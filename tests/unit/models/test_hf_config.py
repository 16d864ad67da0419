from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.gguf_writer import small_llama
from doubles.tiny_checkpoints import COMMON, VARIANTS, Variant, random_tensors
from outrider.core.errors import CheckpointError
from outrider.models.checkpoint import open_checkpoint, read_sampling
from outrider.models.configs import GPT2Config, LayeredConfig, LlamaConfig
from outrider.models.families import FAMILIES, model_type_of, parse_config, read_config
from outrider.models.json_object import JsonObject


def parse(**values: Any) -> LayeredConfig:
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
        "pip install 'transformers<6,>=5.23'"
    )


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON))
    assert read_config(tmp_path).stop_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert read_config(tmp_path).stop_ids == (2, 9)


def test_the_type_alone_is_read_of_any_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert model_type_of(open_checkpoint(tmp_path)) == "mamba"
    assert "mamba" not in FAMILIES


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"top_k": -1, "temperature": 1}, {"temperature": 1.0, "top_k": 0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"eos_token_id": 2}, {}),
        ({"temperature": "hot", "top_p": True, "min_p": 7}, {}),
        ({"temperature": 0.6, "top_p": 2}, {"temperature": 0.6}),
    ],
)
def test_sampling_is_what_the_makers_advise(
    said: dict[str, Any], meant: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_sampling(tmp_path) == meant


def test_a_folder_without_advice_has_none(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}


def test_a_gguf_file_advises_by_its_own_keys(tmp_path: Path) -> None:
    keys = {"temp": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.05}
    file = small_llama({f"general.sampling.{key}": value for key, value in keys.items()})
    assert read_sampling(file.write(tmp_path / "advised.gguf")) == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
    }
    assert read_sampling(small_llama().write(tmp_path / "plain.gguf")) == {}
