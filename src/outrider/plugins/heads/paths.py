"""Heads that draft from one state of the target and the tokens of the path: MLP speculators, Hydra.

    MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124), head i:
        z = gelu(norm_i(a W_i z + b embedding_i(token)) + shift_i);  logits = head_i z
    Hydra (Ankner et al. 2024, arXiv 2402.05109), head i:
        x = [h, e_0, ..., e_i];  x = U_i x + silu(V_i x);  x += silu(W x), ...;  logits = head_i x

where z begins as h, the state of the last token that the target has read, after the target's last
norm, token is the one before the drafted position, the pending one at first, and e_j are embeddings
of pending and drafted tokens. There is no memory to roll back, except where `hydra_head_arch` is
prefix-mlp: then h goes through a decoder layer, which has keys and values of the text.

Shapes:  B = texts, M = logits rows, D = hidden size, Z = inner size, X = inputs of a head,
         V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.draft import Draft
from outrider.core.errors import CheckpointError, given
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext, Stateless
from outrider.drafters.common.growth import DraftPath, DraftSampler, draft_some, grown, last_state
from outrider.kernels.native.forward import Entrance
from outrider.kernels.operators import Kernels, normed, own_kernels, rows_of
from outrider.kernels.plan import PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.configs import LlamaConfig
from outrider.models.heads import HeadsToLoad, check_numbers
from outrider.models.json_object import JsonObject
from outrider.models.layer_kinds import LayerTraits
from outrider.models.llama import LayerOperators
from outrider.models.llama_weights import read_layer
from outrider.models.rope import turns_of
from outrider.models.weights import WeightReader, Weights
from outrider.plugins.heads.hidden import (
    BlockLayer,
    Blocks,
    EntranceNet,
    HeadBlock,
    HeadLimits,
    TargetStates,
    entrance_buffers,
)
from outrider.plugins.heads.native_heads import HeadsShape, HeadWeights, Mix, NativeHeads, Step
from outrider.plugins.heads.target import NormedTarget, normed_target, placement_of

_OTHER_TARGET = "choose heads that were trained for this very target"
_MOST_HEADS = 64


class PathHeads(Protocol):
    """Heads that draft along paths, `num_heads` tokens at most."""

    @property
    def num_heads(self) -> int: ...
    def entered(self, states_BD: Tensor) -> Tensor:
        """Return what drafts begin with, given the normed states of the tokens before."""
        ...

    def begin(self, states_BD: Tensor, pending: Sequence[int]) -> DraftPath:
        """Begin drafts after the pending tokens with such states."""
        ...

    def native(self, sampler: DraftSampler) -> NativeHeads | None:
        """Return a maker of drafts in one call; None without native kernels."""
        ...


@dataclass(frozen=True, slots=True)
class _Maker:
    """A maker of the drafts of `heads`, in one call if there is a `native` one that can."""

    heads: PathHeads
    sampler: DraftSampler
    native: NativeHeads | None

    def __call__(self, rows: Sequence[DraftRow], states_BD: Tensor) -> list[Draft]:
        made = None if self.native is None else self.native(rows, states_BD)
        if made is not None:
            return made
        path = self.heads.begin(states_BD, [row.tokens[-1] for row in rows])
        return grown(self.sampler, rows, path)


class PathDrafter(Stateless):
    """A drafter with heads that read the target's last state. It drafts nothing before the target
    has read a text up to its pending token."""

    def __init__(
        self, name: str, heads: PathHeads, target: NormedTarget, sampler: DraftSampler
    ) -> None:
        self.name, self._heads = name, heads
        self._make = _Maker(heads, sampler, heads.native(sampler))
        self._target, self._kernels = target, own_kernels(target.kernels)
        self.needs = DraftNeeds(hidden_layers=(target.spec.num_layers,))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [self._depth(row) for row in rows], self._drafts)

    def _depth(self, row: DraftRow) -> int:
        if row.hidden is None or not 0 < len(row.tokens) - 1 <= row.hidden.length:
            return 0
        return min(row.budget.depth, self._heads.num_heads)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        states_BD = torch.stack([last_state(row) for row in rows]).float()
        eps = self._target.config.rms_norm_eps
        states_BD = normed(self._kernels, states_BD, self._target.tables.norm_D, eps)
        return self._make(rows, self._heads.entered(states_BD))


@dataclass(frozen=True, slots=True)
class MlpHeads:
    """Heads of an MLP speculator, of a `config.json` with `n_predict`, `emb_dim` and `inner_dim`.
    With `scales_input` the first state is normed once more and divided by the root of 2."""

    heads: tuple[HeadWeights, ...]
    kernels: Kernels
    scales_input: bool

    # That of fms, which trains them.
    eps = 1e-6

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def shape(self) -> HeadsShape:
        first = given(self.heads[0].mix, "mix").inner
        keep = 0.5 ** (0.5 / len(self.heads))
        share = math.sqrt((1 - keep**2) * first.num_out / 2)
        return HeadsShape(size=first.num_in, keep=keep, share=share, eps=self.eps)

    def entered(self, states_BD: Tensor) -> Tensor:
        if not self.scales_input:
            return states_BD
        ones_D = torch.ones_like(states_BD[0])
        return normed(self.kernels, states_BD, ones_D, self.eps) / math.sqrt(2)

    def begin(self, states_BD: Tensor, pending: Sequence[int]) -> DraftPath:
        return _MlpPath(self, states_BD, pending)

    def native(self, sampler: DraftSampler) -> NativeHeads | None:
        return NativeHeads.of(self.kernels, self.heads, self.shape, sampler)

    @classmethod
    def read(cls, heads: HeadsToLoad, target: NormedTarget) -> MlpHeads:
        """Read a folder. Heads may share tensors, which are stored once. Raises CheckpointError for
        tensors that are missing, misshapen or no numbers, or heads of another target."""
        folder, size = heads.folder, target.spec.hidden_size
        raw = _config(folder, target, "emb_dim")
        inner = raw.integer("inner_dim", 0, least=0) or size
        vocab_size = target.spec.vocab_size
        with Weights.at(folder) as weights:
            check_numbers(weights)
            kernels = own_kernels(target.kernels)
            reader = WeightReader(weights, kernels, placement_of(target))

            def named(part: str, index: int) -> str:
                # Only the first projection reads the target's state.
                least = 1 if part == "proj" and index else 0
                names = (f"speculator.{part}.{n}" for n in range(index, least, -1))
                stored = (name for name in names if f"{name}.weight" in reader)
                return next(stored, f"speculator.{part}.{least}")

            found = tuple(
                HeadWeights(
                    mix=Mix(
                        reader.table(f"{named('emb', n)}.weight", vocab_size, inner),
                        reader.linear({named("proj", n): inner}, inner if n else size),
                        reader.vector(f"{named('ln', n)}.weight", inner),
                        reader.vector(f"{named('ln', n)}.bias", inner),
                    ),
                    last=reader.linear({named("head", n): vocab_size}, inner),
                )
                for n in range(raw.integer("n_predict", most=_MOST_HEADS))
            )
            weights.check_all_taken()
        return cls(found, kernels, raw.flag("scale_input", default=False))


class _MlpPath:
    def __init__(self, heads: MlpHeads, states_BD: Tensor, pending: Sequence[int]) -> None:
        self._heads, self._state_MX, self._pending = heads, states_BD, pending
        self._shape = heads.shape

    def first(self) -> Tensor:
        return self._logits(self._pending, 0)

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        self._state_MX = self._state_MX[torch.tensor(above, device=self._state_MX.device)]
        return self._logits(tokens, depth)

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int], depth: int) -> Tensor:
        head, kernels, shape = self._heads.heads[depth], self._heads.kernels, self._shape
        mix = given(head.mix, "mix")
        state_MZ = rows_of(kernels, self._state_MX, mix.inner) * shape.keep
        tokens_M = torch.tensor(tokens, device=state_MZ.device)
        state_MZ += mix.table_VZ[tokens_M].float() * shape.share
        normed_MZ = normed(kernels, state_MZ, mix.norm_Z, shape.eps)
        self._state_MX = functional.gelu(normed_MZ + mix.shift_Z)
        return rows_of(kernels, self._state_MX, head.last)


@dataclass(frozen=True, slots=True)
class HydraHeads:
    """Hydra heads, of a `config.json` with `hydra_num_heads`. Heads that are `grounded` read the
    tokens of the path, others the state alone, which is that of the layer `prefix`, if any."""

    heads: tuple[HeadWeights, ...]
    kernels: Kernels
    embedding_VD: Tensor
    grounded: bool
    prefix: EntranceNet | None = None

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def entered(self, states_BD: Tensor) -> Tensor:
        return states_BD

    def begin(self, states_BD: Tensor, pending: Sequence[int]) -> DraftPath:
        return _HydraPath(self, states_BD, pending)

    def native(self, sampler: DraftSampler) -> NativeHeads | None:
        shape = HeadsShape(
            size=self.embedding_VD.shape[1],
            embeddings_VD=self.embedding_VD if self.grounded else None,
        )
        return NativeHeads.of(self.kernels, self.heads, shape, sampler)

    @classmethod
    def read(cls, heads: HeadsToLoad, target: NormedTarget) -> HydraHeads:
        """Read a folder. Raises CheckpointError for tensors that are missing, misshapen or no
        numbers, heads of another target, and heads of other kinds."""
        folder = heads.folder
        raw = _config(folder, target, "hidden_size")
        kind = raw.text("hydra_head_arch", "mlp")
        if kind not in _HYDRA_KINDS or raw.integer("hidden_state_offset", 0, least=0):
            raise CheckpointError(
                f"{raw.where}: Hydra heads of hydra_head_arch {kind!r}, or that read a hidden "
                f"state of another layer, are not supported; {' and '.join(_HYDRA_KINDS)} are.",
                hint="name EAGLE 3 heads of the same target",
            )
        grounded = raw.flag("grounded_heads", default=False)
        with Weights.at(folder) as weights:
            check_numbers(weights)
            kernels = own_kernels(target.kernels)
            reader = WeightReader(weights, kernels, placement_of(target))
            prefix = _read_prefix(reader, heads, target) if kind == "prefix-mlp" else None
            found = tuple(
                _hydra_head(reader, target, index, grounded=grounded)
                for index in range(raw.integer("hydra_num_heads", most=_MOST_HEADS))
            )
            weights.check_all_taken(unread=(f"{_PREFIX}embed_tokens.",))
        return cls(found, kernels, target.tables.embeddings, grounded, prefix)


_HYDRA_KINDS = ("mlp", "prefix-mlp")
# As it is spelled in the files.
_PREFIX = "prefix_embeding_layer."


def _hydra_head(
    reader: WeightReader, target: NormedTarget, index: int, *, grounded: bool
) -> HeadWeights:
    size, prefix = target.spec.hidden_size, f"hydra_mlp.{index}."

    def affine(name: str, num_out: int, num_in: int) -> tuple[PackedLinear, Tensor | None]:
        linear, has_bias = {name: num_out}, f"{name}.bias" in reader
        return reader.linear(linear, num_in), reader.bias(linear, present=has_bias)

    # A step that trains with dropout has it at the number before.
    first = 0 if f"{prefix}0.linear.weight" in reader else 1
    names = (f"{prefix}{number}." for number in count(first, 1 + first))
    steps: list[Step] = []
    for name in takewhile(lambda one: f"{one}linear.weight" in reader, names):
        width = size * (index + 2 if grounded and not steps else 1)
        own = affine(f"{name}linear", size, width)
        across = affine(f"{name}res_connection", size, width) if width > size else (None, None)
        steps.append(Step(*own, *across))
    if not steps:
        raise CheckpointError(
            f"{prefix}0.linear.weight: this tensor of a Hydra head is missing.",
            hint="is the download complete?",
        )
    head = f"hydra_lm_head.{index}"
    head = head if f"{head}.weight" in reader else f"{head}.1"
    return HeadWeights(*affine(head, target.spec.vocab_size, size), steps)


def _read_prefix(reader: WeightReader, heads: HeadsToLoad, target: NormedTarget) -> EntranceNet:
    """Read the layer before the heads, a Llama's of the target's sizes."""
    sizes = target.config
    if not isinstance(sizes, LlamaConfig):
        raise CheckpointError(
            f"{heads.folder}: these Hydra heads have a layer of a Llama, and the target has none.",
            hint=_OTHER_TARGET,
        )
    attention, capacity = f"{_PREFIX}layers.0.self_attn.", heads.capacity
    layer = replace(
        sizes,
        family="llama",
        num_layers=1,
        layers=(),
        traits=LayerTraits(),
        experts=None,
        sparse_layers=(),
        qk_norm=False,
        fused_tensors=False,
        qkv_bias=f"{attention}q_proj.bias" in reader,
        out_bias=f"{attention}o_proj.bias" in reader,
        mlp_bias=f"{_PREFIX}layers.0.mlp.down_proj.bias" in reader,
    )
    tables, placement = target.tables, placement_of(target)
    turns = turns_of(layer, capacity.num_positions(target.spec.max_tokens), placement.device)
    weights = read_layer(reader, layer, 0, stem=_PREFIX)
    block = HeadBlock(
        config=layer,
        layers=(BlockLayer(LayerOperators(layer, turns), weights),),
        entrance=Entrance(
            token_norm_D=None,
            state_norm_D=None,
            gives_normed=True,
            **entrance_buffers(capacity, layer.hidden_size, placement.device),
        ),
        states=TargetStates(
            layers=(target.spec.num_layers,), norms=(tables.norm_D,), eps=sizes.rms_norm_eps
        ),
        embedding_VD=tables.embeddings,
        head=tables.head,
        norm_D=reader.vector(f"{_PREFIX}norm.weight", layer.hidden_size),
    )
    return EntranceNet(block, reader.kernels, placement, capacity)


class _HydraPath:
    def __init__(self, heads: HydraHeads, states_BD: Tensor, pending: Sequence[int]) -> None:
        self._heads, self._reads_MX, self._pending = heads, states_BD, pending

    def first(self) -> Tensor:
        return self._logits(self._pending, 0)

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        self._reads_MX = self._reads_MX[torch.tensor(above, device=self._reads_MX.device)]
        return self._logits(tokens, depth)

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int], depth: int) -> Tensor:
        heads = self._heads
        if heads.grounded:
            tokens_M = torch.tensor(tokens, device=self._reads_MX.device)
            embedded_MD = heads.embedding_VD[tokens_M].float()
            self._reads_MX = torch.cat([self._reads_MX, embedded_MD], -1)
        x_MX, head = self._reads_MX, heads.heads[depth]
        for step in head.steps:
            x_MX = step.run(heads.kernels, x_MX)
        return rows_of(heads.kernels, x_MX, head.last, head.bias_V)


def _config(folder: Path, target: NormedTarget, key: str) -> JsonObject:
    """Return the config. Raises CheckpointError for sizes that are not the target's."""
    raw = open_checkpoint(folder).document(CONFIG)
    spec = target.spec
    for name, size in ((key, spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if raw.has(name) and raw.integer(name) != size:
            raise CheckpointError(
                f"{raw.where}: the heads have {name} {raw.integer(name)}, the target {size}.",
                hint=_OTHER_TARGET,
            )
    return raw


class PrefixedDrafter:
    """A drafter with Hydra heads behind a layer. It drafts nothing before the target has read a
    text up to its pending token, nor twice for the same text."""

    name = "hydra"

    def __init__(
        self, heads: HydraHeads, prefix: EntranceNet, sampler: DraftSampler, limits: HeadLimits
    ) -> None:
        self._heads, self._make = heads, _Maker(heads, sampler, heads.native(sampler))
        self._blocks = Blocks([prefix], limits)
        self.needs = DraftNeeds(hidden_layers=prefix.hidden_layers)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._blocks.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._blocks.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        depths = [min(self._blocks.depth(row), self._heads.num_heads) for row in rows]
        return draft_some(rows, depths, self._drafts)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        with self._blocks.drafting([row.seq_id for row in rows]):
            # A position of the layer is that of a state: its token is the one after it.
            states_BD = self._blocks.read(self._blocks.catch_up(rows)).states[0]
            return self._make(rows, states_BD)


def mlp_speculator(context: BuildContext) -> PathDrafter:
    """Load an MLP speculator. Raises CheckpointError as `MlpHeads.read` does."""
    target, sampler = _beginning(context)
    heads = MlpHeads.read(context.heads, target)
    return PathDrafter(context.kind.name, heads, target, sampler)


def hydra(context: BuildContext) -> PathDrafter | PrefixedDrafter:
    """Load Hydra heads. Raises CheckpointError as `HydraHeads.read` does."""
    target, sampler = _beginning(context)
    heads, config = HydraHeads.read(context.heads, target), context.config
    if heads.prefix is None:
        return PathDrafter(context.kind.name, heads, target, sampler)
    limits = HeadLimits(
        chunk=config.most_chunk,
        reach=config.most_k + 1,
        window=target.spec.max_tokens,
        first=1,
    )
    return PrefixedDrafter(heads, heads.prefix, sampler, limits)


def _beginning(context: BuildContext) -> tuple[NormedTarget, DraftSampler]:
    words = f"the {context.kind.needs_words}"
    sampler = context.sampler(words, branches=context.resolved.wants_trees)
    return normed_target(context.models.target), sampler
