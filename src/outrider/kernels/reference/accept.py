"""Greedy acceptance of chains on tensors: a draft is accepted as far as it is the target's argmax.

    accept_len = the largest n with draft_i = argmax(logits_i) for all i < n

Of equal logits the first one counts, as everywhere. Row i of the logits is compared with draft
token i, so the row after the last draft token, which gives the bonus token, is not passed. Shorter
drafts are padded with -1, which is never accepted.

Shapes:  B = sequences, K = drafted tokens, V = vocabulary, M = logits rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.kernels.reference import pointwise


def verify_prefix(
    logits_BKV: Tensor,
    draft_ids_BK: Tensor,
    argmax: Callable[[Tensor], list[int]] = pointwise.argmax,
) -> tuple[Tensor, Tensor]:
    """(accept_len_B, mask_BK): int64 lengths, and which draft tokens are accepted. A host sync."""
    if logits_BKV.shape[:2] != draft_ids_BK.shape:
        raise ContractError("there is a row of logits for each draft id")
    chosen = argmax(logits_BKV.flatten(0, 1)) if draft_ids_BK.numel() else []
    choices_BK = torch.tensor(chosen, device=draft_ids_BK.device).view(draft_ids_BK.shape)
    agrees_BK = (choices_BK == draft_ids_BK) & (draft_ids_BK >= 0)
    accept_len_B = agrees_BK.cumprod(-1).sum(-1)
    position_K = torch.arange(draft_ids_BK.shape[1], device=draft_ids_BK.device)
    return accept_len_B, position_K < accept_len_B[:, None]
