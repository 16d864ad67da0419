"""GPT-2 and DistilGPT2: learned positions are added to the tokens, and norms are centred.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. A layer is

    x += out(attention(qkv(norm(x))))
    x += down(gelu(up(norm(x))))

where norm is LayerNorm and every product has a bias; decoder.py runs the passes. Tensors on the hub
have `transformer.` in front or not. Old files also store the causal mask (`attn.bias`,
`attn.masked_bias`), which is no weight.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size, T = positions,
         E = fused q, k and v, A = heads x head size, U = F = FFN size, I = inputs, O = outputs,
         H = half of a head, G = heads, S = slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.models.decoder import LayerKV, ModelCapacity, PassDecoder, Passes, Scratch
from outrider.models.families import GPT2Config
from outrider.models.weights import Placement, WeightReader, Weights

PREFIX = "transformer."
MASKS = (".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, slots=True)
class Gpt2Norm:
    weight_D: Tensor
    bias_D: Tensor


@dataclass(frozen=True, slots=True)
class Gpt2Linear:
    packed: PackedLinear
    bias_O: Tensor


@dataclass(frozen=True, slots=True)
class Gpt2Tables:
    """Tables of the model. Embeddings of positions past the window are zeros: only siblings of a
    tree that are never accepted read them."""

    embeddings: Tensor
    positions_TD: Tensor
    norm: Gpt2Norm
    head: PackedLinear


@dataclass(frozen=True, slots=True)
class Gpt2Layer:
    attention_norm: Gpt2Norm
    qkv: Gpt2Linear
    out: Gpt2Linear
    ffn_norm: Gpt2Norm
    up: Gpt2Linear
    down: Gpt2Linear


class GPT2Reader:
    """Reads the tensors of a GPT-2 checkpoint. Norms, biases and positions are float32."""

    def __init__(self, reader: WeightReader, config: GPT2Config) -> None:
        self._reader, self._config = reader, config
        self._prefix = PREFIX if f"{PREFIX}wte.weight" in reader else ""

    def tables(self, *, num_positions: int) -> Gpt2Tables:
        config, reader = self._config, self._reader
        embedding_VD = reader.table(
            f"{self._prefix}wte.weight", config.vocab_size, config.hidden_size
        )
        positions_TD = reader.vector(
            f"{self._prefix}wpe.weight", config.max_tokens, config.hidden_size
        )
        missing = max(0, num_positions - config.max_tokens)
        return Gpt2Tables(
            embeddings=embedding_VD,
            positions_TD=functional.pad(positions_TD, (0, 0, 0, missing)),
            norm=self._norm(f"{self._prefix}ln_f"),
            head=reader.head(embedding_VD, tied=config.tie_word_embeddings),
        )

    def layer(self, index: int) -> Gpt2Layer:
        prefix = f"{self._prefix}h.{index}."
        hidden, ffn = self._config.hidden_size, self._config.ffn_size
        return Gpt2Layer(
            attention_norm=self._norm(f"{prefix}ln_1"),
            qkv=self._linear(f"{prefix}attn.c_attn", hidden, 3 * hidden),
            out=self._linear(f"{prefix}attn.c_proj", hidden, hidden),
            ffn_norm=self._norm(f"{prefix}ln_2"),
            up=self._linear(f"{prefix}mlp.c_fc", hidden, ffn),
            down=self._linear(f"{prefix}mlp.c_proj", ffn, hidden),
        )

    def _norm(self, name: str) -> Gpt2Norm:
        size = self._config.hidden_size
        return Gpt2Norm(
            self._reader.vector(f"{name}.weight", size), self._reader.vector(f"{name}.bias", size)
        )

    def _linear(self, name: str, num_in: int, num_out: int) -> Gpt2Linear:
        return Gpt2Linear(
            self._reader.conv(name, num_in, num_out), self._reader.vector(f"{name}.bias", num_out)
        )


class GPT2Model(PassDecoder):
    """CausalLM over a PagedKV that it owns. Reads every weight when built."""

    def __init__(
        self,
        config: GPT2Config,
        weights: Weights,
        *,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
    ) -> None:
        self.config, self.kernels = config, kernels
        self._spec = placement.spec(config)
        reader = GPT2Reader(WeightReader(weights, kernels, placement), config)
        length = capacity.num_positions(config.max_tokens)
        self._tables = reader.tables(num_positions=length)
        self._layers = [reader.layer(index) for index in range(config.num_layers)]
        weights.check_all_taken(ignored=MASKS)
        # Heads do not rotate: the operator that rotates them and writes them to the arena gets
        # tables of (1, 0).
        self._cos_TH = torch.ones(length, config.head_dim // 2, device=placement.device)
        self._sin_TH = torch.zeros_like(self._cos_TH)
        self._scale = config.head_dim**-0.5
        self._passes = Passes(
            self._spec, up_size=config.ffn_size, placement=placement, capacity=capacity
        )

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        tables = self._tables
        torch.index_select(tables.embeddings, 0, plan.tokens_N, out=scratch.rows_ND)
        torch.index_select(tables.positions_TD, 0, plan.positions_N, out=scratch.x_ND)
        scratch.x_ND.add_(scratch.rows_ND)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        self._attend(self._layers[depth], plan, scratch, kv)
        self._feed(self._layers[depth], scratch)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        self._norm(x_MD, self._tables.norm, norm_MD)
        self.kernels.linear(norm_MD, self._tables.head, logits_MV)

    def forward(self) -> None:
        """Return None: no native kernel has this family's order of operators."""

    def _attend(self, layer: Gpt2Layer, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        kernels, qkv_NE, attended_NA = self.kernels, scratch.qkv_NE, scratch.attended_NA
        k_GSD, v_GSD = kv
        self._norm(scratch.x_ND, layer.attention_norm, scratch.norm_ND)
        self._multiply(scratch.norm_ND, layer.qkv, qkv_NE)
        kernels.rope_append(qkv_NE, self._cos_TH, self._sin_TH, plan, k_GSD, v_GSD)
        kernels.attention(qkv_NE, k_GSD, v_GSD, plan, self._scale, attended_NA)
        self._multiply(attended_NA, layer.out, scratch.x_ND, accumulate=True)

    def _feed(self, layer: Gpt2Layer, scratch: Scratch) -> None:
        self._norm(scratch.x_ND, layer.ffn_norm, scratch.norm_ND)
        self._multiply(scratch.norm_ND, layer.up, scratch.up_NU)
        self.kernels.gelu(scratch.up_NU, scratch.activated_NF)
        self._multiply(scratch.activated_NF, layer.down, scratch.x_ND, accumulate=True)

    def _norm(self, x_ND: Tensor, norm: Gpt2Norm, out_ND: Tensor) -> None:
        eps = self.config.layer_norm_eps
        self.kernels.layer_norm(x_ND, norm.weight_D, norm.bias_D, eps, out_ND)

    def _multiply(
        self, x_NI: Tensor, linear: Gpt2Linear, out_NO: Tensor, *, accumulate: bool = False
    ) -> None:
        self.kernels.linear(x_NI, linear.packed, out_NO, accumulate=accumulate)
        out_NO.add_(linear.bias_O)
