"""Native attention over texts of several spans: threads share a row's keys, and no bit changes."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.plan import AttentionKind
from unit.kernels.implementations import on_vectors, randn, relative_error
from unit.kernels.paged_cases import Heads, Pass, Sequenced, chain, make_pass
from unit.kernels.test_attention import oracle, run

# As in csrc/attention.cpp.
SPAN = 1024
HEADS = Heads(6, 2, 64)
NODES = (-1, -1, 0, 0, 2, 1, 4)
KINDS = {
    "plain": AttentionKind(0.125),
    "a window within a span": AttentionKind(0.125, 700),
    "a window of two spans": AttentionKind(0.125, 1500),
    "sinks": AttentionKind(0.125, cap=20.0, sinks_H=3 * randn(6)),
}


def texts(*lengths: int, dtype: torch.dtype) -> Pass:
    """Tokens about the end of a span, whose neighbours have more spans than they, as chain and as
    tree; and texts of `lengths`."""
    short = [chain(SPAN - 6, 12), Sequenced(SPAN - 2, NODES), chain(5, 3)]
    long = [chain(length, 4) for length in lengths]
    return make_pass([*short, *long], heads=HEADS, dtype=dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_several_spans_does_not_depend_on_the_pass(
    dtype: torch.dtype, kind: AttentionKind
) -> None:
    case = texts(2 * SPAN - 2, 3000, dtype=dtype)
    alone, together = on_vectors("native-1", dtype), on_vectors("native-3", dtype)
    whole_NO = run(alone, case, kind)
    assert relative_error(whole_NO, oracle(case, kind)) < 1e-5
    for row in range(case.plan.num_tokens):
        for kernels in (alone, together):
            assert torch.equal(run(kernels, case.rows([row]), kind)[0], whole_NO[row])


@pytest.mark.parametrize("threads", [2, 4, 8, 16])
def test_threads_that_share_a_row_change_nothing(threads: int) -> None:
    case = texts(2100, 5000, dtype=torch.bfloat16)
    few, many = case.rows([0, 25, 29]), case
    for part in (few, many):
        expected_NO = run(on_vectors("native-1", torch.bfloat16), part)
        found_NO = run(on_vectors(f"native-{threads}", torch.bfloat16), part)
        assert torch.equal(expected_NO, found_NO)


def test_more_spans_than_there_is_room_for_at_once() -> None:
    case = make_pass([chain(7 * SPAN + 5, 30)], heads=Heads(64, 1, 64))
    expected_NO = run(on_vectors("native-1", torch.float32), case)
    assert torch.equal(expected_NO, run(on_vectors("native-8", torch.float32), case))
    some = case.rows([0, 17])
    assert relative_error(expected_NO[[0, 17]], oracle(some)) < 1e-5
