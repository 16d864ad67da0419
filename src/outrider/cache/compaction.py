"""SnapKV: choice of the keys to keep of a long prompt, by the attention of its last tokens.

The last `window` tokens attend to the whole prompt. A key's vote is the attention that it gets,
summed over these tokens and averaged over the query heads that share the key; votes are pooled over
neighbours. Each layer and KV head keeps the `budget` best keys, the window included (Li et al.
2024, arXiv 2404.14469). The choice depends on the prompt and the model alone. Votes are summed in
float64 and compared in float32, so that the order of a sum does not matter; of equals the first
stays.

Shapes:  W = window, T = prompt tokens, P = those before the window, G = KV heads, R = query heads
         that share one, H = query heads, D = head size, M = budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import ConfigError

# Neighbours whose votes are averaged.
POOLED = 5


@dataclass(frozen=True, slots=True)
class Keep:
    """The number of keys to keep of a longer prompt, and the number of tokens that choose them.
    Raises ConfigError for a window that leaves nothing to choose."""

    budget: int
    window: int

    def __post_init__(self) -> None:
        if not 0 < self.window < self.budget:
            raise ConfigError(
                f"kv_window={self.window} leaves nothing to choose of kv_budget={self.budget}.",
                hint="lower --kv-window or raise --kv-budget",
            )


def kept_keys(q_WHD: Tensor, k_GTD: Tensor, keep: Keep, scale: float) -> Tensor:
    """Positions of the keys to keep, kept_GM (int64), in the order of the text.

    `q_WHD` are the queries of the last W of T tokens, `k_GTD` all keys, both as attention reads
    them; T is above the budget.
    """
    num_before = k_GTD.shape[1] - q_WHD.shape[0]
    votes = [
        _votes(q_WRD, k_TD, scale)
        for q_WRD, k_TD in zip(_by_key_head(q_WHD, k_GTD), k_GTD, strict=True)
    ]
    votes_GP = torch.stack(votes)[:, :num_before]
    pooled_GP = functional.avg_pool1d(votes_GP, POOLED, stride=1, padding=POOLED // 2).float()
    order_GP = pooled_GP.sort(dim=-1, descending=True, stable=True).indices
    chosen_GB = order_GP[:, : keep.budget - keep.window].sort(dim=-1).values
    window_W = torch.arange(num_before, k_GTD.shape[1], device=k_GTD.device)
    return torch.cat([chosen_GB, window_W.expand(k_GTD.shape[0], -1)], dim=1)


def _by_key_head(q_WHD: Tensor, k_GTD: Tensor) -> tuple[Tensor, ...]:
    num_window, _, head_dim = q_WHD.shape
    return q_WHD.reshape(num_window, k_GTD.shape[0], -1, head_dim).unbind(1)


def _votes(q_WRD: Tensor, k_TD: Tensor, scale: float) -> Tensor:
    """Attention of the window to each token, votes_T."""
    # MPS lacks float64; ties may differ there.
    dtype = torch.float32 if k_TD.device.type == "mps" else torch.float64
    num_window, num_tokens = q_WRD.shape[0], k_TD.shape[0]
    scores_RWT = (q_WRD.to(dtype).transpose(0, 1) @ k_TD.to(dtype).T) * scale
    ahead_WT = torch.ones(num_window, num_tokens, dtype=torch.bool, device=k_TD.device)
    ahead_WT = ahead_WT.triu(num_tokens - num_window + 1)
    shares_RWT = scores_RWT.masked_fill(ahead_WT, float("-inf")).softmax(-1)
    return shares_RWT.sum(1).mean(0)
