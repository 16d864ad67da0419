"""Commits in the flat form that packed rounds produce.

Shapes:  B = sequences, W = longest path.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.core.host import host_ints, host_rows
from outrider.core.protocols import StateStore


def commit_packed(
    store: StateStore, seq_ids: Sequence[int], paths_BW: Tensor, lengths_B: Tensor
) -> int:
    """Commit the first `lengths_B[b]` nodes of `paths_BW[b]` for each sequence.

    The number of rows copied, as `StateStore.commit`. Reads both tensors on the host.
    """
    kept = zip(seq_ids, host_rows(paths_BW), host_ints(lengths_B), strict=True)
    return store.commit({seq_id: path[:length] for seq_id, path, length in kept})
