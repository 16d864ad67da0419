"""Names of tensors: those of GGUF files as checkpoints of Hugging Face call them.

Some are laid out otherwise as well. llama.cpp turns neighbours (2i, 2i + 1) of a head for `llama`,
where checkpoints pair (i, i + H/2): its rows of queries and keys are moved back. GPT-2's matrices
lie as inputs by outputs in checkpoints. Gemma's checkpoints hold what norms add to 1.

Shapes:  H = size of a head, O = rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.gguf.reader import Header

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
# What architectures call otherwise, or have besides.
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
class Place:
    """Where a tensor of a checkpoint is in the file: `stored` is its name there. Rows of heads of
    `head_dim` are `turned`, the matrix is `transposed`, numbers are `above_one`, or a list is the
    one row of a matrix (`is_row`). A bias that the file lacks is `zero`, one for each row of its
    matrix."""

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
        """As a checkpoint has it."""
        order_O = self.order(tensor.shape[0])
        if order_O is not None:
            return tensor[order_O]
        if self.is_row:
            return tensor[None]
        if self.above_one:
            return tensor - 1
        return tensor.T.contiguous() if self.transposed else tensor

    def order(self, num_rows: int) -> Tensor | None:
        """Where each row of the checkpoint lies in the file; None if none moves. Of each head all
        first partners come before all second ones."""
        if not self.head_dim or num_rows % self.head_dim:
            return None
        order_H = torch.arange(self.head_dim).view(-1, 2).T.flatten()
        return torch.arange(num_rows).view(-1, self.head_dim)[:, order_H].flatten()


def places(header: Header, architecture: str, head_dim: int) -> Mapping[str, Place]:
    """Every tensor of the file by the name that it has in a checkpoint; unknown ones keep theirs,
    which no model asks for."""
    gpt2 = architecture == "gpt2"
    own = _OWN_NAMES.get(architecture, {})
    layer_names = _GPT2_LAYER if gpt2 else {**_LLAMA_LAYER, **own}
    found: dict[str, Place] = {}
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
        place = Place(
            stored,
            head_dim if turned else 0,
            transposed=gpt2 and part in _TRANSPOSED and ending == "weight",
            above_one=own is _GEMMA and module.endswith("norm"),
            is_row=part == "ffn_gate_inp_shexp",
        )
        whole = name if part == "attn_sinks" else f"{name}.{ending}"
        found[whole if known else stored] = place
    return {**found, **_zero_biases(found, architecture)}


def _zero_biases(found: Mapping[str, Place], architecture: str) -> dict[str, Place]:
    """Biases of modules without one in models where others have some: llama.cpp adds those that it
    finds."""
    qwen = architecture in QKV_BIASED
    modules = ("q_proj", "k_proj", "v_proj") if qwen else ("q_proj", "k_proj", "v_proj", "o_proj")
    zeros: dict[str, Place] = {}
    for group, always in ((modules, qwen), (("gate_proj", "up_proj", "down_proj"), False)):
        weights = [name for name in found if _module(name) in group]
        biases = {name.removesuffix("weight") + "bias" for name in weights}
        if always or biases & found.keys():
            zeros |= {
                name.removesuffix("weight") + "bias": Place(found[name].stored, zero=True)
                for name in weights
                if name.removesuffix("weight") + "bias" not in found
            }
    return zeros


def _module(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`; "" of what is no such matrix."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) == _LAYER_PARTS else ""


def first_missing(header: Header, architecture: str, num_layers: int) -> str | None:
    """The first tensor, by its name in the file, that every model of this kind has and the file
    lacks."""
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
    """Whether gate and up are one matrix, under the name of up."""
    return f"blk.{block}.ffn_gate.weight" not in header.entries
