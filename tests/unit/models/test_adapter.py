"""The adapter's memory is the arena and nothing else, and what it cannot run it refuses by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from doubles.hf_checkpoints import VOCAB, random_hf, tiny_adapter, with_room, write_hf
from doubles.tiny_attention import poison_dead_space
from doubles.tiny_checkpoints import save_tensors
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.plugins import install_command
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.tree import ROOT
from outrider.models.checkpoint import open_checkpoint
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.plugins.transformers.attention import ArenaCache
from outrider.plugins.transformers.config import read_adapter_config
from outrider.plugins.transformers.model import AdapterModel, load_adapter
from outrider.plugins.transformers.row_modules import (
    RowByRow,
    RowExperts,
    RowLinear,
    has_common_form,
    row_norm,
)
from state.test_zero_copy import Watch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAIN = DraftNeeds()
TEXT = [(5 * i * i + 7 * i + 1) % VOCAB for i in range(40)]
OPTIONS = LoadOptions(capacity=ModelCapacity(num_slots=256, page_size=8), device="cpu")


@cache
def loaded(family: str = "gpt_neox", dtype: str = "float32") -> AdapterModel:
    return tiny_adapter(family, dtype=dtype)


def fresh(family: str = "gpt_neox", *, num_slots: int = 1024) -> AdapterModel:
    return with_room(loaded(family), ModelCapacity(num_slots=num_slots, page_size=8))


def rounds(model: AdapterModel, count: int, each: Callable[[], None] = lambda: None) -> None:
    """Draft a tree of four nodes and keep one node, two, or none, `count` times."""
    model.state.open(0, ())
    model.step([StepRow.chain(0, TEXT[:5])], PLAIN)
    model.state.commit({0: range(5)})
    for i in range(count):
        model.step([StepRow(0, tuple(TEXT[i % 30 :][:4]), (ROOT, 0, 0, ROOT))], PLAIN)
        model.state.commit({0: ((0,), (0, 2), ())[i % 3]})
        each()


@pytest.mark.parametrize(("family", "num_rounds"), [("gpt_neox", 20), ("gpt_bigcode", 6)])
def test_the_model_is_given_views_of_one_arena_that_never_moves(
    family: str, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh(family)
    arena = model.state.arena
    start, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    given: list[Tensor] = []
    update = ArenaCache.update

    def spy(cache: ArenaCache, *args: Any) -> tuple[Tensor, Tensor]:
        views = update(cache, *args)
        given.extend(views)
        return views

    monkeypatch.setattr(ArenaCache, "update", spy)
    rounds(model, num_rounds)
    assert len(given) == (num_rounds + 1) * 2 * model.spec.num_layers
    for view in given:
        assert view.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr() == start
        assert start <= view.data_ptr() < view.data_ptr() + view.nbytes <= end
    assert model.state.arena.data_ptr() == start


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_the_only_operation_on_the_arena_is_the_append(family: str) -> None:
    """Chains alone: committing another path of a tree moves its rows, which the trace counts."""
    model = fresh(family)
    if model.kernels.choices[0].name != "native":
        pytest.skip("no C++ compiler: the reference attention gathers pages into a copy")
    model.state.open(0, ())
    new_bytes: list[int] = []
    with Watch(model.state.arena) as watch:
        for i in range(24):
            model.step([StepRow.chain(0, TEXT[i % 30 :][:4])], PLAIN)
            model.state.commit({0: range(i % 3 + 1)})
            new_bytes.append(watch.new_bytes)
            watch.new_bytes = 0
    assert set(watch.on_arena) == {"aten.index_copy_.default"}
    assert len(watch.on_arena) == 24 * 2 * model.spec.num_layers
    # Page tables gain a column a page; nothing else may grow with the text.
    assert max(new_bytes[3:]) - min(new_bytes[3:]) <= 256
    assert model.state.length(0) == 48


def test_rollback_is_no_operation_at_all() -> None:
    model = fresh()
    model.state.open(0, ())
    model.step([StepRow.chain(0, TEXT[:9])], PLAIN)
    before = model.state.arena.clone()
    with Watch(model.state.arena) as watch:
        model.state.commit({0: ()})
    assert (watch.on_arena, watch.new_bytes) == ([], 0)
    assert torch.equal(model.state.arena, before)


def test_poisoned_dead_space_changes_nothing() -> None:
    clean, poisoned = fresh(), fresh()
    rounds(clean, 9)
    rounds(poisoned, 9, lambda: poison_dead_space(poisoned.state))
    row = [StepRow.chain(0, TEXT[:6])]
    expected_MV = clean.step(row, PLAIN).logits_MV
    assert torch.equal(poisoned.step(row, PLAIN).logits_MV, expected_MV)
    assert expected_MV.isfinite().all()


def test_hidden_layers_come_in_the_order_named() -> None:
    model = fresh()
    model.state.open(0, ())
    out = model.step([StepRow.chain(0, TEXT[:5], logits_from=4)], DraftNeeds(hidden_layers=(1, 0)))
    assert out.hidden_NKD is not None
    assert out.hidden_NKD.shape == (5, 2, 40)
    weight_VD = model.body.model.get_input_embeddings().weight
    assert torch.equal(out.hidden_NKD[:, 1], weight_VD[TEXT[:5]])
    with pytest.raises(ConfigError, match="before layer 1 at the latest, and 2 was requested"):
        model.step([StepRow.chain(0, (1,), parent=4)], DraftNeeds(hidden_layers=(2,)))


def test_inexact_functions_run_row_by_row_and_others_at_once() -> None:
    x_13F = torch.linspace(-2, 2, 3 * 37).view(1, 3, 37)
    calls: list[torch.Size] = []

    def tanh(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return torch.tanh(x)

    mode = RowByRow()
    assert torch.equal(mode.__torch_function__(tanh, (), (x_13F,)), torch.tanh(x_13F))
    assert calls == [torch.Size([37])] * 3
    with mode:
        rows = [torch.nn.functional.gelu(row_F) for row_F in x_13F[0]]
        assert torch.equal(torch.nn.functional.gelu(x_13F)[0], torch.stack(rows))
        assert torch.exp(torch.empty(1, 0, 5)).shape == (1, 0, 5)


def test_a_replaced_linear_hides_its_values() -> None:
    head = loaded().body.model.get_output_embeddings()
    assert isinstance(head, RowLinear)
    assert head.weight.shape == (VOCAB, 40)
    assert head.weight.is_meta
    assert head(torch.zeros(2, 0, 40)).shape == (2, 0, VOCAB)


def test_experts_are_ours_and_their_tensors_are_let_go(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    model = load_adapter(write_hf(tmp_path, "olmoe", sizes), OPTIONS)
    assert model.kernels.exact
    assert len(model.config.notes) == 1
    experts = [one for one in model.body.model.modules() if isinstance(one, RowExperts)]
    assert len(experts) == 2
    assert [name for one in experts for name, _ in one.named_parameters()] == []
    spec = model.config.spec("", bytes_per_weight=4, bytes_per_kv=4)
    assert (spec.num_experts, spec.num_active_experts) == (4, 2)
    # Three matrices of each expert, in both layers.
    assert spec.expert_parameters == 2 * 4 * 3 * 48 * 48


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_norm_is_ours_if_it_computes_the_same(family: str) -> None:
    name = f"{family.capitalize()}RMSNorm"
    library = import_module(f"transformers.models.{family}.modeling_{family}")
    theirs: Any = getattr(library, name)(37, eps=1e-5)
    rng = torch.Generator().manual_seed(5)
    theirs.weight.data = 0.3 * torch.randn(37, generator=rng)
    ours = row_norm(theirs, loaded().kernels)
    assert ours is not None
    x = torch.randn(2, 3, 37, generator=rng)
    torch.testing.assert_close(ours(x), theirs(x).detach(), atol=1e-6, rtol=1e-5)
    assert torch.equal(ours(x)[1, 2], ours(x[1:, 2:])[0, 0])

    def unchanged(_: object, rows: torch.Tensor) -> torch.Tensor:
        return rows

    kind: type = type(name, (type(theirs),), {"forward": unchanged})
    other = kind(37, eps=1e-5)
    assert row_norm(other, loaded().kernels) is None


def test_a_matrix_that_is_read_in_another_way_is_not_called_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that multiplies by its weight itself, not through the library's linear."""
    from transformers.models.olmoe import modeling_olmoe  # pyright: ignore

    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    folder, library = write_hf(tmp_path, "olmoe", sizes), cast("Any", modeling_olmoe)

    class Functional:
        @staticmethod
        def linear(x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight.t()

        def __getattr__(self, name: str) -> object:
            return getattr(torch.nn.functional, name)

    monkeypatch.setattr(library, "F", Functional())
    model = load_adapter(folder, OPTIONS)
    assert not model.kernels.exact
    assert "mlp.gate.weight is not read by our kernels" in model.config.notes[-1]


def test_experts_run_row_by_row_by_the_librarys_rules() -> None:
    """Biases, stored inputs by outputs, and a gate of the family's own, against its own loop."""
    from transformers import GptOssConfig  # pyright: ignore
    from transformers.models.gpt_oss import modeling_gpt_oss  # pyright: ignore

    library, configs = cast("Any", modeling_gpt_oss), cast("Any", GptOssConfig)
    config = configs(hidden_size=40, intermediate_size=20, num_local_experts=6)
    config._experts_implementation = "eager"
    inner = library.GptOssExperts(config)
    rng = torch.Generator().manual_seed(3)
    for weight in inner.parameters():
        weight.data = 0.3 * torch.randn(weight.shape, generator=rng)
    x_ND = torch.randn(9, 40, generator=rng)
    chosen_NQ = torch.stack([torch.randperm(6, generator=rng)[:2] for _ in range(9)])
    parts_NQ = torch.rand(9, 2, generator=rng)
    with torch.no_grad():
        expected_ND = inner(x_ND, chosen_NQ, parts_NQ)
        assert has_common_form(inner)
        experts = RowExperts(inner, loaded().kernels)
        with RowByRow(loaded().kernels):
            found_ND = experts(x_ND, chosen_NQ, parts_NQ)
            rows = [
                experts(x_ND[i : i + 1], chosen_NQ[i : i + 1], parts_NQ[i : i + 1])
                for i in range(9)
            ]
    torch.testing.assert_close(found_ND, expected_ND, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat(rows), found_ND)


def test_the_config_is_read_without_weights(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, "starcoder2", {"sliding_window": 32})
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 99]}))
    config = read_adapter_config(open_checkpoint(folder))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        2, 4, 2, 10,
    )  # fmt: skip
    assert (config.vocab_size, config.hidden_size, config.ffn_size) == (VOCAB, 40, 52)
    assert (config.stop_ids, config.dtype) == ((2, 5), "float32")
    assert config.max_tokens == 32
    assert "the window is 32 tokens, not 256" in config.notes[1]
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_adapter(folder, OPTIONS)


@pytest.mark.parametrize("family", ["gpt2", "gemma", "opt"])
def test_parameters_are_counted_once(family: str) -> None:
    """The output head of these families is the embedding."""
    assert loaded(family).spec.num_parameters == random_hf(family).num_parameters()


def test_rotary_factors_of_long_texts_bound_the_window(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 5,
        "long_factor": [2.0] * 5,
        "original_max_position_embeddings": 64,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    config = read_adapter_config(open_checkpoint(write_hf(tmp_path, "phi3", changes)))
    assert config.max_tokens == 64
    assert "rotary" in config.notes[1]


MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4,
}  # fmt: skip
UNLIKE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "does not go through transformers' attention interface"),
    "bloom": ({}, "takes no positions"),
    "mamba": ({}, "takes no positions"),
    "falcon_h1": ({}, "keeps more than keys and values .its cache needs get_conv_state"),
    "gemma2": ({"head_dim": 12}, "its attention asks for softcap"),
    "gpt_oss": ({"head_dim": 12, "num_local_experts": 2, "hidden_size": 48}, "asks for s_aux"),
    "bert": ({}, "its mask is not causal"),
    "deepseek_v3": (MLA, "its queries, keys and values differ in size"),
    "gemma4_text": (
        {**UNLIKE, "head_dim": 12, "global_head_dim": 24, "hidden_size_per_layer_input": 0},
        "of its layers differ in shape",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_run_is_refused_before_its_weights(family: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[family]
    write_config(tmp_path, family, changes)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_adapter_config(open_checkpoint(tmp_path))
    assert caught.value.hint


def write_config(folder: Path, family: str, changes: dict[str, Any]) -> None:
    random_hf(family, changes).config.save_pretrained(folder)


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "an encoder": ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder"),
    "code": ({"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}, "runs no such code"),
    "unknown": ({"model_type": "clip"}, "not a text decoder that transformers"),
    "quantised": ({"quantization_config": {"bits": 4}}, "weights are quantised"),
    "ill-typed": ({"hidden_size": "wide"}, "transformers cannot read it"),
    "nonsense": ({"num_attention_heads": 7}, "not divisible by the number of attention heads"),
    "no window": ({"max_position_embeddings": 0}, "how many positions"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    changes, reason = FILES[name]
    write_config(tmp_path, "gpt_neox", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_adapter_config(open_checkpoint(tmp_path))
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_config_cannot_name_code_to_run(tmp_path: Path) -> None:
    """transformers would fetch an implementation with a slash in its name from the hub."""
    folder = write_hf(tmp_path, "gpt_neox")
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    path = folder / "config.json"
    names = {
        "auto_map": {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.Y"},
        "attn_implementation": "evil/kernel",
        "_attn_implementation": "evil/kernel",
        "_experts_implementation": "evil/kernel",
        "transformers_weights": "other.safetensors",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "_implementation": "e/k"},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    model = load_adapter(folder, OPTIONS)
    assert model.body.model.config._attn_implementation == "outrider"


def test_without_transformers_the_way_to_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match="'gpt_neox' has no decoder") as caught:
        load_adapter(tmp_path, OPTIONS)
    assert caught.value.hint == install_command("hf")


def test_files_that_are_not_this_model_s_weights_are_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, "gpt_neox")
    weights = folder / "model.safetensors"
    tensors = dict(random_hf("gpt_neox").state_dict())
    save_tensors(weights, {**tensors, "extra": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="unexpected weights: extra"):
        load_adapter(folder, OPTIONS)
    del tensors["lm_head.weight"]
    save_tensors(weights, tensors)
    with pytest.raises(CheckpointError, match=r"missing weights: lm_head\.weight"):
        load_adapter(folder, OPTIONS)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a format that can run code"):
        load_adapter(folder, OPTIONS)


def test_an_mtp_block_behind_any_number_of_layers_is_left_out(tmp_path: Path) -> None:
    """transformers ignores those of GLM-4.5's own sizes, behind layer 46 or 92."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    more = {"first_k_dense_replace": 1, "head_dim": 12, "num_nextn_predict_layers": 1}
    folder = write_hf(tmp_path, "glm4_moe", {**sizes, **more})
    tensors = dict(random_hf("glm4_moe", {**sizes, **more}).state_dict())
    block = {"eh_proj.weight": torch.zeros(40, 80), "mlp.gate.weight": torch.zeros(4, 40)}
    behind = {f"model.layers.2.{name}": tensor for name, tensor in block.items()}
    save_tensors(folder / "model.safetensors", {**tensors, **behind})
    assert load_adapter(folder, OPTIONS).spec.num_layers == 2
    foreign = {"model.layers.3.mlp.gate.weight": torch.zeros(4, 40)}
    save_tensors(folder / "model.safetensors", {**tensors, **behind, **foreign})
    with pytest.raises(CheckpointError, match=r"unexpected weights: model\.layers\.3\."):
        load_adapter(folder, OPTIONS)


def test_a_dtype_that_no_kernel_takes_is_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, "gpt_neox")
    with pytest.raises(ConfigError, match="unknown value 'int3'"):
        load_adapter(folder, LoadOptions(capacity=OPTIONS.capacity, device="cpu", dtype="int3"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float64"}))
    with pytest.raises(CheckpointError, match="weights of type float64"):
        load_adapter(folder, OPTIONS)


def test_a_model_that_counts_positions_itself_fails_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would look: positions are accepted, and not used."""
    folder = write_hf(tmp_path, "gpt_neox")
    inner: Any = loaded().body.model.gpt_neox.__class__
    forward = inner.forward

    def deaf(self: Any, input_ids: Tensor, position_ids: object = None, **options: Any) -> Any:
        del position_ids
        return forward(self, input_ids, **options)

    monkeypatch.setattr(inner, "forward", deaf)
    with pytest.raises(CheckpointError, match="other logits than by itself") as caught:
        load_adapter(folder, OPTIONS)
    assert caught.value.hint


def test_keys_that_are_no_views_of_the_arena_are_refused() -> None:
    """A model that repeats, rotates or copies keys after its cache cannot read in place."""
    model = fresh(num_slots=64)
    cache = ArenaCache(model.state, model.kernels, num_heads=4, max_rows=8)
    model.state.open(0, ())
    cache.begin(model.state.plan([StepRow.chain(0, (1, 2))]))
    new_1GND = torch.randn(1, 4, 2, 10)
    k_1GSD, v_1GSD = cache.update(new_1GND, new_1GND, 1)
    assert cache.attend(new_1GND, k_1GSD, v_1GSD, {}).shape == (1, 2, 4, 10)
    others = [(k_1GSD.clone(), v_1GSD), (k_1GSD, v_1GSD + 1), (k_1GSD[:, :2], v_1GSD[:, :2])]
    for other_k, other_v in others:
        with pytest.raises(CheckpointError, match="changes keys or values"):
            cache.attend(new_1GND, other_k, other_v, {})
