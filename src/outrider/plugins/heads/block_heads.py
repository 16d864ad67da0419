"""Folders of block drafters, and what some formats put behind the layers of DFlash.

    DFlash     `fc`, `hidden_norm`, `layers.N`, `norm`; z-lab's folders with `dflash_config`, and
               those of the speculators library, which may have a head of fewer ids and `d2t`
    DFlash2    `layers.N.attention_conv` and `mlp_conv`, and `candidate_selector`
    DSpark     `markov_head`; DeepSpec's folders too, with a table and a head of their own
    XPress     `refiner_head`

A Markov head adds logits that depend on the token before; a selector scores the likeliest tokens of
a position by the token before; a refiner adds logits that depend on all tokens before, and is run
some times on its own choice of the block. `confidence_head` is not read: controllers size drafts.

Shapes:  B = texts, S = size of a block, K = drafted positions, M = logits rows, D = hidden size,
         V = vocabulary, W = ids that are drafted, R = rank, T = candidates of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CheckpointError, given
from outrider.core.protocols import DraftRow
from outrider.core.spec import ModelSpec
from outrider.drafters.common.context import BuildContext
from outrider.drafters.common.growth import NOT_DRAFTED, DraftPath, DraftSampler, grown
from outrider.kernels.operators import Kernels, own_kernels, rows_of
from outrider.kernels.plan import PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.families import parse_llama
from outrider.models.heads import check_numbers
from outrider.models.json_object import JsonObject
from outrider.models.llama_weights import read_layer
from outrider.models.rope import turns_of
from outrider.models.weights import WeightReader, Weights
from outrider.plugins.heads.block_drafts import AtOnce, BlockDrafter, Write
from outrider.plugins.heads.blocks import (
    Backbone,
    BlockConfig,
    BlockConv,
    BlockLayer,
    BlockParts,
    Sight,
)
from outrider.plugins.heads.eagle import (
    FROM_TARGET,
    as_llama,
    check_sizes,
    embedding_of,
    output_head,
)
from outrider.plugins.heads.hidden import TargetStates
from outrider.plugins.heads.medusa import ParallelHeadSampler
from outrider.plugins.heads.native_blocks import RefinerWeights, TokenBefore, Written
from outrider.plugins.heads.target import normed_target, placement_of

# z-lab's default.
_BLOCK_SIZE = 16
_MOST_BLOCK = 1024
# Rows of a round that are context for each text: as many as a block.
_SHARES = 2


def read_block_config(folder: Path, target: ModelSpec, *, from_anchor: bool) -> BlockConfig:
    """Read a folder's config; `from_anchor` is the format's default. Raises CheckpointError for a
    file that is wrong or another target's, VocabularyError if its ids mean other text."""
    raw = open_checkpoint(folder).document(CONFIG)
    part = raw.child("dflash_config")
    own = JsonObject(raw.where, {**raw.values, **(part.values if part else {})})
    described = as_llama(raw)
    layer = parse_llama(described)
    check_sizes(raw.where, layer, target)
    if own.has("attention_value_scale") or not own.flag("rope_is_neox_style", default=True):
        raise CheckpointError(
            f"{raw.where}: scales of values and rotations of neighbours are not supported.",
            hint="name EAGLE 3 heads of the same target",
        )
    size = own.integer("block_size", _BLOCK_SIZE, least=2, most=_MOST_BLOCK)
    return BlockConfig(
        layer=replace(layer, layers=()),
        block_size=size,
        mask_token=own.integer("mask_token_id", least=0, most=target.vocab_size - 1),
        sights=_sights(own, described, layer.num_layers),
        from_anchor=own.flag("sample_from_anchor", default=from_anchor),
        draft_vocab_size=own.integer("draft_vocab_size", target.vocab_size, most=target.vocab_size),
        embedding_scale=own.number("input_embedding_scale", 1.0),
        logit_scale=own.number("output_multiplier", 1.0),
        logit_cap=_cap(own),
        own=own,
    )


def _cap(own: JsonObject) -> float:
    key = "final_logit_softcapping"
    return own.number(key) if own.has(key) and own.values[key] != 0 else 0.0


def _sights(own: JsonObject, described: JsonObject, num_layers: int) -> tuple[Sight, ...]:
    """Return what each layer sees. Sliding layers of speculators see so many tokens before the
    block, those of z-lab so many up to the token itself."""
    usual = described.integer("sliding_window", 0, least=0)
    window = own.integer("swa_window_size", usual, least=0)
    listed = (*described.texts("layer_types"), *["full_attention"] * num_layers)[:num_layers]
    if own.flag("use_swa", default=False):
        listed = ("sliding_attention",) * num_layers
    if own.has("speculators_model_type"):
        causal = not own.flag("sliding_window_non_causal", default=False)
        slides, sees_all = Sight(window, causal=causal, from_block=True), Sight()
    else:
        key = "is_causal" if own.has("is_causal") else "causal"
        slides = Sight(window, causal=own.flag(key, default=True))
        sees_all = Sight(causal=own.flag(key, default=False))
    return tuple(slides if kind == "sliding_attention" and window else sees_all for kind in listed)


Extra = TypeVar("Extra")
# Reads what a format has behind the layers.
ReadExtra = Callable[[WeightReader, BlockConfig], Extra]


def load_blocks(
    context: BuildContext, read_extra: ReadExtra[Extra], *, from_anchor: bool = False
) -> tuple[Backbone, Extra]:
    """Load a block drafter and what it has behind its layers. Raises CheckpointError, naming file
    and tensor, for a folder that is incomplete, not of this target or not all numbers."""
    heads, target = context.heads, normed_target(context.models.target)
    config = read_block_config(heads.folder, target.spec, from_anchor=from_anchor)
    chunk, batch = context.config.most_chunk, context.config.most_batch
    size, page = config.block_size, heads.capacity.page_size
    capacity = replace(
        heads.capacity,
        max_rows=max(chunk + size, _SHARES * size * batch),
        num_slots=heads.capacity.num_slots + batch * (size + page) // page * page,
    )
    placement, kernels = placement_of(target), own_kernels(target.kernels)
    with Weights.at(heads.folder) as weights:
        check_numbers(weights)
        reader = WeightReader(weights, kernels, placement)
        config = _as_stored(config, reader)
        head, ids_W = output_head(reader, weights, config.draft_vocab_size, target)
        hidden, num_states = config.layer.hidden_size, len(capacity.hidden_layers)
        parts = BlockParts(
            layers=tuple(_layer(reader, config, n) for n in range(config.layer.num_layers)),
            turns=turns_of(
                config.layer, capacity.num_positions(target.spec.max_tokens), placement.device
            ),
            states=TargetStates(
                layers=capacity.hidden_layers,
                join=reader.linear({"fc": hidden}, num_states * hidden),
            ),
            context_norm_D=reader.vector("hidden_norm.weight", hidden),
            embedding_VD=embedding_of(reader, target),
            norm_D=reader.vector("norm.weight", hidden),
            head=head,
            ids_W=ids_W,
        )
        extra = read_extra(reader, config)
        weights.check_all_taken(ignored=FROM_TARGET, unread=("confidence_head.",))
    return Backbone(config, parts, kernels, placement, capacity), extra


def block_drafter(
    context: BuildContext, backbone: Backbone, write: Write, *, whole: bool = False
) -> BlockDrafter:
    """Return the drafter of the context's kind; `whole` is that of `BlockDrafter`."""
    return BlockDrafter(
        context.kind.name,
        backbone,
        write,
        chunk=context.config.most_chunk,
        window=context.models.target.spec.max_tokens,
        whole=whole,
    )


Before = TypeVar("Before", bound=TokenBefore)
# Makes the path of a round from the layers, what is behind them, the texts and their blocks.
BeginPath = Callable[[Backbone, Before, Sequence[DraftRow], Written], DraftPath]


def path_drafter(
    context: BuildContext,
    read_extra: ReadExtra[Before | None],
    begin: BeginPath[Before],
    *,
    model: str,
    from_anchor: bool = False,
) -> BlockDrafter:
    """Load a drafter of the paths that `begin` makes; of all positions at once for a folder with
    nothing behind its layers. `model` names them in errors. Raises as `load_blocks` does."""
    backbone, extra = load_blocks(context, read_extra, from_anchor=from_anchor)
    if extra is None:
        parallel = ParallelHeadSampler.of(context, model)
        backbone.choose(parallel.sampler, trees=parallel)
        return block_drafter(context, backbone, AtOnce(backbone, parallel))
    sampler = context.sampler(model, branches=context.resolved.wants_trees)
    backbone.choose(sampler, extra)
    write = AlongPaths(sampler, partial(begin, backbone, extra))
    return block_drafter(context, backbone, write)


def _as_stored(config: BlockConfig, reader: WeightReader) -> BlockConfig:
    """Return the config with the norms and biases that the layers have."""
    attention = "layers.0.self_attn."
    layer = replace(
        config.layer,
        qk_norm=f"{attention}q_norm.weight" in reader,
        qkv_bias=f"{attention}q_proj.bias" in reader,
        out_bias=f"{attention}o_proj.bias" in reader,
    )
    return replace(config, layer=layer)


def _layer(reader: WeightReader, config: BlockConfig, index: int) -> BlockLayer:
    prefix = f"layers.{index}."
    return BlockLayer(
        read_layer(reader, config.layer, index, stem=""),
        *(_conv(reader, config, f"{prefix}{name}") for name in ("attention_conv", "mlp_conv")),
    )


def _conv(reader: WeightReader, config: BlockConfig, name: str) -> BlockConv | None:
    if f"{name}.base_kernel" not in reader:
        return None
    hidden = config.layer.hidden_size
    taps, size = config.own.integer("conv_kernel_size"), config.own.integer("conv_group_size")
    if hidden % size:
        raise CheckpointError(
            f"{config.own.where}: conv_group_size {size} does not divide hidden_size {hidden}.",
            hint="correct it in that file, or download the file again",
        )
    groups = hidden // size
    return BlockConv(
        reader.vector(f"{name}.base_kernel", 2, taps, hidden),
        reader.linear({f"{name}.kernel_projection": 2 * taps * groups}, hidden),
    )


class MarkovHead(TokenBefore):
    """A head whose logits depend on the token before: rows of `table_VR`, multiplied by `out`.

    With a `gate` rows are scaled by a gate of state and row. With `joint`, a recurrent state, which
    begins as zeros, runs along the path: [state, row, hidden] gives its gate, its next value and,
    through tanh, what `out` reads.
    """

    __slots__ = ()

    @classmethod
    def read(cls, reader: WeightReader, config: BlockConfig) -> MarkovHead | None:
        """Read the head; None if the folder has none."""
        name = "markov_head.markov_w1.weight"
        if name not in reader:
            return None
        rank, hidden = config.own.integer("markov_rank"), config.layer.hidden_size
        inner: dict[str, Any] = {}
        for key, part, num_out, num_in in (
            ("gate", "gate_proj", rank, hidden + rank),
            ("joint", "joint_proj", 3 * rank, hidden + 2 * rank),
        ):
            linear = {f"markov_head.{part}": num_out}
            if not inner and f"markov_head.{part}.weight" in reader:
                inner[key] = reader.linear(linear, num_in)
                inner["bias"] = reader.bias(linear, present=True)
        return cls(
            reader.table(name, config.layer.vocab_size, rank),
            reader.linear({"markov_head.markov_w2": config.draft_vocab_size}, rank),
            **inner,
        )

    def step(
        self, kernels: Kernels, tokens_M: Tensor, hidden_MD: Tensor, state_MR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the added logits, [M, W], and the next state. Its operators define those of native
        passes."""
        row_MR = self.table_VR[tokens_M].float()
        if self.gate is not None:
            both = torch.cat([hidden_MD, row_MR], -1)
            kernels.sigmoid_mul(rows_of(kernels, both, self.gate, self.bias), row_MR)
        if self.joint is not None:
            all_three = torch.cat([state_MR, row_MR, hidden_MD], -1)
            parts = rows_of(kernels, all_three, self.joint, self.bias).chunk(3, -1)
            gate_MR, value_MR, row_MR = (part.contiguous() for part in parts)
            kernels.soft_cap(value_MR, 1.0)
            kernels.soft_cap(row_MR, 1.0)
            kept_MR = state_MR - value_MR
            kernels.sigmoid_mul(gate_MR, kept_MR)
            state_MR = kept_MR + value_MR
        return rows_of(kernels, row_MR, self.out), state_MR


class MarkovPath:
    """A Path whose logits are those of the block, plus those of a MarkovHead."""

    def __init__(
        self, backbone: Backbone, head: MarkovHead, rows: Sequence[DraftRow], written: Written
    ) -> None:
        self._backbone, self._head = backbone, head
        self._logits_BKW, hidden_BSD = written.logits_BKW, written.hidden_BSD
        self._hidden_BKD = hidden_BSD[:, -backbone.config.most :]
        self._pending = [row.tokens[-1] for row in rows]
        self._text_M = torch.arange(len(rows), device=hidden_BSD.device)
        self._state_MR = hidden_BSD.new_zeros(len(rows), head.table_VR.shape[1])
        if not backbone.config.from_anchor:
            # The recurrent state begins with the pending token's own row, which drafts nothing.
            pending_B = torch.tensor(self._pending, device=hidden_BSD.device)
            hidden_BD = hidden_BSD[:, 0]
            self._state_MR = head.step(backbone.kernels, pending_B, hidden_BD, self._state_MR)[1]

    def first(self) -> Tensor:
        return self._logits(self._pending, 0)

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        above_M = torch.tensor(above, device=self._text_M.device)
        self._text_M, self._state_MR = self._text_M[above_M], self._state_MR[above_M]
        return self._logits(tokens, depth)

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int], depth: int) -> Tensor:
        hidden_MD = self._hidden_BKD[self._text_M, depth]
        tokens_M = torch.tensor(tokens, device=hidden_MD.device)
        # Indexing copies.
        logits_MW = self._logits_BKW[self._text_M, depth]
        added_MW, self._state_MR = self._head.step(
            self._backbone.kernels, tokens_M, hidden_MD, self._state_MR
        )
        return self._backbone.over_all(logits_MW.add_(added_MW))


class Selector(TokenBefore):
    """Scores of a position's likeliest `num_candidates` tokens, which alone may be drafted: the
    block's logit, plus the product of three rows: of the token before, of the state, which `out`
    makes, and of the candidate."""

    __slots__ = ()

    @classmethod
    def read(cls, reader: WeightReader, config: BlockConfig) -> Selector | None:
        """Read the selector; None if the folder has none."""
        prefix = "candidate_selector."
        if f"{prefix}hidden_projection.weight" not in reader:
            return None
        rank = config.own.integer("selector_rank")
        tables = [
            reader.table(
                name if name in reader else f"{name}.weight", config.layer.vocab_size, rank
            )
            for name in (f"{prefix}predecessor_codebook", f"{prefix}successor_codebook")
        ]
        states = reader.linear({f"{prefix}hidden_projection": rank}, config.layer.hidden_size)
        table_VR, after_VR = tables
        most = config.own.integer("selector_top_k")
        return cls(table_VR, states, after_VR=after_VR, num_candidates=most)


class SelectedPath:
    """A Path of the candidates that a Selector scores."""

    def __init__(
        self, backbone: Backbone, selector: Selector, rows: Sequence[DraftRow], written: Written
    ) -> None:
        hidden_BSD, logits_BKW = written.hidden_BSD, written.logits_BKW
        hidden_BKD, self._selector = hidden_BSD[:, -backbone.config.most :], selector
        num_candidates = min(selector.num_candidates, logits_BKW.shape[-1])
        self._best_BKT, ids_BKT = logits_BKW.topk(num_candidates)
        self._ids_BKT = backbone.target_ids(ids_BKT)
        self._after_VR = given(selector.after_VR, "rows of candidates")
        self._states_BKR = rows_of(backbone.kernels, hidden_BKD, selector.out)
        self._pending = [row.tokens[-1] for row in rows]
        self._text_M = torch.arange(len(rows), device=hidden_BSD.device)
        self._vocab_size = backbone.config.layer.vocab_size

    def first(self) -> Tensor:
        return self._scores(self._pending, 0)

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        self._text_M = self._text_M[torch.tensor(above, device=self._text_M.device)]
        return self._scores(tokens, depth)

    @torch.inference_mode()
    def _scores(self, tokens: Sequence[int], depth: int) -> Tensor:
        text_M, selector = self._text_M, self._selector
        before_MR = selector.table_VR[torch.tensor(tokens, device=text_M.device)].float()
        context_MR = before_MR * self._states_BKR[text_M, depth]
        ids_MT = self._ids_BKT[text_M, depth]
        # A row's sum must not depend on the number of rows.
        added_MT = (context_MR[:, None] * self._after_VR[ids_MT].float()).sum(-1)
        scores_MT = self._best_BKT[text_M, depth] + added_MT
        out_MV = scores_MT.new_full((len(scores_MT), self._vocab_size), NOT_DRAFTED)
        return out_MV.scatter_(1, ids_MT, scores_MT)


class Refiner(RefinerWeights):
    """Logits that depend on all tokens of a block before a position, added to the block's own.

    Position k reads its token before, its state and the mean state of the block, joined to R
    channels; `mix_RSS` adds those of positions up to k, then comes a net with a gate. Tokens are
    the refiner's own choice of the round before, `num_rounds` times; the block's own at first.
    """

    __slots__ = ()

    @classmethod
    def read(cls, reader: WeightReader, config: BlockConfig) -> Refiner:
        own, prefix, size = config.own, "refiner_head.", config.block_size
        rank, hidden = own.integer("xpress_rank"), config.layer.hidden_size
        inner = rank * own.integer("xpress_mlp_ratio", 2)

        def linear(name: str, num_out: int, num_in: int) -> PackedLinear:
            return reader.linear({f"{prefix}{name}": num_out}, num_in)

        return cls(
            reader.table(f"{prefix}token_embed.weight", config.layer.vocab_size, rank),
            linear("down_h", rank, hidden),
            linear("down_g", rank, hidden),
            linear("in_proj", rank, 3 * rank),
            reader.vector(f"{prefix}mix_l", rank, size, size).tril(),
            linear("mlp_gate", inner, rank),
            linear("mlp_up", inner, rank),
            linear("mlp_down", rank, inner),
            linear("readout", config.draft_vocab_size, rank),
            own.integer("num_jacobi_passes", 6, most=_MOST_BLOCK),
        )

    def added(self, kernels: Kernels, states_BSX: Tensor, before_BS: Tensor) -> Tensor:
        """Return the added logits, [B, S, W], given the token before each position."""
        read = torch.cat([states_BSX, self.table_VR[before_BS].float()], -1)
        x_BSR = rows_of(kernels, read, self.join)
        # One text at a time: a row's sum must not depend on the batch.
        x_BSR = x_BSR + torch.stack(
            [torch.einsum("rkj,jr->kr", self.mix_RSS, x_SR) for x_SR in x_BSR]
        )
        both = torch.cat([rows_of(kernels, x_BSR, one) for one in (self.gate, self.up)], -1)
        inner = both.new_empty(*both.shape[:-1], self.gate.num_out)
        kernels.silu_mul(both.flatten(0, -2), inner.flatten(0, -2))
        x_BSR = x_BSR + rows_of(kernels, inner, self.down)
        return rows_of(kernels, x_BSR, self.out)

    def refine(
        self, backbone: Backbone, rows: Sequence[DraftRow], hidden_BSD: Tensor, logits_BKW: Tensor
    ) -> Tensor:
        """Return the refined logits of the drafted positions."""
        kernels, most = backbone.kernels, logits_BKW.shape[1]
        mean_B1R = rows_of(kernels, hidden_BSD.mean(1, keepdim=True), self.mean)
        own_BSR = rows_of(kernels, hidden_BSD, self.own)
        states_BSX = torch.cat([own_BSR, mean_B1R.expand_as(own_BSR)], -1)
        known = [[row.tokens[-1]] for row in rows]
        if not backbone.config.from_anchor:
            # The first position is the pending token's own, after the token before it.
            known = [[row.tokens[-2:][0], row.tokens[-1]] for row in rows]
        known_BX = torch.tensor(known, device=hidden_BSD.device)
        refined_BKW = logits_BKW
        for _ in range(self.num_rounds):
            chosen_BK = backbone.target_ids(refined_BKW.argmax(-1))
            before_BS = torch.cat([known_BX, chosen_BK[:, :-1]], 1)
            refined_BKW = logits_BKW + self.added(kernels, states_BSX, before_BS)[:, -most:]
        return refined_BKW


@dataclass(frozen=True, slots=True)
class AlongPaths:
    """Drafts along the paths that `begin` makes of texts and their blocks."""

    sampler: DraftSampler
    begin: Callable[[Sequence[DraftRow], Written], DraftPath]

    def __call__(self, rows: Sequence[DraftRow], written: Written) -> list[Draft]:
        return grown(self.sampler, rows, self.begin(rows, written))
