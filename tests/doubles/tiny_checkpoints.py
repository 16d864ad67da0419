"""Tiny random checkpoints in Hugging Face format, one variant for each thing a config can say.

Weights come from integers of a seeded generator, so they are the same bits on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from outrider.kernels.operators import DTYPES
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model

COMMON: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
COMMON_GPT2: Mapping[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """`changes` to the common config, `base`; the weights in `num_shards` files."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_shards: int = 1
    base: Mapping[str, Any] = field(default_factory=lambda: COMMON)

    @property
    def config(self) -> dict[str, Any]:
        return {**self.base, **self.changes}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "use_sliding_window": False,
}
_QWEN3 = {**_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
# transformers' default for padding, 32000, would lie outside this vocabulary.
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
}
# As Phi-4-mini: three quarters of a head turn, and the head is tied.
_PARTIAL = {
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
    },
}
_WINDOW_128 = {"original_max_position_embeddings": 128}

VARIANTS = (
    Variant("llama2"),
    Variant("llama3_rope", {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    Variant("linear_rope", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    Variant("yarn_rope", {"rope_scaling": _YARN}),
    Variant("new_rope_keys", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    Variant("mistral", {**_MISTRAL, "num_key_value_heads": 2, "sliding_window": None}),
    Variant("mistral_window", {**_MISTRAL, "num_key_value_heads": 2, "sliding_window": 128}),
    Variant("one_kv_head", {"num_key_value_heads": 1}),
    Variant("wide_heads", {"num_key_value_heads": 2, "head_dim": 32}),
    Variant("tied", {"tie_word_embeddings": True}),
    Variant("attention_bias", {"attention_bias": True, "num_key_value_heads": 2}),
    Variant("mlp_bias", {"mlp_bias": True}),
    Variant("sharded", {"num_key_value_heads": 2}, num_shards=3),
    Variant("qwen2", _QWEN2),
    Variant("qwen2_tied", {**_QWEN2, "tie_word_embeddings": True}),
    Variant("qwen3", _QWEN3),
    Variant("qwen3_tied", {**_QWEN3, "tie_word_embeddings": True, "attention_bias": True}),
    Variant("phi3", {**_PHI3, "sliding_window": 128}),
    Variant("phi3_longrope", {**_PHI3, "rope_scaling": _LONGROPE, **_WINDOW_128}),
    Variant("phi3_partial", {**_PHI3, **_PARTIAL, **_WINDOW_128}),
    Variant("gpt2", base=COMMON_GPT2),
)


def variant(name: str) -> Variant:
    return next(item for item in VARIANTS if item.name == name)


def write_checkpoint(
    folder: Path, item: Variant, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write config.json and safetensors into `folder` (made if need be); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = item.config
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in random_tensors(config, seed=seed).items()
    }
    if item.num_shards == 1:
        save_tensors(folder / "model.safetensors", tensors)
        return folder
    places: dict[str, str] = {}
    for shard in range(item.num_shards):
        file = f"model-{shard + 1:05}-of-{item.num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard :: item.num_shards])
        save_tensors(folder / file, part)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save = cast("Any", safetensors_torch).save_file
    save(dict(tensors), path, metadata={"format": "pt"})


def random_tensors(config: Mapping[str, Any], *, seed: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint that `config` describes, under its Hugging Face name."""
    rng = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, rng) for name, shape in _shapes(config).items()}


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Names the exact weights that a stored result was computed with."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def random_model(
    item: Variant, *, seed: int = 0, dtype: str = "float32", capacity: ModelCapacity | None = None
) -> Decoder:
    """A loaded tiny model."""
    options = LoadOptions(
        capacity=capacity or ModelCapacity(num_slots=1024), dtype=dtype, device="cpu"
    )
    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), item, seed=seed, dtype=DTYPES[dtype])
        return load_model(path, options, name="tiny")


def random_llama(
    item: Variant | None = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    capacity: ModelCapacity | None = None,
) -> LlamaModel:
    """A loaded tiny model of the Llama family, by default of the plain variant."""
    model = random_model(item or VARIANTS[0], seed=seed, dtype=dtype, capacity=capacity)
    assert isinstance(model, LlamaModel)
    return model


Shapes = dict[str, tuple[int, ...]]


def _shapes(config: Mapping[str, Any]) -> Shapes:
    return _gpt2_shapes(config) if config["model_type"] == "gpt2" else _llama_shapes(config)


def _gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, ffn = config["n_embd"], config["n_inner"]
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    norms = ["transformer.ln_f"]
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        norms += [f"{layer}.ln_1", f"{layer}.ln_2"]
        convs = {
            f"{layer}.attn.c_attn": (hidden, 3 * hidden),
            f"{layer}.attn.c_proj": (hidden, hidden),
            f"{layer}.mlp.c_fc": (hidden, ffn),
            f"{layer}.mlp.c_proj": (ffn, hidden),
        }
        shapes.update({f"{name}.weight": shape for name, shape in convs.items()})
        shapes.update({f"{name}.bias": shape[1:] for name, shape in convs.items()})
    shapes.update({f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")})
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _llama_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, ffn, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    family, bias = config["model_type"], config["attention_bias"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        qkv, gate_up = _inputs(config, layer, head)
        out = {f"{layer}.self_attn.o_proj": (hidden, head * config["num_attention_heads"])}
        down = {f"{layer}.mlp.down_proj": (hidden, ffn)}
        if bias or family == "qwen2":
            biased = {**qkv, **out} if bias else qkv
            shapes.update({f"{name}.bias": shape[:1] for name, shape in biased.items()})
        if config["mlp_bias"]:
            biased = {**gate_up, **down}
            shapes.update({f"{name}.bias": shape[:1] for name, shape in biased.items()})
        linears = {**qkv, **out, **gate_up, **down}
        shapes.update({f"{name}.weight": shape for name, shape in linears.items()})
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if family == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _inputs(config: Mapping[str, Any], layer: str, head: int) -> tuple[Shapes, Shapes]:
    """The linears that read the normed residual: of attention and of the FFN."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    attended, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    if config["model_type"] == "phi3":
        fused = {f"{layer}.self_attn.qkv_proj": (attended + 2 * kv, hidden)}
        return fused, {f"{layer}.mlp.gate_up_proj": (2 * ffn, hidden)}
    outputs = {"q": attended, "k": kv, "v": kv}
    qkv = {f"{layer}.self_attn.{k}_proj": (n, hidden) for k, n in outputs.items()}
    return qkv, {f"{layer}.mlp.{part}_proj": (ffn, hidden) for part in ("gate", "up")}


def random_tensor(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    uniform = torch.randint(-(2**20), 2**20, shape, generator=rng).float() / 2**20
    if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        return 1 + uniform / 4
    if name.endswith("bias"):
        return uniform / 4
    # A power of two keeps the products exact, so the bits are the same on every machine.
    return uniform * 2.0 ** -round(math.log2(shape[-1]) / 2 - 1)
