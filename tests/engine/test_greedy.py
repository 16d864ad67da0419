"""Greedy output is plain decoding's, for every drafter, rule, depth, batch, chunk and memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import PROMPT, Kind, check_greedy, plain
from checks.state import VOCAB
from doubles.drafters import (
    EMPTY,
    OUT_OF_STEP,
    REPEATS_LAST,
    oracle,
    random_chains,
    random_trees,
)
from doubles.rig import Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.protocols import AcceptanceRule, Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine.round import StepwiseLM
from outrider.verify.exact import MatchRule, TokenRule

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": lambda: NgramDrafter(max_n=2, min_n=1),
    "model": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5), chunk=3),
    "paged model": lambda: model_drafter(TinyAttentionLM(vocab_size=VOCAB, seed=5), chunk=3),
    "target itself": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB)),
    "chains": lambda: random_chains(VOCAB),
    "trees": lambda: random_trees(VOCAB),
    "empty": lambda: EMPTY,
    "repeats": lambda: REPEATS_LAST,
    "out of step": lambda: OUT_OF_STEP,
}

prompts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4
)
every_rule = pytest.mark.parametrize(
    "rule", [TokenRule(), MatchRule()], ids=lambda rule: type(rule).__name__
)
every_kind = pytest.mark.parametrize("kind", [ToyHybrid, TinyAttentionLM])


# Rules choose the same token where there is no chance, so not each meets each drafter. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@every_rule
@pytest.mark.parametrize("drafter", DRAFTERS)
@examples(10)
@given(
    kind=st.sampled_from([ToyHybrid, TinyAttentionLM]),
    k=st.integers(1, 8),
    prompts=prompts,
    chunk=st.integers(1, 10),
    batch_size=st.integers(1, 4),
    num_tokens=st.integers(1, 12),
)
def test_any_run(
    rule: AcceptanceRule,
    drafter: str,
    kind: Kind,
    k: int,
    prompts: list[list[int]],
    chunk: int,
    batch_size: int,
    num_tokens: int,
) -> None:
    rig = Rig(
        kind(vocab_size=VOCAB), DRAFTERS[drafter](), rule, k=k, chunk=chunk, batch_size=batch_size
    )
    check_greedy(rig, kind, prompts, num_tokens)


@pytest.mark.sample(3)
@every_kind
@pytest.mark.parametrize("k", range(9))
def test_every_depth(kind: Kind, k: int) -> None:
    for drafter in ("ngram", "model", "target itself"):
        rig = Rig(kind(vocab_size=VOCAB), DRAFTERS[drafter](), k=k, chunk=2)
        check_greedy(rig, kind, [PROMPT, (4,), (0, 0, 0, 0)], 11)


@pytest.mark.sample(4)
@every_kind
@pytest.mark.parametrize("k", range(1, 6))
def test_every_place_of_an_error_in_a_draft(kind: Kind, k: int) -> None:
    text = (*PROMPT, *plain(kind, PROMPT, 9))
    for wrong in range(len(PROMPT), len(text)):
        drafter = oracle(text, VOCAB, wrong_at=lambda place: place == wrong)  # noqa: B023
        check_greedy(Rig(kind(vocab_size=VOCAB), drafter, k=k), kind, [PROMPT], 9)


@examples(10)
@given(k=st.integers(0, 5), prompts=prompts, chunk=st.integers(1, 6))
@pytest.mark.parametrize("drafter", ["model", "trees"])
def test_token_by_token_verification(
    drafter: str, k: int, prompts: list[list[int]], chunk: int
) -> None:
    """Feeding a draft token by token gives the same text, at more passes."""
    target = StepwiseLM(TinyAttentionLM(vocab_size=VOCAB))
    rig = Rig(target, DRAFTERS[drafter](), k=k, chunk=chunk)
    check_greedy(rig, TinyAttentionLM, prompts, 8)


@every_kind
def test_small_pages_and_a_small_arena(kind: Kind) -> None:
    """Admission waits for room, and recycled memory changes nothing."""
    sizes = {"page_size": 2} if kind is TinyAttentionLM else {}
    target = kind(vocab_size=VOCAB, num_slots=48, **sizes)
    rig = Rig(target, random_trees(VOCAB), k=3, page_size=2, chunk=3)
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(5)] * 2
    check_greedy(rig, kind, prompts, 7)
    assert max(trace.batch_size for trace in rig.traces) >= 2
