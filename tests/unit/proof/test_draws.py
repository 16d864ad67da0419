"""Texts by chi-square: walked and on tensors they are the same, and wrong ones are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core.config import EXACT_SAMPLERS
from outrider.core.draft import Verdict
from outrider.core.protocols import VerifyRow
from outrider.core.sampling import draw
from outrider.plugins.proof.cases import PAIRS, TEXTS
from outrider.plugins.proof.distributions import Sampler, exact_samplers
from outrider_lab.proof.chisquare import MANY
from outrider_lab.proof.ensemble import (
    engine_texts,
    pair_trials,
    race_trial,
    text_distribution,
    walked_trial,
)

every_sampler = pytest.mark.parametrize("sampler", exact_samplers(), ids=lambda s: s.name)


def test_distributions_of_texts_are_whole() -> None:
    for pair in PAIRS:
        assert sum(pair.text_distribution()) == pytest.approx(1)
        assert len(pair.text_distribution()) == len(TEXTS)
        for table_VV in pair.tables():
            assert torch.allclose(table_VV.sum(-1), torch.ones(6, dtype=torch.float64))


@every_sampler
def test_walked_texts_are_the_first_of_the_many(sampler: Sampler) -> None:
    for pair in PAIRS[:4]:
        trials = pair_trials(sampler, pair, seed=9, num_walked=60, num_texts=2_000)
        assert (trials.num_walked, trials.num_same) == (60, 60)
        assert [trial.num_draws for trial in trials.trials] == [60, 2_000]
        assert all(trial.p_value > 1e-4 for trial in trials.trials)


def test_every_exact_sampler_has_a_form_on_tensors() -> None:
    assert set(MANY) == set(EXACT_SAMPLERS)


class AcceptAll:
    """Keeps every draft."""

    name = "accept all"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [_whole(row) for row in rows]


def _whole(row: VerifyRow) -> Verdict:
    path = tuple(range(len(row.draft)))
    return Verdict(path, draw(row.distributions.at(len(path)), row.rng, len(path) - 1))


def test_a_wrong_rule_is_found() -> None:
    sampler = replace(exact_samplers()[0], rule=AcceptAll())
    trial = walked_trial(sampler, PAIRS[0], seed=0, num_texts=300)
    assert trial.p_value < 1e-12


class OneTokenOnly:
    """Writes what cannot be."""

    name = "one token only"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [Verdict((), 5) for _ in rows]


def beyond_the_vocabulary(probs_V: Tensor, *_: object) -> int:
    return len(probs_V)


def test_an_impossible_text_and_a_defect_have_p_zero() -> None:
    disjoint = next(pair for pair in PAIRS if pair.name == "certain target")
    sampler = replace(exact_samplers()[0], rule=OneTokenOnly())
    assert walked_trial(sampler, disjoint, seed=0, num_texts=20).p_value == 0
    broken = replace(sampler, draw=beyond_the_vocabulary)
    trial = walked_trial(broken, PAIRS[0], seed=0, num_texts=20)
    assert trial.p_value == 0
    assert trial.defect is not None


def test_shared_races() -> None:
    trial = race_trial(PAIRS[0], seed=1, num_races=400)
    assert trial.num_draws == 400
    assert trial.p_value > 1e-4


@pytest.mark.parametrize("sampler", EXACT_SAMPLERS)
def test_the_engine_writes_texts_that_can_be(sampler: str) -> None:
    distribution = text_distribution()
    assert sum(distribution.values()) == pytest.approx(1)
    counts = Counter(engine_texts(sampler, seed=2, num_texts=40))
    assert sum(counts.values()) == 40
    assert set(counts) <= set(distribution)
    assert counts == Counter(engine_texts(sampler, seed=2, num_texts=40))
    assert counts != Counter(engine_texts(sampler, seed=3, num_texts=40))
