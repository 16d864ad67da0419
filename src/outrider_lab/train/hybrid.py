"""A hybrid with an MTP block, from text: the recipe of `outrider train pretrain --family hybrid`.

The model learns the token that comes next, or, with a teacher, the teacher's distribution at every
place: the same number of tokens then brings it much further. Embeddings begin as the teacher's,
projected.

The block is learned along with it, at 0.3 of the loss (DeepSeek-V3, arXiv 2412.19437, 2.2). What a
draft has to foresee is what this model will say, so the block learns the model's own distributions,
which are held still, and not the text. It does so in three turns, the later ones from its own
states (`attend`), so that one block drafts a chain. An output head costs as much as the layers of a
small model: a turn is compared at every third place, and all three take one head together.

Shapes:  B = windows of a batch, T = tokens, V = vocabulary, D = hidden size, P = places,
         E = heads x head size, G = heads, H = head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.configs import HybridConfig, LlamaConfig
from outrider_lab.train.draft_model import Pretraining, begin_like, sizes_of
from outrider_lab.train.hybrid_module import (
    GatedAttention,
    Hybrid,
    HybridDecoder,
    OffsetNorm,
    TrainedHybridLayer,
    fresh_hybrid,
)
from outrider_lab.train.llama_module import Attention, Llama, TrainedLlamaLayer
from outrider_lab.train.loop import Batch
from outrider_lab.train.losses import DistributionCache, TopProbs, faded_mean, head_loss, next_token
from outrider_lab.train.target import FrozenTarget


@torch.no_grad()
def begin_as(net: Hybrid, teacher: Llama | HybridDecoder) -> None:
    """Overwrite what `net` takes from `teacher`.

    With the hidden and FFN size of a Llama it takes the last norm and the embedding, which stays as
    it is where it is the teacher's output head too. Layers that are spread from the teacher's first
    to its last give the FFN, the norms and, where the hybrid attends, the heads; without the first
    one nothing works, since it makes of the embedding what all others read. Recurrences begin at
    random, and small. Of another hidden size, and of a hybrid, there is the embedding alone,
    projected.
    """
    own = net.config
    alike = (own.hidden_size, own.ffn_size) == (teacher.config.hidden_size, teacher.config.ffn_size)
    if not isinstance(teacher, Llama) or not alike or teacher.config.mlp_bias:
        begin_like(net.model.embed_tokens.weight, teacher.model.embed_tokens.weight)
        return
    theirs = teacher.config
    net.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
    net.model.embed_tokens.requires_grad_(requires_grad=not theirs.tie_word_embeddings)
    cast("OffsetNorm", net.model.norm).weight.copy_(teacher.norm_scale - 1)
    layers = cast("Sequence[TrainedHybridLayer]", net.model.layers)
    taught = cast("Sequence[TrainedLlamaLayer]", teacher.model.layers)
    last = len(taught) - 1
    spread = [round(number * last / max(len(layers) - 1, 1)) for number in range(len(layers))]
    pairs = [(layer, taught[number]) for layer, number in zip(layers, spread, strict=True)]
    for layer, like in (*pairs, (cast("TrainedHybridLayer", net.mtp.layers[0]), taught[-1])):
        layer.input_layernorm.weight.copy_(like.input_layernorm.weight - 1)
        layer.post_attention_layernorm.weight.copy_(like.post_attention_layernorm.weight - 1)
        layer.mlp.load_state_dict(like.mlp.state_dict())
        if layer.attends and _same_heads(own, theirs):
            _begin_heads(layer.self_attn, like)


def _same_heads(own: HybridConfig, theirs: LlamaConfig) -> bool:
    plain = not (theirs.qkv_bias or theirs.out_bias or theirs.qk_norm)
    sizes = [(one.num_heads, one.num_kv_heads, one.head_dim, one.rope) for one in (own, theirs)]
    return plain and sizes[0] == sizes[1]


def _begin_heads(heads: GatedAttention, taught: TrainedLlamaLayer) -> None:
    """Gates begin about a half, which `o_proj` makes up for; norms begin as long as the teacher's
    queries and keys are on the whole."""
    own: Attention = taught.self_attn
    head, hidden = heads.q_norm.weight.shape[0], own.q_proj.weight.shape[1]
    queries_GHD = own.q_proj.weight.view(-1, head, hidden)
    heads.q_proj.weight.view(-1, 2, head, hidden)[:, 0] = queries_GHD
    heads.k_proj.weight.copy_(own.k_proj.weight)
    heads.v_proj.weight.copy_(own.v_proj.weight)
    heads.o_proj.weight.copy_(2 * own.o_proj.weight)
    scale_D = taught.input_layernorm.weight
    heads.q_norm.weight.fill_(_length(own.q_proj.weight, scale_D) - 1)
    heads.k_norm.weight.fill_(_length(own.k_proj.weight, scale_D) - 1)


def _length(weight_ED: Tensor, scale_D: Tensor) -> float:
    """Root mean square of what a matrix makes of normed rows, were their parts independent."""
    return float((weight_ED * scale_D).pow(2).sum(1).mean().sqrt())


_TURNS = 3
_WEIGHT = 0.3
# Ids that are kept of a distribution.
NUM_KEPT = 16


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model with the vocabulary of the one that learns, and the distributions it was asked
    for."""

    target: FrozenTarget
    cache: DistributionCache

    def distributions(self, batch: Batch) -> TopProbs:
        teach = partial(self.target.distributions, num_kept=NUM_KEPT)
        return self.cache.distributions(batch.ids_BT, batch.windows, teach)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRecipe(Pretraining[Hybrid, HybridConfig]):
    teacher: Teacher | None = None

    @property
    def facts(self) -> Mapping[str, object]:
        teacher = "" if self.teacher is None else str(self.teacher.target.folder)
        sizes = sizes_of(self.config)
        return {"family": "hybrid", "sizes": sizes, "teacher": teacher, "turns": _TURNS}

    def build(self, generator: torch.Generator) -> Hybrid:
        net = fresh_hybrid(self.config, self.window, generator)
        if self.teacher is not None:
            begin_as(net, self.teacher.target.net)
        return net

    def loss(self, module: Hybrid, batch: Batch) -> Tensor:
        ids_BT, head_VD, teacher = batch.ids_BT, module.head, self.teacher
        states_BTD = module.model.norm(module.model(ids_BT)[0])
        drafts = module.drafts(ids_BT, states_BTD, _TURNS)
        # A text does not say what comes after it, a teacher does.
        distributions = _of_text(ids_BT) if teacher is None else teacher.distributions(batch)
        known = slice(ids_BT.shape[1] - (teacher is None))
        states_BTD = states_BTD[:, known]
        own, said = head_loss(states_BTD.flatten(0, 1), head_VD, distributions, num_own=NUM_KEPT)

        def foreseen(turn: int) -> Tensor:
            places = slice(turn + batch.step % _TURNS, known.stop, _TURNS)
            draft_PD = drafts[turn][:, places].flatten(0, 1)
            return head_loss(draft_PD, head_VD, said.at(len(ids_BT), places))[0]

        return own + _WEIGHT * faded_mean(map(foreseen, range(_TURNS)))

    def figures(self, module: Hybrid, ids_BT: Tensor) -> Mapping[str, Tensor]:
        """The loss, and how often the block's first choice is the model's own, in its first turn
        and in its last."""
        last_BTD, _ = module.model(ids_BT)
        logits_BTV = module.logits(last_BTD)
        drafts = module.drafts(ids_BT, module.model.norm(last_BTD), _TURNS)
        own_BT = logits_BTV.argmax(-1)
        first, last = (
            (functional.linear(drafts[turn], module.head).argmax(-1) == own_BT)[:, turn:]
            for turn in (0, _TURNS - 1)
        )
        return {
            "held_out_loss": next_token(logits_BTV, ids_BT),
            "first_drafts_right": first.float().mean(),
            "third_drafts_right": last.float().mean(),
        }


def _of_text(ids_BT: Tensor) -> TopProbs:
    """The distributions of a text that goes on as it does: of all places but the last of a
    window."""
    next_P1 = ids_BT[:, 1:].flatten()[:, None]
    return TopProbs(next_P1, torch.zeros(next_P1.shape, device=ids_BT.device))
