"""A GGUF file holds what the checkpoint holds, as another reader finds it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles.gguf_file import Floats, Gguf, decoded, tokenizer_for
from doubles.tiny_checkpoints import random_tensors, save_tensors, variant, write_checkpoint
from outrider.core.errors import CheckpointError, ConfigError, MachineError, OutriderError
from outrider.models.loading import resolve
from outrider.models.weights import Weights
from outrider_lab.models.gguf import FORMATS, encoded, interleave
from outrider_lab.models.gguf_export import Exported, GgufOptions, export


def exported(folder: Path, name: str = "f32", **wish: Any) -> Gguf:
    path = folder / f"{name}.gguf"
    *_, last = export(folder, path, GgufOptions(form=name, force=True, **wish))
    assert last.num_tensors == last.num_tensors_in_all
    assert last.num_bytes == path.stat().st_size
    return Gguf.read(path)


def checkpoint(tmp_path: Path, name: str) -> Path:
    return tokenizer_for(write_checkpoint(tmp_path / name, variant(name)))


def source_tensor(folder: Path, name: str, *shape: int) -> Floats:
    with Weights.at(folder) as weights:
        return weights.take(name, *shape).float().numpy().copy()


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.02, 1.0, 300.0]))
def test_a_number_comes_back_within_half_a_step_of_its_block(
    name: str, seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((3, 64)) * spread).astype(np.float32)
    rows[1, :32] = 0
    rows[2] = np.round(rows[2])
    form = FORMATS[name]
    raw = np.frombuffer(b"".join(encoded(torch.tensor(rows), form)), np.uint8)
    back = decoded(name, raw.reshape(-1, form.block_bytes)).reshape(rows.shape)
    largest = np.abs(rows.reshape(-1, 32)).max(1).repeat(32).reshape(rows.shape)
    # The largest of a block of 4 bits is -8 steps, so one on the other side is cut at 7.
    steps = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127, "q4_0": 1 / 8}[name]
    slack = 0 if name == "f32" else largest * 2e-3
    assert np.all(np.abs(back - rows) <= largest * steps + slack)
    assert not back[1, :32].any()


def test_blocks_are_laid_out_as_defined() -> None:
    values = torch.arange(32, dtype=torch.float32)[None] - 16
    eight = b"".join(encoded(values, FORMATS["q8_0"]))
    assert struct.unpack("<e", eight[:2])[0] == pytest.approx(16 / 127, rel=1e-3)
    assert struct.unpack("32b", eight[2:])[:2] == (-127, -119)
    four = b"".join(encoded(values, FORMATS["q4_0"]))
    assert struct.unpack("<e", four[:2])[0] == 2.0
    # x / d + 8.5, whole part: -16 gives 0, 0 gives 8, 15 gives 16 and is cut to 15.
    assert four[2] == 0 | 8 << 4
    assert four[17] == 8 | 15 << 4


@given(heads=st.integers(1, 4), half=st.integers(1, 8))
def test_turned_pairs_become_neighbours_and_come_back(heads: int, half: int) -> None:
    size = 2 * half
    rows = torch.arange(heads * size)
    turned = interleave(rows, size).view(heads, half, 2)
    assert torch.equal(turned[:, :, 1] - turned[:, :, 0], torch.full((heads, half), half))
    assert torch.equal(turned.transpose(1, 2).reshape(-1), rows)


def test_every_tensor_of_a_llama_is_there_under_its_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "attention_bias")
    file = exported(folder)
    assert len(file.tensors) == 3 + 2 * (9 + 4)
    assert {kind for kind, _ in file.tensors.values()} == {"f32"}
    down = source_tensor(folder, "model.layers.1.mlp.down_proj.weight", 64, 96)
    assert np.array_equal(file.tensors["blk.1.ffn_down.weight"][1], down)
    for name, shape in (("weight", (32, 64)), ("bias", (32,))):
        keys = source_tensor(folder, f"model.layers.0.self_attn.k_proj.{name}", *shape)
        wanted = interleave(torch.tensor(keys), 16).numpy()
        assert np.array_equal(file.tensors[f"blk.0.attn_k.{name}"][1], wanted)
    values = source_tensor(folder, "model.layers.0.self_attn.v_proj.weight", 32, 64)
    assert np.array_equal(file.tensors["blk.0.attn_v.weight"][1], values)


def test_sizes_and_scaling_are_told(tmp_path: Path) -> None:
    said = exported(checkpoint(tmp_path, "linear_rope")).metadata
    assert said["general.architecture"] == "llama"
    assert said["llama.rope.scaling.type"] == "linear"
    assert said["llama.rope.scaling.factor"] == 4.0
    assert (said["llama.attention.head_count"], said["llama.block_count"]) == (4, 2)
    assert said["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert said["llama.vocab_size"] == len(said["tokenizer.ggml.tokens"]) == 96


def test_llama_3_stretches_by_a_tensor(tmp_path: Path) -> None:
    kind, factors = exported(checkpoint(tmp_path, "llama3_rope"), "q8_0").tensors[
        "rope_freqs.weight"
    ]
    assert (kind, factors.shape) == ("f32", (8,))
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert np.all(np.diff(factors) >= 0)


def test_mistral_and_qwen_keep_the_order_they_turn_in(tmp_path: Path) -> None:
    assert exported(checkpoint(tmp_path, "mistral")).metadata["general.architecture"] == "llama"
    for name in ("qwen2", "qwen3"):
        folder = checkpoint(tmp_path, name)
        file = exported(folder)
        assert file.metadata["general.architecture"] == name
        size = 64 if name == "qwen3" else 32
        keys = source_tensor(folder, "model.layers.0.self_attn.k_proj.weight", size, 64)
        assert np.array_equal(file.tensors["blk.0.attn_k.weight"][1], keys)
    assert file.tensors["blk.0.attn_q_norm.weight"][1].shape == (32,)


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    assert "output.weight" not in exported(checkpoint(tmp_path, "tied")).tensors
    assert "output.weight" in exported(checkpoint(tmp_path, "llama2")).tensors


@pytest.mark.parametrize("name", ["phi3", "yarn_rope", "gpt2", "qwen3_tied"])
def test_what_llama_cpp_would_run_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be exported") as caught:
        exported(checkpoint(tmp_path, name))
    assert caught.value.hint
    assert not list((tmp_path / name).glob("*.gguf*"))


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "largest"), [("f16", 1e-6), ("bf16", 0.0), ("q8_0", 0.004), ("q4_0", 0.13)]
)
def test_the_embedded_target_in_every_format(name: str, largest: float, tmp_path: Path) -> None:
    source = resolve("outrider/embedded")
    *_, last = export(source, tmp_path / "m.gguf", GgufOptions(form=name, pre_tokenizer="gpt-2"))
    assert "token ids" in last.notes[0]
    file = Gguf.read(tmp_path / "m.gguf")
    kinds = {tensor[1].ndim: tensor[0] for tensor in file.tensors.values()}
    assert kinds == {1: "f32", 2: name}
    weight = source_tensor(source, "model.layers.7.mlp.gate_proj.weight", 704, 256)
    error = np.abs(file.tensors["blk.7.ffn_gate.weight"][1] - weight).max()
    assert error <= largest * np.abs(weight).max()


def test_places_that_are_taken_or_too_small_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path, "llama2")
    path = folder / "m.gguf"
    path.write_text("mine")
    for place, problem in (
        (path, "is there already"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "m.gguf", "no folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            next(export(folder, place, GgufOptions()))
    assert path.read_text() == "mine"

    def nearly_full(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1000)

    monkeypatch.setattr("shutil.disk_usage", nearly_full)
    with pytest.raises(MachineError, match="free"):
        next(export(folder, path, GgufOptions(force=True)))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"intermediate_size": 100}, "no whole blocks"),
        ({"tie_word_embeddings": True}, "is not part"),
    ],
)
def test_a_file_that_fails_leaves_nothing(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, "llama2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if "is not part" in problem:
        _add_a_tensor(folder)
    with pytest.raises(OutriderError, match=problem):
        exported(folder, "q8_0")
    assert not [path for path in folder.iterdir() if "gguf" in path.name]


def _add_a_tensor(folder: Path) -> None:
    tensors = random_tensors(variant("llama2").config, seed=0)
    save_tensors(folder / "model.safetensors", {**tensors, "strange.weight": torch.zeros(2)})


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "llama2")
    tensors = random_tensors(variant("llama2").config, seed=0)
    tensors["lm_head.weight"][0, 0] = 1e5
    save_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="too large for float16"):
        exported(folder, "f16")
    assert exported(folder, "bf16").tensors["output.weight"][1][0, 0] == pytest.approx(
        1e5, rel=0.01
    )


def test_a_run_that_is_left_early_leaves_nothing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "llama2")
    run = export(folder, folder / "m.gguf", GgufOptions())
    assert isinstance(next(run), Exported)
    run.close()
    assert not [path for path in folder.iterdir() if "gguf" in path.name]
