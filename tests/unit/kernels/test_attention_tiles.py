"""Attention on tiles: in software on any CPU, in hardware where there is one."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core import env
from outrider.core.clock import host_ints
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import TILES, VECTORS
from outrider.kernels.native.ops import NativeOps
from outrider.kernels.native.tuning import refused_kinds
from outrider.kernels.plan import AttentionKind
from unit.kernels.implementations import library_of, randn, row_choices, software
from unit.kernels.paged_cases import Heads, Pass, Sequenced, chain, make_pass
from unit.kernels.test_attention import kinds, oracle, run

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("where", ["software", "hardware"])]

TREE = Sequenced(37, (-1, -1, 0, 0, 2, 1, 4))
HEADS = (Heads(6, 2, 64), Heads(8, 1, 96), Heads(2, 2, 128), Heads(3, 1, 256), Heads(20, 1, 32))
SPAN = 1024
# What rounding a weight to bfloat16 may change, relatively.
ROUNDING = 2.0**-8


@functools.cache
def tiles_of(where: str, threads: int = 1, attention: str = TILES) -> NativeOps:
    """Skips the test, with the reason, where there are no tiles."""
    if where == "software":
        library = software()
    else:
        library = library_of(built_kernels(env.compiler(), env.cache_folder()))
        refused = refused_kinds(library, torch.bfloat16, "none")
        if TILES in refused:
            pytest.skip(refused[TILES])
    return NativeOps(library, torch.bfloat16, threads, attention=attention)


def attended(where: str, case: Pass, kind: AttentionKind | None = None, threads: int = 1) -> Tensor:
    return run(cast("Any", tiles_of(where, threads)), case, kind)


def assert_near(found_NO: Tensor, case: Pass, kind: AttentionKind | None = None) -> None:
    """Queries are rounded; each weight differs from the exact one by its rounding at most."""
    rounded = replace(case, qkv_NE=case.qkv_NE.bfloat16().float())
    sizes_NO = oracle(replace(rounded, v_GSD=case.v_GSD.abs()), kind)
    error_NO = (found_NO.double() - oracle(rounded, kind)).abs()
    assert (error_NO <= ROUNDING * sizes_NO + 1e-5 * sizes_NO.max()).all()


def case_of(heads: Heads, **how: Any) -> Pass:
    sequences = [chain(0, 40), TREE, chain(70, 33), chain(31, 2)]
    return make_pass(sequences, heads=heads, dtype=torch.bfloat16, **how)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_is_near_the_exact_one_and_does_not_depend_on_the_pass(
    where: str, heads: Heads
) -> None:
    case = case_of(heads)
    num_rows = case.plan.num_tokens
    for kind in (None, *kinds(heads)[-1:]):
        alone_NO = torch.cat([attended(where, case.rows([n]), kind) for n in range(num_rows)])
        assert_near(alone_NO, case, kind)
        assert torch.equal(attended(where, case, kind), alone_NO)
        for rows in row_choices(num_rows):
            part_NO = attended(where, case.rows(host_ints(rows)), kind, threads=3)
            assert torch.equal(part_NO, alone_NO[rows])


def test_windows_caps_and_sinks(where: str) -> None:
    case = case_of(HEADS[0])
    some = (0, 17, 39, 41, 46, 50, 79, 81)
    for kind in kinds(HEADS[0]):
        whole_NO = attended(where, case, kind)
        assert_near(whole_NO, case, kind)
        for row in some:
            assert torch.equal(attended(where, case.rows([row]), kind)[0], whole_NO[row]), kind


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[4]], ids=str)
def test_places_and_names_of_keys_change_nothing(where: str, heads: Heads) -> None:
    expected_NO = attended(where, case_of(heads))
    for how in ({"seed": 1}, {"seed": None}, {"page_size": 7}, {"page_size": 64}):
        assert torch.equal(attended(where, case_of(heads, **how)), expected_NO), how
    chains = [chain(50, 9), chain(0, 35), chain(64, 3)]
    as_chain, as_tree = (
        make_pass(chains, heads=heads, dtype=torch.bfloat16, as_tree=named)
        for named in (False, True)
    )
    assert as_tree.plan.extra_slots_E is not None
    assert torch.equal(attended(where, as_chain), attended(where, as_tree))


def test_only_named_slots_are_read(where: str) -> None:
    case = make_pass([chain(20, 9), TREE], dtype=torch.bfloat16)
    whole_NO = attended(where, case)
    assert whole_NO.isfinite().all()
    for row in range(16):
        assert torch.equal(attended(where, case.rows([row]).poisoned())[0], whole_NO[row])
    window = AttentionKind(0.125, window=6)
    ends = case.rows([0, 8])
    expected_NO = attended(where, ends, window)
    for slot in set(case.keys[8]) - set(case.keys[0][-6:]) - set(case.keys[8][-6:]):
        ends.k_GSD[:, slot] = ends.v_GSD[:, slot] = torch.nan
    assert torch.equal(attended(where, ends, window), expected_NO)


@pytest.mark.parametrize("committed", [20, 40])
def test_what_is_no_number_stays_in_the_tokens_that_see_it(where: str, committed: int) -> None:
    """A key or value of a later token, of which earlier ones have the weight zero."""
    case = make_pass([chain(committed, 30), TREE], heads=HEADS[0], dtype=torch.bfloat16)
    right_NO = attended(where, case)
    slot = case.keys[12][-1]
    for value in (torch.inf, torch.nan):
        case.v_GSD[0, slot, 5] = case.k_GSD[1, slot, 3] = value
        out_NO = attended(where, case)
        others = [*range(12), *range(30, 37)]
        assert torch.equal(out_NO[others], right_NO[others])
        assert not out_NO[12:30].isfinite().all(dim=1).any()
        alone_NO = torch.cat([attended(where, case.rows([row])) for row in range(30)])
        assert torch.equal(out_NO[:30].nan_to_num(7), alone_NO.nan_to_num(7))


@pytest.mark.parametrize(
    "kind",
    [None, AttentionKind(0.125, 700), AttentionKind(0.125, 1500, 20.0, 3 * randn(6))],
    ids=["plain", "window", "window, cap and sinks"],
)
def test_a_row_of_several_spans_does_not_depend_on_the_pass(
    where: str, kind: AttentionKind | None
) -> None:
    long = [chain(2 * SPAN - 2, 4), Sequenced(SPAN - 2, (-1, -1, 0, 0, 2, 1, 4))]
    case = make_pass([chain(SPAN - 6, 12), *long], heads=HEADS[0], dtype=torch.bfloat16)
    whole_NO = attended(where, case, kind)
    assert_near(whole_NO, case, kind)
    for row in (0, 5, 6, 11, 12, 15, 16, 18, 22):
        for threads in (1, 3):
            one_NO = attended(where, case.rows([row]), kind, threads)
            assert torch.equal(one_NO[0], whole_NO[row])


@pytest.mark.parametrize("size", [30.0, 1e8])
def test_the_best_key_of_large_scores_has_all_the_weight(where: str, size: float) -> None:
    """In several chunks of keys, whose largest scores grow from one to the next or not."""
    case = make_pass([chain(700, 2)], heads=HEADS[0], dtype=torch.bfloat16)
    case.qkv_NE.mul_(size)
    whole_NO = attended(where, case)
    assert_near(whole_NO, case)
    if size > 1e6:
        rounded = replace(case, qkv_NE=case.qkv_NE.bfloat16().float())
        assert (whole_NO - oracle(rounded)).abs().max() < 1e-5
    assert torch.equal(attended(where, case.rows([1]))[0], whole_NO[1])


@pytest.mark.parametrize(("committed", "length"), [(0, 150), (400, 90), (500, 700)])
def test_a_prompt_in_parts_has_its_bits(where: str, committed: int, length: int) -> None:
    """Behind a long text, whose keys rows of all parts share, and at the beginning of one."""
    if where == "software" and length > 150:
        pytest.skip("The case would take a minute in software.")
    case = make_pass([chain(committed, length)], heads=HEADS[0], dtype=torch.bfloat16)
    whole_NO = attended(where, case, threads=2)
    assert torch.equal(attended(where, case), whole_NO)
    for size in (17, 64):
        starts = range(0, length, size)
        parts = [case.rows(range(n, min(n + size, length))) for n in starts]
        assert torch.equal(torch.cat([attended(where, part) for part in parts]), whole_NO)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_rows_have_the_bits_of_many_at_random_places(where: str, seed: int) -> None:
    """Up to 16 queries take another way through blocks, in whole pages or not, than more do."""
    random = np.random.default_rng(seed)
    heads, page_size = HEADS[seed], (32, 48, 16, 5)[seed]
    chains = [chain(int(random.integers(0, 600)), 1 + seed) for _ in range(2)]
    window = None if seed % 2 else AttentionKind(heads.head_dim**-0.5, window=300)
    case = make_pass(
        [chain(int(random.integers(0, 150)), 20), *chains],
        heads=heads,
        dtype=torch.bfloat16,
        page_size=page_size,
        seed=seed,
    )
    whole_NO = attended(where, case, window)
    for rows in ([0], [19], [4, 5], [20], [case.plan.num_tokens - 1], [2, 20]):
        assert torch.equal(attended(where, case.rows(rows), window), whole_NO[rows])


def test_heads_of_other_sizes_use_vectors(where: str) -> None:
    case = case_of(Heads(4, 2, 80))
    on_vectors = cast("Any", tiles_of(where, attention=VECTORS))
    assert torch.equal(attended(where, case), run(on_vectors, case))
