"""The Triton side of the registry, in the interpreter: operators, the trial, a pass of a model."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from doubles.tiny_checkpoints import Variant, random_llama, variant
from outrider.core.errors import NumericsError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.sampling import PLAIN
from outrider.core.spec import DecoderConfig
from outrider.kernels.operators import OPS, Kernels, tried
from outrider.kernels.reference.pointwise import verify_prefix
from outrider.models import loading
from outrider.models.decoder import ModelCapacity as Space
from outrider.models.llama import LlamaModel
from outrider.plugins.gpu.kernels import trial
from outrider.plugins.gpu.kernels.build import triton_kernels
from outrider.plugins.gpu.kernels.eager import EagerProbs
from outrider.plugins.gpu.kernels.ops import TritonOps
from outrider.plugins.gpu.kernels.scratch import Workspace
from unit.kernels.implementations import randn, relative_error
from unit.kernels.triton.interpreted import CPU, cut_attention_small

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


SMALL = DecoderConfig(
    family="a test",
    vocab_size=61,
    hidden_size=32,
    ffn_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_tokens=64,
)


@functools.cache
def eager() -> EagerProbs:
    return EagerProbs(Workspace(CPU), CPU)


@pytest.fixture(autouse=True)
def short_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_ROWS", 2)
    monkeypatch.setattr(trial, "_COMMITTED", 17)
    cut_attention_small(monkeypatch, part=16, keys=16)


def side(quantise: str = "none") -> Kernels:
    make: Any = triton_kernels
    return make(CPU, torch.float32, quantise, ("native: a test",))


def test_every_operator_is_tritons() -> None:
    kernels = side()
    assert [choice.op for choice in kernels.choices] == list(OPS)
    assert {choice.name for choice in kernels.choices} == {"triton"}
    assert {choice.refusals for choice in kernels.choices} == {("native: a test",)}
    assert not kernels.exact
    assert alike(kernels).exact


def alike(kernels: Kernels) -> Kernels:
    """After the trial of two weights, of which the second has inputs that fill no step."""
    for sizes in ((16, 32), (20, 24)):
        kernels.pack(randn(*sizes))
    return tried(kernels, SMALL)


def test_the_answer_of_a_trial_is_that_of_every_lane() -> None:
    kernels = alike(side())
    assert kernels.trial is None
    assert kernels.twin is not None
    assert kernels.twin().exact
    assert tried(kernels, SMALL) is kernels


def test_quantised_linears_say_so() -> None:
    assert side("int4").choices[0].name == "triton int4"


def test_a_trial_finds_rows_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = TritonOps.linear

    def careless(self: TritonOps, x_NI: Tensor, packed: Any, out_NO: Tensor, *rest: bool) -> None:
        linear(self, x_NI, packed, out_NO, *rest)
        if x_NI.shape[0] == 1 and packed.num_in == ragged:
            out_NO.mul_(1 + 2**-22)

    monkeypatch.setattr(TritonOps, "linear", careless)
    ragged = 24
    assert not alike(side()).exact
    ragged = 25
    assert alike(side()).exact


def test_a_trial_has_the_models_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = TritonOps.attention

    def careless(self: TritonOps, qkv_NE: Tensor, *rest: Any) -> None:
        attention(self, qkv_NE, *rest)
        if len(qkv_NE) == 1 and qkv_NE.shape[1] == SMALL.qkv_size:
            rest[-1].mul_(1 + 2**-22)

    monkeypatch.setattr(TritonOps, "attention", careless)
    assert not alike(side()).exact


def test_what_the_host_asks_is_what_the_definitions_say() -> None:
    logits_NV = randn(2, 40)
    out_NV, expected_NV = torch.empty(2, 40), torch.empty(2, 40)
    eager().softmax(logits_NV, 0.7, out_NV)
    PLAIN.softmax(logits_NV, 0.7, expected_NV)
    assert relative_error(out_NV, expected_NV.double()) < 1e-6
    for uniform in (0.0, 0.61):
        assert eager().pick(out_NV[0], uniform) == PLAIN.pick(out_NV[0], uniform)
    for proposal in (out_NV[1], 7):
        left_V, left = eager().leftover(out_NV[0], proposal, 0.9)
        expected_V, expected = PLAIN.leftover(out_NV[0], proposal, 0.9)
        assert relative_error(left_V, expected_V) < 1e-7
        assert left == pytest.approx(expected, rel=1e-12)
    assert eager().argmax(logits_NV) == [int(row.argmax()) for row in logits_NV]


@settings(max_examples=4)
@given(data=st.data())
def test_prefixes_are_those_of_the_reference(data: st.DataObject) -> None:
    num, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    logits_BKV = torch.randint(0, 3, (num, length, 9), generator=torch.Generator().manual_seed(0))
    logits_BKV = logits_BKV.float()
    token = st.integers(-1, 8)
    best_BK = logits_BKV.argmax(-1)
    drafts_BK = torch.tensor([[data.draw(token) for _ in range(length)] for _ in range(num)])
    follows_BK = torch.tensor(
        [[data.draw(st.booleans()) for _ in range(length)] for _ in range(num)]
    )
    drafts_BK = torch.where(follows_BK, best_BK, drafts_BK)
    len_B, mask_BK = verify_prefix(logits_BKV, drafts_BK, eager().argmax)
    expected_B, expected_BK = verify_prefix(logits_BKV, drafts_BK)
    assert torch.equal(len_B, expected_B)
    assert torch.equal(mask_BK, expected_BK)


def test_other_dtypes_go_to_the_definitions() -> None:
    probs_V = torch.softmax(randn(20).double(), -1)
    assert eager().pick(probs_V, 0.4) == PLAIN.pick(probs_V, 0.4)
    left_V, _ = eager().leftover(probs_V, 3)
    assert left_V.dtype == torch.float64
    out_1V = torch.empty(1, 20, dtype=torch.float64)
    eager().softmax(probs_V[None], 1.0, out_1V)
    assert torch.equal(out_1V[0], torch.softmax(probs_V, -1))


def test_a_distribution_that_is_not_numbers_is_an_error() -> None:
    with pytest.raises(NumericsError):
        eager().pick(torch.full((20,), torch.nan), 0.5)


def small(name: str, **changes: int) -> Variant:
    """One layer, of sizes for the interpreter."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    one = variant(name)
    return replace(one, changes={**one.changes, **sizes, **heads, **changes})


def logits_of(model: LlamaModel, tokens: list[int], seq_id: int) -> Tensor:
    return model.step([StepRow.chain(seq_id, tokens)], DraftNeeds()).logits_MV.clone()


@pytest.mark.slow
def test_a_model_gives_the_logits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms of heads; and a pass of three tokens is three passes, bit for bit."""
    space = Space(num_slots=64, page_size=8, max_rows=8, max_logits=8)
    plain = random_llama(small("qwen3", head_dim=16), capacity=space)
    kernels = side()

    def chosen(**_: object) -> Kernels:
        return kernels

    monkeypatch.setattr(loading, "choose", chosen)
    model = random_llama(small("qwen3", head_dim=16), capacity=space)
    assert model.kernels.exact
    assert model.kernels.linear == kernels.linear
    for one in (plain, model):
        one.state.open(1, ())
    together_MV = logits_of(model, [5, 9, 4], 1)
    expected_MV = logits_of(plain, [5, 9, 4], 1)
    assert relative_error(together_MV, expected_MV.double()) < 1e-5
    model.state.open(2, ())
    for place, token in enumerate([5, 9]):
        assert torch.equal(logits_of(model, [token], 2)[0], together_MV[place])
        model.state.commit({2: [0]})


@pytest.mark.slow
def test_activations_in_the_dtype_of_weights_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear rounds them anyway; so programs of it read half as much."""
    kernels = triton_kernels(CPU, torch.bfloat16, "none", (), exact=True)
    other = replace(kernels, choices=(replace(kernels.choices[0], name="a test"),))
    space, found = Space(num_slots=64, page_size=8, max_rows=8, max_logits=8), list[Tensor]()
    for chosen, dtype in ((kernels, torch.bfloat16), (other, torch.float32)):
        monkeypatch.setattr(loading, "choose", lambda chosen=chosen, **_: chosen)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
        model = random_llama(small("llama2"), dtype="bfloat16", capacity=space)
        held = (model.scratch.normed, model.scratch.attended_NA, model.scratch.activated_NF)
        assert {one.dtype for one in held} == {dtype}
        model.state.open(1, ())
        found.append(logits_of(model, [5, 9, 4], 1))
    assert torch.equal(*found)
