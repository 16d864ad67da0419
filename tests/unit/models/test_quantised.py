"""A quantised target is exact with respect to itself, and near what it was made of."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.plan import PackedTable
from outrider.kernels.registry import choose
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve
from outrider_lab.bench.workload import WORKLOADS, load_prompts
from parity.feeding import feed

PROMPTS = [prompt for name in WORKLOADS for prompt in load_prompts(name)[3:5]][:5]
# Long enough that lookups find something in any text: which one it is, near-ties of a CPU decide.
PARAMS = SamplingParams(max_tokens=64)
SCHEMES = ("int8", "int4")


@functools.cache
def plain(scheme: str) -> list[tuple[int, ...]]:
    llm = LLM(config=EngineConfig(drafter="none", quantise=scheme, batch_size=1))
    return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def model_of(scheme: str, *, force_reference: bool = False) -> Decoder:
    capacity = ModelCapacity(num_slots=256, max_rows=256, max_logits=256)
    options = LoadOptions(
        capacity=capacity, device="cpu", quantise=scheme, force_reference=force_reference, threads=1
    )
    return load_model(resolve("outrider/embedded"), options)


@functools.cache
def token_ids() -> list[int]:
    return Tokenizer.load(resolve("outrider/embedded")).encode("\n".join(PROMPTS))[:150]


@functools.cache
def logits(scheme: str, *, chunk: int = 150) -> Tensor:
    model, ids = model_of(scheme), token_ids()
    model.state.open(1, ())
    parts: list[Tensor] = []
    for start in range(0, len(ids), chunk):
        row = StepRow.chain(1, ids[start : start + chunk])
        parts.append(model.step([row], DraftNeeds()).logits_MV.clone())
        model.state.commit({1: range(len(row.tokens))})
    return torch.cat(parts)


def first_logits(model: Decoder, token: int) -> Tensor:
    model.state.open(1, ())
    found = model.step([StepRow.chain(1, [token])], DraftNeeds()).logits_MV.clone()
    model.state.close(1)
    return found


# Schemes by drafters are covered in tests/engine/test_drafter_matrix.py. Other combinations are
# `deep`.
@pytest.mark.covering(1)
@pytest.mark.weights
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_greedy_speculation_equals_greedy_decoding_of_the_quantised_target(
    scheme: str, drafter: str
) -> None:
    llm = LLM(config=EngineConfig(drafter=drafter, quantise=scheme, k=4, batch_size=3))
    assert llm.kernels.exact
    results = llm.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == plain(scheme)
    drafted = sum(result.stats.num_drafted for result in results)
    assert sum(result.stats.num_accepted for result in results) > 0.3 * drafted > 0


@pytest.mark.weights
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_target_has_its_own_logits(scheme: str) -> None:
    """Its greedy texts may be those of the target: near-ties of a CPU decide."""
    assert not torch.equal(logits(scheme), logits("none"))


@pytest.mark.weights
@pytest.mark.parametrize(
    ("scheme", "logit_error", "divergence"), [("int8", 0.1, 3e-3), ("int4", 0.25, 0.02)]
)
def test_logits_stay_near_those_of_the_checkpoint(
    scheme: str, logit_error: float, divergence: float
) -> None:
    own_NV, quantised_NV = logits("none"), logits(scheme)
    assert 0 < float((own_NV - quantised_NV).abs().mean()) < logit_error
    own_NV, quantised_NV = own_NV.log_softmax(1), quantised_NV.log_softmax(1)
    assert float((own_NV.exp() * (own_NV - quantised_NV)).sum(1).mean()) < divergence


@pytest.mark.covering(1)
@pytest.mark.weights
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_do_not_depend_on_chunks(scheme: str, chunk: int) -> None:
    assert torch.equal(logits(scheme, chunk=chunk), logits(scheme))


@pytest.mark.weights
@pytest.mark.parametrize(("scheme", "share"), [("int8", 0.9), ("int4", 0.7)])
def test_the_reference_says_the_same(scheme: str, share: float) -> None:
    """All but the linears differ in their last bits, so now and then an activation rounds to its
    neighbour, and what follows in the text is another text's. Passes over a first token alone have
    few chances of that. Integers of int4 have a scale for 32 inputs, not for the row, so they are
    larger, and their last bits more often reach the middle between two."""
    native, reference = model_of(scheme), model_of(scheme, force_reference=True)
    apart = [
        float((first_logits(native, token) - first_logits(reference, token)).abs().max())
        for token in list(dict.fromkeys(token_ids()))[::2]
    ]
    assert len(apart) > 40
    assert sum(one < 1e-3 for one in apart) > share * len(apart)
    assert max(apart) < 0.7


@pytest.mark.weights
def test_the_target_alone_is_quantised() -> None:
    llm = LLM(config=EngineConfig(drafter="model", quantise="int8", batch_size=1))
    choices = {choice.op: choice.name for choice in llm.kernels.choices}
    assert choices["linear"] in ("native int8", "reference int8")
    assert choices["attention"] in ("native", "reference")
    stored = 2 * llm.spec.num_parameters
    assert llm.spec.weight_bytes < 0.75 * stored
    # The draft is stored in 8 bits of another format, and stays as it is.
    assert llm.models["draft"].kernels.choices[0].name in ("native blocks", "reference blocks")


@pytest.mark.weights
@pytest.mark.parametrize("force_reference", [False, True])
def test_a_tied_table_of_int4_is_its_head(force_reference: bool) -> None:
    model = model_of("int4", force_reference=force_reference)
    assert isinstance(model, LlamaModel)
    assert model.config.tie_word_embeddings
    table = model.tables.embedding
    assert isinstance(table, PackedTable)
    assert model.tables.head is table.packed
    assert table.packed.nbytes < 1.2 * table.packed.num_out * table.packed.num_in


@pytest.mark.parametrize("name", ["llama2", "tied"])
def test_one_call_of_int4_has_the_bits_of_many(name: str, tmp_path: Path) -> None:
    capacity, text = (
        ModelCapacity(num_slots=256, max_rows=64),
        [(5 * i * i + 1) % 96 for i in range(40)],
    )
    options = LoadOptions(capacity=capacity, device="cpu", quantise="int4")
    model = load_model(write_checkpoint(tmp_path, variant(name), seed=4), options)
    assert isinstance(model, LlamaModel)
    if model.forward() is None:
        pytest.skip("no native kernels")
    whole_NV = feed(model, text, [7, 33])
    model.kernels = replace(model.kernels)  # equal ones, which the decoder calls itself
    assert model.forward() is None
    assert torch.equal(feed(model, text, [7, 33]), whole_NV)


def test_a_scheme_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantise"):
        EngineConfig(quantise="int3")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_every_family_of_ours_is_quantised(name: str, scheme: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant(name))
    capacity, text = (
        ModelCapacity(num_slots=256, max_rows=64),
        [(5 * i * i + 1) % 96 for i in range(40)],
    )
    own_NV, quantised_NV = (
        feed(
            load_model(folder, LoadOptions(capacity=capacity, device="cpu", quantise=choice)),
            text,
            [40],
        )
        for choice in ("none", scheme)
    )
    error = float((own_NV - quantised_NV).abs().mean() / own_NV.abs().mean())
    assert 0 < error < {"int8": 0.05, "int4": 0.3}[scheme]


def test_a_family_of_transformers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu", quantise="int8")
    with pytest.raises(ConfigError, match="gpt_bigcode run through transformers"):
        load_model(tmp_path, options)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_spec_s_bytes_are_those_that_are_held(scheme: str, tied: bool) -> None:
    kernels = choose(device=torch.device("cpu"), dtype=torch.bfloat16, quantise=scheme)
    if not kernels.choices[0].name.startswith("native"):
        pytest.skip("the reference kernels hold every integer as a byte")
    head_VD, matrix_OI = torch.ones(640, 256), torch.ones(8192, 256)
    num_tables = 1 if tied else 2
    spec = ModelSpec(
        "x", "llama", 640, 256, 1, 1, 1, 256, 256, 64, 8192 * 256 + num_tables * 640 * 256, 2, 2,
        quantise=scheme, tied=tied,
    )  # fmt: skip
    pack_head = kernels.pack_head or kernels.pack
    held = kernels.pack(matrix_OI).nbytes
    if scheme == "int4" or not tied:
        held += pack_head(head_VD).nbytes
    if scheme == "int8" or not tied:
        held += 2 * head_VD.numel()
    assert spec.weight_bytes == pytest.approx(held, rel=0.05)
