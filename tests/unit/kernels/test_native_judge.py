"""The native verdict on logits is the stages', whatever of their distributions it leaves unmade.

Shapes:  K = N = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Mapping

import pytest
import torch
from native_judge import NativeJudge
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.draft import Draft
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.core.protocols import VerifyRow
from outrider.core.rng import KeyedRng, draw_for
from outrider.core.sampling import Distributions, Sampling, processed_probs
from outrider.core.tree import ROOT, Shape
from outrider.drafters.common.growth import SampledNodes
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
    {"top_k": 2},
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
    return RoundVerdict(draft.tokens, verdict.path, verdict.next_token)


def _row(params: SamplingParams, draft: Draft, rule: str) -> RoundRow:
    return RoundRow(
        params.rng_seed,
        0,
        START,
        params.temperature,
        UNREAD,
        params.top_k,
        params.top_p,
        params.min_p,
        draft.tokens,
        None if draft.is_chain else draft.parents,
        draft.probs_NV,
        rule=rule,
    )


@pytest.mark.covering(2)
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
        got = judge([_row(params, draft, rule)], logits_WV.clone())
        assert got == (None if wanted is None else [wanted])
        counts |= {len(wanted.path)} if wanted else set()
    assert len(counts) > 1 or spoilt == 0


PARENTS = (ROOT, ROOT, ROOT, 0, 0, 1, 3, 3, 3, 5, 6, 9)


def _tree(near_WV: Tensor, params: SamplingParams, side: Sampling, rule: str) -> Draft:
    """Nodes drawn of what their elder siblings left."""
    q_WV = processed_probs(near_WV, params, side)
    rng = KeyedRng(params.rng_seed, 0, START, side.pick)
    shape = Shape(PARENTS, (0,) * 12, (1.0,) * 12)
    nodes = SampledNodes(shape, rng, draw_for(rule), side.leftover)
    for parent in PARENTS:
        above = nodes.drawn[parent] if parent != ROOT else ROOT
        nodes.grow(None if above is None else q_WV[above + 1])
    return nodes.draft()


@pytest.mark.sample(4)
@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", FILTERS, ids=str)
@pytest.mark.parametrize("drawn", [True, False])
def test_verdicts_on_trees_are_those_of_the_stages(
    native_library: ctypes.CDLL, rule: str, how: Mapping[str, float], drawn: bool
) -> None:
    """Some end at the root, some at a leaf, some come there by a younger sibling. With top-k 2 a
    distribution may have no token left for the third."""
    team = function(native_library, "team")(2, None)
    side, judge = native_sampling(native_library, team), NativeJudge(native_library, team)
    paths: set[tuple[int, ...]] = set()
    rows: list[RoundRow] = []
    logits: list[Tensor] = []
    verdicts: list[RoundVerdict | None] = []
    for seed in range(24):
        params = SamplingParams(temperature=0.8, seed=seed, **how)  # pyright: ignore[reportArgumentType]
        logits_WV = 3 * randn(len(PARENTS) + 1, 9001, seed=seed)
        logits_WV[:, :8] += 9
        near_WV = logits_WV + (0.1 + seed % 3) * randn(*logits_WV.shape, seed=seed + 99)
        draft = _tree(near_WV, params, side, rule)
        if not drawn:
            draft = Draft(draft.tokens, draft.parents)
        logits_WV = logits_WV[: len(draft) + 1]
        wanted = _staged(rule, draft, logits_WV, params, side)
        assert wanted is not None
        rows.append(_row(params, draft, rule))
        logits.append(logits_WV)
        verdicts.append(wanted)
        paths.add(wanted.path)
        assert judge(rows[-1:], logits_WV.clone()) == [wanted]
    assert judge(rows, torch.cat(logits)) == verdicts
    assert {len(path) for path in paths} >= {0, 1, 2}
    assert any(path and path[0] for path in paths)


def test_a_greedy_verdict_follows_the_target_s_own_tokens(native_library: ctypes.CDLL) -> None:
    team = function(native_library, "team")(2, None)
    judge = NativeJudge(native_library, team)
    paths: set[tuple[int, ...]] = set()
    for seed in range(24):
        logits_WV = randn(len(PARENTS) + 1, 9001, seed=seed)
        best = tuple(host_ints(logits_WV.argmax(-1)))
        rng = random.Random(seed)
        tokens = [best[above + 1] if rng.random() < 0.4 else 7 for above in PARENTS]
        draft = Draft(tuple(tokens), PARENTS)
        distributions = Distributions(tokens=best)
        (wanted,) = rule_for("block")([VerifyRow(draft, distributions, KeyedRng(0, 0, START))])
        got = judge([_row(SamplingParams(), draft, "block")], logits_WV)
        assert got == [RoundVerdict(draft.tokens, wanted.path, wanted.next_token)]
        paths.add(wanted.path)
    assert len(paths) > 4


def test_a_row_that_wants_its_distributions_finds_all(native_library: ctypes.CDLL) -> None:
    team = function(native_library, "team")(2, None)
    side, judge = native_sampling(native_library, team), NativeJudge(native_library, team)
    logits_WV, params = 3 * randn(4, 9001), SamplingParams(temperature=0.8, top_k=30)
    row = RoundRow(0, 0, START, 0.8, UNREAD, top_k=30, drafted=(1, 2, 3), wants_laws=True)
    wanted_WV = processed_probs(logits_WV.clone(), params, side)
    assert judge([row], logits_WV) is not None
    assert torch.equal(logits_WV, wanted_WV)
