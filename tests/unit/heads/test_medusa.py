"""Medusa heads from files: what they compute, the names they come under, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from doubles.head_files import medusa_logits, medusa_tensors, write_medusa
from doubles.kinds import close_to
from doubles.tiny_checkpoints import random_llama, random_model, random_tensors, variant
from outrider.core.errors import CheckpointError, ConfigError
from outrider.models.heads import hidden_layers_of, kind_of
from outrider.models.llama import LlamaModel
from outrider.plugins.heads.medusa import MedusaConfig, load_medusa, read_medusa_config
from outrider.plugins.heads.target import normed_target
from outrider_lab.drafters.medusa_lite import lite_heads

CONFIG = MedusaConfig(num_heads=3, num_layers=2, chances=((0.5, 0.25), (0.4,)))


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return random_llama()


def head_of(target: LlamaModel) -> torch.Tensor:
    del target
    return random_tensors(variant("llama2").config, seed=0)["lm_head.weight"]


@pytest.mark.parametrize("own", [(), (0, 1, 2), (1,)], ids=["shared", "own", "mixed"])
def test_logits_are_those_of_the_definition(
    target: LlamaModel, tmp_path: Path, own: tuple[int, ...]
) -> None:
    tensors = medusa_tensors(CONFIG, target.spec, own=own)
    net = load_medusa(write_medusa(tmp_path, CONFIG, target.spec, tensors), CONFIG, target)
    rng = torch.Generator().manual_seed(1)
    hidden_BD = torch.randn(4, target.spec.hidden_size, generator=rng)
    normed_BD = torch.nn.functional.rms_norm(
        hidden_BD, hidden_BD.shape[1:], target.tables.norm_D, target.config.rms_norm_eps
    )
    wanted = medusa_logits(tensors, CONFIG, normed_BD, head_of(target))
    close_to(net.logits(hidden_BD, 3), wanted)
    close_to(net.logits(hidden_BD[:1], 2), wanted[:2, :1])
    assert (net.num_heads, net.hidden_layers) == (3, (target.spec.num_layers,))


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "model.safetensors"])
def test_both_published_names_are_read(
    target: LlamaModel, tmp_path: Path, prefix: str, file: str
) -> None:
    tensors = medusa_tensors(CONFIG, target.spec, own=(0, 1, 2))
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    folder = write_medusa(tmp_path, CONFIG, target.spec, named, file=file)
    assert load_medusa(folder, CONFIG, target).num_heads == 3
    assert kind_of(folder) == "medusa"
    assert hidden_layers_of(folder, "medusa", 2) == (2,)


def test_heads_that_the_config_does_not_count_are_read_too(
    target: LlamaModel, tmp_path: Path
) -> None:
    """As first published: two by config.json, five in the file."""
    five = MedusaConfig(num_heads=5)
    tensors = medusa_tensors(five, target.spec, own=range(5))
    two = MedusaConfig(num_heads=2)
    net = load_medusa(write_medusa(tmp_path, two, target.spec, tensors), two, target)
    assert net.num_heads == 5


def test_what_a_folder_says_is_what_was_written(target: LlamaModel, tmp_path: Path) -> None:
    write_medusa(tmp_path, CONFIG, target.spec, {})
    found = read_medusa_config(tmp_path, target.spec)
    assert (found.num_heads, found.num_layers) == (3, 2)
    assert [tuple(shares) for shares in found.chances] == [(0.5, 0.25), (0.4,)]
    published = {"medusa_num_heads": 5, "base_model_name_or_path": "somebody/model"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert read_medusa_config(tmp_path, target.spec) == MedusaConfig(5, 1, ())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 32}, "hidden_size 32, the target 64"),
        ({"vocab_size": 95}, "vocab_size 95, the target 96"),
        ({"medusa_num_heads": None}, "medusa_num_heads is missing"),
        ({"medusa_num_heads": 0}, "from 1"),
        ({"tree_chances": {"0": [0.2, 0.3]}}, "do not rise"),
        ({"tree_chances": {"0": [0.9, 0.9]}}, "1 at most"),
    ],
)
def test_what_does_not_fit_is_named(
    target: LlamaModel, tmp_path: Path, change: dict[str, object], told: str
) -> None:
    write_medusa(tmp_path, CONFIG, target.spec, {})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(CheckpointError, match=told):
        read_medusa_config(tmp_path, target.spec)


def test_tensors_that_are_wrong_are_named(target: LlamaModel, tmp_path: Path) -> None:
    good = medusa_tensors(CONFIG, target.spec)
    broken = good["1.1.linear.weight"].clone()
    broken[3, 5] = torch.nan
    for tensors, told in (
        ({n: t for n, t in good.items() if n != "2.0.linear.weight"}, r"2\.0\.linear\.weight"),
        ({**good, "0.0.linear.weight": torch.zeros(3, 3)}, r"shape \[3, 3\]"),
        ({**good, "3.0.linear.weight": torch.zeros(64, 64)}, r"3\.1\.linear\.weight"),
        ({**good, "0.2.linear.weight": torch.zeros(64, 64)}, "is not part"),
        ({**good, "1.1.linear.weight": broken}, "head 1 has weights that are not numbers"),
    ):
        folder = write_medusa(tmp_path, CONFIG, target.spec, tensors)
        with pytest.raises(CheckpointError, match=told):
            load_medusa(folder, CONFIG, target)


def test_pickles_are_refused(target: LlamaModel, tmp_path: Path) -> None:
    write_medusa(tmp_path, CONFIG, target.spec, {})
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="can run code") as caught:
        kind_of(tmp_path)
    assert "convert" in (caught.value.hint or "")


def test_a_target_that_shares_no_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not share"):
        normed_target(random_model(variant("gpt2")))


def test_lite_heads_are_the_target_s_own_or_random(target: LlamaModel) -> None:
    hidden_BD = torch.randn(2, target.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    tied = lite_heads(target, num_heads=2).logits(hidden_BD, 2)
    normed_BD = torch.nn.functional.rms_norm(
        hidden_BD, hidden_BD.shape[1:], target.tables.norm_D, target.config.rms_norm_eps
    )
    close_to(tied[0], normed_BD @ head_of(target).T)
    assert torch.equal(tied[0], tied[1])
    assert torch.equal(lite_heads(target, init="copy").logits(hidden_BD, 2), tied)
    random = lite_heads(target, num_heads=2, init="random").logits(hidden_BD, 2)
    assert not torch.equal(random[0], random[1])
    assert torch.equal(random, lite_heads(target, init="random").logits(hidden_BD, 2))
