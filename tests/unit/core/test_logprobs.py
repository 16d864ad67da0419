"""What is told of a token's probability."""

from __future__ import annotations

import math

import torch

from outrider.core.sampling import log_probs, token_logprobs

LOG = log_probs(torch.tensor([[0.0, 1.0, 1.0, -3.0], [5.0, 0.0, 0.0, 0.0]], dtype=torch.float64))


def test_a_token_has_its_own_place() -> None:
    first, second = token_logprobs(LOG, [0, 1], [3, 0], 0)
    assert (first.token_id, second.token_id) == (3, 0)
    assert math.isclose(first.logprob, float(LOG[0, 3]))
    assert math.isclose(second.logprob, float(LOG[1, 0]))
    assert first.top == ()


def test_the_likeliest_come_first_and_the_lower_id_among_equals() -> None:
    (entry,) = token_logprobs(LOG, [0], [0], 3)
    assert [token for token, _ in entry.top] == [1, 2, 0]
    assert all(math.isclose(value, float(LOG[0, token])) for token, value in entry.top)


def test_tokens_of_no_probability_are_left_out() -> None:
    probs_V = torch.tensor([[0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    (entry,) = token_logprobs(probs_V.log(), [0], [0], 4)
    assert [token for token, _ in entry.top] == [2, 0]


def test_logs_of_a_distribution_sum_to_one() -> None:
    assert torch.allclose(LOG.exp().sum(-1), torch.ones(2, dtype=torch.float64))
