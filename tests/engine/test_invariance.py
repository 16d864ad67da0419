"""Text depends on a request's own seed, prompt and settings: not on mates, chunks or drafters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import Kind
from checks.rng import check_no_number_is_used_twice
from checks.state import VOCAB
from doubles.drafters import EMPTY, OUT_OF_STEP, random_chains, random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine.round import StepwiseLM
from outrider.verify.exact import MatchRule, TokenRule

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": lambda: NgramDrafter(max_n=2, min_n=1),
    "model": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5), chunk=3),
    "chains": lambda: random_chains(VOCAB),
    "trees": lambda: random_trees(VOCAB),
    "empty": lambda: EMPTY,
    "out of step": lambda: OUT_OF_STEP,
}
every_kind = pytest.mark.parametrize("kind", [ToyHybrid, TinyAttentionLM])

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
requests = st.builds(
    Request,
    prompts,
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8, 1.5]),
        seed=st.integers(0, 5),
        max_tokens=st.integers(1, 10),
        top_k=st.integers(0, 4),
    ),
    sample=st.integers(0, 2),
)


@pytest.mark.parametrize("drafter", ["ngram", "model", "trees"])
@examples(15)
@given(
    kind=st.sampled_from([ToyHybrid, TinyAttentionLM]),
    mates=st.lists(requests, min_size=1, max_size=4),
    chunk=st.integers(1, 9),
    batch_size=st.integers(1, 4),
)
def test_batch_mates_and_chunks_change_nothing(
    kind: Kind, drafter: str, mates: list[Request], chunk: int, batch_size: int
) -> None:
    """Requests run together, greedy and sampled in one batch, get what each gets alone."""

    def rig(chunk: int, batch_size: int) -> Rig:
        made = DRAFTERS[drafter]()
        return Rig(kind(vocab_size=VOCAB), made, k=3, chunk=chunk, batch_size=batch_size)

    together = rig(chunk, batch_size).run(mates)
    assert together == [rig(99, 1).run([mate])[0] for mate in mates]


# Any two of model, drafter and length meet. Other combinations are `deep`.
@pytest.mark.covering(1)
@every_kind
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_under_the_match_rule_no_drafter_changes_the_text(kind: Kind, drafter: str, k: int) -> None:
    asked = [
        Request(prompt, SamplingParams(temperature=0.8, seed=seed, max_tokens=14), sample=sample)
        for prompt, seed, sample in [((1, 2, 1), 3, 0), ((1, 2, 1), 3, 1), ((0,), 4, 0)]
    ]
    wanted = Rig(kind(vocab_size=VOCAB), NoDrafter(), MatchRule(), k=0).run(asked)
    got = Rig(kind(vocab_size=VOCAB), DRAFTERS[drafter](), MatchRule(), k=k).run(asked)
    assert got == wanted
    assert wanted[0] != wanted[1]


@pytest.mark.parametrize("rule", [TokenRule(), MatchRule()], ids=lambda rule: type(rule).__name__)
def test_token_by_token_verification_gives_the_same_sampled_text(
    rule: TokenRule | MatchRule,
) -> None:
    asked = [
        Request((1, 2, 0), SamplingParams(temperature=0.8, seed=seed, max_tokens=12))
        for seed in range(3)
    ]
    for drafter in ("model", "trees"):
        whole = Rig(TinyAttentionLM(vocab_size=VOCAB), DRAFTERS[drafter](), rule, k=3)
        steps = Rig(StepwiseLM(TinyAttentionLM(vocab_size=VOCAB)), DRAFTERS[drafter](), rule, k=3)
        assert whole.run(asked) == steps.run(asked)


def test_no_number_is_used_twice_in_a_generation() -> None:
    check_no_number_is_used_twice()
