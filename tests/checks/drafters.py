"""What every drafter must keep to, checked over whole texts and with rounds left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch

from outrider.core.budget import Budget
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import KeyedRng
from outrider.drafters.ngram import NgramDrafter

VOCAB = 5
MakeDrafter = Callable[[], Drafter]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.3, top_k=4, seed=2)


def row(
    seq_id: int,
    text: Sequence[int],
    *,
    depth: int,
    params: SamplingParams = GREEDY,
    last: Outcome | None = None,
) -> DraftRow:
    noise = KeyedRng(params.seed, 0, len(text))
    return DraftRow(seq_id, list(text), last, Budget(depth), params, noise)


def fresh_draft(
    make: MakeDrafter,
    text: Sequence[int],
    depth: int,
    params: SamplingParams,
    *,
    prompt: Sequence[int] | None = None,
) -> Draft:
    """The draft of a drafter that meets the whole text at once, as a prompt unless it has one."""
    drafter = make()
    drafter.open(0, text if prompt is None else prompt)
    draft = drafter.propose([row(0, text, depth=depth, params=params)])[0]
    drafter.close(0)
    return draft


def assert_same(left: Draft, right: Draft) -> None:
    assert (left.tokens, left.parents) == (right.tokens, right.parents)
    assert (left.probs_NV is None) == (right.probs_NV is None)
    if left.probs_NV is not None and right.probs_NV is not None:
        assert torch.allclose(left.probs_NV, right.probs_NV, atol=1e-6)


def check_shape(draft: Draft, depth: int, params: SamplingParams) -> None:
    """Within budget and vocabulary; laws are laws, and give every drawn token some mass."""
    assert draft.max_depth <= depth
    assert all(0 <= token < VOCAB for token in draft.tokens)
    if draft.probs_NV is not None:
        assert not params.greedy
        assert draft.probs_NV.shape == (len(draft), VOCAB)
        assert float(draft.probs_NV.min()) >= 0
        assert torch.allclose(draft.probs_NV.sum(-1).double(), torch.ones(len(draft)).double())
        assert all(law_V[t] > 0 for law_V, t in zip(draft.probs_NV, draft.tokens, strict=True))


def check_memory(make: MakeDrafter, params: SamplingParams) -> None:
    """After any history, a drafter proposes what one that was not asked before would.

    Rounds accept some, all or none of a draft, or go by without asking; two sequences alternate.
    """
    rng = random.Random(3)
    drafter = make()
    prompts = [(1, 2, 0, 1), (3,)]
    texts = [list(prompt) for prompt in prompts]
    lasts: list[Outcome | None] = [None, None]
    for seq_id, text in enumerate(texts):
        drafter.open(seq_id, text)
    for _ in range(30):
        asked = [seq_id for seq_id in (0, 1) if rng.random() < 0.7]
        depth = rng.randint(1, 5)
        rows = [row(i, texts[i], depth=depth, params=params, last=lasts[i]) for i in asked]
        drafts = dict(zip(asked, drafter.propose(rows), strict=True)) if asked else {}
        assert len(drafts) == len(asked)
        for seq_id, text in enumerate(texts):
            draft = drafts.get(seq_id, Draft.empty())
            check_shape(draft, depth, params)
            if seq_id in drafts:
                again = fresh_draft(make, text, depth, params, prompt=prompts[seq_id])
                assert_same(draft, again)
            # Chains: any number of tokens from the start is a path.
            path = tuple(range(rng.randint(0, len(draft))))
            outcome = Outcome(seq_id, draft, Verdict(path, rng.randrange(VOCAB)))
            lasts[seq_id] = outcome
            text.extend(outcome.tokens)
    drafter.close(0)
    drafter.close(1)


def check_lookup() -> None:
    """Worked examples: the longest tail wins, then the most recent place; copies overlap."""

    def continuation(text: list[int], depth: int, *, max_n: int = 3, min_n: int = 2) -> list[int]:
        return list(
            fresh_draft(partial(NgramDrafter, max_n=max_n, min_n=min_n), text, depth, GREEDY).tokens
        )

    assert continuation([10, 11, 12, 10, 11], 3) == [12, 10, 11]
    assert continuation([7, 8, 9, 1, 8, 9, 2, 7, 8, 9], 1) == [1]
    assert continuation([5, 6, 7, 5, 6, 9, 5, 6], 3) == [9, 5, 6]
    assert continuation([1, 2, 3, 4], 3) == []
    assert continuation([1, 2, 1], 3) == []
    assert continuation([1, 2, 1], 3, min_n=1) == [2, 1, 2]
    assert continuation([4, 4], 4, min_n=1) == [4] * 4
    assert continuation([4], 4, min_n=1) == []
    assert continuation([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert continuation([1, 2, 9, 3, 2], 2, max_n=2, min_n=1) == [9, 3]
