"""Hidden states kept for drafters lie with the keys of their tokens, whatever becomes of those."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from doubles.tiny_checkpoints import random_llama, variant
from outrider.core.protocols import DraftNeeds, HiddenStore, StepRow
from outrider.kernels.operators import DTYPES
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel

LAYERS = (2, 0, 1)
NEEDS = DraftNeeds(hidden_layers=LAYERS)
CAPACITY = ModelCapacity(
    num_slots=128, page_size=4, max_rows=32, max_logits=32, hidden_layers=LAYERS
)
TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["one call", "many"])
def model(dtype: str, request: pytest.FixtureRequest) -> LlamaModel:
    model = random_llama(variant("llama2"), seed=2, dtype=dtype, capacity=CAPACITY)
    if request.param == "many":
        model.kernels = replace(model.kernels)
        assert model.forward() is None
    return model


def told(dtype: str, tokens: tuple[int, ...]) -> Tensor:
    """The states of `tokens` as a model reports them that keeps none."""
    plain = random_llama(
        variant("llama2"), seed=2, dtype=dtype, capacity=replace(CAPACITY, hidden_layers=())
    )
    plain.state.open(0, ())
    hidden_NKD = plain.step([StepRow.chain(0, tokens)], NEEDS).hidden_NKD
    assert hidden_NKD is not None
    return hidden_NKD


def kept(model: LlamaModel, seq_id: int) -> Tensor:
    return model.state.hidden(seq_id, 0, model.state.length(seq_id)).float()


def assert_kept(model: LlamaModel, dtype: str, seq_id: int, tokens: tuple[int, ...]) -> None:
    stored = told(dtype, tokens)
    assert torch.equal(kept(model, seq_id), stored.to(DTYPES[dtype]).float())


def read(model: LlamaModel, seq_id: int, tokens: tuple[int, ...]) -> None:
    out = model.step([StepRow.chain(seq_id, tokens)], NEEDS)
    assert out.hidden_NKD is None
    model.state.commit({seq_id: range(len(tokens))})


def test_they_are_those_that_a_pass_reports(model: LlamaModel, dtype: str) -> None:
    assert isinstance(model.state, HiddenStore)
    model.state.open(1, ())
    for start in range(0, len(TEXT), 3):
        read(model, 1, TEXT[start : start + 3])
    assert_kept(model, dtype, 1, TEXT)
    part_PKD = model.state.hidden(1, 2, 5).float()
    assert torch.equal(part_PKD, kept(model, 1)[2:5])


def test_a_kept_branch_brings_its_states_along(model: LlamaModel, dtype: str) -> None:
    model.state.open(1, ())
    read(model, 1, TEXT[:6])
    model.step([StepRow(1, (7, 8, 2, 60, 5), (-1, -1, 1, 1, 2))], NEEDS)
    assert model.state.commit({1: (1, 2, 4)}) == 3
    assert_kept(model, dtype, 1, (*TEXT[:6], 8, 2, 5))


def test_rejected_tokens_leave_nothing(model: LlamaModel, dtype: str) -> None:
    model.state.open(1, ())
    read(model, 1, TEXT[:6])
    model.step([StepRow.chain(1, (70, 71, 72))], NEEDS)
    model.state.commit({1: (0,)})
    read(model, 1, (5, 5))
    assert_kept(model, dtype, 1, (*TEXT[:6], 70, 5, 5))


def test_shared_beginnings_and_forks_have_them_too(model: LlamaModel, dtype: str) -> None:
    model.state.open(1, ())
    read(model, 1, TEXT)
    assert model.state.open(2, TEXT) == 8
    read(model, 2, (40, 41))
    model.state.fork(1, 3, 7)
    read(model, 3, (9,))
    assert_kept(model, dtype, 2, (*TEXT[:8], 40, 41))
    assert_kept(model, dtype, 3, (*TEXT[:7], 9))
    assert_kept(model, dtype, 1, TEXT)
