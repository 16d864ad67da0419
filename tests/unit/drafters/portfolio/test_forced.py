"""Forced tokens: what a mask leaves no choice of is drafted, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.drafters.common.context import ScoredDraft
from outrider.drafters.portfolio import ForcedDrafter
from outrider.testing import row

VOCAB = 6
PROMPT = (4, 4)


def only(*ids: int) -> Tensor:
    mask_V = torch.zeros(VOCAB, dtype=torch.bool)
    mask_V[list(ids)] = True
    return mask_V


def offer(
    allowed: Callable[[Sequence[int]], Tensor | None] | None,
    written: Sequence[int] = (),
    depth: int = 5,
) -> ScoredDraft:
    drafter = ForcedDrafter()
    drafter.open(0, PROMPT)
    shaper = LogitsProcessor(SamplingParams(), len(PROMPT), allowed=allowed)
    asked = replace(row(0, [*PROMPT, *written], depth=depth), shaper=shaper)
    found = drafter.offers([asked])[0]
    drafter.close(0)
    return found


def test_it_goes_on_until_there_is_a_choice() -> None:
    def allowed(text: Sequence[int]) -> Tensor | None:
        return only(len(text)) if len(text) < 3 else only(0, 1)

    found = offer(allowed)
    assert found.draft.tokens == (0, 1, 2)
    assert found.kept == (1.0, 1.0, 1.0)
    assert offer(allowed, (0, 1)).draft.tokens == (2,)
    assert offer(allowed, (0, 1, 2)).draft.tokens == ()
    assert offer(allowed, depth=2).draft.tokens == (0, 1)


def test_nothing_is_forced_where_all_or_nothing_is_allowed() -> None:
    assert offer(None).draft.tokens == ()
    assert offer(lambda text: None).draft.tokens == ()
    assert offer(lambda text: only()).draft.tokens == ()
    drafter = ForcedDrafter()
    assert drafter.propose([row(0, PROMPT, depth=3)])[0].tokens == ()
