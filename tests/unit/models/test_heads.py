"""What a folder of heads is taken for, and which layers of the target it reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doubles.eagle_heads import EagleFolder, save_tensors
from doubles.tiny_checkpoints import random_llama, random_model, variant, write_checkpoint
from outrider.core.errors import CheckpointError, ConfigError
from outrider.models.heads import DraftKind, HeadKind, hidden_layers_of, kind_of, verifier_of
from outrider.plugins.heads.target import head_target

EAGLE3 = EagleFolder(64, 96)
EAGLE1 = replace(EAGLE3, fused=False)


def folder_of(path: Path, config: Mapping[str, object], names: Sequence[str] = ("a",)) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_tensors(path, {name: torch.ones(1) for name in names})
    return path


KINDS: Mapping[str, tuple[dict[str, object], tuple[str, ...], DraftKind]] = {
    "EAGLE 3": (EAGLE3.config(), ("fc.weight", "midlayer.x"), "eagle"),
    "EAGLE 3, unnamed": ({"model_type": "llama", "draft_vocab_size": 9}, ("fc.weight",), "eagle"),
    "EAGLE 1": (EAGLE1.config(), ("fc.weight", "layers.0.x"), "eagle"),
    "EAGLE 3 of speculators": (EAGLE3.speculators("org/model"), ("fc.weight",), "eagle"),
    "named EAGLE": ({"architectures": ["EagleForCausalLM"]}, ("a",), "eagle"),
    "Medusa": ({"medusa_num_heads": 3, "medusa_num_layers": 1}, ("0.0.linear.weight",), "medusa"),
    "MTP": ({"model_type": "outrider_mtp"}, ("a",), "mtp"),
    "block": ({"model_type": "outrider_block"}, ("a",), "block"),
    "DFlash": ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, ("a",), "dflash"),
    "DFlash by its key": ({"model_type": "qwen3", "dflash_config": {"a": 1}}, ("a",), "dflash"),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, ("a",), "dflash"),
    "P-EAGLE": ({"architectures": ["PEagleSpeculator"], "draft_vocab_size": 9}, ("a",), "peagle"),
    "P-EAGLE by its mask": (
        {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 3},
        ("fc.weight",),
        "peagle",
    ),
    "PARD": ({"model_type": "llama", "pard_token": 3}, ("model.embed_tokens.weight",), "model"),
    "DSpark of DeepSpec": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 4}},
        ("a",),
        "dspark",
    ),
    "DSpark by its name": (
        {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"a": 1}},
        ("a",),
        "dspark",
    ),
    "DSpark by its keys": ({"model_type": "qwen3", "markov_rank": 4}, ("a",), "dspark"),
    "Hydra": ({"hydra_num_heads": 4, "hydra_num_layers": 1}, ("a",), "hydra"),
    "Gemma 4 assistant": ({"model_type": "gemma4_assistant"}, ("a",), "assistant"),
    "Gemma 4 assistant by class": (
        {"architectures": ["Gemma4AssistantForCausalLM"]},
        ("a",),
        "assistant",
    ),
    "Gemma 4 assistant that sees": (
        {"model_type": "gemma4_unified_assistant"},
        ("a",),
        "assistant",
    ),
    "MLP speculator": ({"model_type": "mlp_speculator"}, ("a",), "mlp-speculator"),
    "MLP speculator by class": (
        {"architectures": ["MLPSpeculatorPreTrainedModel"]},
        ("a",),
        "mlp-speculator",
    ),
    **{
        f"{own} of speculators": (
            {"speculators_model_type": own, "draft_vocab_size": 9},
            ("a",),
            kind,
        )
        for own, kind in {
            **dict.fromkeys(("dflash", "dflash2"), "dflash"),
            **{name: name for name in ("dspark", "xpress", "peagle", "mtp")},
        }.items()
    },
    "a model": ({"model_type": "llama"}, ("model.embed_tokens.weight",), "model"),
    "a model with fc": (
        {"model_type": "llama"},
        ("fc.weight", "model.embed_tokens.weight"),
        "model",
    ),
}


@pytest.mark.parametrize(("config", "names", "kind"), KINDS.values(), ids=KINDS)
def test_what_a_folder_is_taken_for(
    config: dict[str, object], names: tuple[str, ...], kind: DraftKind, tmp_path: Path
) -> None:
    assert kind_of(folder_of(tmp_path, config, names)) == kind


UNREAD: Mapping[str, tuple[dict[str, object], str]] = {
    "another of speculators": ({"speculators_model_type": "mlp"}, "mlp heads"),
    "Muse assistant": ({"model_type": "muse_glimmer_assistant"}, "Muse assistant heads"),
    "another assistant": ({"model_type": "qwen9_assistant"}, "assistant heads"),
    "NextN of GLM": (
        {"architectures": ["Glm4MoeForCausalLMNextN"], "model_type": "glm4_moe"},
        r"NextN \(MTP\) heads",
    ),
    "MTP of GLM": ({"architectures": ["Glm4MoeMTPModel"]}, r"NextN \(MTP\) heads"),
    "MTP of MiMo": ({"architectures": ["MiMoMTPModel"]}, r"NextN \(MTP\) heads"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "said"), UNREAD.values(), ids=UNREAD)
def test_heads_that_are_not_read_are_refused_by_name(
    config: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"{said} are not supported") as caught:
        kind_of(folder_of(tmp_path, config, ("fc.weight",)))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["FooDrafter"], "model_type": "foo"}, "FooDrafter"),
        ({"architectures": ["FooDrafter"], "model_type": "qwen3"}, "FooDrafter"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "FooForCausalLM"),
        ({"model_type": "foo"}, "foo"),
    ],
)
def test_an_unknown_net_is_refused_by_its_architecture(
    config: dict[str, object], name: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, config, ("fc.weight", "model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=f"with the architecture {name} ") as caught:
        kind_of(folder)
    assert "eagle, hydra" in (caught.value.hint or "")
    assert "outrider draft suggest TARGET" in (caught.value.hint or "")
    # A model of a family that only transformers may know comes with a tokenizer.
    (folder / "tokenizer.json").write_text("{}")
    if name != "FooDrafter":
        assert kind_of(folder) == "model"


def test_heads_of_speculators_name_their_target(tmp_path: Path) -> None:
    assert verifier_of(folder_of(tmp_path / "a", EAGLE3.speculators("org/model"))) == "org/model"
    assert verifier_of(folder_of(tmp_path / "b", EAGLE3.config())) is None
    assert verifier_of(tmp_path / "nothing") is None
    nothing: dict[str, object] = {}
    nameless = {**EAGLE3.speculators("org/model"), "speculators_config": {"verifier": nothing}}
    with pytest.raises(CheckpointError, match="do not name their target") as caught:
        verifier_of(folder_of(tmp_path / "c", nameless))
    assert "--target MODEL" in (caught.value.hint or "")


def test_a_model_in_shards_is_a_model(tmp_path: Path) -> None:
    assert kind_of(write_checkpoint(tmp_path, variant("sharded"))) == "model"


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json") as caught:
        kind_of(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("config", [EAGLE3.config(), EAGLE1.config()], ids=["named", "unnamed"])
def test_pickled_heads_are_refused_before_anything_is_missed(
    config: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a format") as caught:
        kind_of(tmp_path)
    hint = caught.value.hint or ""
    command = hint.partition("in that folder: ")[2]
    assert command.startswith('python -c "import torch; from safetensors.torch import save_file; ')
    compile(shlex.split(command)[2], "hint", "exec")


def test_a_pickled_model_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert kind_of(tmp_path) == "model"


LAYERS: Mapping[str, tuple[dict[str, object], HeadKind, tuple[int, ...]]] = {
    "EAGLE 3": (EAGLE3.config(), "eagle", (2, 16, 29)),
    "EAGLE 1": (EAGLE1.config(), "eagle", (32,)),
    "said": ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, "eagle", (2, 5)),
    # As `eagle_config` of published heads for 32 layers has them: the layers that give the states.
    "said as outputs": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}},
        "eagle",
        (2, 16, 29),
    ),
    "said by us": (
        {"hidden_layers": [1, 3, 5], "eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        "eagle",
        (1, 3, 5),
    ),
    "said within": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 30, 32]}},
        "eagle",
        (3, 30, 32),
    ),
    # The speculators library counts states: 0 is the embedding's, 32 the last layer's.
    "said by speculators": (
        replace(EAGLE3, layers=(1, 16, 32)).speculators("org/model"),
        "eagle",
        (1, 16, 32),
    ),
    "the embedding's, by speculators": (
        replace(EAGLE3, layers=(0, 1, 2, 5)).speculators("org/model"),
        "eagle",
        (0, 1, 2, 5),
    ),
    "usual ones of speculators": (EAGLE3.speculators("org/model"), "eagle", (2, 16, 29)),
    "Medusa": ({"medusa_num_heads": 3}, "medusa", (32,)),
    "MTP": ({"model_type": "outrider_mtp"}, "mtp", (32,)),
    "block": ({"model_type": "outrider_block", "hidden_layers": [8, 32]}, "block", (8, 32)),
}


@pytest.mark.parametrize(("config", "kind", "wanted"), LAYERS.values(), ids=LAYERS)
def test_the_layers_that_heads_read(
    config: dict[str, object], kind: HeadKind, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    assert hidden_layers_of(folder_of(tmp_path, config), kind, 32) == wanted


@pytest.mark.parametrize("named", [[2, 9, 33], [-1, 2], [4, 4, 5]])
def test_layers_that_the_target_lacks_are_refused(named: list[int], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"hidden_layers": named})
    with pytest.raises(CheckpointError, match="the target has layers 0 to 32") as caught:
        hidden_layers_of(folder, "eagle", 32)
    assert "--target" in (caught.value.hint or "")


@pytest.mark.parametrize("named", [[1, 33], [], [1, 1, 4], [-1, 4]])
def test_states_that_speculators_would_refuse_are_refused(named: list[int], tmp_path: Path) -> None:
    config = EAGLE3.speculators("org/model") | {"eagle_aux_hidden_state_layer_ids": named}
    with pytest.raises(CheckpointError, match="the target has layers 0 to 32"):
        hidden_layers_of(folder_of(tmp_path, config), "eagle", 32)


def test_a_target_too_small_for_the_usual_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the target has layers 0 to 2"):
        hidden_layers_of(folder_of(tmp_path, EAGLE3.config()), "eagle", 2)


def test_only_some_targets_share_their_tables() -> None:
    llama = random_llama()
    assert head_target(llama) is llama
    with pytest.raises(ConfigError, match="does not share its tables") as caught:
        head_target(random_model(variant("gpt2")))
    assert "--drafter ngram" in (caught.value.hint or "")
