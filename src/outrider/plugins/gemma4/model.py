"""Gemma 4 as a decoder of the Llama line: layers of two sizes, shared keys and inputs of layers.

    x += norm(out(attention(rope(norm(q)), rope(norm(k)), norm(v))))
    x += norm(down(gelu(gate(y)) * up(y)))                            y = norm(x)
    x += norm(back(gelu(into(x)) * p))                                p = the layer's own input
    x *= scale

In a mixture (26B-A4B) the FFN's output is the sum of the dense net's and of the experts', each
normed. Layers run operator by operator, on views of the step's buffers in their own sizes.

Shapes:  N = packed tokens, V = vocabulary, D = hidden size or a head's, E = fused q, k and v,
         A = heads x head size, K = keys of all heads, L = layers, P = size of a layer's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.kernels.native.forward import InputNet, LayerWeights, RoutedNorms
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import AttentionKind, Linear, PackedLinear, PackedPlan, PackedTable
from outrider.models.decoder import LayerKV, Scratch
from outrider.models.ffn import gated, mix
from outrider.models.llama import LayerOperators, LlamaModel
from outrider.models.llama_weights import WHOLE, Share, read_layer
from outrider.models.weights import WeightReader
from outrider.plugins.gemma4.config import GemmaConfig


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The weights that make the inputs of all layers: a table of tokens, and a projection of their
    embeddings, which `linear` multiplies by."""

    table: Tensor | PackedTable
    projection: PackedLinear
    norm_P: Tensor
    linear: Linear

    def of(self, kernels: Kernels, config: GemmaConfig, plan: PackedPlan, x_ND: Tensor) -> Tensor:
        """The inputs, of shape [N, L, P], for the scaled embeddings `x_ND`."""
        num_tokens, size = plan.num_tokens, config.input_size
        own_NLP = x_ND.new_empty(num_tokens, config.num_layers, size)
        rows_NP, flat = own_NLP.view(-1, size), own_NLP.view(num_tokens, -1)
        self.linear(x_ND, self.projection, flat)
        flat.mul_(config.hidden_size**-0.5)
        kernels.rms_norm(rows_NP, self.norm_P, config.rms_norm_eps, rows_NP)
        if isinstance(self.table, Tensor):
            tokens = self.table.index_select(0, plan.tokens_N).float()
        else:
            tokens = torch.empty_like(flat)
            self.table.read(plan.tokens_N, tokens)
        return own_NLP.add_(tokens.view_as(own_NLP), alpha=size**0.5).mul_(2.0**-0.5)


@dataclass(frozen=True, slots=True)
class GemmaOperators(LayerOperators):
    """A layer operator by operator."""

    def attend(
        self,
        kernels: Kernels,
        layer: LayerWeights,
        reads: Tensor,
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
    ) -> None:
        config, qkv = self.config, given(layer.qkv, "attention")
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        first_NE = reads.new_empty(len(reads), qkv.num_out)
        kernels.linear(reads, qkv, first_NE)
        if layer.qkv_bias_E is not None:
            first_NE.add_(layer.qkv_bias_E)
        qkv_NE = _fitted(scratch.qkv_NE, queries + 2 * keys)
        q_norm_H = given(layer.q_norm_H, "norm of queries")
        if layer.k_norm_H is None:
            self._norm_each(kernels, first_NE, q_norm_H)
            no_keys = (kv[0][:0], kv[1][:0])
            kernels.rope_append(first_NE, *self.turns, plan, *no_keys)
            qkv_NE[:, :queries] = first_NE
        else:
            # Values are the last product: their own, or that of the keys.
            values_NK = first_NE[:, -keys:].clone(memory_format=torch.contiguous_format)
            self._norm_each(kernels, values_NK, torch.ones_like(q_norm_H))
            qkv_NE[:, : queries + keys] = first_NE[:, : queries + keys]
            qkv_NE[:, -keys:] = values_NK
            eps = config.rms_norm_eps
            kernels.head_norm(qkv_NE, q_norm_H, layer.k_norm_H, config.num_kv_heads, eps)
            kernels.rope_append(qkv_NE, *self.turns, plan, *kv)
        attended_NA = _fitted(scratch.attended_NA, queries)
        kernels.attention(qkv_NE, *kv, plan, layer.attention or config.scale, attended_NA)
        product = (attended_NA, given(layer.out, "attention"), layer.out_bias_D)
        self.add(kernels, scratch, product, layer.attended_norm_D)

    def _norm_each(self, kernels: Kernels, heads_NK: Tensor, weight_D: Tensor) -> None:
        """Norm every head of these contiguous rows, in place."""
        rows_D = heads_NK.view(-1, self.config.head_dim)
        kernels.rms_norm(rows_D, weight_D, self.config.rms_norm_eps, rows_D)

    def feed(self, kernels: Kernels, layer: LayerWeights, reads: Tensor, scratch: Scratch) -> None:
        ffn = self.config.ffn_size
        scratch = replace(
            scratch,
            up_NU=_fitted(scratch.up_NU, 2 * ffn),
            activated_NF=_fitted(scratch.activated_NF, ffn),
        )
        if layer.mixture is None:
            LayerOperators.feed(self, kernels, layer, reads, scratch)
        else:
            self._feed_both(kernels, layer, scratch)

    def _feed_both(self, kernels: Kernels, layer: LayerWeights, scratch: Scratch) -> None:
        """Add the sum of the dense net and the experts, both of which read the residual."""
        norms = given(layer.norms, "norms of a mixture")
        eps, x_ND = self.config.rms_norm_eps, scratch.x_ND
        dense_ND, routed_ND, read_ND = (torch.empty_like(x_ND) for _ in range(3))
        kernels.rms_norm(x_ND, given(layer.ffn_norm_D, "norm"), eps, read_ND)
        kernels.linear(read_ND, given(layer.gate_up, "dense FFN"), scratch.up_NU)
        gated(kernels, self.config.traits.gate, scratch.up_NU, scratch.activated_NF)
        kernels.linear(scratch.activated_NF, given(layer.down, "dense FFN"), dense_ND)
        kernels.rms_norm(dense_ND, norms.dense_D, eps, dense_ND)
        kernels.rms_norm(x_ND, norms.router_D, eps, routed_ND)
        kernels.rms_norm(x_ND, norms.experts_D, eps, read_ND)
        sizes, mixture = self.config.experts, given(layer.mixture, "mixture")
        mixed_ND = mix(kernels, given(sizes, "sizes"), mixture, read_ND, routed_ND=routed_ND)
        kernels.rms_norm(mixed_ND, norms.mixed_D, eps, mixed_ND)
        self._add_to_residual(kernels, scratch, dense_ND.add_(mixed_ND), layer.fed_norm_D)


class GemmaModel(LlamaModel):
    """A LlamaModel with Gemma 4's layers."""

    config: GemmaConfig
    operators = GemmaOperators

    def read_layer(self, reader: WeightReader, index: int, share: Share = WHOLE) -> LayerWeights:
        del share
        return read_gemma_layer(reader, self.config, index)

    def read_others(self, reader: WeightReader) -> tuple[str, ...]:
        config, own = self.config, ("k_proj", "v_proj", "k_norm", "v_norm")
        if size := config.input_size:
            inputs, name = config.num_layers * size, "model.embed_tokens_per_layer.weight"
            self._made_of = LayerInputs(
                reader.tokens(name, config.input_tokens, inputs, tied=False),
                reader.linear({"model.per_layer_model_projection": inputs}, config.hidden_size),
                reader.vector("model.per_layer_projection_norm.weight", size),
                reader.kernels.linear,
            )
        # Files may have matrices of layers that read the keys and values of others.
        sharing = (index for index in range(config.num_layers) if not config.stores(index))
        return tuple(f"model.layers.{index}.self_attn.{n}." for index in sharing for n in own)

    _made_of: LayerInputs | None = None
    _inputs_NLP: Tensor | None = None

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        super().embed(plan, scratch)
        if self._made_of is not None:
            made = self._made_of.of(self.kernels, self.config, plan, scratch.x_ND)
            self._inputs_NLP = made

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        if depth not in self._depths:
            return
        super().layer(depth, plan, scratch, kv)
        layer, inputs_NLP = self._layers[depth], self._inputs_NLP
        if layer.inputs is not None and inputs_NLP is not None:
            self._read_input(layer.inputs, inputs_NLP[:, depth], scratch)
        if layer.scale != 1:
            scratch.x_ND.mul_(layer.scale)

    def _read_input(self, net: InputNet, input_NP: Tensor, scratch: Scratch) -> None:
        """Add to the residual what a layer makes of its own input."""
        kernels, into_NP = self.kernels, scratch.x_ND.new_empty(input_NP.shape)
        kernels.linear(scratch.x_ND, net.into, into_NP)
        kernels.gelu_mul(torch.cat([into_NP, input_NP], dim=1), into_NP)
        kernels.linear(into_NP, net.back, scratch.norm_ND)
        eps = self.config.rms_norm_eps
        kernels.rms_norm(scratch.norm_ND, net.norm_D, eps, scratch.norm_ND)
        scratch.x_ND.add_(scratch.norm_ND)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        super().head(x_MD, norm_MD, logits_MV)
        if self.config.suppressed:
            logits_MV[:, list(self.config.suppressed)] = -torch.inf

    def _make_forward(self) -> None:
        """Return None: no native call has this order of operators."""


def read_gemma_layer(reader: WeightReader, config: GemmaConfig, index: int) -> LayerWeights:
    """Read layer `index`. Raises CheckpointError for a tensor that is missing or misshapen."""
    config, prefix = config.at(index), f"model.layers.{index}."
    hidden = config.hidden_size

    def norm(name: str) -> Tensor:
        return reader.vector(f"{prefix}{name}.weight", hidden)

    inputs = norms = None
    if size := config.input_size:
        inputs = InputNet(
            reader.linear({f"{prefix}per_layer_input_gate": size}, hidden),
            reader.linear({f"{prefix}per_layer_projection": hidden}, size),
            norm("post_per_layer_input_norm"),
        )
    if config.experts is not None:
        norms = RoutedNorms(
            reader.vector(f"{prefix}router.scale", hidden).mul_(hidden**-0.5),
            norm("pre_feedforward_layernorm_2"),
            norm("post_feedforward_layernorm_1"),
            norm("post_feedforward_layernorm_2"),
        )
    mixer = partial(_read_attention, reader, config, index)
    layer = read_layer(reader, config, index, mixer=mixer)
    scalar = f"{prefix}layer_scalar"
    scale = float(reader.vector(scalar, 1)) if scalar in reader else 1.0
    return replace(layer, scale=scale, inputs=inputs, norms=norms)


def _read_attention(
    reader: WeightReader, config: GemmaConfig, index: int, prefix: str
) -> Mapping[str, Any]:
    """Read the attention of layer `index`, as a MixerReader does."""
    name, head, stores = f"{prefix}self_attn.", config.head_dim, config.stores(index)
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    outputs = {f"{name}q_proj": queries}
    if stores:
        outputs[f"{name}k_proj"] = keys
        if index not in config.values_from_keys:
            outputs[f"{name}v_proj"] = keys
    out = {f"{name}o_proj": config.hidden_size}
    window = config.layer_kind(index).window
    return {
        "qkv": reader.linear(outputs, config.hidden_size),
        "qkv_bias_E": reader.bias(outputs, present=config.qkv_bias),
        "q_norm_H": reader.vector(f"{name}q_norm.weight", head),
        "k_norm_H": reader.vector(f"{name}k_norm.weight", head) if stores else None,
        "out": reader.linear(out, queries),
        "out_bias_D": reader.bias(out, present=config.out_bias),
        "attention": AttentionKind(config.scale, window) if window else None,
    }


def _fitted(buffer: Tensor, width: int) -> Tensor:
    """Contiguous rows of `width` numbers in a buffer that has as many rows of at least so many."""
    num_rows = len(buffer)
    return buffer.reshape(-1)[: num_rows * width].view(num_rows, width)
