"""The native verdict on logits is the stages', whatever of their distributions it leaves unmade.

Shapes:  K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.core.protocols import VerifyRow
from outrider.core.rng import KeyedRng, draw_for
from outrider.core.sampling import Distributions, Sampling, processed_probs
from outrider.kernels.native.judge import NativeJudge
from outrider.kernels.native.ops import function
from outrider.kernels.native.rounds import RULES, CacheSpan, RoundRow, RoundVerdict
from outrider.kernels.native.sampling import native_sampling
from outrider.verify.rules import rule_for
from unit.kernels.implementations import randn

START, UNREAD = 3, CacheSpan(0, (), ())
FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.9},
)


def _staged(
    rule: str, draft: Draft, logits_WV: Tensor, params: SamplingParams, side: Sampling
) -> RoundVerdict | None:
    probs_WV = processed_probs(logits_WV.clone(), params, side)
    rng = KeyedRng(params.rng_seed, 0, START, side.pick)
    row = VerifyRow(draft, Distributions(probs_NV=probs_WV), rng)
    try:
        verdict = rule_for(rule, sampling=side)([row])[0]
    except NumericsError:
        return None
    return RoundVerdict(draft.tokens, len(verdict.path), verdict.next_token)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", FILTERS, ids=str)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("spoilt", [None, 0, 3, 6])
def test_verdicts_are_those_of_the_stages(
    native_library: ctypes.CDLL,
    rule: str,
    how: Mapping[str, float],
    drawn: bool,
    spoilt: int | None,
) -> None:
    """Drafts that agree a lot and hardly; a row without numbers counts only where it is looked
    at."""
    team, size, k = function(native_library, "team")(2, None), 9001, 6
    side, judge = native_sampling(native_library, team), NativeJudge(native_library, team)
    counts: set[int] = set()
    for seed in range(12):
        params = SamplingParams(temperature=0.8, seed=seed, **how)  # pyright: ignore[reportArgumentType]
        logits_WV = 3 * randn(k + 1, size, seed=seed)
        logits_WV[:, :40] += 9  # so that drafts chosen by themselves agree too
        near_KV = logits_WV[:k] + (0.2 + seed % 3) * randn(k, size, seed=seed + 99)
        q_KV = processed_probs(near_KV, params, side)
        rng = KeyedRng(seed, 0, START, side.pick)
        tokens = [draw_for(rule)(q_KV[node], rng, node, node) for node in range(k)]
        if spoilt is not None:
            logits_WV[spoilt, 5000] = math.nan
        draft = Draft.chain(tokens, q_KV if drawn else None)
        wanted = _staged(rule, draft, logits_WV, params, side)
        row = RoundRow(
            seed, 0, START, 0.8, UNREAD, params.top_k, params.top_p, params.min_p, draft.tokens
        )
        row.rule = rule
        got = judge([row], logits_WV.clone(), q_KV if drawn else None)
        assert got == (None if wanted is None else [wanted])
        counts |= {wanted.num_accepted} if wanted else set()
    assert len(counts) > 1 or spoilt == 0


def test_a_row_that_wants_its_distributions_finds_all(native_library: ctypes.CDLL) -> None:
    team = function(native_library, "team")(2, None)
    side, judge = native_sampling(native_library, team), NativeJudge(native_library, team)
    logits_WV, params = 3 * randn(4, 9001), SamplingParams(temperature=0.8, top_k=30)
    row = RoundRow(0, 0, START, 0.8, UNREAD, top_k=30, drafted=(1, 2, 3), wants_laws=True)
    wanted_WV = processed_probs(logits_WV.clone(), params, side)
    assert judge([row], logits_WV, None) is not None
    assert torch.equal(logits_WV, wanted_WV)
