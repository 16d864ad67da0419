"""Drops keys of a prompt that a decoder has read, but for those that its end attends to.

The queries of the prompt's end are needed once more, and no cache holds queries. So its last tokens
go through the layers again, over a copy of the sequence's keys and values, layer by layer; each
layer's queries and keys then choose (cache/compaction.py), and what is kept is gathered. Nothing is
written to the arena before all layers have chosen.

It costs a pass of as many rows as the window has, and one copy of a layer's memory at a time.

Shapes:  N = W = tokens of the window, T = tokens, G = KV heads, S = slots, D = head size,
         M = kept tokens, H = query heads, C = copied slots, whole pages of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.compaction import Keep, kept_keys
from outrider.cache.paged_kv import PagedKV
from outrider.kernels.plan import PackedPlan
from outrider.models.decoder import Scratch, Stack


def compact(stack: Stack, kv: PagedKV, scratch: Scratch, seq_id: int, keep: Keep) -> None:
    """Keep of the committed tokens of `seq_id` what `keep` says; there are more of them.

    `scratch` has a row for each token of the window. Raises CapacityError, with nothing changed,
    where others share so much of it that there is no room for a copy.
    """
    tokens, slots_T = kv.tokens(seq_id), kv.slots(seq_id)
    first = len(tokens) - keep.window
    with torch.inference_mode():
        plan = _again(tokens[first:], first, kv.page_size, slots_T.device)
        stack.embed(plan, scratch)
        kept: list[Tensor] = []
        for depth, (k_GSD, v_GSD) in enumerate(kv.layers):
            k_GCD, v_GCD = (_copied(all_GSD, slots_T, kv.page_size) for all_GSD in (k_GSD, v_GSD))
            stack.layer(depth, plan, scratch, (k_GCD, v_GCD))
            places_GM = _chosen(scratch, k_GCD[:, : len(tokens)], keep)
            kept.append(_gathered(k_GSD, v_GSD, slots_T[places_GM]))
        kv.replace(seq_id, torch.stack(kept))


def _again(tokens: Sequence[int], first: int, page_size: int, device: torch.device) -> PackedPlan:
    """A pass of `tokens`, from position `first` on, over a copy that lies in order."""
    end = first + len(tokens)
    positions_N = torch.arange(first, end, dtype=torch.int32, device=device)
    pages_P = torch.arange(-(-end // page_size), dtype=torch.int32, device=device)
    return PackedPlan(
        page_size=page_size,
        tokens_N=torch.tensor(tokens, dtype=torch.int32, device=device),
        positions_N=positions_N,
        slots_N=positions_N,
        seq_N=torch.zeros_like(positions_N),
        visible_N=positions_N + 1,
        pages_BP=pages_P[None],
    )


def _copied(all_GSD: Tensor, slots_T: Tensor, page_size: int) -> Tensor:
    num_slots = -(-len(slots_T) // page_size) * page_size
    copy_GCD = all_GSD.new_zeros(all_GSD.shape[0], num_slots, all_GSD.shape[2])
    copy_GCD[:, : len(slots_T)] = all_GSD[:, slots_T]
    return copy_GCD


def _chosen(scratch: Scratch, k_GTD: Tensor, keep: Keep) -> Tensor:
    """By the queries that a layer left in `scratch`, turned as the keys are."""
    num_kv_heads, _, head_dim = k_GTD.shape
    heads_WED = scratch.qkv_NE.view(keep.window, -1, head_dim)
    return kept_keys(heads_WED[:, : -2 * num_kv_heads], k_GTD, keep, head_dim**-0.5)


def _gathered(k_GSD: Tensor, v_GSD: Tensor, slots_GM: Tensor) -> Tensor:
    """The rows of each head, of shape [2, G, M, D]."""
    heads_G1 = torch.arange(k_GSD.shape[0], device=k_GSD.device)[:, None]
    return torch.stack([k_GSD[heads_G1, slots_GM], v_GSD[heads_G1, slots_GM]])
