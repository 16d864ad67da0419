"""The decoders against themselves: however a text is fed, every token sees the same logits.

Shapes:  M = packed logits rows, V = vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from doubles.tiny_checkpoints import random_llama, random_model, random_tensors, variant
from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import Decoder, ModelCapacity
from outrider.models.llama import GPT2Model, LlamaModel
from parity.feeding import feed

PLAIN = DraftNeeds()
TEXT = [(5 * i * i + 7 * i + 1) % 96 for i in range(40)]
CAPACITY = ModelCapacity(num_slots=256, page_size=8, max_rows=48, max_logits=48)


@pytest.fixture(
    params=[
        ("one_kv_head", "float32"),
        ("one_kv_head", "bfloat16"),
        ("qwen3", "float32"),
        ("phi3_partial", "bfloat16"),
        ("gpt2", "float32"),
        ("gpt2", "bfloat16"),
        ("phi3_partial", "float16"),
        ("gpt2", "float16"),
    ],
    ids="-".join,
    scope="module",
)
def model(request: pytest.FixtureRequest) -> Decoder:
    name, dtype = request.param
    return random_model(variant(name), dtype=dtype, capacity=CAPACITY)


def step(model: Decoder, *rows: StepRow) -> Tensor:
    return model.step(rows, PLAIN).logits_MV.clone()


def assert_same(model: Decoder, found: Tensor, expected: Tensor) -> None:
    if model.kernels.exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(ends=st.sets(st.integers(1, len(TEXT) - 1), max_size=8))
def test_chunks_do_not_matter(model: Decoder, ends: set[int]) -> None:
    cuts = [0, *sorted(ends), len(TEXT)]
    sizes = [end - start for start, end in pairwise(cuts)]
    assert_same(model, feed(model, TEXT, sizes), feed(model, TEXT, [len(TEXT)]))


def test_batch_mates_do_not_matter(model: Decoder) -> None:
    alone = [feed(model, TEXT[start : start + 9], [9]) for start in (0, 9, 18)]
    for index in range(3):
        model.state.open(index, ())
    rows = [StepRow.chain(index, TEXT[9 * index : 9 * index + 9]) for index in range(3)]
    together_MV = step(model, *rows)
    for index in range(3):
        model.state.close(index)
    assert_same(model, together_MV, torch.cat(alone))


def test_a_tree_is_its_paths(model: Decoder) -> None:
    model.state.open(1, ())
    step(model, StepRow.chain(1, TEXT[:11]))
    model.state.commit({1: range(11)})
    tokens, parents = (3, 5, 8, 13, 21, 34), (-1, -1, 0, 0, 2, 1)
    tree_MV = step(model, StepRow(1, tokens, parents))
    paths = {4: (0, 2, 4), 3: (0, 3), 5: (1, 5)}
    for node, path in paths.items():
        model.state.commit({1: ()})
        chain_MV = step(model, StepRow.chain(1, [tokens[i] for i in path]))
        assert_same(model, chain_MV[-1], tree_MV[node])
    model.state.close(1)


def test_a_tree_may_grow_below_staged_nodes_and_commit_any_path(model: Decoder) -> None:
    expected_MV = feed(model, [*TEXT[:6], 40, 41, 42], [9])
    model.state.open(1, ())
    step(model, StepRow.chain(1, TEXT[:6]))
    model.state.commit({1: range(6)})
    step(model, StepRow(1, (50, 40), (-1, -1)))
    step(model, StepRow(1, (51, 41), (0, 1)))
    assert model.state.commit({1: (1, 3)}) == 2
    assert model.state.length(1) == 8
    assert_same(model, step(model, StepRow.chain(1, (42,))), expected_MV[-1:])
    model.state.close(1)


def test_rollback_forgets(model: Decoder) -> None:
    model.state.open(1, ())
    step(model, StepRow.chain(1, TEXT[:6]))
    model.state.commit({1: range(6)})
    first_MV = step(model, StepRow.chain(1, (7, 8)))
    model.state.commit({1: ()})
    step(model, StepRow.chain(1, (70, 71, 72)))
    model.state.commit({1: ()})
    assert_same(model, step(model, StepRow.chain(1, (7, 8))), first_MV)
    model.state.close(1)


def test_logits_come_only_where_asked(model: Decoder) -> None:
    every_MV = feed(model, TEXT[:8], [8])
    model.state.open(1, ())
    model.state.open(2, ())
    rows = [StepRow.chain(seq, TEXT[:8], logits_from=start) for seq, start in ((1, 6), (2, 8))]
    some_MV = step(model, *rows)
    assert some_MV.shape == (2, 96)
    assert_same(model, some_MV, every_MV[6:])
    model.state.commit({1: (), 2: ()})
    none_MV = step(model, rows[1])
    assert none_MV.shape == (0, 96)
    model.state.close(1)
    model.state.close(2)


def test_hidden_layers_come_in_the_order_named_and_are_kept(model: Decoder) -> None:
    model.state.open(1, ())
    row = StepRow.chain(1, TEXT[:5], logits_from=4)
    hidden_NKD = model.step([row], DraftNeeds(hidden_layers=(2, 0))).hidden_NKD
    assert hidden_NKD is not None
    assert hidden_NKD.shape == (5, 2, 64)
    before_NKD = hidden_NKD.clone()
    model.state.commit({1: ()})
    other_NKD = model.step([row], DraftNeeds(hidden_layers=(0, 1, 2))).hidden_NKD
    assert other_NKD is not None
    assert torch.equal(hidden_NKD, before_NKD)
    assert torch.equal(hidden_NKD[:, 0], other_NKD[:, 2])
    assert torch.equal(hidden_NKD[:, 1], other_NKD[:, 0])
    model.state.close(1)


def test_the_last_hidden_layer_is_what_the_head_reads() -> None:
    model = random_llama(seed=2, capacity=CAPACITY)
    tensors = random_tensors(variant("llama2").config, seed=2)
    model.state.open(1, ())
    out = model.step([StepRow.chain(1, TEXT[:5])], DraftNeeds(hidden_layers=(2,)))
    assert out.hidden_NKD is not None
    x_ND = out.hidden_NKD[:, 0]
    norm_ND = x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + 1e-5)
    logits_NV = norm_ND * tensors["model.norm.weight"] @ tensors["lm_head.weight"].T
    torch.testing.assert_close(out.logits_MV, logits_NV, atol=1e-5, rtol=1e-5)


def test_no_hidden_state_is_kept_unasked(model: Decoder) -> None:
    model.state.open(1, ())
    assert model.step([StepRow.chain(1, (1,))], PLAIN).hidden_NKD is None
    model.state.close(1)


def test_the_next_step_reuses_every_buffer(model: Decoder) -> None:
    model.state.open(1, ())
    first_MV = model.step([StepRow.chain(1, (1, 2, 3))], PLAIN).logits_MV
    second_MV = model.step([StepRow.chain(1, (4, 5, 6), parent=2)], PLAIN).logits_MV
    assert first_MV.data_ptr() == second_MV.data_ptr()
    assert second_MV.dtype == torch.float32
    model.state.close(1)


def test_more_than_a_step_holds_is_a_bug_of_the_caller(model: Decoder) -> None:
    model.state.open(1, ())
    for rows in ([StepRow.chain(1, [0] * 49)], []):
        with pytest.raises(ContractError):
            model.step(rows, PLAIN)
    model.state.close(1)


def test_a_full_arena_stages_nothing() -> None:
    model = random_llama(capacity=ModelCapacity(num_slots=16, page_size=8))
    model.state.open(1, ())
    step(model, StepRow.chain(1, TEXT[:10]))
    model.state.commit({1: range(10)})
    with pytest.raises(CapacityError):
        step(model, StepRow.chain(1, TEXT[:7]))
    assert model.state.num_staged(1) == 0
    step(model, StepRow.chain(1, TEXT[:6]))


def test_positions_up_to_the_window_are_finite() -> None:
    model = random_llama(
        variant("mistral_window"), capacity=ModelCapacity(num_slots=512, max_logits=1)
    )
    model.state.open(1, ())
    assert (model.spec.max_tokens, model.spec.window) == (256, 128)
    row = StepRow.chain(1, (TEXT * 8)[:256], logits_from=255)
    assert step(model, row).isfinite().all()


def test_the_spec_counts_the_weights_that_were_read(model: Decoder) -> None:
    assert isinstance(model, LlamaModel | GPT2Model)
    itemsize = model.state.layers[0][0].itemsize
    assert model.spec.bytes_per_weight == model.spec.bytes_per_kv == itemsize
    assert model.spec.name == "tiny"
