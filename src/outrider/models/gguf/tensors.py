"""Tensors of a GGUF file under the names of Hugging Face checkpoints.

Some also have another layout. llama.cpp rotates neighbours (2i, 2i + 1) of a head for `llama`,
where checkpoints pair (i, i + H/2), so rows of queries and keys are moved back. GPT-2's matrices
are inputs by outputs in checkpoints. Gemma's checkpoints hold a norm's weight minus 1.

Shapes:  H = size of a head, O = rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.plan import BlockRows
from outrider.models.gguf.blocks import decode, held_bytes
from outrider.models.gguf.reader import Entry, Header, map_file

# Names of tensors: maps the names in GGUF files to those in checkpoints of Hugging Face.
#
# Some tensors also have another layout. llama.cpp rotates neighbours (2i, 2i + 1) of a head for
# `llama`, where checkpoints pair (i, i + H/2), so rows of queries and keys are moved back. GPT-2's
# matrices are inputs by outputs in checkpoints. Gemma's checkpoints hold a norm's weight minus 1.
#
# Shapes:  H = size of a head, O = rows.
# Factors of rotary frequencies, which config.json has, and no weights.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LLAMA_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_QWEN_MIXTURE = {
    **_EXPERTS,
    **_SHARED,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors that an architecture names differently, or has in addition.
_OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen2moe": _QWEN_MIXTURE,
    "qwen3moe": _QWEN_MIXTURE,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": {
        **_EXPERTS,
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
    },
}
_GPT2_OUTER = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_TURNED_BY, _TURNED = ("llama", "smollm3"), ("attn_q", "attn_k")
# Architectures with biases of queries, keys and values, and of nothing else.
QKV_BIASED = ("qwen2", "qwen2moe")
# Names such as `model.layers.0.mlp.up_proj.weight`.
_LAYER_PARTS = 6
_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The source of a checkpoint's tensor: `stored` is its name in the file. Its layout may differ:
    rows of heads of `head_dim` are paired as neighbours (0: they are not), the matrix is
    `transposed`, numbers are 1 larger (`above_one`), or a vector is a matrix of one row in
    checkpoints (`is_row`). A bias that the file lacks is `zero`: a 0 for each row of the matrix
    `stored`."""

    stored: str
    head_dim: int = 0
    transposed: bool = False
    above_one: bool = False
    is_row: bool = False
    zero: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if self.zero:
            return stored[:1]
        if self.is_row:
            return (1, *stored)
        return stored[::-1] if self.transposed else stored

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor in a checkpoint's layout."""
        order_O = self.order(tensor.shape[0])
        if order_O is not None:
            return tensor[order_O]
        if self.is_row:
            return tensor[None]
        if self.above_one:
            return tensor - 1
        return tensor.T.contiguous() if self.transposed else tensor

    def order(self, num_rows: int) -> Tensor | None:
        """order_O: the row in the file of each row of the checkpoint; None if no row moves. In a
        checkpoint's head, all first partners of pairs come before all second ones."""
        if not self.head_dim or num_rows % self.head_dim:
            return None
        order_H = torch.arange(self.head_dim).view(-1, 2).T.flatten()
        return torch.arange(num_rows).view(-1, self.head_dim)[:, order_H].flatten()


def tensor_sources(header: Header, architecture: str, head_dim: int) -> Mapping[str, TensorSource]:
    """The tensors by their checkpoint names. Unknown ones keep their own, which no model reads."""
    gpt2 = architecture == "gpt2"
    own = _OWN_NAMES.get(architecture, {})
    layer_names = _GPT2_LAYER if gpt2 else {**_LLAMA_LAYER, **own}
    found: dict[str, TensorSource] = {}
    for stored in header.entries:
        if stored in FACTORS:
            continue
        module, _, ending = stored.rpartition(".")
        block, _, part = module.removeprefix("blk.").partition(".")
        if module.startswith("blk.") and part:
            known = layer_names.get(part)
            name = f"h.{block}.{known}" if gpt2 else f"model.layers.{block}.{known}"
        else:
            known = (_GPT2_OUTER if gpt2 else _LLAMA_OUTER).get(module)
            name = known or ""
        if known == "self_attn.qkv_proj" or (known == "mlp.up_proj" and _is_fused(header, block)):
            name = name.replace("mlp.up_proj", "mlp.gate_up_proj")
        turned = architecture in _TURNED_BY and part in _TURNED
        source = TensorSource(
            stored,
            head_dim if turned else 0,
            transposed=gpt2 and part in _TRANSPOSED and ending == "weight",
            above_one=own is _GEMMA and module.endswith("norm"),
            is_row=part == "ffn_gate_inp_shexp",
        )
        whole = name if part == "attn_sinks" else f"{name}.{ending}"
        found[whole if known else stored] = source
    return {**found, **_zero_biases(found, architecture)}


def _zero_biases(found: Mapping[str, TensorSource], architecture: str) -> dict[str, TensorSource]:
    """Zero biases of modules without a bias, in models where other modules have one: llama.cpp adds
    only the biases that a file has, while our decoders read one for every such module."""
    qwen = architecture in QKV_BIASED
    modules = ("q_proj", "k_proj", "v_proj") if qwen else ("q_proj", "k_proj", "v_proj", "o_proj")
    zeros: dict[str, TensorSource] = {}
    for group, always in ((modules, qwen), (("gate_proj", "up_proj", "down_proj"), False)):
        weights = [name for name in found if _module(name) in group]
        biases = {name.removesuffix("weight") + "bias" for name in weights}
        if always or biases & found.keys():
            zeros |= {
                name.removesuffix("weight") + "bias": TensorSource(found[name].stored, zero=True)
                for name in weights
                if name.removesuffix("weight") + "bias" not in found
            }
    return zeros


def _module(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`; "" for other kinds of names."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) == _LAYER_PARTS else ""


def first_missing(header: Header, architecture: str, num_layers: int) -> str | None:
    """The GGUF name of the first missing tensor that models of this kind have; None if none."""
    own = _OWN_NAMES.get(architecture, {})
    parts = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", *own}
    if not any(part.endswith("_exps") for part in own):
        parts |= {"ffn_gate", "ffn_up", "ffn_down"}
    stored = {name.split(".")[2] for name in header.entries if name.startswith("blk.")}
    if "attn_qkv" in stored:
        parts = parts - {"attn_q", "attn_k", "attn_v"} | {"attn_qkv"}
    if architecture in ("phi3", "gpt2"):
        parts -= {"ffn_gate"}
    if architecture == "qwen3moe":
        parts -= {part for part in parts if part.endswith("_shexp")}
    if architecture == "gpt-oss":
        parts -= {"ffn_norm"}
    names = ["token_embd.weight"]
    names += [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in sorted(parts)]
    return next(
        (name for name in [*names, "output_norm.weight"] if name not in header.entries), None
    )


def _is_fused(header: Header, block: str) -> bool:
    """True if gate and up are one matrix under the name of up."""
    return f"blk.{block}.ffn_gate.weight" not in header.entries


_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The tensors of one file under the names of checkpoints, decoded when they are read.

    Floats have their own dtype; quantised tensors become float32.
    """

    max_read = 1 << 22

    def __init__(
        self, path: Path, entries: Mapping[str, Entry], sources: Mapping[str, TensorSource]
    ) -> None:
        """`entries` and `sources` are those of the model, of whose files `path` is one."""
        self._entries = entries
        self._sources = {
            name: source for name, source in sources.items() if entries[source.stored].path == path
        }
        self._memory = map_file(path)

    def let_go(self) -> None:
        """Release the pages that were read; a later read takes them from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def keys(self) -> list[str]:
        return list(self._sources)

    @property
    def num_values(self) -> int:
        entries = self._entries
        return sum(prod(p.shape(entries[p.stored].shape)) for p in self._sources.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors in memory where kernels run on blocks (native/csrc/groups.h)."""
        sources = (source for source in self._sources.values() if not source.zero)
        entries = [self._entries[source.stored] for source in sources]
        return sum(one.num_values // one.kind.block * held_bytes(one.kind) for one in entries)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the tensor that `get_tensor` returns."""
        source = self._sources[name]
        if source.zero:
            return torch.float32
        return _DTYPES.get(self._entries[source.stored].kind.name, torch.float32)

    def blocks(self, name: str) -> Sequence[BlockRows]:
        """The stored rows of a matrix, or of each matrix of a stack. Empty for a tensor that is not
        quantised or has another layout in checkpoints."""
        source = self._sources[name]
        entry = self._entries[source.stored]
        if (
            not entry.kind.is_quantised
            or source.transposed
            or source.zero
            or len(entry.shape) not in (2, 3)
        ):
            return ()
        *stack, num_out, num_in = entry.shape
        raw = np.frombuffer(self._memory, np.uint8, entry.num_bytes, entry.offset)
        order_O = source.order(num_out)
        return [
            BlockRows(part, entry.kind.number, num_out, num_in, order_O)
            for part in raw.reshape(prod(stack), -1)
        ]

    def get_tensor(self, name: str) -> Tensor:
        source = self._sources[name]
        entry = self._entries[source.stored]
        if source.zero:
            return torch.zeros(source.shape(entry.shape))
        raw = np.frombuffer(self._memory, np.uint8, entry.num_bytes, entry.offset)
        # Copied if nothing is decoded: PyTorch accepts no read-only memory.
        numbers = decode(raw, entry.kind) if entry.kind.is_quantised else raw.copy()
        flat: Tensor = torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]
        return source.laid_out(flat.view(self.dtype_of(name)).view(entry.shape))
