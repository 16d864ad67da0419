"""Attention of blocks that draft on from their own states, for all places of a window at once.

In the engine a block reads text with the target's states, and below it what it drafts with its own.
In training every place is a place where a round may begin. So a window is read in turns: in the
first one every place has the target's state of the token before; in turn r + 1 it has what the
block made of that token in turn r. A query of turn r sees the keys of the first turn up to r places
before its own, and then one key of each later turn, its own included. EAGLE-3 calls this
training-time test (Li et al. 2025, arXiv 2503.01840, 3.2).

At every place all turns are to say what the target says there. A later draft counts only where
earlier ones were right, so turn s weighs 0.8 ** s.

Shapes:  B = windows, T = tokens, D = hidden size, G = heads, H = head size, W = ids of a law,
         P = places (B x T).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.families import LlamaConfig
from outrider.train.llama_module import Attention, Turns
from outrider.train.losses import TopLaws, distillation, top_laws

_DECAY = 0.8
# Ids that are kept of a target's law.
_NUM_KEPT = 32
# Keys and values of one turn.
Heads = tuple[Tensor, Tensor]


def heads_of(
    own: Attention, config: LlamaConfig, x_BTD: Tensor, turns: Turns
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, as many of each, turned by position."""

    def split(linear: nn.Linear, num_heads: int) -> Tensor:
        rows_BTE = linear(x_BTD)
        return rows_BTE.unflatten(-1, (num_heads, config.head_dim)).transpose(1, 2)

    groups = config.num_heads // config.num_kv_heads
    q_BGTH = turns(split(own.q_proj, config.num_heads))
    k_BGTH = turns(split(own.k_proj, config.num_kv_heads)).repeat_interleave(groups, 1)
    v_BGTH = split(own.v_proj, config.num_kv_heads).repeat_interleave(groups, 1)
    return q_BGTH, k_BGTH, v_BGTH


def attend(q_BGTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, kept: list[Heads]) -> Tensor:
    """What a block attends to in its next turn, whose keys and values are added to `kept`."""
    kept.append((k_BGTH, v_BGTH))
    if len(kept) == 1:
        out_BGTH = functional.scaled_dot_product_attention(q_BGTH, k_BGTH, v_BGTH, is_causal=True)
        return out_BGTH.transpose(1, 2).flatten(2)
    num_tokens, late = q_BGTH.shape[2], len(kept) - 1
    places_T = torch.arange(num_tokens, device=q_BGTH.device)
    unseen_TT = places_T[None] > places_T[:, None] - late
    scores = [(q_BGTH @ kept[0][0].mT).masked_fill(unseen_TT, -torch.inf)]
    drafted = [
        (later(k, late - turn), later(v, late - turn))
        for turn, (k, v) in enumerate(kept[1:], start=1)
    ]
    for turn, (k, _) in enumerate(drafted, start=1):
        score_BGT1 = (q_BGTH * k).sum(-1, keepdim=True)
        unread_T1 = (places_T < late - turn)[:, None]
        scores.append(score_BGT1.masked_fill(unread_T1, -torch.inf))
    shares = (torch.cat(scores, dim=-1) * q_BGTH.shape[-1] ** -0.5).softmax(-1)
    out_BGTH = shares[..., :num_tokens] @ kept[0][1]
    for number, (_, v) in enumerate(drafted, start=num_tokens):
        out_BGTH = out_BGTH + shares[..., number, None] * v
    return out_BGTH.transpose(1, 2).flatten(2)


def later(x: Tensor, places: int) -> Tensor:
    """`x`, of shape [..., T, D], moved to later places; zeros come first."""
    if not places:
        return x
    return functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


def divergence(turns: Iterable[Tensor], wanted_BTW: Tensor) -> Tensor:
    """How far the laws of all turns, logits_BTW each, are from those of the target's logits, in
    nats a place: a weighted mean. The first places of later turns have no state before them."""
    laws = top_laws(wanted_BTW.flatten(0, 1), _NUM_KEPT)
    ids_BTC, logprobs_BTC = (
        kept_PC.view(*wanted_BTW.shape[:2], -1) for kept_PC in (laws.ids_PC, laws.logprobs_PC)
    )
    total, weights = wanted_BTW.new_zeros((), dtype=torch.float32), 0.0
    for turn, logits_BTW in enumerate(turns):
        part = TopLaws(ids_BTC[:, turn:].flatten(0, 1), logprobs_BTC[:, turn:].flatten(0, 1))
        weight = _DECAY**turn
        total = total + weight * distillation(logits_BTW[:, turn:].flatten(0, 1), part)
        weights += weight
    return total / weights


def accepted_drafts(ids_T: Tensor, turns: Iterable[Tensor]) -> Tensor:
    """Of the drafts of a round whose pending token is at p, one a turn, how many are the text's:
    accepted_T. `turns` are the ids that each turn chooses after every token. Draft number s is
    turn s at p + s, since what it follows were accepted drafts, which are the text."""
    accepted_T, going_T = torch.zeros_like(ids_T), torch.ones_like(ids_T)
    for turn, chosen_T in enumerate(turns):
        right_T = torch.zeros_like(ids_T)
        right_T[: max(len(ids_T) - 1 - turn, 0)] = chosen_T[turn:-1] == ids_T[turn + 1 :]
        going_T = going_T * right_T
        accepted_T += going_T
    return accepted_T
