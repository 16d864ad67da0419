"""The sampling operators against float64 distributions, at edges, and with rows and threads that
must not matter.

Shapes:  N = rows, V = vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.distribution import CASES, check_tree_distribution
from checks.effort import examples
from outrider.core.draft import Verdict
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import KeyedRng, inverse_cdf
from outrider.core.sampling import PLAIN, Distributions, Sampling, leftover, processed_probs
from outrider.kernels.native.ops import function
from outrider.verify.exact import BlockRule, TokenRule
from unit.kernels.implementations import IMPLEMENTATIONS, kernels_named, randn

# About lanes, blocks of sums and blocks of exponentials, and a vocabulary of no round size.
SIZES = (1, 5, 16, 17, 511, 513, 4095, 4096, 4097, 50_257)
TINY = torch.finfo(torch.float32).tiny
BELOW_ONE = 1 - 2.0**-53

every_side = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def sampling(name: str) -> Sampling:
    return kernels_named(name, torch.float32).sampling


def softmax(side: Sampling, logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    out_NV = torch.full_like(logits_NV, torch.nan)
    side.softmax(logits_NV, temperature, out_NV)
    return out_NV


def some_distribution(size: int, seed: int = 0) -> Tensor:
    return torch.softmax(3 * randn(size, seed=seed), -1)


@every_side
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.05, 0.8, 100.0])
def test_softmax_is_the_float64_distribution(name: str, size: int, temperature: float) -> None:
    logits_NV = 4 * randn(3, size)
    logits_NV[1, ::3] = -math.inf
    logits_NV[1, -1] = 2.0
    got_NV = softmax(sampling(name), logits_NV, temperature)
    wanted_NV = torch.softmax(logits_NV.double() / temperature, -1)
    # The exponent of e is rounded, and its error is the result's relative one. PyTorch also adds
    # whole rows in float32.
    unit = 2.0**-21 if name == "reference" else 2.0**-23
    largest = float(logits_NV[logits_NV.isfinite()].abs().max()) / temperature
    error_NV = (got_NV - wanted_NV).abs() / (wanted_NV + TINY)
    assert float(error_NV[wanted_NV > 1e-30].max()) < unit * (6 + largest)
    assert bool((got_NV[1, 0 : max(size - 1, 0) : 3] == 0).all())
    assert torch.allclose(got_NV.double().sum(-1), torch.ones(3).double(), atol=1e-6)


@every_side
def test_a_vanishing_temperature_is_greedy(name: str) -> None:
    logits_NV = torch.full((2, 9000), -5.0)
    logits_NV[0, 8000] = logits_NV[1, 17] = logits_NV[1, 8999] = 30.0
    got_NV = softmax(sampling(name), logits_NV, 1e-20)
    assert float(got_NV[0, 8000]) == 1
    assert float(got_NV[1, 17]) == float(got_NV[1, 8999]) == 0.5
    assert int((got_NV > 0).sum()) == 3


@every_side
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_spoil_their_row_alone(name: str, bad: float) -> None:
    side, logits_NV = sampling(name), randn(3, 9000)
    logits_NV[0, 4500] = bad
    logits_NV[1] = -math.inf
    got_NV = softmax(side, logits_NV)
    assert bool(got_NV[1].isnan().all())
    assert bool(got_NV[2].isfinite().all())
    for row_V in got_NV[:2]:
        with pytest.raises(NumericsError):
            side.pick(row_V, 0.5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
def test_native_distributions_have_no_subnormal_numbers(name: str) -> None:
    """Arithmetic on them is a hundred times slower."""
    logits_NV = torch.linspace(-120, 0, 9000)[None].repeat(2, 1)
    got_NV = softmax(sampling(name), logits_NV)
    assert float(got_NV[got_NV > 0].min()) >= TINY
    left_V, _ = sampling(name).leftover(got_NV[0], 0.9999 * got_NV[1])
    assert int((left_V > 0).sum()) > 4000
    assert float(left_V[left_V > 0].min()) >= TINY


@every_side
def test_distributions_may_take_the_place_of_logits(name: str) -> None:
    side, logits_NV = sampling(name), randn(4, 9000)
    wanted_NV = softmax(side, logits_NV, 0.7)
    side.softmax(logits_NV, 0.7, logits_NV)
    assert torch.equal(logits_NV, wanted_NV)


@every_side
@pytest.mark.parametrize("size", [100, 8192, 50_257])
def test_rows_do_not_see_each_other(name: str, size: int) -> None:
    side, logits_NV = sampling(name), 3 * randn(17, size)
    together_NV = softmax(side, logits_NV, 0.8)
    for first, end in ((0, 1), (16, 17), (3, 9)):
        assert torch.equal(softmax(side, logits_NV[first:end], 0.8), together_NV[first:end])


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("size", [8192, 128_256])
def test_threads_do_not_change_a_bit(threads: int, size: int) -> None:
    alone, together = sampling("native-1"), sampling(f"native-{threads}")
    logits_NV = 3 * randn(9, size)
    probs_NV = softmax(alone, logits_NV, 0.8)
    assert torch.equal(softmax(together, logits_NV, 0.8), probs_NV)
    for proposal in (probs_NV[1], 77):
        left_V, total = alone.leftover(probs_NV[0], proposal, 0.9)
        again_V, same = together.leftover(probs_NV[0], proposal, 0.9)
        assert (total, True) == (same, torch.equal(left_V, again_V))
    for uniform in torch.rand(50, generator=torch.Generator().manual_seed(1)).double():
        assert alone.pick(probs_NV[2], float(uniform)) == together.pick(probs_NV[2], float(uniform))


@every_side
@examples(60)
@given(
    blocks=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_pick_is_the_inverse_cdf(name: str, blocks: list[list[int]], uniform: float) -> None:
    """Where sums are exact there is one answer, wherever the blocks of a sum begin."""
    weights_V = torch.zeros(4 * 600)
    for place, block in enumerate(blocks):
        weights_V[600 * place : 600 * place + 3] = torch.tensor(block).float()
    weights_V[511:513] = 1.0
    assert sampling(name).pick(weights_V, uniform) == inverse_cdf(weights_V, uniform)


@every_side
@pytest.mark.parametrize("size", SIZES)
def test_only_what_has_weight_is_picked(name: str, size: int) -> None:
    pick, probs_V = sampling(name).pick, some_distribution(size)
    probs_V[::2] = 0
    probs_V[size // 3] = 1e-30
    for uniform in (0.0, 5e-324, 2.0**-53, 0.3, 0.5, 1 - 2.0**-52, BELOW_ONE):
        assert float(probs_V[pick(probs_V, uniform)]) > 0
        only_V = torch.zeros(size)
        only_V[size // 2] = 1e-38
        assert pick(only_V, uniform) == size // 2


@every_side
def test_a_number_at_the_edge_belongs_to_the_next_index(name: str) -> None:
    pick, even_V = sampling(name).pick, torch.ones(1024)
    for index in (0, 1, 511, 512, 513, 1023):
        assert pick(even_V, index / 1024) == index
    assert pick(even_V, BELOW_ONE) == 1023


@every_side
@pytest.mark.parametrize("weights", [[0.0] * 20, [1.0, math.nan], [math.inf, 1.0]], ids=str)
def test_what_is_no_distribution_is_an_error(name: str, weights: list[float]) -> None:
    with pytest.raises(NumericsError, match="not numbers"):
        sampling(name).pick(torch.tensor(weights), 0.5)


@every_side
def test_picks_follow_their_distribution(name: str) -> None:
    """Chi-square at 5 sigma over 30,000 numbers: one in each cell of an even grid, at random."""
    pick, probs_V = sampling(name).pick, some_distribution(1500)
    count = 30_000
    generator = torch.Generator().manual_seed(5)
    numbers = torch.rand(count, dtype=torch.float64, generator=generator)
    drawn = torch.tensor([pick(probs_V, float(u)) for u in numbers])
    cells = torch.bucketize(torch.arange(1500), torch.arange(50, 1500, 50), right=True)
    seen = torch.bincount(cells[drawn], minlength=30).double()
    wanted = torch.zeros(30, dtype=torch.float64).index_add_(0, cells, probs_V.double()) * count
    chi_square = float(((seen - wanted) ** 2 / wanted).sum())
    assert chi_square < 29 + 5 * math.sqrt(2 * 29)


@every_side
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [1.0, 0.37])
def test_leftover_is_what_is_not_covered(name: str, size: int, share: float) -> None:
    p_V, q_V = some_distribution(size), some_distribution(size, seed=1)
    for proposal in (q_V, size // 2):
        before = p_V.clone(), q_V.clone()
        left_V, total = sampling(name).leftover(p_V, proposal, share)
        wanted_V, wanted = leftover(p_V.double(), proposal, share)
        assert float((left_V.double() - wanted_V).abs().max()) <= 1e-7
        assert total == pytest.approx(wanted, rel=1e-5, abs=1e-9)
        assert total == pytest.approx(float(left_V.double().sum()), rel=1e-12)
        assert torch.equal(p_V, before[0])
        assert torch.equal(q_V, before[1])


@every_side
def test_a_distribution_leaves_nothing_of_itself(name: str) -> None:
    p_V = some_distribution(9000)
    left_V, total = sampling(name).leftover(p_V, p_V)
    assert total == 0
    assert not bool(left_V.any())
    sure_V = torch.zeros(9000)
    sure_V[7] = 1.0
    assert sampling(name).leftover(sure_V, 7)[1] == 0


@every_side
def test_a_distribution_that_is_no_distribution_leaves_none(name: str) -> None:
    p_V, q_V = some_distribution(600), some_distribution(600, seed=1)
    p_V[550] = math.nan
    left_V, total = sampling(name).leftover(p_V, q_V)
    assert math.isnan(total)
    with pytest.raises(NumericsError):
        sampling(name).pick(left_V, 0.5)


@every_side
def test_masses_are_the_distribution_s_own(name: str) -> None:
    probs_NV = torch.stack([some_distribution(700, seed) for seed in range(4)])
    tokens = [699, 0, 41]
    wanted = [float(probs_NV[node, token]) for node, token in enumerate(tokens)]
    for form_NV in (probs_NV, probs_NV.T.contiguous().T, probs_NV.double()):
        assert sampling(name).masses(form_NV, tokens) == wanted
    assert sampling(name).masses(probs_NV[:0], []) == []


@every_side
def test_other_tensors_go_to_the_definitions(name: str) -> None:
    side, logits_NV = sampling(name), randn(40, 6).double()
    assert torch.equal(softmax(side, logits_NV), softmax(PLAIN, logits_NV))
    turned_NV = logits_NV.float().T
    assert torch.allclose(softmax(side, turned_NV), torch.softmax(turned_NV, -1))
    probs_V = torch.softmax(logits_NV[:, 0], -1)
    assert side.pick(probs_V, 0.6) == inverse_cdf(probs_V, 0.6)
    assert side.leftover(probs_V, 3)[1] == leftover(probs_V, 3)[1]
    assert side.leftover(probs_V.float(), probs_V)[0].dtype is torch.float64


@pytest.mark.covering(1)
@every_side
@pytest.mark.parametrize("rule", [TokenRule, BlockRule], ids=lambda rule: rule.name)
def test_rules_keep_the_distribution_through_these_operators(
    name: str, rule: type[TokenRule] | type[BlockRule]
) -> None:
    """All branches of the distribution tests' cases; distributions in float32, as a model's are, to
    its rounding."""
    shipped = rule(sampling(name))
    for case in CASES:
        check_tree_distribution(_Single(shipped), case, tolerance=2e-6)


class _Single:
    """`rule` on the float32 forms of all distributions."""

    exact = True

    def __init__(self, rule: AcceptanceRule) -> None:
        self._rule = rule

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return self._rule([_single(row) for row in rows])


def _single(row: VerifyRow) -> VerifyRow:
    probs_NV, q_NV = row.distributions.probs_NV, row.draft.probs_NV
    assert probs_NV is not None
    draft = replace(row.draft, probs_NV=None if q_NV is None else q_NV.float())
    return replace(row, draft=draft, distributions=Distributions(probs_NV=probs_NV.float()))


FILTERS = (
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.7, "min_p": 0.1},
)


def filtered_distributions(side: Sampling, logits_NV: Tensor, how: Mapping[str, float]) -> Tensor:
    params = SamplingParams(temperature=0.8, **how)  # pyright: ignore[reportArgumentType]
    return processed_probs(logits_NV, params, side)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_filters_keep_what_the_definitions_keep(
    name: str, size: int, how: Mapping[str, float]
) -> None:
    logits_NV = 4 * randn(4, size)
    logits_NV[1] = (4 * logits_NV[1]).round() / 4  # many ties
    logits_NV[2] = 0  # nothing but ties
    logits_NV[3, 1::2] = -math.inf
    side, params = sampling(name), SamplingParams(temperature=0.8, **how)  # pyright: ignore[reportArgumentType]
    if 0 < params.top_k < size:
        masked_NV = torch.empty_like(logits_NV)
        side.top_k(logits_NV, params.top_k, masked_NV)
        PLAIN.top_k(logits_NV, params.top_k, logits_NV)
        assert torch.equal(masked_NV, logits_NV)
    probs_NV = softmax(side, logits_NV, 0.8)
    wanted_NV = probs_NV.double()
    PLAIN.keep_likely(wanted_NV, params.top_p, params.min_p)
    got_NV = probs_NV.clone()
    side.keep_likely(got_NV, params.top_p, params.min_p)
    # By rounding, tokens at an edge may fall on either side of it: one or two, or a trace of mass.
    differs_NV = (got_NV > 0) != (wanted_NV > 0)
    for probs_V, differs_V in zip(probs_NV, differs_NV, strict=True):
        assert int(differs_V.sum()) <= 2 or float((probs_V * differs_V).sum()) < 1e-7
    if int(differs_NV.sum()) == 0:
        assert torch.allclose(got_NV.double(), wanted_NV, rtol=1e-6, atol=1e-30)
    assert torch.allclose(got_NV.double().sum(-1), torch.ones(4).double(), atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
def test_equal_tokens_are_kept_in_their_order(name: str) -> None:
    """A distribution of equal masses tells which tokens a nucleus takes."""
    side = sampling(name)
    for size in (8, 64, 4096):
        probs_NV = torch.full((2, size), 1 / size)
        side.keep_likely(probs_NV, 0.5, 0.0)
        assert bool((probs_NV[:, : size // 2] == 2 / size).all())
        assert not bool(probs_NV[:, size // 2 :].any())
    logits_NV = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    side.top_k(logits_NV, 2, logits_NV)
    assert [float(x) for x in logits_NV[0]] == [-math.inf, 3, 2, 2, 2, -math.inf]


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_a_filtered_row_is_its_own_alone(name: str, how: Mapping[str, float]) -> None:
    side, logits_NV = sampling(name), 3 * randn(9, 50_257)
    together_NV = filtered_distributions(side, logits_NV.clone(), how)
    for row in (0, 8):
        alone_NV = filtered_distributions(side, logits_NV[row : row + 1].clone(), how)
        assert torch.equal(alone_NV[0], together_NV[row])


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("how", FILTERS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_filters_leave_no_distribution_of_what_is_none(
    name: str, how: Mapping[str, float], bad: float
) -> None:
    side, logits_NV = sampling(name), randn(2, 9000)
    logits_NV[0, 4500] = bad
    probs_NV = filtered_distributions(side, logits_NV, how)
    with pytest.raises(NumericsError):
        side.pick(probs_NV[0], 0.5)
    assert side.pick(probs_NV[1], 0.5) >= 0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, 4097, 20_001])
def test_a_native_race_is_won_by_the_definition_s_winner(
    native_library: ctypes.CDLL, size: int, threads: int
) -> None:
    """Weights of every size, none at all for many, and equal ones."""
    race, team = function(native_library, "race"), function(native_library, "team")(threads, None)
    generator = torch.Generator().manual_seed(size)
    wide_V = torch.softmax(9 * torch.randn(size, generator=generator), dim=-1)
    few_V = torch.where(torch.rand(size, generator=generator) < 0.01, wide_V, 0.0)
    few_V[size // 2] = 1e-30
    for weights_V in (wide_V, few_V, torch.full((size,), 1 / size), torch.full((size,), 1e-45)):
        for seed, sample, start in ((0, 0, 0), (2**63 + 5, 3, 77), (12345, 0, 2**31)):
            for depth in range(3):
                wanted = KeyedRng(seed, sample, start).race_at(weights_V, depth)
                got = race(team, weights_V.data_ptr(), seed, start + depth, sample, size)
                assert got == wanted


@pytest.mark.parametrize(
    ("seed", "first", "weights", "winner"),
    [
        (19, 14, (16663691, 16449602), 15),
        (45, 8, (5810027, 11634686), 9),
        (102, 18, (4933167, 1668764), 18),
    ],
)
def test_a_race_that_the_last_bit_decides(
    native_library: ctypes.CDLL, seed: int, first: int, weights: tuple[int, int], winner: int
) -> None:
    """Fused multiply-adds would round a logarithm otherwise, and another token would win."""
    race, team = function(native_library, "race"), function(native_library, "team")(1, None)
    weights_V = torch.zeros(64)
    weights_V[first : first + 2] = torch.tensor(weights) * 2.0**-26
    assert KeyedRng(seed, 0, 0).race_at(weights_V, 0) == winner
    assert race(team, weights_V.data_ptr(), seed, 0, 0, 64) == winner


def test_a_race_of_no_distribution_has_no_winner(native_library: ctypes.CDLL) -> None:
    race, team = function(native_library, "race"), function(native_library, "team")(2, None)
    for number in (0.0, math.nan, math.inf):
        weights_V = torch.zeros(9001)
        weights_V[5000] = number
        assert race(team, weights_V.data_ptr(), 1, 2, 3, 9001) == -1
