"""What is written, judged by the target itself: perplexity, formats, rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError
from outrider.core.params import SamplingParams
from outrider.plugins.compat.wrapper import Cache
from outrider_lab.bench.quality import (
    PLAIN,
    Nats,
    Quality,
    RuleRow,
    RuleStudy,
    compare_formats,
    compare_rules,
    read,
    windows_of,
)

VOCAB = 5
PROMPTS = ("def quicksort(items):", "Question: what is 3 plus 4?\nAnswer:")


@dataclass(frozen=True, slots=True)
class Bigrams:
    """Finds the id after the last one `odds` times as likely as each other."""

    odds: float = 1.0

    def forward(
        self, ids: Sequence[int], past_key_values: Cache | None = None, use_cache: bool = True
    ) -> tuple[Tensor, Cache | None]:
        del past_key_values, use_cache
        logits_1NV = torch.zeros(1, len(ids), VOCAB)
        for place, token in enumerate(ids):
            logits_1NV[0, place, (token + 1) % VOCAB] = math.log(self.odds)
        return logits_1NV, None


ids_of = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20)


@settings(max_examples=40)
@given(ids_of)
def test_perplexity_of_a_flat_distribution_is_the_size_of_the_vocabulary(ids: list[int]) -> None:
    found = read(Bigrams(), ids)
    assert found.num_tokens == len(ids) - 1
    assert found.perplexity == pytest.approx(VOCAB, rel=1e-6)


def test_perplexity_counts_only_what_was_written() -> None:
    judge = Bigrams(odds=4.0)
    # Each next id has 4 of 8 parts.
    assert read(judge, [0, 1, 2, 3]).perplexity == pytest.approx(2)
    assert read(judge, [0, 0, 0, 1, 2], start=3).perplexity == pytest.approx(2)
    assert read(judge, [0, 1, 2, 2], start=3).perplexity == pytest.approx(8)
    assert read(judge, [0, 1], start=2) == Nats()
    assert Nats().perplexity is None
    assert Nats(1e6, 2).perplexity is None


@settings(max_examples=40)
@given(st.lists(ids_of, max_size=5), st.integers(2, 9), st.integers(0, 60))
def test_windows_cover_the_text_without_overlap(
    texts: list[list[int]], size: int, most: int
) -> None:
    windows = windows_of(texts, size, most)
    assert all(2 <= len(window) <= size for window in windows)
    assert sum(map(len, windows)) <= most
    if most >= 100:
        assert sum(map(len, windows)) >= sum(map(len, texts)) - len(texts)


def test_formats_are_compared_with_the_first() -> None:
    models = {"a": Bigrams(4.0), "b": Bigrams(4.0), "c": Bigrams(0.5)}
    windows = [(0, 1, 2, 3), (2, 3)]
    rows = {row.form: row for row in compare_formats(models.__getitem__, ("a", "b", "c"), windows)}
    assert rows["a"].divergence_nats is None
    assert rows["b"].divergence_nats == pytest.approx(0)
    assert (rows["b"].same_first_choice, rows["c"].same_first_choice) == (1, 0)
    assert rows["a"].perplexity == pytest.approx(2)
    assert rows["a"].num_tokens == 4
    # p = 1/2 and 1/8 four times; q = 1/9 and 2/9.
    wanted = 0.5 * math.log(0.5 * 9) + 0.5 * math.log(9 / 16)
    assert rows["c"].divergence_nats == pytest.approx(wanted)
    assert rows["c"].perplexity == pytest.approx(9)
    assert not list(compare_formats(models.__getitem__, (), windows))


def study(**given: object) -> RuleStudy:
    engine = EngineConfig(k=3, device="cpu", dtype="float32", batch_size=2)
    base = RuleStudy(
        target="outrider/embedded",
        draft=None,
        engine=engine,
        params=SamplingParams(max_tokens=12),
        prompts=PROMPTS,
        read=lambda prompt, written: Nats(float(len(written)), len(written)),
    )
    return replace(base, **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.weights
@pytest.mark.slow
def test_exact_rules_keep_the_text_and_lossy_ones_say_that_they_are() -> None:
    plain, block, lossy = compare_rules(study(), ("block", "top_k"))
    assert (plain.rule, plain.drafter, plain.acceptance) == (PLAIN, "none", None)
    assert block.must_match
    assert (block.num_same, block.num_texts, block.first_difference) == (2, 2, None)
    assert block.tokens_per_round is not None
    assert block.tokens_per_round > 1
    assert block.perplexity == pytest.approx(math.e)
    assert block.against_plain is not None
    assert block.against_plain.value == 1
    assert (lossy.exact, lossy.must_match, lossy.broken) == (False, False, False)


@pytest.mark.weights
@pytest.mark.slow
def test_sampled_text_is_judged_where_a_rule_ties_it_to_the_seed() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9)
    _, token, coupled = compare_rules(study(params=params), ("token", "coupled"))
    assert (token.exact, token.must_match) == (True, False)
    assert coupled.must_match
    assert coupled.num_same == 2


@pytest.mark.weights
def test_a_rule_that_cannot_run_says_why() -> None:
    engine = EngineConfig(k=3, device="cpu", drafter="eagle")
    _, block = compare_rules(study(engine=engine, draft="no/such/heads"), ("block",))
    assert block.reason
    assert block.num_texts == 0
    with pytest.raises(CheckpointError):
        list(compare_rules(study(target="no/such/model"), ("block",)))


BLOCK = RuleRow(rule="block", drafter="model", exact=True, must_match=True, num_texts=4, num_same=4)
PLAINLY = replace(BLOCK, rule=PLAIN, drafter="none")


def test_a_broken_promise_is_said_first() -> None:
    broken = replace(BLOCK, num_same=3, first_difference=5)
    found = Quality([], [PLAINLY, broken])
    assert not found.holds
    assert found.findings[0] == "block broke its promise: a text parts at 5."
