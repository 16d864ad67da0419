"""Latent attention beyond logits and greedy text, which test_native_families.py has: the cache, its
dropped and 8-bit rows, MTP blocks, and GGUF files with blocks.

Shapes:  P = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from doubles.gguf_families import write_gguf
from doubles.hf_checkpoints import hushed, write_hf
from doubles.tiny_checkpoints import save_tensors
from doubles.tiny_families import FAMILIES, add_words, write_family
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import parse_config
from outrider.models.json_object import JsonObject
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.mtp import load_mtp, read_mtp_config
from parity.feeding import feed

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXT = [(7 * i * i + 3 * i) % 96 for i in range(60)]
PROMPTS = [TEXT[:9], TEXT[:30], TEXT[:4]]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
CAPACITY = ModelCapacity(num_slots=512, page_size=16)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("latent")

    @cache
    def written(name: str) -> Path:
        return add_words(write_family(root / name, name))

    return written


def load(path: Path, capacity: ModelCapacity = CAPACITY, **options: Any) -> LlamaModel:
    usual: dict[str, Any] = {"dtype": "float32", "device": "cpu", **options}
    model = load_model(path, LoadOptions(capacity=capacity, **usual))
    assert isinstance(model, LlamaModel)
    return model


def texts(path: Path, **settings: Any) -> list[Sequence[int]]:
    usual: dict[str, Any] = {"batch_size": 3, "page_size": 8, "prefill_chunk": 16}
    with closing(LLM(path, config=EngineConfig(**{**usual, **settings}))) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


# Layers, heads, still, turning and value sizes; bytes of a token in bfloat16 in the arena, and as
# keys and values of all heads.
PUBLISHED = {
    "deepseek_v2": ((27, 16, 128, 64, 128), 31_104, 276_480),
    "glm4_moe_lite": ((47, 20, 192, 64, 256), 54_144, 962_560),
    "deepseek_v3": ((61, 128, 128, 64, 128), 70_272, 4_997_120),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_bytes_of_a_token(family: str) -> None:
    (layers, heads, still, turning, values), stored, plain = PUBLISHED[family]
    settings = {
        "model_type": family,
        "vocab_size": 1000,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "max_position_embeddings": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_experts_per_tok": 4,
        "q_lora_rank": None,
    }
    config = parse_config(JsonObject("here", settings))
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    assert spec.kv_bytes_per_token == stored == layers * (512 + turning) * 2
    assert layers * heads * (still + turning + values) * 2 == plain


def test_the_arena_has_one_row_for_a_key_and_its_value(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("deepseek_v3"))
    assert model.state.arena.shape == (2, 1, 1, 512, 26)
    assert model.state.arena.nbytes == 512 * model.spec.kv_bytes_per_token
    assert all(keys is values for keys, values in model.state.layers)


def test_accepted_paths_of_a_tree_move_rows(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("glm4_moe_lite"))
    expected_NV = feed(model, TEXT[:24], [24])
    model.state.open(1, ())
    model.step([StepRow.chain(1, TEXT[:20])], DraftNeeds())
    model.state.commit({1: range(20)})
    tree = StepRow(1, (90, TEXT[20], 3, TEXT[21]), (-1, -1, 0, 1), logits_from=0)
    model.step([tree], DraftNeeds())
    model.state.commit({1: (1, 3)})
    found_MV = model.step([StepRow.chain(1, TEXT[22:24])], DraftNeeds()).logits_MV
    assert torch.equal(found_MV, expected_NV[22:])
    model.state.close(1)
    # A text with the same beginning finds its pages.
    assert model.state.open(2, TEXT[:24]) == 16
    found_MV = model.step([StepRow.chain(2, TEXT[16:24])], DraftNeeds()).logits_MV
    assert torch.equal(found_MV, expected_NV[16:])


# A row of the cache has whole groups of 32 numbers.
WIDE = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}


def test_rows_of_8_bits_are_near_and_exact(tmp_path: Path) -> None:
    family, changes = FAMILIES["deepseek_v3"]
    folder = add_words(write_hf(tmp_path, family, {**changes, **WIDE}, seed=3))
    plain, eight = load(folder), load(folder, kv_dtype="int8")
    assert eight.spec.kv_bytes_per_token == 2 * 34
    near_NV, whole_NV = feed(plain, TEXT, [60]), feed(eight, TEXT, [60])
    # Another expert may be chosen where two are nearly equal.
    assert 0 < float((near_NV - whole_NV).abs().mean()) < 0.02
    assert torch.equal(feed(eight, TEXT, [1] * 60), whole_NV)
    ways = ({"drafter": "none"}, {"drafter": "ngram", "k": 4, "min_ngram": 1})
    first, second = (texts(folder, kv_dtype="int8", **way) for way in ways)
    assert first == second


# Every matrix has whole blocks of 32 inputs.
BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 8,
}


@pytest.mark.parametrize("apart", [True, False])
def test_matrices_in_blocks(apart: bool, tmp_path: Path) -> None:
    family, changes = FAMILIES["deepseek_v3"]
    folder = write_hf(tmp_path / "plain", family, {**changes, **BLOCKS}, seed=3)
    path = write_gguf(folder, tmp_path / "a.gguf", apart=apart, in_blocks=True)
    model = load(path, dtype="auto")
    layer = model.layers[0]
    assert layer.latent is not None
    assert layer.latent.queries is not None
    in_blocks = layer.latent.queries.call
    assert [one.call == in_blocks for one in layer.latent.keys] == [apart] * 4
    whole_NV, plain_NV = feed(model, TEXT, [60]), feed(load(path), TEXT, [60])
    assert torch.equal(feed(model, TEXT, [1] * 60), whole_NV)
    assert torch.equal(feed(model, TEXT, [7, 1, 20, 32]), whole_NV)
    assert 0 < float((whole_NV - plain_NV).abs().mean()) < 0.1


def test_dropped_rows_leave_speculation_exact(folder_of: Callable[[str], Path]) -> None:
    some: dict[str, Any] = {"kv_budget": 16, "kv_window": 6, "prefill_chunk": 64}
    plain = texts(folder_of("deepseek_v2"), drafter="none", **some)
    assert plain == texts(folder_of("deepseek_v2"), drafter="ngram", k=4, min_ngram=1, **some)
    assert plain != texts(folder_of("deepseek_v2"), drafter="none")


def with_mtp(plain: Path, folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
    """`plain` with an MTP block behind its two layers: the last one's tensors, and its own."""
    config = json.loads((plain / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    read = cast("Any", safetensors_torch).load_file
    tensors: dict[str, Tensor] = read(plain / "model.safetensors")
    size, rng = config["hidden_size"], torch.Generator().manual_seed(5)
    own = {
        "eh_proj": 0.15 * torch.randn(size, 2 * size, generator=rng),
        **{
            name: 1 + 0.1 * torch.randn(size, generator=rng)
            for name in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    last, behind = "model.layers.1.", "model.layers.2."
    again = {
        name.replace(last, behind): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    named = {f"{behind}{name}.weight": tensor for name, tensor in own.items()}
    folder.mkdir()
    save_tensors(folder / "model.safetensors", {**tensors, **again, **named})
    (folder / "config.json").write_text(json.dumps(config))
    return add_words(folder), own


def defined(plain: Path, own: Mapping[str, Tensor], states_PD: Tensor) -> Tensor:
    """Logits of the block for TEXT's first tokens, by the layer of transformers."""
    with hushed():
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    body, num = model.model.eval(), len(states_PD)

    def normed(x_PD: Tensor, name: str) -> Tensor:
        eps = model.config.rms_norm_eps
        return x_PD * (x_PD.square().mean(-1, keepdim=True) + eps).rsqrt() * own[name]

    with torch.no_grad():
        embedded_PD = body.embed_tokens(torch.tensor(TEXT[:num]))
        read_PD = normed(body.norm(states_PD), "hnorm")
        x_1PD = (torch.cat([normed(embedded_PD, "enorm"), read_PD], -1) @ own["eh_proj"].T)[None]
        at = torch.arange(num)[None]
        ahead = torch.full((num, num), -torch.inf).triu(1)[None, None]
        turns = body.rotary_emb(x_1PD, at)
        out = body.layers[1](
            x_1PD, attention_mask=ahead, position_ids=at, position_embeddings=turns
        )
        found_1PD: Tensor = cast("Any", out)[0] if isinstance(out, tuple) else out
        return model.lm_head(normed(found_1PD, "shared_head.norm"))[0]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "glm4_moe"])
def test_an_mtp_block_behind_the_layers(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, own = with_mtp(folder_of(name), tmp_path / "mtp")
    target = load(folder, replace(CAPACITY, hidden_layers=(2,)))
    assert torch.equal(feed(target, TEXT, [60]), feed(load(folder_of(name)), TEXT, [60]))
    states_PD = torch.randn(12, 40, generator=torch.Generator().manual_seed(8))
    (net,) = load_mtp(folder, read_mtp_config(folder, target.spec), target, CAPACITY)
    net.state.open(1, ())
    found = net.step([StepRow.chain(1, TEXT[:12])], net.fuse(states_PD[:, None])).logits_MV
    expected_PV = defined(folder_of(name), own, states_PD)
    torch.testing.assert_close(found, expected_PV, atol=1e-4, rtol=1e-4)
    plain = texts(folder, drafter="none", batch_size=1)
    assert texts(folder, drafter="mtp", k=3) == plain
    assert texts(folder, drafter="mtp", k=2, tree_nodes=6, batch_size=1) == plain


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_gguf_file_with_an_mtp_block(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = folder_of(name)
    folder, _ = with_mtp(plain, tmp_path / "mtp")
    path = write_gguf(folder, tmp_path / "a.gguf")
    model = load(path)
    assert model.config.num_layers == 2
    torch.testing.assert_close(
        feed(model, TEXT, [60]), feed(load(plain), TEXT, [60]), atol=1e-5, rtol=0
    )
    alone = texts(path, drafter="none", tokenizer=str(plain))
    assert alone == texts(path, drafter="mtp", k=3, tokenizer=str(plain))
