"""Slots of an arena that no committed row lies in: whatever is written there must not matter."""

from __future__ import annotations

import torch

from outrider.cache.paged_kv import PagedKV
from outrider.core.clock import host_ints


def live_slots(store: PagedKV) -> list[int]:
    """Slots that hold committed rows of open sequences.

    The rest is dead space, but for free pages whose beginning `open` may still find.
    """
    open_now = store._sequences  # pyright: ignore[reportPrivateUsage]
    return sorted({slot for seq_id in open_now for slot in host_ints(store.slots(seq_id))})


def poison_dead_space(store: PagedKV) -> None:
    """Overwrite every slot that holds no committed row; nothing may be staged."""
    dead = torch.ones(store.arena.shape[3], dtype=torch.bool)
    dead[live_slots(store)] = False
    store.arena[:, :, :, dead] = torch.nan
