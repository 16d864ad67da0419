"""Acceptance by script: rates, ranks and places, and that nothing else decides what is said."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.state import Rollback, check_rollback
from doubles.tiny_attention import TinyAttentionLM
from outrider.core.errors import ConfigError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.lanes.ahead.fan_out import MissCurve
from outrider_lab.models.gemm import gemm_shape
from outrider_lab.models.scripted import Script, ScriptedLM
from outrider_lab.models.synthetic import (
    NUM_RANKS,
    Agreement,
    SyntheticLM,
    WordScript,
    write_random,
    write_words,
)

NEEDS = DraftNeeds()
VOCAB = 97
TARGET = WordScript(vocab_size=VOCAB, seed=3)


def draft(*rates: float, misses: MissCurve | None = None) -> WordScript:
    agreement = Agreement(rates=rates, misses=misses or MissCurve(0.4, 1.0))
    return WordScript(vocab_size=VOCAB, seed=3, agreement=agreement)


def contexts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.randrange(VOCAB) for _ in range(8)) for _ in range(count)]


def ranking(script: WordScript, context: Sequence[int], place: int = 0) -> list[int]:
    """Ids, the likeliest first, by the logits."""
    logits_MV = torch.full((1, script.vocab_size), 5.0)
    write_words([script.ids(context, place)], logits_MV)
    return [int(i) for i in logits_MV[0].argsort(descending=True, stable=True)]


def said(script: WordScript, context: Sequence[int], place: int = 0) -> int:
    return script.ids(context, place)[0]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_a_draft_agrees_at_its_rate(rate: float) -> None:
    num = 400
    agreed = sum(said(draft(rate), c) == said(TARGET, c) for c in contexts(num))
    assert abs(agreed - num * rate) <= 4 * (num * rate * (1 - rate)) ** 0.5


def test_coins_of_contexts_that_follow_each_other_are_independent() -> None:
    """Runs of agreement have the lengths of independent coins."""
    script, text = draft(0.8), list(contexts(1)[0])
    agreed: list[bool] = []
    for _ in range(1000):
        context = text[-8:]
        token = said(TARGET, context)
        agreed.append(said(script, context) == token)
        text.append(token)
    after = Counter(pairwise(agreed))
    for first in (True, False):
        num = after[first, True] + after[first, False]
        assert abs(after[first, True] - 0.8 * num) <= 4 * (0.16 * num) ** 0.5
    assert len(set(text)) > 0.9 * VOCAB


def test_rates_go_by_place_and_the_last_goes_on() -> None:
    script = draft(1.0, 0.0)
    for context in contexts(20):
        right = [said(script, context, place) == said(TARGET, context) for place in range(4)]
        assert right == [True, False, False, False]


def test_a_higher_rate_agrees_wherever_a_lower_one_does() -> None:
    for context in contexts(60):
        lower, higher = (said(draft(rate), context) for rate in (0.4, 0.7))
        assert lower != said(TARGET, context) or higher == lower


@given(
    scale=st.floats(0.05, 1.0), power=st.floats(0.2, 3.0), coin=st.floats(0, 1, exclude_max=True)
)
def test_a_rank_is_the_least_that_the_distribution_of_misses_allows(
    scale: float, power: float, coin: float
) -> None:
    curve = MissCurve(scale, power)
    rank = Agreement(rates=(0.5,), misses=curve).rank(coin)
    assert 1 <= rank <= NUM_RANKS + 1
    if rank <= NUM_RANKS:
        assert curve(rank) <= coin
    if rank > 1:
        assert curve(rank - 1) > coin


def test_the_targets_word_stands_where_the_distribution_of_misses_says() -> None:
    curve = MissCurve(0.5, 1.0)
    script = draft(0.0, misses=curve)
    ranks = [ranking(script, c).index(said(TARGET, c)) for c in contexts(400)]
    assert 0 not in ranks
    for count in (1, 2, 5, 20):
        missed = sum(rank > count for rank in ranks) / len(ranks)
        assert abs(missed - curve(count)) <= 4 * (0.25 / len(ranks)) ** 0.5


def test_distributions_are_point_masses_for_any_ordinary_temperature() -> None:
    logits_MV = torch.empty(1, VOCAB)
    for script in (TARGET, draft(0.5)):
        write_words([script.ids((1, 2), 0)], logits_MV)
        top = (logits_MV[0] / 1.5).softmax(0).sort(descending=True).values
        assert top[0] == 1
        assert 0 < top[1:].sum() < 1e-15


def synthetic(
    *, vocab_size: int = 11, num_slots: int = 256, page_size: int = 4, seed: int = 0
) -> SyntheticLM:
    inner = TinyAttentionLM(vocab_size=vocab_size, num_slots=num_slots, page_size=page_size)
    agreement = Agreement(rates=(0.5,))
    return SyntheticLM(inner, WordScript(vocab_size=vocab_size, seed=seed, agreement=agreement))


class SyntheticRollback(Rollback):
    """Pages are shared, so that sequences open with what others have read."""

    kind = staticmethod(synthetic)

    def make(self, data: st.DataObject) -> CausalLM:
        sizes = st.integers(12, 48), st.integers(1, 4)
        num_slots, page_size = (data.draw(size) for size in sizes)
        return synthetic(vocab_size=5, num_slots=num_slots, page_size=page_size)


def test_what_is_said_after_a_rollback_is_said_as_if_nothing_had_been() -> None:
    check_rollback(SyntheticRollback, percent=4)


def drafting(*rates: float) -> SyntheticLM:
    inner = ScriptedLM(Script(vocab_size=VOCAB))
    model = SyntheticLM(inner, draft(*rates))
    model.state.open(0, (1, 2, 3))
    return model


def test_places_count_from_where_the_text_ends() -> None:
    """A draft model reads up to the pending token, and then a token a pass."""
    model = drafting(1.0)
    model.step([StepRow.chain(0, (1, 2, 3), logits_from=2)], NEEDS)
    assert model.state.place(0, 2) == 0
    for node in (3, 4):
        model.step([StepRow.chain(0, (5,), parent=node - 1)], NEEDS)
        assert model.state.place(0, node) == node - 2
    model.state.commit({0: range(4)})
    model.step([StepRow.chain(0, (7, 8), logits_from=1)], NEEDS)
    assert model.state.place(0, 1) == 0


def test_branches_below_a_trunk_begin_anew() -> None:
    """Drafting ahead reads a draft at once, and hangs foreseen verdicts from its tokens."""
    model = drafting(1.0)
    model.step([StepRow.chain(0, (1, 2, 3, 6, 6), logits_from=2)], NEEDS)
    assert [model.state.place(0, node) for node in (2, 3, 4)] == [0, 1, 2]
    model.step([StepRow(0, (7, 8), (2, 4))], NEEDS)
    model.step([StepRow(0, (9, 9), (5, 6))], NEEDS)
    assert [model.state.place(0, node) for node in (5, 6, 7, 8)] == [0, 0, 1, 1]


def test_what_a_branch_says_is_what_is_said_later() -> None:
    """The same token after the same text, at the same place, however it was come to."""
    rates = (0.9, 0.1, 0.5)
    ahead, later = drafting(*rates), drafting(*rates)
    ahead.step([StepRow.chain(0, (1, 2, 3, 6), logits_from=2)], NEEDS)
    ahead.step([StepRow(0, (7,), (3,))], NEEDS)
    found = ahead.step([StepRow(0, (8,), (4,))], NEEDS).logits_MV
    later.step([StepRow.chain(0, (1, 2, 3, 6, 7), logits_from=4)], NEEDS)
    wanted = later.step([StepRow.chain(0, (8,), parent=4)], NEEDS).logits_MV
    assert torch.equal(found, wanted)


def test_without_cost_the_same_is_said_and_nobody_works() -> None:
    model = drafting(0.6)
    free = model.without_cost()
    free.state.open(0, (1, 2, 3))
    row = StepRow.chain(0, (1, 2, 3))
    assert torch.equal(free.step([row], NEEDS).logits_MV, model.step([row], NEEDS).logits_MV)
    assert isinstance(model.inner, ScriptedLM)
    assert model.inner.num_steps == 1
    assert free.spec == model.spec


def test_random_weights_are_an_ordinary_checkpoint(tmp_path: Path) -> None:
    folder, shape = tmp_path / "c", replace(gemm_shape("32x48x2x2x1x16"), vocab_size=VOCAB)
    write_random(folder, shape, torch.bfloat16, max_tokens=64)
    options = LoadOptions(
        capacity=ModelCapacity(num_slots=64, max_rows=8, max_logits=8), device="cpu", threads=1
    )
    inner = load_model(folder, options)
    assert isinstance(inner, LlamaModel)
    assert inner.config.max_tokens == 64
    assert (inner.spec.num_layers, inner.spec.head_dim, inner.spec.ffn_size) == (2, 16, 48)
    model = SyntheticLM(inner, TARGET)
    model.state.open(0, ())
    out = model.step([StepRow.chain(0, (1, 2, 3))], NEEDS)
    assert int(out.logits_MV[2].argmax()) == said(TARGET, (1, 2, 3))
    with pytest.raises(ConfigError, match="is there already"):
        write_random(folder, shape, torch.bfloat16, max_tokens=64)
