"""eagle-lite: extrapolates the target's last hidden state in a straight line; it has no weights.

With h and h_prev the residuals after the target's last layer of the last two tokens that it read,
the pending token's state is guessed as h + alpha (h - h_prev), and the next state in the same way
from the guess. The target's norm and output head make logits of each guess. Guesses get worse at
once, so eagle-lite drafts two tokens at most.

Shapes:  B = texts, P = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.core.draft import Draft
from outrider.core.errors import given
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext, Stateless

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.drafters.common.growth import DraftSampler
    from outrider.plugins.heads.target import NormedTarget

ALPHA = 0.7
MAX_DRAFT = 2


class LiteDrafter(Stateless):
    """A drafter without state. It drafts nothing before the target has read two tokens and all but
    the pending one."""

    name = "eagle-lite"

    def __init__(
        self,
        target: NormedTarget,
        sampler: DraftSampler,
        *,
        alpha: float = ALPHA,
        max_draft: int = MAX_DRAFT,
    ) -> None:
        from outrider.kernels.operators import own_kernels

        self._tables, self._kernels = target.tables, own_kernels(target.kernels)
        self._eps = target.config.rms_norm_eps
        self._sampler, self._alpha, self._max_draft = sampler, alpha, max_draft
        self.needs = DraftNeeds(hidden_layers=(target.spec.num_layers,))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        from outrider.drafters.common.growth import draft_some

        return draft_some(rows, [self._depth(row) for row in rows], self._drafts)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        import torch

        pairs = [_last_two(row) for row in rows]
        before_BD, now_BD = (torch.stack(states) for states in zip(*pairs, strict=True))
        builder = self._sampler.builder(rows, [0] * len(rows))
        while True:
            before_BD, now_BD = now_BD, now_BD + self._alpha * (now_BD - before_BD)
            if not builder.grow(self._logits(now_BD)):
                return builder.drafts()
            above = list(builder.above)
            before_BD, now_BD = before_BD[above], now_BD[above]

    def _logits(self, state_BD: Tensor) -> Tensor:
        import torch

        tables, kernels = self._tables, self._kernels
        with torch.inference_mode():
            norm_BD = torch.empty_like(state_BD)
            kernels.rms_norm(state_BD, tables.norm_D, self._eps, norm_BD)
            logits_BV = state_BD.new_empty(len(state_BD), tables.head.num_out)
            kernels.linear(norm_BD, tables.head, logits_BV)
        return logits_BV

    def _depth(self, row: DraftRow) -> int:
        length = len(row.tokens) - 1
        if row.hidden is None or row.hidden.length < length or length < 2:
            return 0
        return min(row.budget.depth, self._max_draft)


def _last_two(row: DraftRow) -> tuple[Tensor, Tensor]:
    """Return states of the last two tokens that the target has read, each of shape [D]."""
    end = len(row.tokens) - 1
    before_D, now_D = given(row.hidden, "hidden state").read(end - 2, end)[:, 0].float()
    return before_D, now_D


def build(context: BuildContext) -> LiteDrafter:
    from outrider.plugins.heads.target import normed_target

    target, sampler = normed_target(context.models.target), context.sampler("eagle-lite")
    return LiteDrafter(target, sampler, alpha=context.config.lite_alpha)


KIND = DrafterKind(
    name="eagle-lite",
    build=build,
    reads=("last layer",),
    keeps_apart=True,
    accepted=0.2,
)
