"""The definition of greedy verification of chains: how far each draft follows the target's choice.

    accept_len = the largest n with draft_i = argmax(logits_i) for all i < n

The first largest logit is the choice, as everywhere. Row i of the logits is the law that draft
token i must meet, so the row behind the last draft token, which gives the bonus token, is not
among them. Shorter drafts are padded with -1, which is never accepted. Nothing waits for the host.

Shapes:  B = sequences, K = drafted tokens, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.errors import ContractError


def verify_prefix(logits_BKV: Tensor, draft_ids_BK: Tensor) -> tuple[Tensor, Tensor]:
    """(accept_len_B, mask_BK): int64 lengths, and which draft tokens are accepted."""
    if logits_BKV.shape[:2] != draft_ids_BK.shape:
        raise ContractError("there is a row of logits for each draft id")
    return agreed_prefix(logits_BKV.argmax(-1), draft_ids_BK)


def agreed_prefix(choices_BK: Tensor, draft_ids_BK: Tensor) -> tuple[Tensor, Tensor]:
    """As `verify_prefix`, from the target's choices."""
    agrees_BK = (choices_BK == draft_ids_BK) & (draft_ids_BK >= 0)
    accept_len_B = agrees_BK.cumprod(-1).sum(-1)
    place_K = torch.arange(draft_ids_BK.shape[1], device=draft_ids_BK.device)
    return accept_len_B, place_K < accept_len_B[:, None]
