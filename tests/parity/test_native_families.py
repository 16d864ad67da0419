"""Families of models/family_table.py: logits and greedy text are those of transformers, and rows
have the same bits however they are fed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import torch as safetensors_torch

from doubles.gguf_families import write_gguf
from doubles.hf_checkpoints import VOCAB, random_wrapper, write_hf
from doubles.published import mxfp4
from doubles.tiny_checkpoints import save_tensors, variant, write_checkpoint
from doubles.tiny_families import FAMILIES, WRAPPERS, write_family, write_wrapper
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from parity.feeding import feed, greedy
from parity.oracle import Oracle

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]
CAPACITY = ModelCapacity(num_slots=512, page_size=16)
every_family = pytest.mark.parametrize("name", FAMILIES)
# Layers that the native call for a whole pass lacks: xIELU, exact GELU, two norms of one residual,
# Gemma 4's.
BY_OPERATOR = (
    "gemma4", "gemma4_equal", "gemma4_shared", "gemma4_moe", "apertus", "apertus_unusual",
    "gpt_neox", "falcon", "falcon_new", "falcon_one_norm",
)  # fmt: skip
# A tree of twelve nodes behind a text, by parents.
TREE = (-1, -1, 0, 0, 2, 1, 4, 6, 7, 8, 9, 10)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    @cache
    def written(name: str) -> Path:
        return write_family(root / name, name)

    return written


def load(
    folder: Path, *, dtype: str = "float32", force_reference: bool = False, quantise: str = "none"
) -> LlamaModel:
    options = LoadOptions(
        capacity=CAPACITY,
        dtype=dtype,
        device="cpu",
        force_reference=force_reference,
        quantise=quantise,
    )
    model = load_model(folder, options)
    assert isinstance(model, LlamaModel)
    assert model.kernels.exact
    return model


@every_family
def test_logits_and_hidden_states_are_those_of_transformers(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    logits_NV, hidden_NKD = Oracle(folder_of(name)).run(TEXT)
    for force_reference in (False, True):
        model = load(folder_of(name), force_reference=force_reference)
        model.state.open(1, ())
        out = model.step([StepRow.chain(1, TEXT)], DraftNeeds(hidden_layers=(0, 1)))
        torch.testing.assert_close(out.logits_MV, logits_NV, atol=1e-4, rtol=1e-5)
        assert out.hidden_NKD is not None
        torch.testing.assert_close(out.hidden_NKD, hidden_NKD[:, :2], atol=1e-4, rtol=1e-5)


# The logits of each family are those of transformers, however rows are fed: tests above and below.
@pytest.mark.sample(4)
@every_family
def test_greedy_text_is_that_of_transformers(name: str, folder_of: Callable[[str], Path]) -> None:
    expected, lead = Oracle(folder_of(name)).greedy(TEXT[:9], 40)
    assert lead > 1e-4, "a tie: choose another seed"
    assert greedy(load(folder_of(name)), TEXT[:9], 40) == expected


@every_family
def test_every_weight_is_counted(name: str, folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of(name))
    stored = sum(path.stat().st_size for path in folder_of(name).glob("*.safetensors"))
    assert 0 <= stored - model.spec.num_parameters * 4 < 32768
    reads = model.spec.num_experts
    assert bool(reads) == bool(model.config.sparse_layers)


@pytest.mark.covering(1)
@every_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_have_the_same_bits_however_they_are_fed(
    name: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of(name), dtype=dtype)
    whole_NV = feed(model, TEXT, [60])
    assert torch.equal(feed(model, TEXT, [1] * 60), whole_NV)
    assert torch.equal(feed(model, TEXT, [7, 1, 20, 2, 30]), whole_NV)
    # Beside others, and operator by operator.
    kernels = model.kernels
    if kernels.forward is not None:
        assert (model.forward() is None) == (name in BY_OPERATOR)
    model.kernels = replace(kernels, forward=None)
    rows = [StepRow.chain(1, TEXT), StepRow.chain(2, TEXT[:33])]
    for row in rows:
        model.state.open(row.seq_id, ())
    both_MV = model.step(rows, DraftNeeds()).logits_MV
    assert torch.equal(both_MV[:60], whole_NV)
    assert torch.equal(both_MV[60:], whole_NV[:33])


@every_family
def test_a_node_of_a_tree_has_the_bits_of_its_path(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    model, tokens = load(folder_of(name), dtype="bfloat16"), [5 * i + 3 for i in range(len(TREE))]
    model.state.open(1, ())
    model.step([StepRow.chain(1, TEXT[:40])], DraftNeeds())
    model.state.commit({1: range(40)})
    tree_MV = model.step([StepRow(1, tuple(tokens), TREE, 0)], DraftNeeds()).logits_MV.clone()
    model.state.commit({1: ()})
    for node in range(len(TREE)):
        path = [node]
        while (parent := TREE[path[0]]) >= 0:
            path.insert(0, parent)
        row = StepRow.chain(1, [tokens[i] for i in path])
        assert torch.equal(model.step([row], DraftNeeds()).logits_MV[-1], tree_MV[node])
        model.state.commit({1: ()})


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma3_text", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("quantise", ["int8", "int4"])
def test_quantised_rows_have_the_same_bits(
    name: str, quantise: str, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of(name), quantise=quantise)
    whole_NV = feed(model, TEXT, [60])
    assert torch.equal(feed(model, TEXT, [1] * 60), whole_NV)


def test_a_pass_reads_the_experts_that_it_chooses(folder_of: Callable[[str], Path]) -> None:
    """What nobody chose may be anything, NaN too; what was chosen may not."""
    model = load(folder_of("qwen3_moe"))
    expected_NV = feed(model, TEXT[:1], [1])
    for layer in model.layers:
        assert layer.mixture is not None
        read = 0
        for net in layer.mixture.experts:
            kept = net.gate_up.data.clone()
            net.gate_up.data.fill_(torch.nan)
            read += not torch.equal(feed(model, TEXT[:1], [1]), expected_NV)
            net.gate_up.data.copy_(kept)
        assert read == 2


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_model_that_also_sees(name: str, tmp_path: Path) -> None:
    folder, oracle = write_wrapper(tmp_path, name)
    model = load(folder)
    assert any("pictures" in note for note in model.config.notes)
    with torch.no_grad():
        logits_NV = oracle(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(feed(model, TEXT, [60]), logits_NV, atol=1e-4, rtol=1e-5)


def test_queries_grow_with_the_position_in_a_longer_context(
    folder_of: Callable[[str], Path],
) -> None:
    folder, text = folder_of("ministral3"), [*TEXT, *TEXT, *TEXT]
    short: Decoder = load(folder)
    assert short.spec.max_tokens == 64
    assert any("queries that grow with the position" in note for note in short.config.notes)
    capacity = replace(CAPACITY, window=200, max_logits=256)
    model = load_model(folder, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    assert (model.spec.max_tokens, model.config.notes) == (256, ())
    whole_NV = feed(model, text, [180])
    torch.testing.assert_close(whole_NV, Oracle(folder).run(text)[0], atol=1e-4, rtol=1e-5)
    assert torch.equal(feed(model, text, [70, 1, 59, 50]), whole_NV)


def test_queries_over_latents_grow_as_well(tmp_path: Path) -> None:
    text, eyes = WRAPPERS["mistral4"]
    rope = {**text["rope_parameters"], "original_max_position_embeddings": 16}
    oracle = random_wrapper("mistral3", {**text, "rope_parameters": rope}, eyes, seed=3)
    oracle.save_pretrained(tmp_path)
    capacity = replace(CAPACITY, window=200)
    model = load_model(tmp_path, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    with torch.no_grad():
        logits_NV = oracle(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(feed(model, TEXT, [60]), logits_NV, atol=1e-4, rtol=1e-5)


# Cases of which GGUF files say all that counts.
IN_GGUF = (
    "qwen2_moe", "qwen3_moe", "gemma", "gemma2_plain", "gemma3_plain", "smollm3", "gpt_oss",
    "mixtral", "granite", "granitemoe", "granitemoeshared", "olmo2", "olmo3", "olmoe",
    "exaone4_whole", "cohere", "cohere2", "seed_oss", "stablelm", "arcee", "nemotron",
    "starcoder2", "glm4", "ernie4_5", "ernie4_5_moe", "dots1", "glm4_moe", "minimax_m2",
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "hunyuan_alpha", "hunyuan_moe",
    "apertus", "exaone_moe", "hy_v3", "granite_swa_plain", "granitemoe_swa", "glm", "phi",
    "gpt_neox", "falcon", "falcon_new", "falcon_one_norm", "olmo", "jais2", "afmoe", "gemma4",
    "gemma4_shared", "gemma4_moe",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_is_the_checkpoint_that_it_was_made_from(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of(name)
    path = write_gguf(folder, tmp_path / "a.gguf")
    expected_NV = feed(load(folder), TEXT, [60])
    torch.testing.assert_close(feed(load(path), TEXT, [60]), expected_NV, atol=1e-5, rtol=0)


def test_a_gguf_file_of_muse_glimmer_is_its_text_part(tmp_path: Path) -> None:
    """Its files have norms of queries and keys, pairs of neighbours that rotate, and no epsilon of
    the norms behind attention and FFN."""
    folder, _ = write_wrapper(tmp_path / "folder", "muse_glimmer")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["post_norm_eps"] = 1e-8
    (folder / "config.json").write_text(json.dumps(config))
    path = write_gguf(folder, tmp_path / "a.gguf")
    expected_NV = feed(load(folder), TEXT, [60])
    torch.testing.assert_close(feed(load(path), TEXT, [60]), expected_NV, atol=1e-5, rtol=0)


def test_masks_in_files_of_gpt_neox_are_no_weights(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("gpt_neox")
    tensors: dict[str, torch.Tensor] = cast("Any", safetensors_torch).load_file(
        folder / "model.safetensors"
    )
    prefix = "gpt_neox.layers.0.attention."
    masks = {"bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e9)}
    tensors |= {f"{prefix}{name}": mask for name, mask in masks.items()}
    save_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert torch.equal(feed(load(tmp_path), TEXT, [60]), feed(load(folder), TEXT, [60]))


def test_older_gguf_files_have_one_matrix_for_keys_and_values(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("deepseek_v2")
    path = write_gguf(folder, tmp_path / "a.gguf", apart=False)
    expected_NV = feed(load(folder), TEXT, [60])
    torch.testing.assert_close(feed(load(path), TEXT, [60]), expected_NV, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["phi3_longrope", "phi3_partial"])
def test_long_factors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """transformers takes them for a text that is longer than the original window."""
    folder = write_checkpoint(tmp_path, variant(name), seed=3)
    text = [(7 * i * i + 3 * i) % 96 for i in range(150)]
    capacity = replace(CAPACITY, window=200, max_logits=256)
    model = load_model(folder, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    assert model.spec.max_tokens == 256
    logits_NV, _ = Oracle(folder).run(text)
    torch.testing.assert_close(feed(model, text, [100, 50]), logits_NV, atol=1e-4, rtol=1e-5)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Its experts in MXFP4 are the model of their numbers, which transformers computes alike."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 12}
    changes = {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    plain = write_hf(tmp_path / "plain", "gpt_oss", changes, seed=3)
    read = cast("Any", safetensors_torch).load_file
    tensors: dict[str, torch.Tensor] = read(plain / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        codes = mxfp4(packed.pop(name).transpose(1, 2).contiguous().numpy())
        packed |= {f"{name}{part}": tensor for part, tensor in codes.parts.items()}
        tensors[name] = torch.from_numpy(codes.numbers.copy())  # pyright: ignore[reportUnknownMemberType]
    save_tensors(plain / "model.safetensors", tensors)
    published = tmp_path / "published"
    published.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (published / "config.json").write_text(json.dumps(config))
    save_tensors(published / "model.safetensors", packed)
    found_NV = feed(load(published), TEXT, [60])
    assert torch.equal(found_NV, feed(load(plain), TEXT, [60]))
    torch.testing.assert_close(found_NV, Oracle(plain).run(TEXT)[0], atol=1e-4, rtol=1e-5)
