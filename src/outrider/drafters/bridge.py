"""Bridge: a draft model with another tokenizer; its ids become text, and the text the target's ids.

The draft model reads the sequence in its own vocabulary and drafts greedily, one pass a token for
the whole batch (`ModelDrafter`). Its text is spelled in the target's vocabulary and proposed as a
chain that was chosen deterministically. So every exact rule stays exact, whatever the translation
loses: a token x is accepted with probability p(x). A draft of K target tokens takes about K times
(draft ids per target token) passes. The draft model's memory is sized in the target's tokens; if a
text has more ids in its vocabulary and does not fit, it gets no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.core.draft import Budget, Draft
from outrider.core.errors import given
from outrider.core.params import SamplingParams
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext, Translation, Translator

if TYPE_CHECKING:
    from outrider.drafters.common.growth import DraftSampler

_GREEDY = SamplingParams()
# A bound on the passes, however many draft ids a target token has.
_MOST_PASSES = 4


@dataclass(frozen=True, slots=True)
class _Space:
    """The capacity of the draft model's memory: a window of ids, in pages."""

    model: CausalLM
    page_size: int

    def fitting(self, row: DraftRow, num_free: int) -> DraftRow | None:
        """Return `row` with a draft that fits window and free tokens; None if none does."""
        depth = min(row.budget.depth, self.model.spec.max_tokens - len(row.tokens))
        if depth < 1 or self.num_new(row) > num_free:
            return None
        return replace(row, budget=Budget(depth))

    def num_new(self, row: DraftRow) -> int:
        """Return the most tokens, in whole pages, that drafting may take."""
        state = self.model.state
        # Its earlier drafts are staged, and keep their pages.
        held = state.length(row.seq_id) + state.num_staged(row.seq_id)
        wanted = len(row.tokens) + row.budget.depth - held
        return -(-wanted // self.page_size) * self.page_size


class BridgeDrafter:
    """A drafter with `model` through `translator`; it feeds at most `chunk` tokens in one pass.

    `page_size` is that of the draft model's memory.
    """

    name = "bridge"
    needs = DraftNeeds()

    def __init__(
        self,
        model: CausalLM,
        sampler: DraftSampler,
        translator: Translator,
        *,
        chunk: int,
        page_size: int,
    ) -> None:
        from outrider.drafters.common.draft_model import ModelDrafter

        self._inner = ModelDrafter(model, sampler, chunk=chunk)
        self._translator = translator
        self._space = _Space(model, page_size)
        self._translations: dict[int, Translation] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        translation = self._translator.open()
        self._inner.open(seq_id, translation.to_draft(prompt))
        self._translations[seq_id] = translation

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        translated = self._fitting([self._translated(row) for row in rows if row.budget.depth])
        drafts = self._inner.propose(translated)
        pairs = zip(translated, drafts, strict=True)
        drafted = {row.seq_id: draft.tokens for row, draft in pairs}
        return [self._proposal(row, drafted.get(row.seq_id, ())) for row in rows]

    def close(self, seq_id: int) -> None:
        del self._translations[seq_id]
        self._inner.close(seq_id)

    def _translated(self, row: DraftRow) -> DraftRow:
        """Return the draft model's row. Distributions and shaping are not translated."""
        ids = self._translations[row.seq_id].to_draft(row.tokens)
        depth = min(
            -(-row.budget.depth * len(ids) // len(row.tokens)), row.budget.depth * _MOST_PASSES
        )
        return replace(
            row, tokens=ids, last=None, budget=Budget(depth), params=_GREEDY, shaper=None
        )

    def _fitting(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        num_free = self._space.model.state.num_free_tokens
        fitting: list[DraftRow] = []
        for row in rows:
            fit = self._space.fitting(row, num_free)
            if fit is not None:
                num_free -= self._space.num_new(fit)
                fitting.append(fit)
        return fitting

    def _proposal(self, row: DraftRow, drafted: Sequence[int]) -> Draft:
        if not drafted:
            return Draft.empty()
        spelled = self._translations[row.seq_id].to_target(drafted)
        return Draft.chain(spelled[: row.budget.depth])


def build(context: BuildContext) -> BridgeDrafter:
    config = context.config
    return BridgeDrafter(
        context.draft,
        context.sampler("the draft model"),
        given(context.models.translator, "translator"),
        chunk=config.most_chunk,
        page_size=config.page_size,
    )


KIND = DrafterKind(
    name="bridge",
    build=build,
    source="model",
    reads=("translator",),
    must_have=("translator",),
    needs_words="a draft model",
    not_in_process="a draft model with another vocabulary",
    keeps_apart=True,
    accepted=0.55,
)
