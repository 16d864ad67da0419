"""Writes a Llama of given sizes and random weights: a real model's every cost, and no sense.

The folder is an ordinary checkpoint without a tokenizer, so it loads as any does, in one process or
shared among ranks. What it says comes from a script (synthetic.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.models.gemm_shape import GemmShape
from outrider.models.inflate import NORM, meaningless
from outrider.models.inflate_files import write_json
from outrider.models.llama_weights import EMBEDDING
from outrider.models.weights import HEAD, INDEX


def write_random(folder: Path, shape: GemmShape, dtype: torch.dtype, *, max_tokens: int) -> None:
    """One file for the tables and one a layer; config.json comes last, so half a folder is never
    taken for a model. Raises ConfigError if there is something in the folder already."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already.", hint="name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    num_bytes = 0
    for number, sizes in enumerate(_shards(shape)):
        name = f"model-{number:05}.safetensors"
        tensors = {tensor: _made(tensor, size, dtype) for tensor, size in sizes.items()}
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": places})
    write_json(folder / "config.json", _config(shape, dtype, max_tokens))


def _made(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(size, dtype=dtype) if len(size) == 1 else meaningless(name, size, dtype)


def _shards(shape: GemmShape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Sizes of tensors by name, a file after the other."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    attended, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    table = (shape.vocab_size, hidden)
    yield {EMBEDDING: table, HEAD: table, NORM: (hidden,)}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}."
        yield {
            f"{layer}self_attn.q_proj.weight": (attended, hidden),
            f"{layer}self_attn.k_proj.weight": (kv, hidden),
            f"{layer}self_attn.v_proj.weight": (kv, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, attended),
            f"{layer}mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}mlp.up_proj.weight": (ffn, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, ffn),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
        }


def _config(shape: GemmShape, dtype: torch.dtype, max_tokens: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_tokens,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
