"""Tensors that a GGUF file lacks: biases that are zero, and others, which are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from doubles.gguf_writer import LLAMA, small_llama, wide_llama
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError
from outrider.models.configs import LlamaConfig
from outrider.models.families import read_native_config
from outrider.models.weights import Weights, stored_in

BIASED: list[tuple[str, tuple[str, ...], tuple[bool, bool, bool]]] = [
    ("llama", ("attn_q", "attn_k", "attn_v"), (True, True, False)),
    ("llama", ("attn_q",), (True, True, False)),
    ("llama", ("attn_output",), (True, True, False)),
    ("llama", ("ffn_up",), (False, False, True)),
    ("llama", ("attn_k", "ffn_down"), (True, True, True)),
    ("qwen2", (), (True, False, False)),
    ("qwen3", ("attn_v",), (True, True, False)),
]


@pytest.mark.parametrize(("arch", "modules", "flags"), BIASED)
def test_biases_that_a_file_lacks_are_zero(
    tmp_path: Path, arch: str, modules: tuple[str, ...], flags: tuple[bool, bool, bool]
) -> None:
    file = small_llama()
    file.metadata = {key.replace("llama.", f"{arch}.", 1): v for key, v in LLAMA.items()}
    file.metadata["general.architecture"] = arch
    for module in modules:
        file.add(f"blk.0.{module}.bias", np.arange(file.tensors[f"blk.0.{module}.weight"].shape[0]))
    path = file.write(tmp_path / "a.gguf")
    config = read_native_config(path)
    assert isinstance(config, LlamaConfig)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == flags
    names = {"attn_output": "self_attn.o_proj"}
    with Weights.at(path) as weights:
        found = dict(weights.each())
        plain = sum(tensor.numel() for name, tensor in found.items() if name.endswith("weight"))
        assert weights.stored.most_values >= plain
    biases = {name: tensor for name, tensor in found.items() if name.endswith("bias")}
    assert len(biases) == 3 * flags[0] + flags[1] + 3 * flags[2]
    with_numbers = {
        f"model.layers.0.{names.get(module) or _bias_of(module)}.bias" for module in modules
    }
    assert {name for name, tensor in biases.items() if tensor.any()} == with_numbers
    file.tensors = {name: one for name, one in file.tensors.items() if name.endswith("weight")}
    bare = Weights.at(file.write(tmp_path / "b.gguf")).stored.held_bytes
    # A vector takes four bytes a number, and those that are not there none.
    sizes = sum(file.tensors[f"blk.0.{module}.weight"].shape[0] for module in modules)
    assert Weights.at(path).stored.held_bytes == bare + 4 * sizes


def _bias_of(module: str) -> str:
    part, _, name = module.partition("_")
    return f"self_attn.{name}_proj" if part == "attn" else f"mlp.{name}_proj"


@pytest.mark.parametrize(
    "name",
    ["blk.0.ffn_up.weight", "blk.0.attn_k.weight", "blk.0.ffn_norm.weight", "output_norm.weight"],
)
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    file = small_llama()
    del file.tensors[name]
    path = file.write(tmp_path / "a.gguf")
    config = read_native_config(path)
    with pytest.raises(CheckpointError, match=f"the tensor {name} is missing") as caught:
        stored_in(path).check_claim(config.num_parameters)
    assert "download it again" in str(caught.value.hint)


def test_a_layer_that_is_missing_is_named_by_its_first_tensor(tmp_path: Path) -> None:
    path = small_llama({"llama.block_count": 2}).write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"the tensor blk\.1\.attn_k\.weight is missing"):
        stored_in(path).check_claim(read_native_config(path).num_parameters)
    wide = small_llama({"llama.feed_forward_length": 96}).write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="its settings imply"):
        stored_in(wide).check_claim(read_native_config(wide).num_parameters)


def test_a_second_scale_multiplies_the_numbers_of_a_matrix(tmp_path: Path) -> None:
    """NVFP4: `.scale` of a matrix counts, `.input_scale` is of activations in 4 bits."""
    file = wide_llama(["NVFP4"])
    plain = dict(Weights.at(file.write(tmp_path / "plain.gguf")).each())
    file.add("blk.0.attn_q.scale", np.array([0.75], np.float32))
    file.add("blk.1.ffn_up.scale", np.array([3.0], np.float32))
    file.add("blk.1.ffn_up.input_scale", np.array([9.0], np.float32))
    scaled = dict(Weights.at(file.write(tmp_path / "scaled.gguf")).each())
    factors = {
        "model.layers.0.self_attn.q_proj.weight": 0.75,
        "model.layers.1.mlp.up_proj.weight": 3.0,
    }
    assert scaled.keys() == plain.keys()
    for name, tensor in scaled.items():
        assert tensor.equal(plain[name] * factors.get(name, 1.0))
    config = EngineConfig(drafter="none", dtype="float32")
    ids = []
    for name in ("plain", "scaled"):
        with LLM(tmp_path / f"{name}.gguf", config=config) as llm:
            (result,) = llm.generate([[5, 9, 7]], SamplingParams(max_tokens=24, ignore_eos=True))
            ids.append(result.token_ids)
    assert ids[0] != ids[1]
