"""The block net from files: what it computes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from doubles.head_files import block_guess, block_tensors, write_block
from doubles.kinds import close_to
from doubles.tiny_checkpoints import random_llama, random_tensors, variant
from outrider.core.errors import CheckpointError
from outrider.models.heads import hidden_layers_of, kind_of
from outrider.models.llama import LlamaModel
from outrider_lab.models.block_net import BlockConfig, BlockContext, load_block, read_block_config

CONFIG = BlockConfig(
    num_places=4, num_context=3, num_layers=2, num_heads=4, ffn_size=48, hidden_layers=(1, 2)
)


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return random_llama()


def contexts_of(target: LlamaModel, *sizes: int) -> list[BlockContext]:
    rng = torch.Generator().manual_seed(6)
    return [
        BlockContext(
            torch.randn(size, 2, target.spec.hidden_size, generator=rng),
            tuple(range(5, 5 + size)),
        )
        for size in sizes
    ]


def test_guesses_are_those_of_the_definition(target: LlamaModel, tmp_path: Path) -> None:
    """Also of texts that are shorter than the context, beside others."""
    tensors = block_tensors(CONFIG, target.spec)
    net = load_block(write_block(tmp_path, CONFIG, target.spec, tensors), CONFIG, target)
    contexts = contexts_of(target, 3, 1, 2)
    guess = net.guess(contexts, 4)
    head_VD = random_tensors(variant("llama2").config, seed=0)["lm_head.weight"]
    for index, context in enumerate(contexts):
        next_CD = target.tables.embeddings[list(context.next_ids)]
        read_CD = torch.cat([context.hidden_CLD.flatten(1), next_CD], dim=1)
        x_KD, sure_K = block_guess(tensors, CONFIG, read_CD)
        close_to(guess.logits_BKV[index], x_KD @ head_VD.T)
        close_to(guess.confidence_BK[index], sure_K)


def test_asking_for_fewer_places_changes_none_of_them(target: LlamaModel, tmp_path: Path) -> None:
    tensors = block_tensors(CONFIG, target.spec)
    net = load_block(write_block(tmp_path, CONFIG, target.spec, tensors), CONFIG, target)
    contexts = contexts_of(target, 3)
    whole, part = net.guess(contexts, 4), net.guess(contexts, 2)
    close_to(part.logits_BKV, whole.logits_BKV[:, :2])
    assert part.confidence_BK.shape == (1, 2)


def test_what_a_folder_says_is_what_was_written(target: LlamaModel, tmp_path: Path) -> None:
    folder = write_block(tmp_path, CONFIG, target.spec, block_tensors(CONFIG, target.spec))
    assert read_block_config(folder, target.spec) == CONFIG
    assert kind_of(folder) == "block"
    assert hidden_layers_of(folder, "block", 2) == (1, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 32}, "hidden_size 32, the target 64"),
        ({"vocab_size": 95}, "vocab_size 95, the target 96"),
        ({"num_places": None}, "num_places is missing"),
        ({"num_heads": 5}, "num_heads=5"),
    ],
)
def test_what_does_not_fit_is_named(
    target: LlamaModel, tmp_path: Path, change: dict[str, object], told: str
) -> None:
    write_block(tmp_path, CONFIG, target.spec, {})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(CheckpointError, match=told):
        read_block_config(tmp_path, target.spec)


def test_layers_that_the_target_lacks_are_named(target: LlamaModel, tmp_path: Path) -> None:
    write_block(tmp_path, CONFIG, target.spec, {})
    with pytest.raises(CheckpointError, match=r"\[1, 2\].*0 to 1"):
        hidden_layers_of(tmp_path, "block", 1)


def test_weights_that_are_no_numbers_are_found(target: LlamaModel, tmp_path: Path) -> None:
    for name in ("queries.weight", "confidence.bias", "layers.1.mlp.down_proj.weight"):
        tensors = block_tensors(CONFIG, target.spec)
        tensors[name].view(-1)[0] = torch.nan
        folder = write_block(tmp_path, CONFIG, target.spec, tensors)
        with pytest.raises(CheckpointError, match="not numbers"):
            load_block(folder, CONFIG, target)
