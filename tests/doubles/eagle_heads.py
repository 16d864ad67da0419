"""Random EAGLE heads in the published formats, and their arithmetic written out slowly.

Shapes:  P = tokens, D = hidden size, W = ids that are drafted, V = vocabulary, K = captured layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class EagleFolder:
    """What is written: for a target of these sizes, EAGLE 3 if `fused`. `ids` are those that are
    drafted, all of the vocabulary if None; `scale` is that of the weights. Tensors in `without` are
    left out and `changes` made to config.json."""

    hidden_size: int
    vocab_size: int
    fused: bool = True
    ids: tuple[int, ...] | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn_size: int = 48
    eps: float = 1e-5
    theta: float = 10000.0
    scale: float = 0.08
    bias: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0
    layers: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_layers: int = 1
    qk_norm: bool = False
    own_bias: bool = False

    @property
    def prefix(self) -> str:
        return "midlayer" if self.fused else "layers.0"

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3" if self.fused else "LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": 64,
            "torch_dtype": "float16",
        }
        if self.fused:
            found["draft_vocab_size"] = self.vocab_size if self.ids is None else len(self.ids)
        if self.layers:
            found["eagle_aux_hidden_state_layer_ids"] = list(self.layers)
        return {**found, **self.changes}

    def prefixes(self) -> list[str]:
        """Of all layers, the first of which has its own name."""
        return [self.prefix, *(f"layers.{index}" for index in range(1, self.num_layers))]

    def speculators(self, target: str) -> dict[str, Any]:
        """config.json as the speculators library writes it, of heads for a Qwen3 `target`."""
        layer = self.config()
        of_layers = ("layer_types", "sliding_window")
        own = {key: layer.pop(key) for key in self.changes if key not in of_layers}
        own["draft_vocab_size"] = layer.pop("draft_vocab_size")
        layer |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        if self.layers:
            own["eagle_aux_hidden_state_layer_ids"] = layer.pop("eagle_aux_hidden_state_layer_ids")
        verifier = {"name_or_path": target, "architectures": ["Qwen3ForCausalLM"]}
        return {
            "architectures": ["Eagle3DraftModel"],
            "model_type": "speculator_model",
            "speculators_model_type": "eagle3",
            "speculators_version": "0.6.0",
            "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
            "transformer_layer_config": layer,
            **own,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for index, prefix in enumerate(self.prefixes()):
            layer = self._layer_shapes(first=index == 0)
            found |= {f"{prefix}.{name}": shape for name, shape in layer.items()}
        d = self.hidden_size
        num_states = len(self.layers) or 3 if self.fused else 2
        found["fc.weight"] = (d, num_states * d)
        if self.fused:
            size = self.vocab_size if self.ids is None else len(self.ids)
            found |= {"norm.weight": (d,), "lm_head.weight": (size, d)}
        elif self.bias:
            found["fc.bias"] = (d,)
        if self.changes.get("fc_norm"):
            found |= {f"fc_norm.{index}.weight": (d,) for index in range(num_states)}
        if self.changes.get("norm_before_fc"):
            found["input_norm.weight"] = (num_states * d,)
        return found

    def _layer_shapes(self, *, first: bool) -> dict[str, tuple[int, ...]]:
        d, f, inputs = self.hidden_size, self.ffn_size, self.hidden_size * (1 + self.fused * first)
        attended, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (attended, inputs),
            "self_attn.k_proj.weight": (kv, inputs),
            "self_attn.v_proj.weight": (kv, inputs),
            "self_attn.o_proj.weight": (d, attended),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if self.fused:
            layer["input_layernorm.weight"] = (d,)
        if self.fused and first:
            layer["hidden_norm.weight"] = (d,)
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        if self.own_bias:
            outputs = {"q": attended, "k": kv, "v": kv, "o": d}
            layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in outputs.items()}
        return layer

    def tensors(self) -> Tensors:
        rng = torch.Generator().manual_seed(self.seed)
        found = {name: self._drawn(shape, rng) for name, shape in self.shapes().items()}
        if self.ids is not None:
            size = len(self.ids)
            found["d2t"] = torch.tensor(self.ids) - torch.arange(size)
            found["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool)
            found["t2d"][list(self.ids)] = True
        return {name: tensor for name, tensor in found.items() if name not in self.without}

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        save_tensors(folder, self.tensors())
        return folder

    def _drawn(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        drawn = torch.randn(shape, generator=rng)
        drawn = 1 + 0.1 * drawn if len(shape) == 1 else self.scale * drawn
        return drawn.to(self.dtype)


def save_tensors(folder: Path, tensors: Tensors) -> None:
    cast("Any", safetensors_torch).save_file(tensors, folder / "model.safetensors")


@dataclass(frozen=True, slots=True)
class TargetTables:
    """In float32: what heads share with their target."""

    embedding_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor
    eps: float


class SlowEagle:
    """The whole text at every call, in float64, after the project's own code and papers."""

    def __init__(self, heads: EagleFolder, target: TargetTables) -> None:
        self._heads, self._target = heads, target
        self._prefix = heads.prefix
        self._tensors = {name: tensor.double() for name, tensor in heads.tensors().items()}

    def fused(self, hidden_PKD: Tensor) -> Tensor:
        flat_PX = hidden_PKD.double().flatten(1)
        heads, size = self._heads, self._heads.hidden_size
        if heads.changes.get("fc_norm"):
            states = torch.split(flat_PX, size, dim=1)
            weights = [self._tensors[f"fc_norm.{index}.weight"] for index in range(len(states))]
            pairs = zip(states, weights, strict=True)
            flat_PX = torch.cat([_norm(x_PD, weight, heads.eps) for x_PD, weight in pairs], dim=1)
        if heads.changes.get("norm_before_fc"):
            flat_PX = _norm(flat_PX, self._tensors["input_norm.weight"], heads.eps)
        if heads.fused:
            return self._fc(flat_PX)
        return _norm(flat_PX, self._target.norm_D.double(), self._target.eps)

    def read(self, tokens: Sequence[int], before_PD: Tensor) -> tuple[Tensor, Tensor]:
        """(logits_PV, states_PD) after each token, given the state of the token before it."""
        heads, tensors, eps = self._heads, self._tensors, self._heads.eps
        token_PD = self._target.embedding_VD.double()[list(tokens)]
        if heads.fused:
            x_PD = before_PD
            inputs_PX = torch.cat(
                [
                    _norm(token_PD, self._layer("input_layernorm"), eps),
                    _norm(before_PD, self._layer("hidden_norm"), eps),
                ],
                dim=1,
            )
            if heads.changes.get("norm_before_residual"):
                x_PD = _norm(before_PD, self._layer("hidden_norm"), eps)
        else:
            x_PD = inputs_PX = self._fc(torch.cat([token_PD, before_PD], dim=1))
        for index, prefix in enumerate(heads.prefixes()):
            self._prefix = prefix
            if prefix != heads.prefix:
                inputs_PX = _norm(x_PD, self._layer("input_layernorm"), eps)
            x_PD = x_PD + self._attention(inputs_PX, self._window(index))
            y_PD = _norm(x_PD, self._layer("post_attention_layernorm"), eps)
            gate_PF = functional.silu(y_PD @ self._layer("mlp.gate_proj").T)
            up_PF = y_PD @ self._layer("mlp.up_proj").T
            x_PD = x_PD + (gate_PF * up_PF) @ self._layer("mlp.down_proj").T
        if not heads.fused:
            return x_PD @ self._target.head_VD.double().T, x_PD
        normed_PD = _norm(x_PD, tensors["norm.weight"], eps)
        own_PW = normed_PD @ tensors["lm_head.weight"].T
        state_PD = normed_PD if heads.changes.get("norm_output") else x_PD
        if heads.ids is None:
            return own_PW, state_PD
        logits_PV = own_PW.new_full((len(tokens), heads.vocab_size), -1e10)
        logits_PV[:, list(heads.ids)] = own_PW
        return logits_PV, state_PD

    def _fc(self, inputs_PX: Tensor) -> Tensor:
        out_PD = inputs_PX @ self._tensors["fc.weight"].T
        return out_PD + self._tensors.get("fc.bias", torch.zeros(()))

    def _layer(self, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}.{name}.weight"]

    def _times(self, x_PX: Tensor, name: str) -> Tensor:
        """By a matrix of attention, with its bias, if it has one."""
        name = f"self_attn.{name}_proj"
        bias = self._tensors.get(f"{self._prefix}.{name}.bias", torch.zeros(()))
        return x_PX @ self._layer(name).T + bias

    def _window(self, index: int) -> int:
        """Of the last tokens that a layer sees; 0 is all."""
        kinds = self._heads.changes.get("layer_types", ())
        slides = kinds[index : index + 1] == ["sliding_attention"]
        return self._heads.changes["sliding_window"] if slides else 0

    def _attention(self, inputs_PX: Tensor, window: int) -> Tensor:
        heads = self._heads
        q_HPE = self._split(self._times(inputs_PX, "q"), heads.num_heads)
        k_HPE = self._split(self._times(inputs_PX, "k"), heads.num_kv_heads)
        v_HPE = self._split(self._times(inputs_PX, "v"), heads.num_kv_heads)
        if heads.qk_norm:
            q_HPE = _norm(q_HPE, self._layer("self_attn.q_norm"), heads.eps)
            k_HPE = _norm(k_HPE, self._layer("self_attn.k_norm"), heads.eps)
        repeats = heads.num_heads // heads.num_kv_heads
        k_HPE = self._turned(k_HPE).repeat_interleave(repeats, 0)
        v_HPE = v_HPE.repeat_interleave(repeats, 0)
        scores_HPP = self._turned(q_HPE) @ k_HPE.transpose(1, 2) / heads.head_dim**0.5
        later_PP = torch.ones(scores_HPP.shape[1:], dtype=torch.bool).triu(1)
        hidden_PP = later_PP | ~torch.ones_like(later_PP).triu(1 - window) if window else later_PP
        shares_HPP = scores_HPP.masked_fill(hidden_PP, float("-inf")).softmax(-1)
        out_PA = (shares_HPP @ v_HPE).transpose(0, 1).flatten(1)
        return self._times(out_PA, "o")

    def _split(self, x_PA: Tensor, num_heads: int) -> Tensor:
        return x_PA.view(len(x_PA), num_heads, self._heads.head_dim).transpose(0, 1)

    def _turned(self, x_HPE: Tensor) -> Tensor:
        half = self._heads.head_dim // 2
        rates_R = self._heads.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles_PR = torch.arange(x_HPE.shape[1], dtype=torch.float64)[:, None] * rates_R
        first, second = x_HPE[..., :half], x_HPE[..., half:]
        cos, sin = angles_PR.cos(), angles_PR.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm(x_PD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_PD / (x_PD.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D
