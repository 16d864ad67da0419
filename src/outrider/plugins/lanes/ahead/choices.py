"""Settings of drafting ahead, and the memory that a draft model needs for it.

No tensors: a process reads this module before it loads PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from outrider.core.config import EngineConfig
from outrider.core.spec import DraftCapacity

if TYPE_CHECKING:
    from outrider.plugins.lanes.ahead.forecast import Kind as Fallback
    from outrider.plugins.lanes.ahead.forecast import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadChoices:
    """Settings of drafting ahead. `fan_out` verdicts are predicted for drafts of up to `k` tokens,
    shared out by `policy`; after a miss `fallback` drafts. A `saguaro` of 1 leaves distributions
    unchanged; a `force_hits` of -1 forces no hits. `always` drafts ahead at any cost."""

    k: int
    fan_out: int = 16
    policy: Policy = "top"
    fallback: Fallback = "jit"
    saguaro: float = 1.0
    force_hits: float = -1.0
    always: bool = False
    max_ngram: int = 3
    min_ngram: int = 2

    @classmethod
    def of(cls, config: EngineConfig) -> AheadChoices:
        """Return the choices of the settings."""
        return cls(
            k=config.most_k,
            fan_out=config.fan_out,
            policy=cast("Policy", config.fan_policy),
            fallback=cast("Fallback", config.fallback),
            saguaro=config.saguaro,
            force_hits=config.force_hits,
            always=config.hybrid_threshold == 0,
            max_ngram=config.max_ngram,
            min_ngram=config.min_ngram,
        )


def capacity_needed(k: int, fan_out: int, batch: int) -> DraftCapacity:
    """Return the capacity for `batch` sequences, `k` tokens and `fan_out` verdicts each.

    A sequence stages a trunk (a token that was not read yet, the pending one and the draft) and `k`
    nodes a branch. A pass reads all trunks, or the newest node of every branch.
    """
    return DraftCapacity(
        num_rows=batch * max(k + 2, fan_out),
        num_logits=batch * max(k + 1, fan_out),
        num_slots=k + 2 + k * fan_out,
    )
