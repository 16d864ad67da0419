"""Block drafters: a few layers that read the target's states and a block of masked tokens.

DFlash (Chen et al. 2026, arXiv 2602.06036) and formats that extend it write a block in one pass:

    c_p = norm_c(fc [h_p])                    the target's states at position p, of several layers
    x   = embedding of [pending, mask, mask, ...]
    per layer:  x += out(attention(q(y), k([c, y]), v([c, y])));  x += ffn(norm(x))     y = norm(x)
    logits = head(norm(x))

The pending token has no state yet, so the context ends before it. Tokens of the block see the
context and, unless a layer is causal, the whole block. Row i predicts the token of its own
position, or with `from_anchor` the one after it: then the pending token's row has the first draft.

Keys and values of the context depend on the text alone and lie in an arena of pages. New context
and a block are staged in one pass, and only the context is retained: a block is rolled back.
Cost: a pass of B times S rows over the layers, and the projection of the new context.

Shapes:  B = texts, S = size of a block, P = tokens of one text, N = packed rows (N = M + new
         context), M = B times S, K = drafted positions, D = hidden size, V = vocabulary, W = ids
         that are drafted, L = captured layers, E = fused q, k and v, F = FFN size, C = taps of a
         convolution, G = groups of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import NumericsError, given
from outrider.core.protocols import DraftRow, StepRow
from outrider.drafters.common.growth import NOT_DRAFTED, DraftSampler
from outrider.kernels.native.forward import (
    DecoderTraits,
    ForwardParts,
    LayerWeights,
    NativeForward,
)
from outrider.kernels.operators import Kernels, normed
from outrider.kernels.plan import PackedLinear, PackedPlan, sent
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import ModelCapacity, Passes
from outrider.models.json_object import JsonObject
from outrider.models.rope import Turns
from outrider.models.weights import Placement
from outrider.plugins.heads.hidden import TargetStates
from outrider.plugins.heads.native_blocks import (
    BlockSizes,
    BlockText,
    BlockWeights,
    NativeBlocks,
    RefinerWeights,
    TokenBefore,
    Written,
)
from outrider.plugins.heads.native_choice import Chooser, TreeShapes


@dataclass(frozen=True, slots=True)
class Sight:
    """The part of a text that a block's token sees in a layer: with a `window` the last tokens of
    the text alone, and if it is `causal` no later token of the block. The window ends at the token
    itself, or with `from_block` begins so many tokens before the block."""

    window: int = 0
    causal: bool = False
    from_block: bool = False

    def span(self, position: int, start: int, stop: int) -> tuple[int, int]:
        """The first position that the token at `position` of the block from `start` to `stop` sees,
        and the one after the last."""
        end = position + 1 if self.causal else stop
        if not self.window:
            return 0, end
        if self.from_block:
            return max(start - self.window, 0), end
        return max(position - self.window + 1, 0), min(end, position + self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Sizes of a block drafter. `sights` has one for each layer. Embeddings are multiplied by
    `embedding_scale`, logits by `logit_scale`, and then capped by `logit_cap` (0: not). `own` has
    the keys of the folder's config."""

    layer: LlamaConfig
    own: JsonObject
    block_size: int
    mask_token: int
    sights: tuple[Sight, ...]
    from_anchor: bool = False
    draft_vocab_size: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def most(self) -> int:
        """The number of positions that a block predicts."""
        return self.block_size - (not self.from_anchor)


@dataclass(frozen=True, slots=True)
class BlockConv:
    """A convolution over the tokens of a block before and after a part of a layer (DFlash2).

    Tap c multiplies the token c positions before, nothing before the block, by a weight of its
    channel in `base_2CD` and one of its group that `kernels` computes from the input: those of the
    entry come first, then those of the exit.
    """

    base_2CD: Tensor
    kernels: PackedLinear

    def weights(self, kernels: Kernels, x_MD: Tensor) -> Tensor:
        """The weights of entry and exit, of shape [M, 2, C, G]."""
        out = x_MD.new_empty(len(x_MD), self.kernels.num_out)
        kernels.linear(x_MD, self.kernels, out)
        return out.view(len(x_MD), 2, self.base_2CD.shape[1], -1)

    def run(self, x_MD: Tensor, weights_M2CG: Tensor, side: int, block_size: int) -> Tensor:
        """Return the tokens after the convolution of `side`: 0 is the entry, 1 the exit."""
        num_groups = weights_M2CG.shape[3]
        x_BSD = x_MD.view(-1, block_size, x_MD.shape[1])
        out_MGX = torch.zeros_like(x_MD).view(len(x_MD), num_groups, -1)
        for tap in range(self.base_2CD.shape[1]):
            moved_BSD = functional.pad(x_BSD, (0, 0, tap, 0))[:, :block_size]
            own_GX = self.base_2CD[side, tap].view(num_groups, -1)
            factors_MGX = own_GX + weights_M2CG[:, side, tap, :, None]
            out_MGX += moved_BSD.reshape(out_MGX.shape) * factors_MGX
        return out_MGX.view(x_MD.shape)


@dataclass(frozen=True, slots=True)
class BlockLayer:
    weights: LayerWeights
    attention_conv: BlockConv | None = None
    ffn_conv: BlockConv | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Weights; norms are float32. `states` makes c before its norm, `context_norm_D`. `head` knows
    the `ids_W`, None for all. `embedding_VD` and `head` may be the target's."""

    layers: tuple[BlockLayer, ...]
    turns: Turns
    states: TargetStates
    context_norm_D: Tensor
    embedding_VD: Tensor
    norm_D: Tensor
    head: PackedLinear
    ids_W: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NewContext:
    """Tokens of a text from `start` on that are read next, and the target's states of them."""

    row: DraftRow
    start: int
    stop: int

    def states(self) -> Tensor:
        """Return states_PLD."""
        return given(self.row.hidden, "hidden state").read(self.start, self.stop)


class Backbone:
    """The layers of a block drafter, and the keys and values of its texts."""

    def __init__(
        self,
        config: BlockConfig,
        parts: BlockParts,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
    ) -> None:
        self.config, self._parts, self.kernels = config, parts, kernels
        self.hidden_layers = parts.states.layers
        self._passes = Passes(
            placement.spec(config.layer),
            up_size=2 * config.layer.ffn_size,
            placement=placement,
            capacity=replace(capacity, hidden_layers=(), max_logits=1),
        )
        self._reads_ND = torch.empty(
            capacity.max_rows, config.layer.hidden_size, device=placement.device
        )
        self.state = self._passes.kv
        self._chooser: Chooser | None = None
        self._native = self._native_pass()
        self.num_texts = max(capacity.max_rows // (2 * config.block_size), 1)

    def choose(
        self,
        sampler: DraftSampler,
        before: TokenBefore | None = None,
        refiner: RefinerWeights | None = None,
        *,
        trees: TreeShapes | None = None,
    ) -> None:
        """Let native passes make drafts with the choices of `sampler`, by logits that depend on the
        token `before`, or of all positions at once, with `trees`, which a `refiner` may change."""
        self._chooser = Chooser(sampler, self.config.layer.vocab_size, self._parts.ids_W, trees)
        if self._native is not None and refiner is not None:
            self._native.refine(refiner)
        if self._native is not None and before is not None:
            self._native.follow(before)

    def write(self, parts: Sequence[NewContext], depth: int) -> Written:
        """Read new context, which is staged, and write a block for each text, in one call if there
        is a native pass, which makes chains too. Logits are of the first `depth` drafted positions.
        Raises NumericsError for logits that are no numbers, of which a pass chooses."""
        if self._native is not None:
            return self._natively(self._native, parts, depth)
        hidden_BSD = self.read(parts)
        first = self.config.block_size - self.config.most
        hidden_BKD = hidden_BSD[:, first : first + depth]
        logits_RW = self.logits(hidden_BKD.flatten(0, 1))
        return Written(hidden_BSD, logits_RW.view(*hidden_BKD.shape[:2], -1))

    def _natively(self, native: NativeBlocks, parts: Sequence[NewContext], depth: int) -> Written:
        counts = {part.row.seq_id: part.stop - part.start for part in parts}
        size = self.config.block_size
        self.state.reserve({seq_id: count + size for seq_id, count in counts.items()})
        with torch.inference_mode():
            states_PX = torch.cat([part.states().flatten(1) for part in parts]).float()
        texts = [
            BlockText(
                part.start,
                count,
                self.state.pages(seq_id),
                part.row.tokens[-1],
                part.row.tokens[-2:][0],
            )
            for part, (seq_id, count) in zip(parts, counts.items(), strict=True)
        ]
        chooser = self._chooser
        made = None if chooser is None else chooser.made([part.row for part in parts])
        written = native(texts, states_PX, depth, made)
        if written is None:
            chooser = given(chooser, "chooser")
            chooser.shapings.check()
            raise NumericsError(chooser.model_name)
        for part, (seq_id, count) in zip(parts, counts.items(), strict=True):
            if count:
                self.state.note_chain(seq_id, part.row.tokens[part.start : part.stop])
        return written

    @torch.inference_mode()
    def read(self, parts: Sequence[NewContext], *, writes: bool = True) -> Tensor:
        """Stage new context and, if it `writes`, a block for each text; return the block's hidden
        states after the last norm, of shape [B, S, D]. Its operators define a `native` pass."""
        config, size = self.config, self.config.block_size if writes else 0
        rows = [StepRow.chain(part.row.seq_id, self._tokens(part, writes=writes)) for part in parts]
        plan = self.state.plan(rows)
        lengths = [part.stop - part.start for part in parts]
        order_N = sent(torch.tensor(_blocks_first(lengths, size)), plan.tokens_N.device)
        plan, num_block = _ordered(plan, order_N), size * len(parts)
        x_MD = self._passes.scratch.x_ND[:num_block]
        tokens_M = plan.tokens_N[:num_block]
        x_MD.copy_(self._parts.embedding_VD.index_select(0, tokens_M.long()))
        if config.embedding_scale != 1:
            x_MD.mul_(config.embedding_scale)
        states_PLD = torch.cat([part.states() for part in parts])
        if len(states_PLD):
            self._reads_ND[num_block : plan.num_tokens] = self._context(states_PLD)
        plans = self._attention_plans(parts, plan, num_block) if writes else {}
        for depth, layer in enumerate(self._parts.layers):
            attended = plans.get(config.sights[depth])
            self._layer(layer, plan, attended, x_MD, self.state.layers[depth])
        if not writes:
            return x_MD.view(len(parts), 0, x_MD.shape[1])
        hidden_MD = normed(self.kernels, x_MD, self._parts.norm_D, config.layer.rms_norm_eps)
        return hidden_MD.view(len(parts), size, -1)

    def _native_pass(self) -> NativeBlocks | None:
        """Return the native pass; None without native kernels."""
        config, parts, buffers = self.config, self._parts, self._passes.scratch.for_native
        if self.kernels.forward is None or parts.states.join is None:
            return None
        forward = self.kernels.forward(
            ForwardParts(
                embedding_VD=parts.embedding_VD,
                final_norm_D=parts.norm_D,
                head=parts.head,
                turns=[parts.turns] * len(parts.layers),
                layers=[replace(one.weights, attention=None) for one in parts.layers],
                kv=self.state.layers,
                buffers=buffers,
                eps=config.layer.rms_norm_eps,
                scale=config.layer.scale,
                ffn_size=config.layer.ffn_size,
                hidden_SKD=parts.embedding_VD.new_empty(0),
                traits=DecoderTraits(
                    embedding_scale=config.embedding_scale,
                    logit_scale=config.logit_scale,
                    logit_cap=config.logit_cap,
                ),
            )
        )
        if not isinstance(forward, NativeForward):
            return None
        return NativeBlocks(
            forward,
            BlockWeights(
                parts.states.join,
                parts.context_norm_D,
                [
                    (conv.kernels, conv.base_2CD) if conv else None
                    for one in parts.layers
                    for conv in (one.attention_conv, one.ffn_conv)
                ],
                parts.ids_W,
            ),
            reads_ND=self._reads_ND,
            sights=[(one.window, one.causal, one.from_block) for one in config.sights],
            sizes=BlockSizes(
                config.block_size,
                config.most,
                config.mask_token,
                self.state.page_size,
                config.layer.vocab_size,
            ),
        )

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits over the ids that are drafted, of shape [R, W]."""
        hidden_RD = hidden_RD.contiguous()
        out_RW = hidden_RD.new_empty(len(hidden_RD), self._parts.head.num_out)
        self.kernels.linear(hidden_RD, self._parts.head, out_RW)
        if self.config.logit_scale != 1:
            out_RW.mul_(self.config.logit_scale)
        if self.config.logit_cap:
            self.kernels.soft_cap(out_RW, self.config.logit_cap)
        return out_RW

    def over_all(self, logits_RW: Tensor) -> Tensor:
        """Return logits over the target's ids; others than the drafted have almost no share."""
        ids_W = self._parts.ids_W
        if ids_W is None:
            return logits_RW
        out_RV = logits_RW.new_full((len(logits_RW), self.config.layer.vocab_size), NOT_DRAFTED)
        return out_RV.index_copy_(1, ids_W, logits_RW)

    def target_ids(self, ids: Tensor) -> Tensor:
        """Return the target's ids of drafted ones."""
        return ids if self._parts.ids_W is None else self._parts.ids_W[ids]

    def _context(self, states_PLD: Tensor) -> Tensor:
        parts, eps = self._parts, self.config.layer.rms_norm_eps
        context_PD = parts.states.fused(self.kernels, states_PLD)
        return normed(self.kernels, context_PD, parts.context_norm_D, eps)

    def _tokens(self, part: NewContext, *, writes: bool) -> tuple[int, ...]:
        """The tokens to stage: new context, then the pending token and masks."""
        tokens = tuple(part.row.tokens[part.start : part.stop])
        if not writes:
            return tokens
        masks = (self.config.mask_token,) * (self.config.block_size - 1)
        return (*tokens, part.row.tokens[-1], *masks)

    def _attention_plans(
        self, parts: Sequence[NewContext], plan: PackedPlan, num_block: int
    ) -> dict[Sight, PackedPlan]:
        """Return the plan of the block's rows for each kind of layer. A row that does not see the
        beginning of its text lists the slots of what it sees."""
        first, device = _ordered(plan, slice(0, num_block)), plan.tokens_N.device
        found: dict[Sight, PackedPlan] = {}
        for sight in set(self.config.sights):
            spans = [self._spans(sight, part) for part in parts]
            visible = [0 if begin else end for rows in spans for begin, end in rows]
            listed = [
                slots_T
                for part, rows in zip(parts, spans, strict=True)
                for slots_T in self._listed(part, rows)
            ]
            found[sight] = own = replace(
                first, visible_N=sent(torch.tensor(visible, dtype=torch.int32), device)
            )
            if any(map(len, listed)):
                offsets_N1 = torch.tensor([0, *map(len, listed)]).cumsum(0, dtype=torch.int32)
                found[sight] = replace(
                    own,
                    extra_offsets_N1=sent(offsets_N1, device),
                    extra_slots_E=sent(torch.cat(listed), device),
                )
        return found

    def _spans(self, sight: Sight, part: NewContext) -> list[tuple[int, int]]:
        stop = part.stop + self.config.block_size
        return [sight.span(position, part.stop, stop) for position in range(part.stop, stop)]

    def _listed(self, part: NewContext, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the slots of what each row sees, int32, empty if that begins with the text."""
        begins = [begin for begin, _ in spans]
        if not any(begins):
            return [torch.empty(0, dtype=torch.int32)] * len(spans)
        least, size = min(begins), self.state.page_size
        pages = torch.tensor(self.state.pages(part.row.seq_id), dtype=torch.int32)
        at_T = torch.arange(least, max(end for _, end in spans))
        slots_T = pages[at_T // size] * size + (at_T % size).int()
        return [slots_T[begin - least : end - least if begin else 0] for begin, end in spans]

    def _layer(
        self,
        layer: BlockLayer,
        plan: PackedPlan,
        attended: PackedPlan | None,
        x_MD: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> None:
        """Write the keys and values of the pass; add the layer to the block's rows, if any."""
        kernels, weights, config = self.kernels, layer.weights, self.config.layer
        scratch = self._passes.view(plan.num_tokens)
        reads_ND, mixing = self._reads_ND[: plan.num_tokens], None
        if attended is not None:
            reads_MD = self._enter(x_MD, given(weights.attention_norm_D, "norm"))
            if layer.attention_conv is not None:
                mixing = layer.attention_conv.weights(kernels, reads_MD)
                reads_MD = layer.attention_conv.run(reads_MD, mixing, 0, self.config.block_size)
            reads_ND[: len(x_MD)] = reads_MD
        kernels.linear(reads_ND, given(weights.qkv, "attention"), scratch.qkv_NE)
        if weights.qkv_bias_E is not None:
            scratch.qkv_NE.add_(weights.qkv_bias_E)
        if weights.q_norm_H is not None and weights.k_norm_H is not None:
            heads = (weights.q_norm_H, weights.k_norm_H, config.num_kv_heads, config.rms_norm_eps)
            kernels.head_norm(scratch.qkv_NE, *heads)
        kernels.rope_append(scratch.qkv_NE, *self._parts.turns, plan, *kv)
        if attended is None:
            return
        own = self._passes.view(len(x_MD))
        kernels.attention(own.qkv_NE, *kv, attended, config.scale, own.attended_NA)
        out = given(weights.out, "attention")
        self._add(own.attended_NA, out, weights.out_bias_D, layer.attention_conv, mixing)
        self._feed(layer, x_MD)

    def _feed(self, layer: BlockLayer, x_MD: Tensor) -> None:
        kernels, weights, own = self.kernels, layer.weights, self._passes.view(len(x_MD))
        reads_MD, mixing = self._enter(x_MD, given(weights.ffn_norm_D, "norm")), None
        if layer.ffn_conv is not None:
            mixing = layer.ffn_conv.weights(kernels, reads_MD)
            reads_MD = layer.ffn_conv.run(reads_MD, mixing, 0, self.config.block_size)
        kernels.linear(reads_MD, given(weights.gate_up, "dense FFN"), own.up_NU)
        kernels.silu_mul(own.up_NU, own.activated_NF)
        down = given(weights.down, "dense FFN")
        self._add(own.activated_NF, down, weights.down_bias_D, layer.ffn_conv, mixing)

    def _enter(self, x_MD: Tensor, norm_D: Tensor) -> Tensor:
        return normed(self.kernels, x_MD, norm_D, self.config.layer.rms_norm_eps)

    def _add(
        self,
        given_MX: Tensor,
        product: PackedLinear,
        bias_D: Tensor | None,
        conv: BlockConv | None,
        mixing: Tensor | None,
    ) -> None:
        """Add a product to the residual, after the exit of a convolution, if there is one."""
        own = self._passes.view(len(given_MX))
        self.kernels.linear(given_MX, product, own.norm_ND)
        if bias_D is not None:
            own.norm_ND.add_(bias_D)
        added_MD = own.norm_ND
        if conv is not None and mixing is not None:
            added_MD = conv.run(added_MD, mixing, 1, self.config.block_size)
        own.x_ND.add_(added_MD)


def _blocks_first(lengths: Sequence[int], size: int) -> list[int]:
    """Indices of packed rows, those of blocks first: text i has `lengths[i]` tokens of context, and
    then `size` of its block."""
    blocks: list[int] = []
    context: list[int] = []
    start = 0
    for length in lengths:
        context += range(start, start + length)
        blocks += range(start + length, start + length + size)
        start += length + size
    return blocks + context


def _ordered(plan: PackedPlan, rows: Tensor | slice) -> PackedPlan:
    """The plan of these packed rows, in this order."""
    return replace(
        plan,
        tokens_N=plan.tokens_N[rows],
        positions_N=plan.positions_N[rows],
        slots_N=plan.slots_N[rows],
        seq_N=plan.seq_N[rows],
        visible_N=plan.visible_N[rows],
    )
