"""What a user decides about drafting ahead.

No tensors: a process reads it before it loads PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.drafters.ahead.fallback import Kind as Fallback
    from outrider.drafters.ahead.forecast import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadChoices:
    """`fan_out` verdicts are foreseen for drafts of up to `k` tokens, shared out by `policy`; what
    is not foreseen is drafted by `fallback`. A `saguaro` of 1 leaves laws as they are, a
    `force_hits` of -1 hits. `always` drafts ahead also where that takes longer than verifying."""

    k: int
    fan_out: int = 16
    policy: Policy = "top"
    fallback: Fallback = "jit"
    saguaro: float = 1.0
    force_hits: float = -1.0
    always: bool = False
    max_ngram: int = 3
    min_ngram: int = 2
