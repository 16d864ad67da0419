"""Drafts of several tokens in one causal pass, which reads masks in place of undrafted tokens.

    P-EAGLE    the layers of EAGLE 3; a masked token has a trained state instead of the target's
               (Hui et al. 2026, arXiv 2602.01469)
    PARD       a draft model with a token for masks (An et al. 2025, arXiv 2504.18583)

A pass reads the new tokens of a text up to the pending one, and then a mask for every further token
of the draft. The logits after the pending token and after each mask are those of one draft token.
Masks are staged and never retained.

Shapes:  N = packed tokens, M = packed logits rows, K = positions, V = vocabulary, D = hidden size,
         L = captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import given
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow, StepRow
from outrider.drafters.common.context import BuildContext
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import FusedDrafts, TextPart, draft_some
from outrider.drafters.common.native import FusedChains, KeyedChains, fused_model_drafts
from outrider.kernels.native.rounds import NativeLookups
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.heads import HeadsToLoad
from outrider.models.json_object import JsonObject
from outrider.models.weights import Weights
from outrider.plugins.heads.eagle import load_eagle
from outrider.plugins.heads.hidden import Blocks, EntranceNet, HeadLimits
from outrider.plugins.heads.medusa import ParallelHeadSampler
from outrider.plugins.heads.native_choice import Chooser, NativeChoice
from outrider.plugins.heads.passes import target_states
from outrider.plugins.heads.target import normed_target, placement_of

_STATE = "mask_hidden"
# The keys under which trainers write the id of a mask.
_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class Mask:
    """The id and the state of a masked token, and the most tokens of a draft."""

    token: int
    state_LD: Tensor
    most: int


def _masked(part: TextPart, token: int) -> StepRow:
    """The tokens of `part` and the masks behind them, with logits from the pending token on."""
    masks = (token,) * (part.row.budget.depth - 1)
    tokens = (*part.tokens, *masks)
    return StepRow.chain(part.row.seq_id, tokens, logits_from=len(part.tokens) - 1)


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choice of drafts by `sampler`, in one call for each text if there is a `native` one."""

    sampler: ParallelHeadSampler
    native: NativeChoice | None

    @classmethod
    def of(
        cls, sampler: ParallelHeadSampler, native: NativeLookups | None, vocab_size: int
    ) -> _Choices:
        if native is None:
            return cls(sampler, None)
        chooser = Chooser(sampler.sampler, vocab_size, trees=sampler)
        return cls(sampler, NativeChoice(native, chooser))

    def drafts(self, parts: Sequence[TextPart], logits_MV: Tensor) -> list[Draft]:
        rows = [part.row for part in parts]
        each = torch.split(logits_MV, [row.budget.depth for row in rows])
        return [self._draft(row, own_KV) for row, own_KV in zip(rows, each, strict=True)]

    def _draft(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        made = None if self.native is None else self.native(row, logits_KV)
        return self.sampler.draft(row, logits_KV) if made is None else made


def _in_one_call(fused: FusedDrafts | None, parts: Sequence[TextPart]) -> list[Draft] | None:
    """Return chains that one call made; None for trees, or if it cannot."""
    if fused is None or any(part.row.budget.size > part.row.budget.depth for part in parts):
        return None
    made = fused.try_rows(parts)
    return None if made is None else [one.draft for one in made]


class MaskedHeadDrafter:
    """A drafter with P-EAGLE heads. It drafts nothing before the target has read a text up to its
    pending token, nor twice for the same text."""

    name = "peagle"

    def __init__(
        self,
        net: EntranceNet,
        mask: Mask,
        sampler: ParallelHeadSampler,
        limits: HeadLimits,
        *,
        batch_size: int,
        choose: NativeLookups | None = None,
    ) -> None:
        self._net, self._mask = net, mask
        self._choices = _Choices.of(sampler, choose, net.vocab_size)
        self._blocks = Blocks([net], limits)
        self.needs = DraftNeeds(hidden_layers=net.hidden_layers)
        self._state_1D = net.fuse(mask.state_LD[None])
        self._fused: FusedDrafts | None = None
        if net.native is not None:
            chains = KeyedChains(
                net.native.model,
                replace(sampler.sampler, branches=False),
                batch_size=batch_size,
                vocab_size=net.native.vocab_size,
                mask=mask.token,
            )
            self._fused = FusedChains(chains, net.state, enter=self._enter)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._blocks.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._blocks.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        depths = [min(self._blocks.depth(row), self._mask.most) for row in rows]
        return draft_some(rows, depths, self._drafts)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        with self._blocks.drafting([row.seq_id for row in rows]):
            parts = self._blocks.catch_up(rows)
            drafts = _in_one_call(self._fused, parts)
            if drafts is None:
                steps = [_masked(part, self._mask.token) for part in parts]
                self._net.state.reserve({step.seq_id: len(step.tokens) for step in steps})
                logits_MV = self._net.step(steps, self._states(parts)).logits_MV
                drafts = self._choices.drafts(parts, logits_MV)
            self._blocks.note(parts)
            return drafts

    def _states(self, parts: Sequence[TextPart]) -> Tensor:
        """Return the state before each token of a text and before the masks behind it."""
        known_ND, states = self._net.fuse(target_states(parts)), list[Tensor]()
        each = torch.split(known_ND, [len(part.tokens) for part in parts])
        for part, known_PD in zip(parts, each, strict=True):
            states += [known_PD, self._state_1D.expand(part.row.budget.depth - 1, -1)]
        return torch.cat(states)

    def _enter(self, parts: Sequence[TextPart]) -> bool:
        given(self._net.native, "native pass").enter(self._states(parts))
        return True


def load_peagle(context: BuildContext, sampler: ParallelHeadSampler) -> MaskedHeadDrafter:
    """Load P-EAGLE heads. Raises CheckpointError, naming file and tensor, for heads that are
    incomplete, not of this target or not all numbers."""
    heads, config = context.heads, context.config
    target = normed_target(context.models.target)
    batch, reach, page = config.most_batch, config.most_k + 1, heads.capacity.page_size
    capacity = replace(
        heads.capacity,
        max_rows=max(config.most_chunk, batch * (reach + config.most_k)),
        max_logits=batch * config.most_k,
        num_slots=heads.capacity.num_slots + batch * (config.most_k + page) // page * page,
    )
    heads = replace(heads, capacity=capacity)
    mask = _read_mask(heads, target.spec.vocab_size, target.spec.hidden_size)
    net = load_eagle(heads, target, unread=(_STATE,))
    device = placement_of(target).device
    mask = replace(mask, state_LD=mask.state_LD.to(device))
    limits = HeadLimits(
        chunk=config.most_chunk, reach=reach, window=target.spec.max_tokens, first=1
    )
    lookups = context.models.lookups
    return MaskedHeadDrafter(net, mask, sampler, limits, batch_size=batch, choose=lookups)


def _read_mask(heads: HeadsToLoad, vocab_size: int, hidden_size: int) -> Mask:
    raw = open_checkpoint(heads.folder).document(CONFIG)
    key = next((key for key in _TOKENS if raw.has(key)), _TOKENS[0])
    num_layers = len(heads.capacity.hidden_layers)
    with Weights.at(heads.folder) as weights:
        found = (tensor for name, tensor in weights.each() if name == _STATE)
        state = next(found, torch.empty(0))
        if state.numel() != num_layers * hidden_size:
            # Trainers write it with one axis or more, and else this is the error.
            state = weights.take(_STATE, 1, 1, num_layers * hidden_size)
        state_LD = state.float().clone().view(num_layers, hidden_size)
    return Mask(
        raw.integer(key, least=0, most=vocab_size - 1),
        state_LD,
        _num_trained(raw),
    )


# A folder that does not say for how many tokens it was trained drafts as many as the setting says.
_ANY = 1 << 16


def _num_trained(raw: JsonObject) -> int:
    """The length of the drafts that the heads were trained for."""
    part = raw.child("speculators_config")
    methods = part.objects("proposal_methods") if part else ()
    return methods[0].integer("speculative_tokens", _ANY) if methods else _ANY


class MaskedModelDrafter(ModelDrafter):
    """A ModelDrafter whose model reads `mask` in place of tokens not yet drafted."""

    def __init__(
        self,
        model: CausalLM,
        sampler: ParallelHeadSampler,
        *,
        mask: int,
        chunk: int,
        fused: FusedDrafts | None = None,
        choose: NativeLookups | None = None,
    ) -> None:
        # The model's memory has only text, and no tree.
        chains = replace(sampler.sampler, branches=False)
        super().__init__(model, chains, chunk=chunk, fused=fused, mask=mask)
        self._choices = _Choices.of(sampler, choose, model.spec.vocab_size)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        most = self.share(len(rows), less=max(row.budget.depth for row in rows) - 1)
        parts = [TextPart.end(row, self.begin(row.seq_id, row.tokens, most=most)) for row in rows]
        drafts = _in_one_call(self._fused, parts)
        if drafts is None:
            steps = [_masked(part, self.mask) for part in parts]
            logits_MV = self.model.step(steps, self.needs).logits_MV
            drafts = self._choices.drafts(parts, logits_MV)
        for part in parts:
            self.note(part.row.seq_id, part.tokens)
        return drafts


def masked_model_drafter(context: BuildContext, model: CausalLM, mask: int) -> MaskedModelDrafter:
    parallel = ParallelHeadSampler.of(context, "the draft model")
    config, fused = context.config, None
    if config.fused_round:
        size = config.most_batch
        fused = fused_model_drafts(model, parallel.sampler, batch_size=size, mask=mask)
    lookups, chunk = context.models.lookups, config.most_chunk
    return MaskedModelDrafter(model, parallel, mask=mask, chunk=chunk, fused=fused, choose=lookups)
