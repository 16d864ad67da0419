"""What every CausalLM and its StateStore must do; small models of every family."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from doubles.kinds import KINDS, Kind, close_to
from outrider.core.errors import CapacityError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.tree import ROOT

NEEDS = DraftNeeds()
TEXT = (1, 4, 2, 2, 0, 3, 1)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def step(model: CausalLM, *rows: StepRow) -> Tensor:
    return model.step(rows, NEEDS).logits_MV.clone()


def opened(kind: Kind, tokens: tuple[int, ...] = ()) -> CausalLM:
    """A model with sequence 0, which has read `tokens`."""
    model = kind()
    model.state.open(0, ())
    if tokens:
        step(model, StepRow.chain(0, tokens))
        model.state.commit({0: range(len(tokens))})
    return model


@cache
def oracle(kind: Kind) -> CausalLM:
    """What reads whole texts; building a model takes longer than reading one."""
    return kind()


@cache
def whole(kind: Kind, tokens: tuple[int, ...]) -> Tensor:
    model = oracle(kind)
    model.state.open(0, ())
    logits_NV = step(model, StepRow.chain(0, tokens))
    model.state.close(0)
    return logits_NV


@every_kind
def test_logits_cover_the_vocabulary_in_row_order(kind: Kind) -> None:
    model = opened(kind)
    model.state.open(1, ())
    out = model.step([StepRow.chain(1, TEXT[:3], logits_from=2), StepRow.chain(0, TEXT)], NEEDS)
    assert out.logits_MV.shape == (1 + len(TEXT), model.spec.vocab_size)
    assert out.num_passes == 1
    close_to(out.logits_MV[:1], whole(kind, TEXT[:3])[2:])
    close_to(out.logits_MV[1:], whole(kind, TEXT))


@every_kind
def test_one_pass_equals_many(kind: Kind) -> None:
    """Prefill, decode and verify are one call: cut anywhere, the logits are the same."""
    wanted = whole(kind, TEXT)
    for cut in range(1, len(TEXT)):
        model = opened(kind, TEXT[:cut])
        close_to(step(model, StepRow.chain(0, TEXT[cut:])), wanted[cut:])


@every_kind
def test_logits_come_from_where_they_were_asked(kind: Kind) -> None:
    wanted = whole(kind, TEXT)
    for logits_from in range(len(TEXT) + 1):
        row = StepRow.chain(0, TEXT, logits_from=logits_from)
        close_to(step(opened(kind), row), wanted[logits_from:])


@every_kind
def test_a_tree_node_sees_its_own_path_only(kind: Kind) -> None:
    tokens, parents = (2, 3, 0, 4, 1, 1), (ROOT, ROOT, 0, 1, 2, 2)
    paths = ((2,), (3,), (2, 0), (3, 4), (2, 0, 1), (2, 0, 1))
    model = opened(kind, TEXT)
    got = step(model, StepRow(0, tokens, parents))
    for logits_V, path in zip(got, paths, strict=True):
        close_to(logits_V, whole(kind, TEXT + path)[-1])


@every_kind
def test_trees_grow_over_several_steps(kind: Kind) -> None:
    """Later steps name nodes of earlier ones; node ids count from the last commit."""
    model = opened(kind, TEXT)
    step(model, StepRow(0, (2, 3), (ROOT, ROOT)))
    assert model.state.num_staged(0) == 2
    got = step(model, StepRow(0, (4, 0), (1, 2)))
    close_to(got, whole(kind, (*TEXT, 3, 4, 0))[-2:])
    model.state.commit({0: (1, 2)})
    assert (model.state.length(0), model.state.num_staged(0)) == (len(TEXT) + 2, 0)
    close_to(step(model, StepRow.chain(0, (0,))), whole(kind, (*TEXT, 3, 4, 0))[-1:])


@every_kind
def test_committing_nothing_is_rollback(kind: Kind) -> None:
    model = opened(kind, TEXT)
    for _ in range(3):
        step(model, StepRow(0, (2, 3, 3), (ROOT, 0, ROOT)))
        assert model.state.commit({0: ()}) == 0
        assert (model.state.length(0), model.state.num_staged(0)) == (len(TEXT), 0)
    close_to(step(model, StepRow.chain(0, (1,))), whole(kind, (*TEXT, 1))[-1:])


@every_kind
def test_a_fork_and_its_source_go_separate_ways(kind: Kind) -> None:
    model = opened(kind, TEXT)
    model.state.fork(0, 5)
    assert model.state.length(5) == len(TEXT)
    for seq_id, tokens in ((0, (2, 3)), (5, (4, 4))):
        step(model, StepRow.chain(seq_id, tokens))
        model.state.commit({seq_id: range(2)})
    rows = [StepRow.chain(5, (1,)), StepRow.chain(0, (1,))]
    forked, source = step(model, *rows)
    close_to(forked, whole(kind, (*TEXT, 4, 4, 1))[-1])
    close_to(source, whole(kind, (*TEXT, 2, 3, 1))[-1])


@pytest.mark.covering(1)
@every_kind
@pytest.mark.parametrize("length", range(len(TEXT) + 1))
def test_a_fork_of_a_beginning_forgets_the_rest(kind: Kind, length: int) -> None:
    model = opened(kind, TEXT)
    model.state.fork(0, 1, length)
    assert (model.state.length(1), model.state.length(0)) == (length, len(TEXT))
    forked, source = step(model, StepRow.chain(1, (4,)), StepRow.chain(0, (4,)))
    close_to(forked, whole(kind, (*TEXT[:length], 4))[-1])
    close_to(source, whole(kind, (*TEXT, 4))[-1])


@every_kind
def test_a_fork_outlives_its_source(kind: Kind) -> None:
    model = opened(kind, TEXT)
    model.state.fork(0, 1)
    model.state.close(0)
    model.state.open(2, ())
    step(model, StepRow.chain(2, (3,) * 9))
    close_to(step(model, StepRow.chain(1, (1,))), whole(kind, (*TEXT, 1))[-1:])


@every_kind
def test_closing_gives_all_memory_back(kind: Kind) -> None:
    model = kind()
    free = model.state.num_free_tokens
    for seq_id in range(3):
        model.state.open(seq_id, TEXT)
        step(model, StepRow.chain(seq_id, TEXT[model.state.length(seq_id) :]))
        assert model.state.num_free_tokens < free
    model.state.commit({1: (), 2: range(2)})
    for seq_id in range(3):
        model.state.close(seq_id)
    assert model.state.num_free_tokens == free


@every_kind
def test_what_open_reuses_need_not_be_fed(kind: Kind) -> None:
    """Stores may share beginnings or not; the logits after them are the same."""
    model = opened(kind, TEXT)
    reused = model.state.open(1, TEXT)
    assert model.state.length(1) == reused <= len(TEXT)
    rest = (*TEXT, 2)[reused:]
    close_to(step(model, StepRow.chain(1, rest))[-1], whole(kind, (*TEXT, 2))[-1])


@every_kind
def test_a_full_memory_refuses_and_changes_nothing(kind: Kind) -> None:
    model = kind(num_slots=8)
    model.state.open(0, ())
    step(model, StepRow.chain(0, TEXT[:4]))
    model.state.commit({0: range(4)})
    free = model.state.num_free_tokens
    with pytest.raises(CapacityError):
        step(model, StepRow.chain(0, (1,) * 5))
    assert (model.state.length(0), model.state.num_staged(0)) == (4, 0)
    assert model.state.num_free_tokens == free
    close_to(step(model, StepRow.chain(0, TEXT[4:])), whole(kind, TEXT)[4:])


@every_kind
def test_mates_of_a_pass_do_not_matter(kind: Kind) -> None:
    model = opened(kind, TEXT)
    model.state.open(1, ())
    model.state.open(2, ())
    rows = [StepRow(1, (3, 3, 1), (ROOT, ROOT, 0)), StepRow.chain(0, (1,)), StepRow.chain(2, (0,))]
    got = step(model, *rows)
    close_to(got[3], whole(kind, (*TEXT, 1))[-1])
    close_to(got[4], whole(kind, (0,))[0])


@every_kind
def test_a_pass_without_logits_only_reads(kind: Kind) -> None:
    model = opened(kind)
    out = model.step([StepRow.chain(0, TEXT, logits_from=len(TEXT))], NEEDS)
    assert out.logits_MV.shape == (0, model.spec.vocab_size)
    assert model.state.num_staged(0) == len(TEXT)


@every_kind
def test_the_same_weights_give_the_same_logits(kind: Kind) -> None:
    again, other = (step(opened(kind), StepRow.chain(0, TEXT)) for _ in range(2))
    assert torch.equal(again, other)
    assert torch.equal(again, whole(kind, TEXT))
