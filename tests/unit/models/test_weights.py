from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.tiny_checkpoints import save_tensors
from outrider.core.errors import CheckpointError
from outrider.models.checkpoint import INDEX, PICKLES, WEIGHTS
from outrider.models.weights import Weights


def save(path: Path, **tensors: Tensor) -> None:
    save_tensors(path, tensors)


def save_index(folder: Path, places: Mapping[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Weights.at(folder)
    return caught.value


def test_one_file(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, a=torch.arange(6.0).view(2, 3), b=torch.ones(4))
    with Weights.at(tmp_path) as weights:
        assert torch.equal(weights.take("a", 2, 3), torch.arange(6.0).view(2, 3))
        kept = weights.take("b", 4)
        assert "a" in weights
        assert "c" not in weights
        weights.check_all_taken()
    assert torch.equal(kept, torch.ones(4)), "a view must outlive the reader"


def test_shards(tmp_path: Path) -> None:
    save(tmp_path / "one.safetensors", a=torch.zeros(2))
    save(tmp_path / "two.safetensors", b=torch.ones(2), c=torch.ones(1))
    save_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with Weights.at(tmp_path) as weights:
        assert torch.equal(weights.take("b", 2), torch.ones(2))
        assert torch.equal(weights.take("a", 2), torch.zeros(2))


def test_a_tensor_is_mapped_and_not_copied(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, a=torch.ones(1000))
    with Weights.at(tmp_path) as weights:
        assert weights.take("a", 1000).data_ptr() == weights.take("a", 1000).data_ptr()


@pytest.mark.parametrize("suffix", PICKLES)
def test_pickles_are_refused_unread(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"pytorch_model{suffix}").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    error = refusal(tmp_path)
    assert f"pytorch_model{suffix}" in str(error)
    assert "can run code" in str(error)
    assert error.hint is not None
    assert "save_pretrained" in error.hint


def test_safetensors_beside_a_pickle_are_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    save(tmp_path / WEIGHTS, a=torch.ones(1))
    with Weights.at(tmp_path) as weights:
        weights.take("a", 1)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path} has neither {WEIGHTS} nor {INDEX}" in str(refusal(tmp_path))


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1, -500])
def test_a_truncated_file_is_named_with_its_size(tmp_path: Path, keep: int) -> None:
    path = tmp_path / WEIGHTS
    save(path, a=torch.ones(1000))
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    error = refusal(tmp_path)
    assert f"{path} ({len(data)} bytes) is damaged or incomplete" in str(error)
    assert error.hint is not None
    assert "download it again" in error.hint


@pytest.mark.parametrize("junk", [b"\xff" * 4096, b"\x02" + b"\0" * 7 + b"[]", b"PK\x03\x04" * 99])
def test_a_file_of_junk_is_named(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(junk)
    assert "damaged or incomplete" in str(refusal(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path / "one.safetensors", a=torch.zeros(2))
    save_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert f"{tmp_path / 'two.safetensors'} is missing" in str(refusal(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors", "/etc/other.safetensors", "sub/one.safetensors",
        "..\\other.safetensors", "C:other.safetensors", "one.bin", "", "..", "a\0.safetensors",
    ],
)  # fmt: skip
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(tmp_path / "other.safetensors", a=torch.zeros(2))
    save_index(folder, {"a": name})
    assert "not a safetensors file of this folder" in str(refusal(folder))


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "["])
def test_a_bad_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert INDEX in str(refusal(tmp_path))


def test_a_shard_name_must_be_text(tmp_path: Path) -> None:
    save_index(tmp_path, {"a": 3})
    assert "weight_map: a must be a string, got 3" in str(refusal(tmp_path))


def test_a_missing_tensor_is_named_with_its_nearest(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, **{"model.norm.weights": torch.ones(4)})
    with Weights.at(tmp_path) as weights, pytest.raises(CheckpointError) as caught:
        weights.take("model.norm.weight", 4)
    assert "the tensor model.norm.weight, of shape [4], is missing" in str(caught.value)
    assert caught.value.hint is not None
    assert "model.norm.weights" in caught.value.hint


def test_another_shape_is_named_beside_the_expected_one(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, a=torch.ones(4, 2))
    with Weights.at(tmp_path) as weights, pytest.raises(CheckpointError) as caught:
        weights.take("a", 2, 4)
    assert "a has shape [4, 2], but config.json implies [2, 4]" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_quantised_tensors_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path / WEIGHTS, a=torch.ones(4).to(dtype))
    with Weights.at(tmp_path) as weights, pytest.raises(CheckpointError, match="quantised"):
        weights.take("a", 4)


def test_a_tensor_that_nobody_wants_is_named(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, a=torch.ones(1), extra=torch.ones(1), old=torch.ones(1))
    with Weights.at(tmp_path) as weights:
        weights.take("a", 1)
        with pytest.raises(CheckpointError, match=r"extra is not part .*\(2 such"):
            weights.check_all_taken()


def test_stored_rotary_frequencies_may_stay_unread(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)})
    with Weights.at(tmp_path) as weights:
        weights.check_all_taken()


def test_what_is_ignored_is_up_to_the_family(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, **{"h.0.attn.bias": torch.ones(1), "h.0.c_attn.bias": torch.ones(1)})
    with Weights.at(tmp_path) as weights:
        with pytest.raises(CheckpointError, match=r"h\.0\.c_attn\.bias is not part .*\(1 such"):
            weights.check_all_taken(ignored=(".attn.bias",))
        weights.take("h.0.c_attn.bias", 1)
        weights.check_all_taken(ignored=(".attn.bias",))


def test_the_stored_dtype_is_told(tmp_path: Path) -> None:
    save(tmp_path / WEIGHTS, a=torch.ones(1, dtype=torch.bfloat16))
    with Weights.at(tmp_path) as weights:
        assert weights.stored_dtype("a") is torch.bfloat16
        assert weights.stored_dtype("b") is torch.float32
