"""Tensors of checkpoints, fused and packed, by the families' configs; a rank reads its share.

q, k and v become one matrix, and so do gate and up, unless the files already hold them so (Phi-3).
`read_attention` reads the first half of a layer; layers of another kind have a reader of their own.

Ranks split a model as Megatron-LM does (Shoeybi et al. 2019): matrices that read the residual (q,
k, v, gate, up) are cut by outputs, so a rank has whole heads and whole FFN features; matrices that
write to it (out, down) are cut by inputs, and one sum over ranks follows each. Query heads go with
the key head that they read. The output head is cut by tokens; all ranks hold the embedding.

Shapes:  V = vocabulary or a rank's part of it, M = packed logits rows, D = hidden size, E = fused
         q, k and v, F = FFN size, H = a head or heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.native.ranks import NativeRanks
from outrider.kernels.plan import AttentionKind, PackedLinear, PackedTable
from outrider.models.configs import LayeredConfig, LlamaConfig
from outrider.models.expert_kinds import ExpertNames
from outrider.models.families import MIMO, MIMO_BLOCKS, row_of
from outrider.models.ffn import read_curve, read_mixture
from outrider.models.latent import read_latent
from outrider.models.layer_kinds import Gate, Norms
from outrider.models.rope import turning_order
from outrider.models.weights import FamilyNames, TextNames, WeightReader, Weights


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `rank` of `size` in anything that is cut."""

    rank: int = 0
    size: int = 1

    def cut(self, total: int) -> slice:
        """The rank's part of `total` rows or columns; parts differ by at most one."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def part(self, config: LlamaConfig) -> LlamaConfig:
        """The sizes of this rank's model. Rank 0 gets whole logits, others compute their part."""
        columns = self.cut(config.vocab_size)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            ffn_size=config.ffn_size // self.size,
            vocab_size=columns.stop - columns.start if self.rank else config.vocab_size,
        )


WHOLE = Share()


class Comm(Protocol):
    """Sums and messages among ranks. Calls block; MachineError says that another rank is gone."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def backend(self) -> str:
        """The means of communication, for reports."""
        ...

    @property
    def memory(self) -> NativeRanks | None:
        """The shared memory over which native passes sum; None if ranks share no memory."""
        ...

    @property
    def ordered(self) -> bool:
        """True if sums are added up in the order of ranks, at every offset of a tensor."""
        ...

    def all_reduce_(self, tensor: Tensor) -> None:
        """Leave the sum over all ranks in `tensor`, with the same bits on every rank."""
        ...

    def send(self, tensor: Tensor, to: int) -> None: ...
    def recv_(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with the tensor that rank `source` sends, which has the same size."""
        ...

    def barrier(self) -> None: ...
    def end(self) -> None:
        """Make calls that wait fail, in every rank. May be called from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The comm of a model that is whole in one process."""

    rank: int = 0
    size: int = 1
    backend: str = "none"
    memory: None = None
    ordered: bool = True

    def all_reduce_(self, tensor: Tensor) -> None:
        del tensor

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError(f"{tensor.shape} for rank {to}, but there is none")

    def recv_(self, tensor: Tensor, source: int) -> None:
        raise AssertionError(f"{tensor.shape} from rank {source}, but there is none")

    def barrier(self) -> None:
        pass

    def end(self) -> None:
        pass


class LogitParts:
    """Brings every rank's columns of the logits to rank 0.

    A column has the bits that a whole head would give it: no sum is cut.
    """

    def __init__(self, comm: Comm, vocab_size: int, logits_MV: Tensor) -> None:
        """`logits_MV` is the buffer for the logits of one step."""
        self._comm = comm
        self._columns = [Share(rank, comm.size).cut(vocab_size) for rank in range(comm.size)]
        # A product writes contiguous rows and peers send them, so parts need a buffer of their own.
        widest = max(columns.stop - columns.start for columns in self._columns)
        num_numbers = logits_MV.shape[0] * widest if comm.size > 1 and comm.rank == 0 else 0
        self._flat = torch.empty(num_numbers, device=logits_MV.device)

    def own(self, logits_MV: Tensor) -> Tensor:
        """The buffer that this rank's head writes to; the next call overwrites it."""
        if self._comm.size == 1 or self._comm.rank:
            return logits_MV
        return self._buffer(logits_MV.shape[0], self._columns[0])

    def gather(self, part_MV: Tensor, logits_MV: Tensor) -> None:
        """Fill rank 0's `logits_MV`, given what `own` returned and the head wrote."""
        if self._comm.rank:
            self._comm.send(part_MV, 0)
            return
        if self._comm.size == 1:
            return
        logits_MV[:, self._columns[0]] = part_MV
        for rank, columns in enumerate(self._columns[1:], start=1):
            theirs_MV = self._buffer(logits_MV.shape[0], columns)
            self._comm.recv_(theirs_MV, rank)
            logits_MV[:, columns] = theirs_MV

    def _buffer(self, num_rows: int, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        return self._flat[: num_rows * width].view(num_rows, width)


EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Tables:
    embedding: Tensor | PackedTable
    norm_D: Tensor
    head: PackedLinear
    head_bias_V: Tensor | None = None

    @property
    def embeddings(self) -> Tensor:
        """The embeddings of all tokens as numbers, [V, D]."""
        return self.embedding if isinstance(self.embedding, Tensor) else self.embedding.kept


def read_tables(reader: WeightReader, config: LayeredConfig, share: Share = WHOLE) -> Tables:
    embedding = reader.tokens(
        EMBEDDING, config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Tables(
        embedding=embedding,
        norm_D=_last_norm(reader, config),
        head=reader.head(
            embedding, tied=config.tie_word_embeddings, rows=share.cut(config.vocab_size)
        ),
        head_bias_V=reader.vector("lm_head.bias", config.vocab_size)
        if config.traits.head_bias
        else None,
    )


def _last_norm(reader: WeightReader, config: LayeredConfig) -> Tensor:
    if config.traits.from_zero_last:
        config = replace(config, traits=replace(config.traits, from_one=False))
    return read_norm(reader, config, "model.norm", config.hidden_size)


def family_names(weights: Weights, family: str) -> TextNames:
    """The names of the tensors of a model of the family `family`."""
    plain, row = TextNames.of(weights), row_of(family)
    return FamilyNames(plain.model, plain.head, row.names, weights) if row.names else plain


def read_norm(reader: WeightReader, config: LayeredConfig, name: str, size: int) -> Tensor:
    """The factors that a norm multiplies by; with them, if norms have one, the bias, [2, D]."""
    if config.traits.bare:
        return reader.ones(size)
    weight_D = reader.vector(f"{name}.weight", size)
    if config.traits.from_one:
        weight_D.add_(1)
    if config.traits.norm_bias:
        return torch.stack([weight_D, reader.vector(f"{name}.bias", size)])
    return weight_D


def mtp_prefixes(weights: Weights, config: LlamaConfig) -> tuple[str, ...]:
    """Prefixes of MTP blocks, which are numbered on after the last layer, or those of MiMo; a
    drafter reads them."""
    behind = (f"model.layers.{index}." for index in count(config.num_layers))
    found = takewhile(lambda prefix: f"{prefix}enorm.weight" in weights, behind)
    return *found, *([MIMO_BLOCKS] if config.family == MIMO else [])


# Reads the fields of LayerWeights between the first norm and the residual; takes a prefix of names.
MixerReader = Callable[[str], Mapping[str, Any]]


def read_attention(
    reader: WeightReader, config: LayeredConfig, prefix: str, index: int, share: Share
) -> Mapping[str, Any]:
    """Read the attention of layer `index`, as a MixerReader does."""
    if config.latent is not None:
        return read_latent(reader, config, prefix)
    hidden, head, attended = config.hidden_size, config.head_dim, config.num_heads * config.head_dim
    qkv, out = _qkv_names(reader, prefix, config), {f"{prefix}self_attn.o_proj": hidden}
    order_E = _qkv_order(config, share)

    def head_norm(name: str, num_heads: int) -> Tensor | None:
        if not config.qk_norm:
            return None
        whole, scale = f"{prefix}self_attn.{name}", config.traits.bare_heads
        if scale and f"{whole}.weight" not in reader:
            return reader.ones(head).mul_(scale if name == "q_norm" else 1.0)
        size = num_heads * head if config.traits.whole_heads else head
        weight_H = read_norm(reader, config, whole, size)
        order_H = _turning_order(config)
        return weight_H if order_H is None else weight_H.view(-1, head)[:, order_H].flatten()

    gate = None
    if config.traits.gated:
        queries = {f"{prefix}self_attn.q_proj": 2 * attended}
        gate = reader.linear(queries, hidden, _pairs_of_heads(config)[:, 1].flatten())
    if config.traits.gate_apart:
        gate = reader.linear({f"{prefix}self_attn.gate_proj": attended}, hidden)
    return {
        "qkv": reader.linear(qkv, hidden, order_E),
        "qkv_bias_E": reader.bias(qkv, present=config.qkv_bias, order_O=order_E),
        "q_norm_H": head_norm("q_norm", config.num_heads),
        "k_norm_H": head_norm("k_norm", config.num_kv_heads),
        "out": reader.linear(out, attended, columns=share.cut(attended)),
        "out_bias_D": _summed_bias(
            reader, out, share, present=config.out_bias, scale=config.traits.scales.attended
        ),
        "attention": _attention_kind(reader, config, prefix, index),
        "gate": gate,
    }


def read_layer(
    reader: WeightReader,
    config: LayeredConfig,
    index: int,
    share: Share = WHOLE,
    *,
    stem: str = "model.",
    mixer: MixerReader | None = None,
) -> LayerWeights:
    """Read layer `index`, whose names begin with `stem`. It attends, unless it has a `mixer` of its
    own. Raises CheckpointError for a tensor that is missing or has another shape."""
    prefix = f"{stem}layers.{index}."
    hidden, ffn = config.hidden_size, config.ffn_size
    gate_up, down = _gate_up_names(reader, prefix, config), {_down_name(reader, prefix): hidden}
    order_2F = _gate_up_order(config, share)
    norms = {
        role: read_norm(reader, config, f"{prefix}{name}", hidden)
        for role, name in _norm_names(reader, prefix, config).items()
    }
    sparse = config.experts if index in config.sparse_layers else None
    # Layers of Gemma's mixtures have a dense net, too.
    is_dense = config.feeds(index) and (not sparse or sparse.names is ExpertNames.GEMMA)
    has_bias = config.mlp_bias and is_dense
    mixed = mixer(prefix) if mixer else read_attention(reader, config, prefix, index, share)
    return LayerWeights(
        attention_norm_D=norms.get("attention"),
        **mixed,
        ffn_norm_D=norms.get("ffn"),
        gate_up=reader.linear(gate_up, hidden, order_2F) if is_dense else None,
        gate_up_bias_2F=reader.bias(gate_up, present=has_bias, order_O=order_2F),
        down=reader.linear(down, ffn, columns=share.cut(ffn)) if is_dense else None,
        down_bias_D=_summed_bias(
            reader, down, share, present=has_bias, scale=config.traits.scales.fed
        ),
        attended_norm_D=norms.get("attended"),
        fed_norm_D=norms.get("fed"),
        curve=read_curve(reader, config.traits, prefix, index)
        if config.traits.gate is Gate.XIELU
        else (),
        mixture=read_mixture(reader, sparse, prefix, hidden) if sparse else None,
    )


def _summed_bias(
    reader: WeightReader,
    outputs: dict[str, int],
    share: Share,
    *,
    present: bool,
    scale: float = 1.0,
) -> Tensor | None:
    """The bias of a linear whose outputs the ranks sum, so only rank 0 adds it. Inputs of the
    linear are multiplied by `scale` in a pass."""
    bias_D = reader.bias(outputs, present=present)
    if bias_D is not None and scale != 1:
        bias_D.mul_(scale)
    return bias_D if share.rank == 0 else None


# Names of the norms of a layer, by where they are.
_NORM_NAMES = {
    Norms.BEFORE: {"attention": "input_layernorm", "ffn": "post_attention_layernorm"},
    Norms.AFTER: {"attended": "post_attention_layernorm", "fed": "post_feedforward_layernorm"},
    Norms.AROUND: {
        "attention": "input_layernorm",
        "attended": "post_attention_layernorm",
        "ffn": "pre_feedforward_layernorm",
        "fed": "post_feedforward_layernorm",
    },
    Norms.PARALLEL: {"attention": "input_layernorm"},
    Norms.TWO_PARALLEL: {"attention": "input_layernorm", "ffn": "post_attention_layernorm"},
}


# GLM's names of the norms around attention and FFN.
_GLM_NORMS = {
    "attention": "input_layernorm",
    "attended": "post_self_attn_layernorm",
    "ffn": "post_attention_layernorm",
    "fed": "post_mlp_layernorm",
}
# Falcon's names of two norms of one residual; GGUF files call the second one as others do.
_FALCON_ATTENTION, _FALCON_FFN = "ln_attn", ("ln_mlp", "input_layernorm")
# Names of an FFN's matrices; the second ones are StarCoder 2's.
_UP_NAMES, _DOWN_NAMES = ("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")


def _norm_names(reader: WeightReader, prefix: str, config: LayeredConfig) -> Mapping[str, str]:
    if f"{prefix}{_FALCON_ATTENTION}.weight" in reader:
        fed = next(one for one in _FALCON_FFN if f"{prefix}{one}.weight" in reader)
        return {"attention": _FALCON_ATTENTION, "ffn": fed}
    is_glm = f"{prefix}{_GLM_NORMS['attended']}.weight" in reader
    return _GLM_NORMS if is_glm else _NORM_NAMES[config.traits.norms]


def _down_name(reader: WeightReader, prefix: str) -> str:
    found = (one for one in _DOWN_NAMES if f"{prefix}{one}.weight" in reader)
    return prefix + next(found, _DOWN_NAMES[0])


def _attention_kind(
    reader: WeightReader, config: LayeredConfig, prefix: str, index: int
) -> AttentionKind | None:
    sinks_H = None
    if config.traits.sinks:
        sinks_H = reader.vector(f"{prefix}self_attn.sinks", config.num_heads)
    window = config.layer_kind(index).window
    if not window and not config.traits.attention_cap and sinks_H is None:
        return None
    return AttentionKind(config.scale, window, config.traits.attention_cap, sinks_H)


def _turning_order(config: LayeredConfig) -> Tensor | None:
    return turning_order(config.rope, config.head_dim, interleaved=config.traits.interleaved)


def _qkv_names(reader: WeightReader, prefix: str, config: LayeredConfig) -> dict[str, int]:
    """Names and numbers of outputs of the parts of the fused matrix of queries, keys and values."""
    if config.fused_tensors and f"{prefix}self_attn.qkv_proj.weight" in reader:
        return {f"{prefix}self_attn.qkv_proj": config.qkv_size}
    attended, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        f"{prefix}self_attn.q_proj": attended * (2 if config.traits.gated else 1),
        f"{prefix}self_attn.k_proj": kv,
        f"{prefix}self_attn.v_proj": kv,
    }


def _gate_up_names(reader: WeightReader, prefix: str, config: LayeredConfig) -> dict[str, int]:
    ffn = config.ffn_size
    if config.traits.gate.num_up == 1:
        up = next((one for one in _UP_NAMES if f"{prefix}{one}.weight" in reader), _UP_NAMES[0])
        return {f"{prefix}{up}": ffn}
    if config.fused_tensors and f"{prefix}mlp.gate_up_proj.weight" in reader:
        return {f"{prefix}mlp.gate_up_proj": 2 * ffn}
    return {f"{prefix}mlp.gate_proj": ffn, f"{prefix}mlp.up_proj": ffn}


def _pairs_of_heads(config: LayeredConfig) -> Tensor:
    """The stored rows of each query head and of its gate, of shape [heads, 2, H]."""
    rows = 2 * config.num_heads * config.head_dim
    return torch.arange(rows).view(config.num_heads, 2, config.head_dim)


def _qkv_order(config: LayeredConfig, share: Share) -> Tensor | None:
    """order_E: the checkpoint's row of each row of the fused q, k and v; None if no row moves."""
    order_H, gated = _turning_order(config), config.traits.gated
    by_group = config.traits.by_group
    if order_H is None and share == WHOLE and not gated and not by_group:
        return None
    heads = torch.arange(config.qkv_size).view(-1, config.head_dim)
    if gated:
        queries = _pairs_of_heads(config)
        keys = queries.numel() + torch.arange(2 * config.num_kv_heads * config.head_dim)
        heads = torch.cat([queries[:, 0], keys.view(-1, config.head_dim)])
    if by_group:
        groups = heads.view(config.num_kv_heads, -1, config.head_dim)
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        heads = torch.cat([part.reshape(-1, config.head_dim) for part in parts])
    if order_H is not None:
        turned = heads[: -config.num_kv_heads]
        turned.copy_(turned[:, order_H])
    kinds = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads])
    return torch.cat([kind[share.cut(len(kind))] for kind in kinds]).flatten()


def _gate_up_order(config: LayeredConfig, share: Share) -> Tensor | None:
    """order_2F: the checkpoint's row of each row of gate and up; None if no row moves."""
    if share == WHOLE:
        return None
    rows = torch.arange(2 * config.ffn_size).view(2, config.ffn_size)
    return rows[:, share.cut(config.ffn_size)].flatten()
