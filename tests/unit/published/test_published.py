"""Published quantised folders: numbers bit by bit, refusals, and a model that runs on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors_torch
from tokenizers import Tokenizer as Backend
from tokenizers import models as token_models
from torch import Tensor
from torch.nn import functional

from doubles.hf_checkpoints import write_hf
from doubles.published import (
    FORMATS,
    Format,
    Packer,
    float8,
    mlx,
    mxfp4,
    mxfp8,
    write_published,
)
from doubles.tiny_checkpoints import save_tensors, variant
from outrider import EngineConfig
from outrider.api.memory import files_of, memory_parts
from outrider.api.plan import plan_pair
from outrider.core import env
from outrider.core.errors import CheckpointError, given
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.kernels.native import build
from outrider.kernels.native.ops import NativeGrouped
from outrider.kernels.plan import BlockRows
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.models.weights import Weights, stored_in
from outrider.plugins.published.codes import Codes
from unit.kernels.implementations import kernels_named
from unit.models.configs import parse

MATRIX = "model.layers.0.mlp.down_proj"
BY_NAME = {form.name: form for form in FORMATS}
SHAPE = (80, 96)


def matrix(rows: int = SHAPE[0], columns: int = SHAPE[1]) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(7)
    return rng.normal(0, 0.3, (rows, columns)).astype(np.float32)


def folder_of(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    key: str = "quantization_config",
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({key: config}))
    save_tensors(path / "model.safetensors", {n: t.contiguous() for n, t in tensors.items()})
    return path


def stored(form: Format) -> dict[str, Tensor]:
    return {MATRIX + part: tensor for part, tensor in form.pack(matrix()).parts.items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_numbers_are_those_of_the_formula(tmp_path: Path, form: Format, dtype: torch.dtype) -> None:
    wanted = torch.from_numpy(form.pack(matrix()).numbers).to(dtype)  # pyright: ignore[reportUnknownMemberType]
    folder = folder_of(tmp_path, dict(form.config), stored(form), form.key)
    with Weights.at(folder) as weights:
        assert weights.names == (f"{MATRIX}.weight",)
        found = weights.take(f"{MATRIX}.weight", *SHAPE, dtype=dtype)
        weights.check_all_taken()
    assert found.dtype == dtype
    assert torch.equal(found, wanted)


def test_pieces_of_a_matrix_are_made_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = BY_NAME["fp8-block"]
    wanted = form.pack(matrix()).numbers
    folder = folder_of(tmp_path, dict(form.config), stored(form))
    monkeypatch.setattr("outrider.plugins.published.codes._AT_ONCE", 7 * SHAPE[1])
    with Weights.at(folder) as weights:
        assert np.array_equal(weights.take(f"{MATRIX}.weight", *SHAPE).numpy(), wanted)


def test_experts_of_mxfp4_lie_as_in_an_unquantised_checkpoint(tmp_path: Path) -> None:
    stack = matrix(3 * 8, 64).reshape(3, 8, 64)
    packed = mxfp4(stack)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name + part: tensor for part, tensor in packed.parts.items()}
    with Weights.at(folder_of(tmp_path, {"quant_method": "mxfp4"}, tensors)) as weights:
        found = weights.take(name, 3, 64, 8, dtype=torch.bfloat16)
        weights.check_all_taken()
    assert np.array_equal(found.float().numpy(), packed.numbers)


def test_experts_of_mxfp4_have_the_numbers_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations import mxfp4 as theirs

    packed = mxfp4(matrix(3 * 8, 64).reshape(3, 8, 64))
    tensors = {f"experts{part}": tensor for part, tensor in packed.parts.items()}
    convert = theirs.convert_moe_packed_tensors
    wanted = convert(tensors["experts_blocks"], tensors["experts_scales"], dtype=torch.bfloat16)
    with Weights.at(folder_of(tmp_path, {"quant_method": "mxfp4"}, tensors)) as weights:
        assert torch.equal(weights.take("experts", 3, 64, 8, dtype=torch.bfloat16), wanted)


def test_codes_are_to_be_had_without_their_numbers(tmp_path: Path) -> None:
    form = BY_NAME["gptq-order"]
    with Weights.at(folder_of(tmp_path, dict(form.config), stored(form))) as weights:
        codes = weights.codes(f"{MATRIX}.weight")
    assert isinstance(codes, Codes)
    assert codes.codes_OI.dtype == torch.uint8
    assert codes.group_size == 32
    assert codes.order is not None
    groups_I = codes.groups_I
    assert groups_I is not None
    assert torch.equal(groups_I[codes.order], groups_I.sort().values)


# The numbers of each format, matrix by matrix, are compared above.
@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_model_is_that_of_its_numbers(tmp_path: Path, form: Format) -> None:
    """Bit by bit: both folders hold the same model."""
    quantised, plain = write_published(tmp_path, variant("qwen3"), form)
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), dtype="float32", device="cpu")
    ours, theirs = load_model(quantised, options), load_model(plain, options)
    assert isinstance(ours, LlamaModel)
    assert isinstance(theirs, LlamaModel)
    for mine, other in zip(ours.streamed, theirs.streamed, strict=True):
        assert torch.equal(mine, other)


def test_gpt_oss_runs_from_its_blocks(tmp_path: Path) -> None:
    """As its makers publish it: experts in MXFP4, all else in floats."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 12, "sliding_window": 6}
    plain = write_hf(
        tmp_path / "plain", "gpt_oss", {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    file = plain / "model.safetensors"
    numbers = dict(safetensors_torch.load_file(file))  # pyright: ignore[reportUnknownMemberType]
    blocks: dict[str, Tensor] = {}
    for name, tensor in numbers.items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            blocks[name] = tensor
            continue
        packed = mxfp4(tensor.float().transpose(1, 2).numpy())
        numbers[name] = torch.from_numpy(packed.numbers.copy())  # pyright: ignore[reportUnknownMemberType]
        blocks |= {name + part: value for part, value in packed.parts.items()}
    save_tensors(file, numbers)
    folder = tmp_path / "blocks"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder / "model.safetensors", blocks)
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), dtype="bfloat16", device="cpu")
    rows = [StepRow.chain(0, [5, 9, 7, 30, 2])]
    logits: list[Tensor] = []
    for one in (plain, folder):
        model = load_model(one, options)
        model.state.open(0, ())
        logits.append(model.step(rows, DraftNeeds()).logits_MV.clone())
    assert len(blocks) > len(numbers)
    assert torch.equal(*logits)
    grouped()
    model = load_model(folder, LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu"))
    assert model.kernels.pack_blocks is not None
    model.state.open(0, ())
    near = functional.cosine_similarity(model.step(rows, DraftNeeds()).logits_MV, logits[0])
    assert bool((near > 0.98).all())


# Blocks of these have 64 inputs.
NVFP4 = ("nvfp4-compressed", "nvfp4-modelopt")
WIDE = (80, 128)
# Kernels run on the codes of these.
WITH_BLOCKS = frozenset(
    ("packed-int4", "packed-int4-zeros", "packed-int8-channel", "int8", "awq", "gptq", "gptq-v2",
     "gptq-int2", "mxfp4-compressed", "mlx-2", "mlx-3", "mlx-4", "mlx-float16",
     *NVFP4)
)  # fmt: skip


def grouped() -> NativeGrouped:
    kernels_named("native-1", torch.bfloat16)  # skips where there are none
    library = build.built_kernels(env.compiler(), env.cache_folder()).library
    assert library is not None
    return NativeGrouped(library, 1)


def packed_for_blocks(form: Format) -> dict[str, Tensor]:
    weight = matrix(*WIDE) if form.name in NVFP4 else matrix()
    return {MATRIX + part: tensor for part, tensor in form.pack(weight).parts.items()}


def read_back(blocks: Sequence[BlockRows]) -> Tensor:
    side = grouped()
    packed = given(side.pack(blocks), "layout of these blocks")
    out_OI = torch.empty(packed.num_out, packed.num_in)
    side.table(packed, torch.float32).read(torch.arange(packed.num_out), out_OI)
    return out_OI


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_blocks_have_the_numbers_of_the_codes(tmp_path: Path, form: Format) -> None:
    folder = folder_of(tmp_path, dict(form.config), packed_for_blocks(form), form.key)
    shape = WIDE if form.name in NVFP4 else SHAPE
    with Weights.at(folder) as weights:
        blocks = weights.stacked_blocks(f"{MATRIX}.weight", 1, *shape)
        numbers = weights.take(f"{MATRIX}.weight", *shape)
    if form.name not in WITH_BLOCKS:
        assert blocks is None
        return
    assert blocks is not None
    assert torch.equal(read_back(blocks), numbers)


FLOAT8: dict[str, tuple[dict[str, Any], Packer, bool]] = {
    "tensor": (dict(BY_NAME["fp8-tensor"].config), float8("tensor"), True),
    "channel": (dict(BY_NAME["float8-channel"].config), float8("channel"), True),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        float8("block", 128, ".weight_scale_inv"), True,
    ),
    "blocks of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, float8("block", 128), True,
    ),
    "smaller blocks": (dict(BY_NAME["fp8-block"].config),
                       float8("block", 40, ".weight_scale_inv"), False),
    "a power of two for 32": (dict(BY_NAME["mxfp8-compressed"].config), mxfp8, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_stays_8_bits_where_128_inputs_share_a_scale(tmp_path: Path, name: str) -> None:
    grouped()
    config, pack, stays = FLOAT8[name]
    packed = pack(matrix(80, 256))
    tensors = {MATRIX + part: tensor for part, tensor in packed.parts.items()}
    if name == "blocks of modelopt":  # blocks by 1 by blocks by 1
        scale = f"{MATRIX}.weight_scale"
        tensors[scale] = tensors[scale][:, None, :, None]
    with Weights.at(folder_of(tmp_path, config, tensors)) as weights:
        blocks = weights.stacked_blocks(f"{MATRIX}.weight", 1, 80, 256)
        found = weights.take(f"{MATRIX}.weight", 80, 256)
    assert np.array_equal(found.numpy(), packed.numbers)
    assert (blocks is not None) == stays
    if blocks is not None:
        assert torch.equal(read_back(blocks), found)
        assert sum(one.raw.nbytes for one in blocks) == 80 * 256 * 132 // 128


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_stay_what_they_are(bits: int, dtype: torch.dtype) -> None:
    """And those that no type of blocks can hold make numbers of a matrix."""
    noise = torch.Generator().manual_seed(0)
    top = 1 << bits
    codes_OI = torch.randint(0, top, (20, 64), dtype=torch.uint8, generator=noise)
    codes_OI[0, 0] = top - 1
    scales_RG = (torch.rand(20, 2, generator=noise) + 0.1).to(dtype)
    zeros_RG = torch.full((20, 2), top // 2)
    codes = Codes(codes_OI=codes_OI, scales_RG=scales_RG, zeros_RG=zeros_RG, group_size=32)
    blocks = codes.blocks()
    assert bool(blocks) == (dtype != torch.float32)
    if blocks:
        assert torch.equal(read_back(blocks), codes.numbers(torch.float32))


def test_groups_that_are_no_multiple_of_a_block_become_numbers() -> None:
    codes_OI = torch.zeros(4, 96, dtype=torch.uint8)
    scales_RG, zeros_RG = torch.ones(4, 4, dtype=torch.float16), torch.zeros(4, 4)
    odd = Codes(codes_OI=codes_OI, scales_RG=scales_RG, zeros_RG=zeros_RG, group_size=24)
    assert not odd.blocks()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(WITH_BLOCKS))
def test_a_model_runs_on_its_codes(tmp_path: Path, name: str) -> None:
    """Near the numbers that they stand for, a row at a time or several, in the memory planned."""
    grouped()
    quantised, plain = write_published(tmp_path, variant("qwen3"), BY_NAME[name])
    capacity = ModelCapacity(num_slots=64)
    ours = load_model(quantised, LoadOptions(capacity=capacity, device="cpu"))
    theirs = load_model(plain, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    text = [5, 9, 7, 30, 2]
    logits: list[Tensor] = []
    for model in (ours, theirs):
        model.state.open(0, ())
        logits.append(model.step([StepRow.chain(0, text)], DraftNeeds()).logits_MV.clone())
    near = functional.cosine_similarity(logits[0], logits[1])
    assert bool((near > 0.995).all())
    ours.state.open(1, ())
    singly: list[Tensor] = []
    for token in text:
        singly.append(ours.step([StepRow.chain(1, [token])], DraftNeeds()).logits_MV.clone())
        ours.state.commit({1: [0]})
    assert torch.equal(singly[-1][-1], logits[0][-1])
    assert ours.kernels.pack_blocks is not None
    held = stored_in(quantised).held_bytes
    assert 0 < held < stored_in(plain).num_bytes


PLANNED: dict[str, tuple[str, dict[str, bool]]] = {
    "float8": ("fp8-tensor", {}),
    "mlx": ("mlx-4", {}),
    "nvfp4": ("nvfp4-compressed", {}),
    "blocks": ("gptq", {}),
    "a tied head": ("gptq", {"tie_word_embeddings": True}),
    "another order": ("gptq-order", {}),
    "claimed to be in order": ("gptq-order", {"desc_act": False}),
    "zeros of 8 bits": ("packed-int8-channel", {"zeros": True}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_is_what_a_model_takes(tmp_path: Path, name: str, dtype: str) -> None:
    """Also where its claims are wrong, and matrices become numbers that blocks cannot hold."""
    grouped()
    form, claims = PLANNED[name]
    tied = bool(claims.get("tie_word_embeddings"))
    folder, _ = write_published(tmp_path, variant("tied" if tied else "qwen3"), BY_NAME[form])
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": dtype}
    if "desc_act" in claims:
        config["quantization_config"]["desc_act"] = claims["desc_act"]
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    tensors = dict(safetensors_torch.load_file(path))  # pyright: ignore[reportUnknownMemberType]
    tensors |= {n: t.to(getattr(torch, dtype)) for n, t in tensors.items() if "embed_tokens" in n}
    if "zeros" in claims:
        for name in [n for n in tensors if n.endswith(".weight_packed")]:
            num_out = len(tensors[name])
            zeros = torch.full((-(-num_out // 4), 1), 0x7F7F7F7F, dtype=torch.int32)
            tensors[name.replace("_packed", "_zero_point")] = zeros
    save_tensors(path, tensors)
    words = {f"t{i}": i for i in range(config["vocab_size"])}
    Backend(token_models.WordLevel(words, "t0")).save(str(folder / "tokenizer.json"))
    plan = plan_pair(str(folder), None, EngineConfig(drafter="none", device="cpu"))
    parts = {part.name: part.num_bytes for part in memory_parts(plan, files_of(plan))}
    model = load_model(folder, LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu"))
    assert isinstance(model, LlamaModel)
    taken = sum(one.nbytes for one in model.streamed) + model.tables.embeddings.nbytes
    assert taken <= parts["weights of the target"] <= 1.2 * taken


def test_experts_of_mxfp4_run_on_their_blocks(tmp_path: Path) -> None:
    stack = matrix(3 * 40, 64).reshape(3, 40, 64)
    packed = mxfp4(stack)
    tensors = {f"experts{part}": tensor for part, tensor in packed.parts.items()}
    with Weights.at(folder_of(tmp_path, {"quant_method": "mxfp4"}, tensors)) as weights:
        blocks = weights.stacked_blocks("experts", 3, 40, 64)
    assert blocks is not None
    order_O = torch.arange(40).flip(0)
    for one, numbers_IO in zip(blocks, packed.numbers, strict=True):
        wanted = torch.from_numpy(numbers_IO.T.copy())  # pyright: ignore[reportUnknownMemberType]
        assert torch.equal(read_back([one]), wanted)
        assert torch.equal(read_back([one.in_order(order_O)]), wanted[order_O])
        assert torch.equal(read_back([one.in_order(order_O).in_order(order_O)]), wanted)


def test_a_bias_of_zeros_beside_a_matrix_is_none(tmp_path: Path) -> None:
    """GPTQ writes one for every linear."""
    quantised, _ = write_published(tmp_path, variant("llama2"), BY_NAME["gptq"])
    path = quantised / "model.safetensors"
    with Weights.at(quantised) as weights:
        assert stored_in(quantised).most_values >= sum(
            weights.take(name, *tensor.shape).numel() for name, tensor in weights.each()
        )
    packed = dict(safetensors_torch.load_file(path))  # pyright: ignore[reportUnknownMemberType]
    name = "model.layers.0.self_attn.q_proj.bias"
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), dtype="float32", device="cpu")
    save_tensors(path, {**packed, name: torch.zeros(64)})
    load_model(quantised, options)
    save_tensors(path, {**packed, name: torch.ones(64)})
    with pytest.raises(CheckpointError, match="is not part of this model"):
        load_model(quantised, options)


def without(part: str, form: str) -> tuple[Format, dict[str, Tensor]]:
    tensors = stored(BY_NAME[form])
    del tensors[MATRIX + part]
    return BY_NAME[form], tensors


def changed(part: str, form: str, tensor: Tensor) -> tuple[Format, dict[str, Tensor]]:
    return BY_NAME[form], {**stored(BY_NAME[form]), MATRIX + part: tensor}


WRONG = {
    "gptq without scales": (without(".scales", "gptq"), "scales is missing"),
    "gptq without zeros": (without(".qzeros", "gptq"), "qzeros is missing"),
    "awq without zeros": (without(".qzeros", "awq"), "qzeros is missing"),
    "packed without scales": (without(".weight_scale", "packed-int4"), "weight_scale is missing"),
    "packed without shape": (without(".weight_shape", "packed-int4"), "weight_shape is missing"),
    "float8 without scales": (without(".weight_scale", "fp8-tensor"), "no scales that say"),
    "int8 without scales": (without(".weight_scale", "int8"), "no scales that say"),
    "groups beyond the scales": (
        changed(".g_idx", "gptq", torch.full((96,), 3, dtype=torch.int32)), "groups 3 to 3 of 3",
    ),
    "negative groups": (
        changed(".g_idx", "gptq", torch.arange(-1, 95, dtype=torch.int32)), "groups -1 to 94",
    ),
    "too few groups": (changed(".g_idx", "gptq", torch.zeros(5, dtype=torch.int32)), "shape [5]"),
    "scales of another size": (
        changed(".scales", "gptq", torch.ones(2, 80, dtype=torch.float16)), "shape [2, 80]",
    ),
    "zeros of another size": (
        changed(".qzeros", "awq", torch.ones(3, 3, dtype=torch.int32)), "shape [3, 3]",
    ),
    "words of no type": (
        changed(".qweight", "gptq", torch.ones(12, 80, dtype=torch.int64)), "type torch.int64",
    ),
    "words in a row": (
        changed(".qweight", "gptq", torch.ones(12, dtype=torch.int32)), "shape [12]",
    ),
    "words of no inputs": (
        changed(".qweight", "awq", torch.ones(0, 10, dtype=torch.int32)), "shape [0, 10]",
    ),
    "words of no outputs": (
        changed(".qweight", "gptq", torch.ones(12, 0, dtype=torch.int32)), "shape [12, 0]",
    ),
    "no scales": (changed(".weight_scale", "int8", torch.ones(80, 0)), "shape [80, 0]"),
    "a shape that lies": (
        changed(".weight_shape", "packed-int4", torch.tensor([80, 200])), "shape [80, 12] for",
    ),
    "a shape of three": (
        changed(".weight_shape", "packed-int4", torch.tensor([2, 2, 2])), "the sizes [2, 2, 2]",
    ),
    "blocks of another size": (
        changed(".weight_scale_inv", "fp8-block", torch.ones(7, 7)), "shape [7, 7]",
    ),
    "scales that do not divide": (
        changed(".weight_scale", "int8", torch.ones(80, 7)), "shape [80, 7]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    (form, tensors), said = WRONG[name]
    with (
        Weights.at(folder_of(tmp_path, dict(form.config), tensors)) as weights,
        pytest.raises(CheckpointError) as caught,
    ):
        weights.take(f"{MATRIX}.weight", *SHAPE)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["words of no inputs", "words of no outputs", "no scales"])
def test_what_is_empty_makes_no_blocks(tmp_path: Path, name: str) -> None:
    (form, tensors), said = WRONG[name]
    with (
        Weights.at(folder_of(tmp_path, dict(form.config), tensors)) as weights,
        pytest.raises(CheckpointError) as caught,
    ):
        weights.stacked_blocks(f"{MATRIX}.weight", 1, *SHAPE)
    assert said in str(caught.value)


def test_another_shape_than_the_configs_is_refused(tmp_path: Path) -> None:
    form = BY_NAME["awq"]
    with (
        Weights.at(folder_of(tmp_path, dict(form.config), stored(form))) as weights,
        pytest.raises(CheckpointError, match=r"shape \[80, 96\], but config.json implies"),
    ):
        weights.take(f"{MATRIX}.weight", 96, 80)


PACKED = dict(BY_NAME["packed-int4"].config)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unnamed": ({"bits": 4}, "does not say how"),
    "hqq": ({"quant_method": "hqq"}, "by 'hqq'"),
    "mxfp6": ({**PACKED, "format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
    "another algorithm of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "as 'W4A8_AWQ'",
    ),
    "sparse": ({**PACKED, "format": "marlin-24"}, "'marlin-24'"),
    "rotated": ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "no groups": ({**PACKED, "config_groups": {}}, "config_groups"),
    "3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "to 3 bits"),
    "awq of 8 bits": ({"quant_method": "awq", "bits": 8}, "AWQ to 8 bits"),
    "awq's other order": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
    "mixed gptq": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "several",
    ),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
    "block of three": ({"quant_method": "fp8", "weight_block_size": [1, 2, 3]}, "two sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_not_read_are_refused_by_name(name: str) -> None:
    config, said = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        parse(quantization_config=config)
    assert said in str(caught.value)
    assert caught.value.exit_code == 3


def test_the_hint_of_a_refusal_is_a_way_on() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(quantization_config=REFUSED["hqq"][0])
    assert "--quantise int4" in str(caught.value.hint)


def test_a_mode_of_mlx_that_is_not_read_is_refused_by_name() -> None:
    own = {"group_size": 64, "bits": 4, "mode": "trellis"}
    for config in ({"quantization": own}, {"quantization": own, "quantization_config": own}):
        with pytest.raises(CheckpointError, match="MLX in the mode 'trellis'"):
            parse(**config)


def test_modules_of_mlx_have_settings_of_their_own(tmp_path: Path) -> None:
    """A module may have another group and another number of bits, and a stack is of experts."""
    other = mlx(6)(matrix(8, 64))
    stack = [mlx(4)(matrix(8, 128) * factor) for factor in (1, 2, 3)]
    tensors = {"gate" + part: tensor for part, tensor in other.parts.items()}
    for part in (".weight", ".scales", ".biases"):
        # Stacks have groups of 64: of two scales of 32 the first stands for both.
        parts = [one.parts[part] for one in stack]
        tensors["mlp.switch_mlp.up_proj" + part] = torch.stack(
            [one if part == ".weight" else one[:, ::2] for one in parts]
        )
    config = {"group_size": 64, "bits": 4, "gate": {"group_size": 32, "bits": 6}, "head": False}
    with Weights.at(folder_of(tmp_path, config, tensors, "quantization")) as weights:
        assert np.array_equal(weights.take("gate.weight", 8, 64).numpy(), other.numbers)
        found = weights.take("mlp.experts.up_proj.weight", 3, 8, 128)
        blocks = weights.stacked_blocks("mlp.experts.up_proj.weight", 3, 8, 128)
        weights.check_all_taken()
    for number, one in enumerate(stack):
        groups = found[number].view(8, 4, 32)[:, ::2]
        assert np.array_equal(groups.numpy(), one.numbers.reshape(8, 4, 32)[:, ::2])
    assert blocks is not None
    grouped()
    assert torch.equal(read_back([blocks[1]]), found[1])


def test_gptq_without_a_word_in_config_json(tmp_path: Path) -> None:
    """Its first files had a document of their own."""
    form = BY_NAME["gptq"]
    folder = folder_of(tmp_path, {}, stored(form))
    (folder / "config.json").write_text("{}")
    own = {"bits": 4, "group_size": 32, "desc_act": False}
    (folder / "quantize_config.json").write_text(json.dumps(own))
    with Weights.at(folder) as weights:
        found = weights.take(f"{MATRIX}.weight", *SHAPE)
    assert np.array_equal(found.numpy(), form.pack(matrix()).numbers)
