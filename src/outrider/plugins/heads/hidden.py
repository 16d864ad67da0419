"""Drafts from hidden states of the target: the net and the loop that EAGLE and MTP share.

A block is decoder layers behind an entrance (kernels/native/forward.py), which makes a residual of
a token and of the state of the token before it. A pass costs the layers, mostly one, the entrance
and the output head, which is most of it for a small target. With native kernels a pass over Llama
layers is one call; operator by operator, which is the definition, it has the same bits.

At position p a block reads the token there and the state of the token before. Text is read with the
target's states. Drafted tokens are read with the block's own states and dropped when the draft is
done; accepted ones are read again with the target's states, together with the pending token. So
every entry of the block's KV cache is of text and never changes, and reading what is new is one
pass of at most K + 1 tokens.

Shapes:  P = tokens of one text, N = packed tokens, M = packed logits rows, R = texts,
         K = captured layers, D = hidden size, V = vocabulary, W = ids that are drafted,
         X = inputs of a product, A = heads x head size.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import ContractError, given
from outrider.core.protocols import CacheStore, DraftNeeds, DraftRow, StepRow
from outrider.drafters.common.growth import (
    NOT_DRAFTED,
    DraftSampler,
    FusedDrafts,
    TextPart,
    draft_some,
)
from outrider.drafters.common.native import HeadMemory
from outrider.kernels.native.forward import Attends, Entrance, Forward, ForwardParts, LayerWeights
from outrider.kernels.operators import Kernels, compile_ahead, normed
from outrider.kernels.plan import PackedLinear, PackedPlan, PackedTable
from outrider.models.configs import LayeredConfig
from outrider.models.decoder import LayerKV, ModelCapacity, Passes, Scratch
from outrider.models.llama import LayerOperators
from outrider.models.weights import Placement
from outrider.plugins.heads.passes import HeadPass, NetOutput, head_pass, target_states


class HeadNet(Protocol):
    """A net of one block or a few."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states `fuse` takes."""
        ...

    @property
    def state(self) -> CacheStore:
        """The block's own KV: nodes are staged by `step` and retained by `commit`."""
        ...

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        """Return the states that the block reads, of shape [P, D], from the target's states."""
        ...

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        """Run one packed pass; `hidden_ND` has the state of the token before each packed token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """Limits of a block. One pass reads at most `chunk` tokens of a text alone, and `reach`
    together with other texts: K + 1 is what a round may add. A block has `window` positions. It
    reads a text from its token `first` on; the state before the text's first token is zero."""

    chunk: int
    reach: int
    window: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class BlocksOutput:
    """A pass's output for the newest tokens: the logits that follow them, and the states of the
    blocks, by number, that read them, each of shape [M, D]."""

    logits_MV: Tensor
    states: Mapping[int, Tensor]

    def of(self, rows: Sequence[int]) -> Mapping[int, Tensor]:
        """Return the states of some of them."""
        return {block: states_MD[list(rows)] for block, states_MD in self.states.items()}


class Blocks:
    """Nets, one for each trained depth, that read the same texts in step. Within `drafting`,
    `catch_up` and `read` stage the new tokens of texts, `follow` drafts below them.

    A model that was trained to several depths has a block for each (DeepSeek-V3, arXiv 2412.19437,
    2.2): block j reads the state that block j - 1 made of the token before, the first one the
    target's states. Draft i comes from block i, or from the last block, which then reads its own
    states. A block whose turn has not come reads the drafts too, or it would have gaps.
    """

    def __init__(self, nets: Sequence[HeadNet], limits: HeadLimits) -> None:
        self._nets, self._limits = nets, limits
        # The number of staged tokens that are text.
        self._read: dict[int, int] = {}
        # The states that all blocks but the last made of the last token that is retained, or will
        # be.
        self._ends: dict[int, list[Tensor]] = {}
        self._new_ends: dict[int, list[Tensor]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        # A page is found by its tokens, so they must be all that its entries depend on; and a later
        # block cannot continue a text that it did not read itself.
        shared = () if self._limits.first or len(self._nets) > 1 else prompt[:-1]
        for net in self._nets:
            net.state.open(seq_id, shared)

    def close(self, seq_id: int) -> None:
        for net in self._nets:
            net.state.close(seq_id)
        self._ends.pop(seq_id, None)

    def depth(self, row: DraftRow) -> int:
        """Return how deep to draft: 0 before the target has read the text up to its pending token,
        and for a text that was drafted for before. The last draft token is not read, so it may lie
        past the window."""
        length = len(row.tokens)
        if row.hidden is None or row.hidden.length < length - 1 or self._num_unread(row) < 1:
            return 0
        return max(0, min(row.budget.depth, self._limits.window - length + 1))

    @contextmanager
    def drafting(self, seq_ids: Sequence[int]) -> Generator[None]:
        """Retain, at the end, the text that was read within, and no draft. After a failure it
        retains nothing, so that the same texts, except the failed one, can be drafted for."""
        try:
            yield
        except BaseException:
            for seq_id in seq_ids:
                self._read.pop(seq_id, None)
                self._new_ends.pop(seq_id, None)
            raise
        finally:
            self._settle(seq_ids)

    def catch_up(self, rows: Sequence[DraftRow]) -> list[TextPart]:
        """Read from each text what one pass cannot read together with others; return the rest, up
        to its pending token. There must be something new."""
        parts: list[TextPart] = []
        for row in rows:
            start = len(row.tokens) - self._num_unread(row)
            far = len(row.tokens) - self._limits.reach
            for at in range(start, far, self._limits.chunk):
                tokens = row.tokens[at : min(at + self._limits.chunk, far)]
                self.read([TextPart(row, at, tokens)])
                self._settle([row.seq_id])
            parts.append(TextPart.end(row, row.tokens[max(start, far) :]))
        return parts

    def read(self, parts: Sequence[TextPart]) -> BlocksOutput:
        """Stage these tokens; return the output for the last of each text."""
        rows = [part.step for part in parts]
        needed = {row.seq_id: len(row.tokens) for row in rows}
        for net in self._nets:
            net.state.reserve(needed)
        out = self._nets[0].step(rows, self._nets[0].fuse(target_states(parts)))
        made = [torch.split(out.hidden_ND, list(needed.values()))]
        rows = [replace(row, logits_from=len(row.tokens)) for row in rows]
        for net in self._nets[1:]:
            before = torch.cat(self._before(rows, made))
            later = net.step(rows, before)
            made.append(torch.split(later.hidden_ND, list(needed.values())))
        self.note(parts)
        if len(self._nets) > 1:
            for index, part in enumerate(parts):
                self._new_ends[part.row.seq_id] = [own[index][-1].clone() for own in made[:-1]]
        states = {n: torch.stack([own_PD[-1] for own_PD in own]) for n, own in enumerate(made)}
        return BlocksOutput(out.logits_MV, states)

    def note(self, parts: Sequence[TextPart]) -> None:
        """Record that a pass in which no block failed has read these."""
        for part in parts:
            self._read[part.row.seq_id] = len(part.tokens)

    def follow(
        self, steps: Sequence[StepRow], above: Mapping[int, Tensor], offset: int
    ) -> BlocksOutput:
        """Stage the newest drafted tokens, `offset` tokens below the pending one; `above` are the
        states at the token before each, in the same order."""
        last = len(self._nets) - 1
        first = min(offset, last)
        outputs: dict[int, NetOutput] = {}
        for block in range(first, last + 1):
            if block == first + 1:  # Later blocks only read.
                steps = [replace(step, logits_from=len(step.tokens)) for step in steps]
            source = block - 1 if offset <= block else block
            outputs[block] = self._nets[block].step(steps, above[source])
        states = {block: out.hidden_ND for block, out in outputs.items()}
        return BlocksOutput(outputs[first].logits_MV, states)

    def _num_unread(self, row: DraftRow) -> int:
        """Return the number of new tokens of a text; 0 if this text was drafted for before."""
        return len(row.tokens) - self._limits.first - self._nets[0].state.length(row.seq_id)

    def _settle(self, seq_ids: Sequence[int]) -> None:
        """Retain the tokens that were read of these texts, and no draft. All blocks then hold the
        same tokens, whatever failed before."""
        paths = {seq_id: range(self._read.pop(seq_id, 0)) for seq_id in seq_ids}
        for net in self._nets:
            net.state.commit(paths)
        for seq_id in seq_ids:
            if seq_id in self._new_ends:
                self._ends[seq_id] = self._new_ends.pop(seq_id)

    def _before(self, rows: Sequence[StepRow], made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the newest block's states of the token before each token, by text."""
        block = len(made) - 1
        before: list[Tensor] = []
        for row, own_PD in zip(rows, made[block], strict=True):
            ends = self._ends.get(row.seq_id)
            end_D = torch.zeros_like(own_PD[0]) if ends is None else ends[block]
            before.append(torch.cat([end_D[None], own_PD[:-1]]))
        return before


class HiddenDrafter:
    """A drafter with `nets`, whose logits are over the target's ids: chains, or trees of one net.

    It drafts nothing before the target has read a text up to its pending token, nor beyond the end
    of the blocks' window. A second request for the same text, as after a failure of the target,
    also gets an empty draft: that round costs a draft. With `fused`, which requires a single block,
    drafts are made in one call where possible.
    """

    def __init__(
        self,
        name: str,
        nets: Sequence[HeadNet],
        sampler: DraftSampler,
        limits: HeadLimits,
        fused: FusedDrafts | None = None,
    ) -> None:
        if len(nets) != 1 and (fused is not None or sampler.branches):
            raise ContractError("trees, and drafts in one call, are of one net")
        self.name, self._sampler, self._fused = name, sampler, fused
        self.needs = DraftNeeds(hidden_layers=nets[0].hidden_layers)
        self._blocks = Blocks(nets, limits)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._blocks.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._blocks.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [self._blocks.depth(row) for row in rows], self._drafts)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        with self._blocks.drafting([row.seq_id for row in rows]):
            return self._drafted(rows)

    def _drafted(self, rows: Sequence[DraftRow]) -> list[Draft]:
        parts = self._blocks.catch_up(rows)
        fused = None if self._fused is None else self._fused.try_rows(parts)
        if fused is not None:
            self._blocks.note(parts)
            return [one.draft for one in fused]
        out = self._blocks.read(parts)
        builder = self._sampler.builder(rows, [len(part.tokens) - 1 for part in parts])
        for offset in count(1):
            steps = builder.grow(out.logits_MV)
            if not steps:
                break
            out = self._blocks.follow(steps, out.of(builder.above), offset)
        return builder.drafts()


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """A decoder layer within a block, which attends."""

    operators: LayerOperators
    weights: LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """The target's states that a block reads: those of `layers`, concatenated. `norms` scale them,
    one for each of as many equal parts, with their eps; then `join` makes one state of them. Both
    may be missing."""

    layers: tuple[int, ...]
    norms: tuple[Tensor, ...] = ()
    eps: float = 0.0
    join: PackedLinear | None = None
    join_bias_D: Tensor | None = None

    @torch.inference_mode()
    def fused(self, kernels: Kernels, hidden_PKD: Tensor) -> Tensor:
        """Return states_PD that the block reads instead of the target's."""
        states_PX = hidden_PKD.float().flatten(1).contiguous()
        if self.norms:
            parts = states_PX.chunk(len(self.norms), dim=1)
            pairs = zip(parts, self.norms, strict=True)
            scaled = [normed(kernels, x.contiguous(), norm, self.eps) for x, norm in pairs]
            states_PX = torch.cat(scaled, dim=1)
        if self.join is None:
            return states_PX
        out_PD = states_PX.new_empty(len(states_PX), self.join.num_out)
        kernels.linear(states_PX, self.join, out_PD)
        return out_PD if self.join_bias_D is None else out_PD.add_(self.join_bias_D)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBlock:
    """A block's weights; norms are float32. The output head, `head`, reads the residual after
    `norm_D`, if there is one, and knows the `ids_W`, None for all. `embedding_VD` and `head` may be
    the target's."""

    config: LayeredConfig
    layers: tuple[BlockLayer, ...]
    entrance: Entrance
    states: TargetStates
    embedding_VD: Tensor | PackedTable
    head: PackedLinear
    norm_D: Tensor | None
    ids_W: Tensor | None = None


class EntranceBuffers(TypedDict):
    """Memory of an entrance."""

    states_ND: Tensor
    pair_N2D: Tensor
    own_ND: Tensor


def entrance_buffers(capacity: ModelCapacity, size: int, device: torch.device) -> EntranceBuffers:
    """Allocate buffers for as many packed tokens as the capacity allows."""
    states_ND, own_ND = (torch.empty(capacity.max_rows, size, device=device) for _ in range(2))
    pair_N2D = torch.empty(capacity.max_rows, 2 * size, device=device)
    return {"states_ND": states_ND, "pair_N2D": pair_N2D, "own_ND": own_ND}


class EntranceNet:
    """A HeadNet of one block with KV of its own, and the stack that its passes run. Logits are over
    the target's ids: an id that is not drafted has almost no probability. If there is a `native`
    pass, it runs."""

    def __init__(
        self, block: HeadBlock, kernels: Kernels, place: Placement, capacity: ModelCapacity
    ) -> None:
        self._block, self._kernels = block, kernels
        # Each block has memory of its own, with the keys and values of its layers.
        self._config = config = replace(block.config, num_layers=len(block.layers))
        # The residual after the last layer, of every token.
        self._own_states = DraftNeeds(hidden_layers=(len(block.layers),))
        self._passes = Passes(
            place.spec(config),
            up_size=2 * config.ffn_size,
            placement=place,
            capacity=replace(capacity, hidden_layers=()),
        )
        self.hidden_layers, self.vocab_size = block.states.layers, config.vocab_size
        self.native = self._native()
        compile_ahead(kernels, config.vocab_size, self.state, self._rehearse)

    def _rehearse(self, row: StepRow) -> None:
        states_ND = self._block.entrance.states_ND
        self.step([row], torch.zeros_like(states_ND[: len(row.tokens)]))

    @property
    def state(self) -> HeadMemory:
        return self._passes.kv

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        return self._block.states.fused(self._kernels, hidden_PKD)

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        if self.native is not None:
            return self.native.step(rows, hidden_ND)
        return self._by_operators(rows, hidden_ND)

    @torch.inference_mode()
    def _by_operators(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        block = self._block
        block.entrance.states_ND[: len(hidden_ND)].copy_(hidden_ND)
        out = self._passes.step(self, rows, self._own_states)
        own_ND = given(out.hidden_NKD, "hidden state")[:, 0].contiguous()
        if block.entrance.gives_normed and block.norm_D is not None:
            own_ND = normed(self._kernels, own_ND, block.norm_D, self._config.rms_norm_eps)
        return NetOutput(out.logits_MV, own_ND)

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        block, entrance, size = self._block, self._block.entrance, self._config.hidden_size
        pair_N2D = entrance.pair_N2D[: plan.num_tokens]
        if isinstance(block.embedding_VD, Tensor):
            torch.index_select(block.embedding_VD, 0, plan.tokens_N, out=scratch.rows_ND)
            scratch.x_ND.copy_(scratch.rows_ND)
        else:
            block.embedding_VD.read(plan.tokens_N, scratch.x_ND)
        self._enter(scratch, entrance.token_norm_D, pair_N2D[:, :size])
        scratch.x_ND.copy_(entrance.states_ND[: plan.num_tokens])
        self._enter(scratch, entrance.state_norm_D, pair_N2D[:, size:])
        if entrance.join is not None:
            self._kernels.linear(pair_N2D, entrance.join, scratch.x_ND)
            if entrance.join_bias_D is not None:
                scratch.x_ND.add_(entrance.join_bias_D)
        elif entrance.keeps_norm:
            scratch.x_ND.copy_(pair_N2D[:, size:])

    def _enter(self, scratch: Scratch, norm_D: Tensor | None, half_ND: Tensor) -> None:
        """Fill one half of the pairs."""
        given_ND = scratch.x_ND
        if norm_D is not None:
            self._kernels.rms_norm(given_ND, norm_D, self._config.rms_norm_eps, scratch.norm_ND)
            given_ND = scratch.norm_ND
        half_ND.copy_(given_ND)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        entrance, reads = self._block.entrance, None
        if depth == 0 and entrance.attends is Attends.PAIR:
            reads = entrance.pair_N2D[: plan.num_tokens]
        elif depth == 0 and entrance.attends is Attends.RESIDUAL:
            reads = scratch.x_ND
        layer = self._block.layers[depth]
        layer.operators.run(self._kernels, layer.weights, plan, scratch, kv, reads)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        block, kernels = self._block, self._kernels
        if block.norm_D is not None:
            kernels.rms_norm(x_MD, block.norm_D, self._config.rms_norm_eps, norm_MD)
            x_MD = norm_MD
        if block.ids_W is None:
            kernels.linear(x_MD, block.head, logits_MV)
            return
        logits_MW = x_MD.new_empty(len(x_MD), block.head.num_out)
        kernels.linear(x_MD, block.head, logits_MW)
        logits_MV.fill_(NOT_DRAFTED).index_copy_(1, block.ids_W, logits_MW)

    def forward(self) -> Forward | None:
        return None

    def _native(self) -> HeadPass | None:
        """Return the native pass; None without native kernels."""
        config, block, scratch = self._config, self._block, self._passes.scratch
        weights = [layer.weights for layer in block.layers]
        mixtures = [layer.mixture for layer in weights if layer.mixture is not None]
        if any(mixture.native is None for mixture in mixtures):
            return None
        gated_NA = None
        if any(layer.gate is not None for layer in weights):
            gated_NA = torch.empty_like(scratch.attended_NA)
        parts = ForwardParts(
            embedding_VD=block.embedding_VD,
            final_norm_D=block.norm_D,
            head=block.head,
            turns=[layer.operators.turns for layer in block.layers],
            layers=weights,
            kv=self.state.layers,
            buffers=scratch.for_native,
            eps=config.rms_norm_eps,
            scale=config.scale,
            ffn_size=config.ffn_size,
            hidden_SKD=torch.empty(0, dtype=block.embedding_VD.dtype),
            entrance=block.entrance,
            gated_NA=gated_NA,
        )
        return head_pass(self._kernels, parts, self.state, self._passes.logits_MV, block.ids_W)
