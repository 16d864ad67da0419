"""Native nodes of trees are those of the definition: the same, in the same order, at every level.

Shapes:  V = vocabulary, M = nodes of a level.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.core.sampling import SHARPNESS, ChosenNodes, NodeChoice, TreeLimits, rank
from outrider.core.tree import ROOT
from outrider.kernels.native.ops import team
from outrider.kernels.native.rounds import MOST_NODES
from outrider.kernels.native.sampling import MOST_WIDTH, NativeTrees

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[1, 2], ids=["native-1", "native-2"])
def native(request: pytest.FixtureRequest, native_library: ctypes.CDLL) -> NativeTrees:
    return NativeTrees(native_library, team(native_library, request.param))


def frontier(rng: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    """Rows of logits: plain, with ties, masked, all equal, equal to each other, with no mass."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits_MV = rng.choice([0.5, 3.0, 8.0]) * torch.randn(num_rows, vocab_size, generator=generator)
    match rng.randrange(6):
        case 1:
            return logits_MV.round() * rng.choice([1.0, 0.0, -1.0])
        case 2:
            drawn_MV = torch.rand(num_rows, vocab_size, generator=generator)
            return logits_MV.masked_fill(drawn_MV < rng.choice([0.3, 0.99]), -INF)
        case 3:
            return logits_MV[:1].repeat(num_rows, 1)
        case 4:
            logits_MV[rng.randrange(num_rows)] = rng.choice([-INF, INF, -1e10, 2.0])
        case _:
            pass
    return logits_MV


def limits_of(rng: random.Random) -> TreeLimits:
    return TreeLimits(
        num_nodes=rng.choice([1, 2, 7, 16, 40, MOST_NODES]),
        depth=rng.randint(1, 7),
        width=rng.choice([1, 3, MOST_WIDTH]),
        least_read=rng.choice([0.0, 0.02, 0.3]),
    )


def grown_together(
    rng: random.Random, one: NodeChoice, other: NodeChoice, vocab_size: int
) -> Iterator[Tensor]:
    """Grows both by the same logits until they are done."""
    num_rows = 1
    while num_rows:
        logits_MV = frontier(rng, num_rows, vocab_size)
        yield logits_MV
        assert one.grow(logits_MV)
        assert other.grow(logits_MV)
        assert one.level == other.level
        assert one.kept() == other.kept()
        num_rows = len(one.level.tokens)


def test_nodes_are_the_definition_s_bit_for_bit(native: NativeTrees) -> None:
    """By the same chances, of which there are the same bits."""
    rng, num_frontiers = random.Random(1), 0
    for _ in range(1200):
        limits = limits_of(rng)
        pair = native.nodes(limits), ChosenNodes(limits, native.rank)
        for _ in grown_together(rng, *pair, rng.choice([3, 17, 64, 100, 777])):
            num_frontiers += 1
        kept = pair[0].kept()
        assert len(kept.tokens) <= limits.num_nodes
        assert list(kept.worths) == sorted(kept.worths, reverse=True)
        assert all(ROOT <= parent < node for node, parent in enumerate(kept.parents))
    assert num_frontiers > 2000


def test_ranks_are_the_definition_s(native: NativeTrees) -> None:
    """The same tokens in the same order, ties too; chances as near as float32 allows."""
    rng = random.Random(2)
    for _ in range(600):
        num_rows, vocab_size = rng.randint(1, MOST_WIDTH), rng.choice([3, 16, 17, 100, 4099])
        logits_MV = frontier(rng, num_rows, vocab_size)
        num_ranks = min(vocab_size, rng.choice([1, 5, MOST_WIDTH]))
        got = native.rank(logits_MV, num_ranks, SHARPNESS)
        wanted = rank(logits_MV, num_ranks, SHARPNESS)
        assert got is not None
        assert wanted is not None
        for row in range(num_rows):
            assert got.shares[row] == pytest.approx(wanted.shares[row], rel=5e-5, abs=1e-35)
            for place, share in enumerate(wanted.shares[row]):
                assert share < 1e-35 or got.tokens[row][place] == wanted.tokens[row][place]


@pytest.mark.parametrize("vocab_size", [3, 100, 4099])
@pytest.mark.parametrize("bad", [0, -1])
def test_a_logit_that_is_no_number_is_told(native: NativeTrees, vocab_size: int, bad: int) -> None:
    logits_MV = torch.zeros(1, vocab_size)
    logits_MV[0, bad] = NAN
    limits = TreeLimits(num_nodes=5, depth=2, width=4)
    assert not native.nodes(limits).grow(logits_MV)
    assert not ChosenNodes(limits).grow(logits_MV)
    assert native.rank(logits_MV, 2, SHARPNESS) is None


def test_of_equal_tokens_the_first_ones_are_taken() -> None:
    """Also where zeros have two signs, and where equal ones lie on either side of the edge."""
    logits_MV = torch.tensor([[-1.0, -0.0, 2.0, 0.0, 2.0, 0.0]])
    ranked = rank(logits_MV, 4, SHARPNESS)
    assert ranked is not None
    assert ranked.tokens == [[2, 4, 1, 3]]
    assert ranked.shares[0][2] == ranked.shares[0][3]


def test_logits_and_limits_beyond_the_native_ones(native: NativeTrees) -> None:
    """Other dtypes and layouts are copied; larger trees are the definition's."""
    rng = random.Random(3)
    limits = TreeLimits(num_nodes=12, depth=3, width=4)
    doubles, plain = native.nodes(limits), native.nodes(limits)
    for logits_MV in grown_together(rng, plain, ChosenNodes(limits, native.rank), 50):
        assert doubles.grow(logits_MV.double().t().contiguous().t())
    assert doubles.kept() == plain.kept()
    larger = TreeLimits(num_nodes=MOST_NODES + 1, depth=2, width=4)
    assert isinstance(native.nodes(larger), ChosenNodes)
    assert isinstance(native.nodes(TreeLimits(8, 2, width=MOST_WIDTH + 1)), ChosenNodes)
