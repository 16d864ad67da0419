"""The seam between a captured round and what draws and judges: logits in, tokens out.

`TorchRoundLaws` (graph_accept.py) is the definition, in tensor operators of any device;
`TritonRoundLaws` (graph_triton.py) are fused kernels. A row draws with numbers keyed as those of
`KeyedNoise`, so both give the text that stages give.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """What the numbers of a round are keyed by, but for node and role. All int64, of shape B."""

    seed_B: Tensor
    sample_B: Tensor
    start_B: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a round. `temperature_B` is float32, 0 for greedy rows; `depth_B` (int64) is how
    many of the K tokens count: near the limit of a text rounds draft less."""

    temperature_B: Tensor
    depth_B: Tensor
    keys: Keys


@dataclass(frozen=True, slots=True)
class Judged:
    """How many tokens each row keeps, the target's own token after them, both int64, and whether
    its logits were no numbers: then the token is any."""

    kept_B: Tensor
    next_B: Tensor
    broken_B: Tensor


class RoundLaws(Protocol):
    """Draws drafts, node by node, and judges them. Remembers the laws of a round's drafts."""

    def begin(self, rows: Rows) -> None:
        """A round of `rows` begins."""
        ...

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        """A token a row (int64), and whether its logits were no numbers."""
        ...

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged: ...
