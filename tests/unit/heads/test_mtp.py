"""MTP blocks from files: what they compute, where they are found, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.kinds import close_to
from doubles.tiny_checkpoints import random_llama, random_tensors, variant
from doubles.tiny_mtp import (
    Tensors,
    block_like,
    llama_block,
    mtp_definition,
    mtp_tensors,
    write_mtp,
)
from outrider.core.errors import CheckpointError
from outrider.core.protocols import StepRow
from outrider.models.decoder import ModelCapacity
from outrider.models.heads import hidden_layers_of, kind_of
from outrider.models.llama import LlamaModel
from outrider.plugins.heads.hidden import EntranceNet
from outrider.plugins.heads.mtp import MtpConfig, load_mtp, read_mtp_config

CAPACITY = ModelCapacity(num_slots=128, page_size=4, max_rows=32, max_logits=32, hidden_layers=(2,))
TOKENS = (5, 1, 90, 7, 7, 30)


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return random_llama()


def states(count: int) -> Tensor:
    rng = torch.Generator().manual_seed(8)
    return torch.randn(count, 64, generator=rng)


def table(name: str) -> Tensor:
    return random_tensors(variant("llama2").config, seed=0)[name]


def loaded(folder: Path, target: LlamaModel) -> tuple[EntranceNet, ...]:
    return load_mtp(folder, read_mtp_config(folder, target.spec), target, CAPACITY)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_it_computes_what_the_definition_says(
    target: LlamaModel, tmp_path: Path, family: str
) -> None:
    config = block_like(target.config, family=family)
    tensors = mtp_tensors(config)
    (net,) = loaded(write_mtp(tmp_path, config, tensors), target)
    embedded_PD = table("model.embed_tokens.weight")[list(TOKENS)]
    read_PD, own_PD = mtp_definition(tensors, llama_block(config), embedded_PD, states(6))
    net.state.open(1, ())
    out = net.step([StepRow.chain(1, TOKENS)], net.fuse(states(6)[:, None]))
    close_to(out.hidden_ND, own_PD)
    close_to(out.logits_MV, read_PD @ table("lm_head.weight").T)


def test_passes_of_any_size_give_the_same_bits(target: LlamaModel, tmp_path: Path) -> None:
    config = block_like(target.config)
    (net,) = loaded(write_mtp(tmp_path, config, mtp_tensors(config)), target)
    net.state.open(1, ())
    whole = net.step([StepRow.chain(1, TOKENS)], states(6))
    net.state.commit({1: ()})
    for place, token in enumerate(TOKENS):
        other = net.step([StepRow.chain(1, (token,))], states(6)[place : place + 1])
        net.state.commit({1: (0,)})
        assert torch.equal(other.logits_MV[0], whole.logits_MV[place])
        assert torch.equal(other.hidden_ND[0], whole.hidden_ND[place])


def test_a_published_block_reads_what_the_targets_last_norm_gives(
    target: LlamaModel, tmp_path: Path
) -> None:
    config = block_like(target.config, reads_normed=True)
    (net,) = loaded(write_mtp(tmp_path, config, mtp_tensors(config)), target)
    normed_PD = torch.nn.functional.rms_norm(
        states(3), (64,), table("model.norm.weight"), target.config.rms_norm_eps
    )
    close_to(net.fuse(states(3)[:, None]), normed_PD)


def test_a_folder_of_its_own_is_known_by_its_type(target: LlamaModel, tmp_path: Path) -> None:
    config = block_like(target.config, depth=3)
    write_mtp(tmp_path, config, mtp_tensors(config))
    assert kind_of(tmp_path) == "mtp"
    assert hidden_layers_of(tmp_path, "mtp", target.spec.num_layers) == (2,)
    assert read_mtp_config(tmp_path, target.spec).depth == 3
    assert len(loaded(tmp_path, target)) == 3


def test_copies_of_the_targets_tables_are_left_alone(target: LlamaModel, tmp_path: Path) -> None:
    config = block_like(target.config)
    copies = {
        "model.layers.0.embed_tokens.weight": torch.ones(96, 64),
        "model.layers.0.shared_head.head.weight": torch.ones(96, 64),
    }
    assert loaded(write_mtp(tmp_path, config, {**mtp_tensors(config), **copies}), target)


def refused(folder: Path, target: LlamaModel) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded(folder, target)
    assert caught.value.hint
    return str(caught.value)


def rewritten(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 32}, "hidden_size 32, the target 64"),
        ({"vocab_size": 95}, "vocab_size 95, the target 96"),
        ({"block_type": "gpt2"}, "block_type 'gpt2' is not known"),
        ({"num_hidden_layers": 9}, "9 MTP blocks are more than the 8"),
        ({"num_hidden_layers": 2}, "model.layers.1.enorm.weight, of shape [64], is missing"),
        ({"intermediate_size": 80}, "implies [80, 64]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    target: LlamaModel, tmp_path: Path, changes: Mapping[str, object], told: str
) -> None:
    config = block_like(target.config)
    folder = rewritten(write_mtp(tmp_path, config, mtp_tensors(config)), **changes)
    assert told in refused(folder, target)


@pytest.mark.parametrize("name", ["enorm", "eh_proj", "mlp.down_proj", "shared_head.norm"])
def test_a_weight_that_is_no_number_is_found_when_it_is_loaded(
    target: LlamaModel, tmp_path: Path, name: str
) -> None:
    config = block_like(target.config, depth=2)
    tensors = mtp_tensors(config)
    tensors[f"model.layers.1.{name}.weight"].view(-1)[-1] = torch.nan
    folder = write_mtp(tmp_path, config, tensors)
    assert "MTP block 1 has weights that are not numbers" in refused(folder, target)


def test_a_target_without_a_block_says_so(target: LlamaModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(variant("llama2").config))
    assert "names no MTP block: it has no num_nextn_predict_layers" in refused(tmp_path, target)


def behind_the_layers(folder: Path, depth: int) -> tuple[Path, MtpConfig, Tensors]:
    """A target's checkpoint with blocks behind its last layer, as DeepSeek-V3 publishes them."""
    from doubles.tiny_checkpoints import save_tensors

    plain = variant("llama2")
    values = {**plain.config, "num_nextn_predict_layers": depth}
    (folder / "config.json").write_text(json.dumps(values))
    own = random_llama().config
    block = replace(own, num_layers=depth)
    config = MtpConfig(block=block, first_layer=own.num_layers, reads_normed=True)
    blocks = mtp_tensors(config, first=own.num_layers)
    save_tensors(folder / "model.safetensors", {**random_tensors(plain.config, seed=0), **blocks})
    return folder, config, blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_may_lie_in_the_targets_own_files(tmp_path: Path, depth: int) -> None:
    from outrider.models.decoder import LoadOptions
    from outrider.models.loading import load_model

    folder, config, blocks = behind_the_layers(tmp_path, depth)
    target = load_model(folder, LoadOptions(capacity=CAPACITY, device="cpu"))
    assert isinstance(target, LlamaModel)
    assert target.spec.num_layers == 2
    found = read_mtp_config(folder, target.spec)
    assert found == config
    net = load_mtp(folder, found, target, CAPACITY)[0]
    renamed = {name.replace("layers.2.", "layers.0."): part for name, part in blocks.items()}
    embedded_PD = table("model.embed_tokens.weight")[list(TOKENS)]
    read_PD, _ = mtp_definition(renamed, llama_block(config), embedded_PD, states(6))
    net.state.open(1, ())
    out = net.step([StepRow.chain(1, TOKENS)], states(6))
    close_to(out.logits_MV, read_PD @ table("lm_head.weight").T)
