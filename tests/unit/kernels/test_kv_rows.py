"""Keys and values in integers of 8 bits: their rows, the operators that use them, texts."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError
from outrider.kernels.plan import floats, head_dim_of, row_size, stored
from outrider.models.configs import GPT2Config
from outrider.models.loading import check_kv_dtype
from unit.kernels.implementations import DRAFTERS, DTYPES, IMPLEMENTATIONS, kernels_named, randn
from unit.kernels.paged_cases import Heads, Sequenced, chain, make_pass

HEADS = (Heads(4, 2, 64), Heads(3, 1, 32), Heads(8, 2, 128), Heads(5, 1, 96))
TREE = Sequenced(37, (-1, -1, 0, 0, 2, 1, 4))
PROMPTS = ["def quicksort(items):", "Once upon a time", "x = [1, 2, 3, 1, 2, 3, 1, 2"]


def test_a_row_is_codes_and_scales() -> None:
    x = torch.zeros(64)
    x[:32] = torch.arange(-16.0, 16.0)
    x[40] = 254.0
    rows = stored(x, torch.int8)
    assert (rows.shape[0], row_size(64, torch.int8), head_dim_of(rows)) == (68, 68, 64)
    scales = rows[64:].view(torch.float16)
    assert torch.equal(scales, torch.tensor([16 / 127, 2.0]).half())
    assert torch.equal(rows[:3].int(), torch.tensor([-127, -119, -111]).int())
    assert (rows[40], rows[41]) == (127, 0)
    assert row_size(64, torch.float16) == head_dim_of(x.half()) == 64


def test_what_is_read_is_near_what_was_written() -> None:
    x = randn(50, 3, 128) * torch.logspace(-3, 3, 50)[:, None, None]
    found = floats(stored(x, torch.int8))
    largest = x.reshape(50, 3, -1, 32).abs().amax(-1, keepdim=True)
    error = (found - x).reshape(50, 3, -1, 32).abs()
    # Half a step, and what rounding the scale to float16 loses at the ends.
    assert (error <= largest * (0.5 / 127 + 2**-11)).all()
    assert torch.equal(floats(stored(torch.zeros(2, 32), torch.int8)), torch.zeros(2, 32))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_operators_are_those_of_floats_on_what_is_stored(
    name: str, dtype: torch.dtype, heads: Heads
) -> None:
    kernels, wide = kernels_named(name, dtype), kernels_named(name, torch.float32)
    case = make_pass([chain(60, 5), TREE, chain(70, 1)], heads=heads, dtype=torch.float32)
    length = int(case.plan.positions_N.max()) + 1
    angles_TH = randn(length, heads.head_dim // 2)
    tables = (angles_TH.cos(), angles_TH.sin())
    k_GSR, v_GSR = stored(case.k_GSD, torch.int8), stored(case.v_GSD, torch.int8)
    want_k_GSR, want_v_GSR = k_GSR.clone(), v_GSR.clone()
    q_NE, qkv_NE = case.qkv_NE.clone(), case.qkv_NE.clone()
    kernels.rope_append(q_NE, *tables, case.plan, k_GSR, v_GSR)
    # What is stored are the keys that it turned in place, as float32 turns them, and the values.
    heads_NAD = q_NE.view(case.plan.num_tokens, -1, heads.head_dim)
    slots_N = case.plan.slots_N.long()
    for want_GSR, first in ((want_k_GSR, heads.num_heads), (want_v_GSR, -heads.num_kv_heads)):
        new_NGD = heads_NAD[:, first:][:, : heads.num_kv_heads]
        want_GSR[:, slots_N] = stored(new_NGD.transpose(0, 1), torch.int8)
    assert torch.equal(k_GSR, want_k_GSR)
    assert torch.equal(v_GSR, want_v_GSR)
    k_GSD, v_GSD = case.k_GSD.clone(), case.v_GSD.clone()
    wide.rope_append(qkv_NE, *tables, case.plan, k_GSD, v_GSD)
    turned_NGD = heads_NAD[:, heads.num_heads : -heads.num_kv_heads]
    torch.testing.assert_close(turned_NGD.transpose(0, 1), k_GSD[:, slots_N])
    found: list[Tensor] = []
    for one, keys, values in ((kernels, k_GSR, v_GSR), (wide, floats(k_GSR), floats(v_GSR))):
        out_NO = torch.full((case.plan.num_tokens, heads.num_heads * heads.head_dim), torch.nan)
        one.attention(q_NE, keys, values, case.plan, 0.125, out_NO)
        found.append(out_NO)
    assert torch.equal(*found)
    assert not found[0].isnan().any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_finite_number_stays_none(name: str, bad: float) -> None:
    case = make_pass([chain(3, 2)], heads=Heads(2, 1, 64), dtype=torch.float32)
    k_GSR, v_GSR = stored(case.k_GSD, torch.int8), stored(case.v_GSD, torch.int8)
    qkv_NE = case.qkv_NE.clone()
    qkv_NE[1, -1] = bad
    still = (torch.ones(8, 32), torch.zeros(8, 32))
    kernels_named(name, torch.float32).rope_append(qkv_NE, *still, case.plan, k_GSR, v_GSR)
    values = floats(v_GSR)[0, case.plan.slots_N.long()]
    assert values[1, 32:].isnan().all()
    assert values[1, :32].isfinite().all()
    assert values[0].isfinite().all()


@functools.cache
def texts(
    drafter: str, nodes: int = 0, *, model: str = "", reference: bool = False
) -> list[tuple[int, ...]]:
    config = EngineConfig(
        kv_dtype="int8", drafter=drafter, k=5, tree_nodes=nodes, batch_size=2, device="cpu",
        force_reference=reference,
    )  # fmt: skip
    with LLM(model or "outrider/embedded", config=config) as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=8 if reference else 24))
        return [result.token_ids for result in results]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(("drafter", "nodes"), DRAFTERS)
def test_greedy_text_is_the_same_with_every_drafter(drafter: str, nodes: int) -> None:
    assert texts(drafter, nodes) == texts("none")


@pytest.mark.slow
@pytest.mark.weights
def test_a_hybrid_s_text_is_the_same_with_drafts() -> None:
    plain, drafted = (texts(name, model="outrider/embedded-hybrid") for name in ("none", "mtp"))
    assert drafted == plain


@pytest.mark.slow
@pytest.mark.weights
def test_reference_kernels_write_the_same_with_and_without_drafts() -> None:
    assert texts("model", reference=True) == texts("none", reference=True)


@pytest.mark.slow
@pytest.mark.weights
def test_an_arena_takes_half_the_memory() -> None:
    sizes = {}
    for kind in ("auto", "int8"):
        with LLM(kv_dtype=kind, device="cpu", drafter="none", arena_tokens=4096) as llm:
            (planned,) = (n for part, n in llm.memory.items() if part.startswith("KV arena"))
            per_token, dim = llm.spec.kv_bytes_per_token, llm.spec.head_dim
            assert planned == 4096 * per_token
            sizes[kind] = planned
    assert sizes["int8"] * 2 * dim == sizes["auto"] * (dim + dim // 16)


@pytest.mark.parametrize(
    ("name", "head_dim", "device", "told"),
    [
        ("int4", 64, "cpu", "unknown value 'int4'"),
        ("int8", 80, "cpu", "heads of this model have 80"),
        ("int8", 64, "cuda", "the kernels for CUDA read only floats"),
    ],
)
def test_what_cannot_be_is_refused(name: str, head_dim: int, device: str, told: str) -> None:
    config = GPT2Config(
        family="gpt2", vocab_size=8, hidden_size=2 * head_dim, ffn_size=8, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=head_dim, max_tokens=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=told):
        check_kv_dtype(name, config, torch.device(device))
