"""The distribution of a whole generation: every round, key, residual and bonus, enumerated.

The engine, its drafter and its rule are the shipped ones; what is expected comes from a fresh model
fed the text in one go, from the slow processed distribution, and from logits that are shaped one
node at a time in plain Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from checks.distribution import (
    TOLERANCE,
    assert_same_distribution,
    floats,
    joint_distribution,
)
from checks.state import fresh_logits
from doubles.drafters import random_chains, random_trees
from doubles.every_branch import Distribution, EveryBranch, Tokens, distribution
from doubles.racing import Racing
from doubles.rig import Request, Rig, model_drafter, walking
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Budget, Draft
from outrider.core.logits import AllowedTokens, LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, CausalLM, Drafter, DraftRow
from outrider.core.rng import KeyedRng, race_node
from outrider.drafters.ngram import NgramDrafter
from outrider.plugins.proof.distributions import filtered


def shaped(
    logits: Sequence[float],
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: frozenset[int] = frozenset(),
    bad_words: Sequence[Sequence[int]] = (),
    allowed: AllowedTokens | None = None,
) -> list[float]:
    """The logits of the token that follows `prompt` and `text`."""
    values = [
        value + (params.logit_bias or {}).get(token, 0.0) for token, value in enumerate(logits)
    ]
    for token in range(len(values)):
        if token in prompt or token in text:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * list(text).count(token)
        values[token] -= params.presence_penalty * (token in text)
    mask_V = allowed(text) if allowed is not None else None
    if mask_V is not None:
        may = {token for token in range(len(values)) if bool(mask_V[token])}
        may = may or set(stop_ids) or set(range(len(values)))
        values = [v if token in may else -math.inf for token, v in enumerate(values)]
    banned = {word[-1] for word in bad_words if _ends_with(text, word[:-1])}
    if len(text) < params.min_tokens:
        banned |= stop_ids
    rest = [-math.inf if token in banned else v for token, v in enumerate(values)]
    return rest if max(rest) > -math.inf else values


def _ends_with(text: Sequence[int], head: Sequence[int]) -> bool:
    start = len(text) - len(head)
    return start >= 0 and all(text[start + i] == token for i, token in enumerate(head))


@st.composite
def shaping_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Any mixture of the features that shape logits."""
    bias = st.dictionaries(st.integers(0, vocab_size - 1), st.floats(-5, 5), max_size=3)
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.2, -0.4])),
        logit_bias=draw(st.none() | bias),
        min_tokens=draw(st.integers(0, 6)),
    )


VOCAB = 3
LENGTH = 3
PROMPT = (0, 1, 2, 0, 1)
FILTERS = (
    SamplingParams(temperature=1.3, max_tokens=LENGTH),
    SamplingParams(temperature=0.7, top_k=2, max_tokens=LENGTH),
    SamplingParams(temperature=1.6, top_p=0.8, max_tokens=LENGTH),
    SamplingParams(temperature=2.5, min_p=0.2, top_p=0.97, max_tokens=LENGTH),
)


def target_distribution(
    kind: Callable[..., CausalLM],
    prompt: Sequence[int],
    params: SamplingParams,
    vocab_size: int = VOCAB,
) -> Distribution:
    def conditional(text: Tokens) -> Tensor:
        logits_V = fresh_logits(kind, [*prompt, *text], vocab_size)
        return torch.tensor(filtered(floats(logits_V), params), dtype=torch.float64)

    return joint_distribution(conditional, params.max_tokens)


def engine_distribution(rig: Rig, prompt: Sequence[int], params: SamplingParams) -> Distribution:
    def generation(rng: EveryBranch) -> Tokens:
        with walking(Racing(rng)):
            return tuple(rig.run([Request(prompt, params)])[0])

    return distribution(generation)


def check_engine_distribution(
    rig: Rig,
    kind: Callable[..., CausalLM],
    params: SamplingParams,
    tolerance: float = TOLERANCE,
) -> None:
    wanted = target_distribution(kind, PROMPT, params, rig.target.spec.vocab_size)
    assert_same_distribution(engine_distribution(rig, PROMPT, params), wanted, tolerance)


def distribution_drafters() -> dict[str, Callable[[], Drafter]]:
    return {
        "model": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7), chunk=2),
        "ngram": lambda: NgramDrafter(max_n=2, min_n=1),
        "chains": lambda: random_chains(VOCAB),
        "trees": lambda: random_trees(VOCAB, num_nodes=2),
    }


def check_penalised_engine_distribution() -> None:
    """Penalties count what each draft node follows, as plain decoding would have counted there."""
    params = SamplingParams(
        temperature=1.1,
        repetition_penalty=1.4,
        frequency_penalty=0.6,
        presence_penalty=-0.5,
        max_tokens=LENGTH,
    )

    def conditional(text: Tokens) -> Tensor:
        logits = floats(fresh_logits(ToyHybrid, [*PROMPT, *text], VOCAB))
        shares = filtered(shaped(logits, PROMPT, text, params), params)
        return torch.tensor(shares, dtype=torch.float64)

    def generation(rng: EveryBranch) -> Tokens:
        request = Request(PROMPT, params, shaper=LogitsProcessor(params, len(PROMPT)))
        with walking(rng):
            return tuple(rig.run([request])[0])

    rig = Rig(ToyHybrid(vocab_size=VOCAB, seed=0), distribution_drafters()["model"](), k=2)
    assert_same_distribution(distribution(generation), joint_distribution(conditional, LENGTH))


def racing_drafter() -> Drafter:
    """Draws with the numbers of the coupled rule, so it is for that rule alone."""
    return model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7), chunk=2, draw=race_node)


def check_hybrid_engine_distribution(
    rule: AcceptanceRule, drafter: Drafter, params: SamplingParams
) -> None:
    target = ToyHybrid(vocab_size=VOCAB, seed=0)
    check_engine_distribution(Rig(target, drafter, rule, k=2, chunk=3), ToyHybrid, params)


def check_reported_distribution(make: Callable[[], Drafter], params: SamplingParams) -> None:
    """Enumerated drafts of a sampling drafter follow the distributions that it reports with them.

    Node by node: among drafts with the same tokens before it, a node's tokens come with the very
    frequencies of the distribution reported for it, and that distribution does not depend on what
    was drawn there.
    """
    text = [*PROMPT, 2]
    reports: dict[Tokens, Draft] = {}

    def drafting(rng: EveryBranch) -> Tokens:
        drafter = make()
        drafter.open(0, PROMPT)
        row = DraftRow(0, text, None, Budget(2), params, rng.at(len(text)))
        draft = drafter.propose([row])[0]
        drafter.close(0)
        reports[draft.tokens] = draft
        return draft.tokens

    found = distribution(drafting)
    assert all(len(draft) == 2 for draft in reports.values())
    for tokens, draft in reports.items():
        assert draft.probs_NV is not None
        wanted = 1.0
        for token, probs_V in zip(tokens, draft.probs_NV, strict=True):
            wanted *= float(probs_V[token])
        assert abs(found[tokens] - wanted) <= 1e-12
        cousins = [other for other in reports.values() if other.tokens[0] == tokens[0]]
        first, second = draft.probs_NV
        for other in cousins:
            assert other.probs_NV is not None
            assert torch.equal(other.probs_NV[0], first)
            assert torch.equal(other.probs_NV[1], second)


def check_drafting_distribution(params: SamplingParams) -> None:
    """The distribution a model drafter reports is its own model's, processed as the target's would
    be."""
    drafter = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=0))
    drafter.open(0, PROMPT)
    rng = KeyedRng(0, 0, len(PROMPT))
    draft = drafter.propose([DraftRow(0, PROMPT, None, Budget(2), params, rng)])[0]
    assert draft.probs_NV is not None
    for node, probs_V in enumerate(draft.probs_NV):
        logits_V = fresh_logits(ToyHybrid, [*PROMPT, *draft.tokens[:node]], VOCAB)
        wanted = torch.tensor(filtered(floats(logits_V), params), dtype=torch.float64)
        assert float((probs_V - wanted).abs().max()) <= 1e-12
