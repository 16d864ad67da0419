"""Heads beside a target: which are found, what speaks against them, what their weights hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.eagle_heads import EagleFolder, save_tensors
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core.errors import CheckpointError
from outrider.models.heads import (
    find_heads,
    has_own_mtp,
    own_mtp_depth,
)
from outrider_lab.cli.draft_fit import size_remarks, weight_remarks

# Of tests/doubles/tiny_checkpoints.py; three layers deep enough for the layers that EAGLE 3 fuses.
HIDDEN, VOCAB = 64, 96


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", variant("llama2"))


def eagle(folder: Path, **changes: Any) -> Path:
    heads = EagleFolder(HIDDEN, VOCAB, fused=False, changes={"max_position_embeddings": 256})
    heads.write(folder)
    edit(folder, **changes)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def texts(target: Path, heads: Path, *, wrong: bool) -> list[str]:
    return [r.text for r in size_remarks(target, heads) if r.wrong == wrong]


def test_heads_in_the_folder_come_before_heads_beside_it(target: Path, tmp_path: Path) -> None:
    beside = eagle(tmp_path / "a-heads")
    assert find_heads(target) == {"eagle": beside}
    within = eagle(target / "heads")
    assert find_heads(target) == {"eagle": within}


def test_heads_of_another_target_and_models_are_not_taken(target: Path, tmp_path: Path) -> None:
    eagle(tmp_path / "other", hidden_size=128)
    write_checkpoint(tmp_path / "draft", variant("llama2"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    assert find_heads(target) == {}


def test_sizes_and_layers_that_are_not_the_targets_are_wrong(target: Path, tmp_path: Path) -> None:
    heads = eagle(tmp_path / "heads", hidden_size=128, vocab_size=100, hidden_layers=[7])
    found = texts(target, heads, wrong=True)
    assert found[:2] == [
        "hidden_size is 128 and the target's 64",
        "vocab_size is 100 and the target's 96",
    ]
    assert "hidden layers [7]" in found[2]
    assert texts(target, eagle(tmp_path / "good"), wrong=True) == []


def test_a_short_window_and_other_positions_are_cautions(target: Path, tmp_path: Path) -> None:
    heads = eagle(tmp_path / "heads", max_position_embeddings=100, rope_theta=500.0)
    assert texts(target, heads, wrong=True) == []
    window, rope = texts(target, heads, wrong=False)
    assert "100 tokens and the target's 256" in window
    assert "theta 500 and the target's with theta 10000" in rope


def test_a_model_has_no_heads_to_judge(target: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a model"):
        size_remarks(target, target)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_found_by_name(tmp_path: Path, bad: float) -> None:
    heads = EagleFolder(HIDDEN, VOCAB, fused=False)
    folder = heads.write(tmp_path / "heads")
    assert weight_remarks(folder) == []
    tensors = heads.tensors()
    tensors["fc.weight"][3, 5] = bad
    save_tensors(folder, tensors)
    (remark,) = weight_remarks(folder)
    assert remark.wrong
    assert remark.text.endswith(": fc.weight")


def test_many_bad_tensors_are_counted(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.tensor([float("nan")]) for i in range(5)}
    save_tensors(tmp_path, tensors)
    (remark,) = weight_remarks(tmp_path)
    assert remark.text.endswith("t0, t1, t2 and 2 more")


def test_an_mtp_block_is_announced_and_must_be_there(target: Path) -> None:
    assert own_mtp_depth(target) == 0
    edit(target, num_nextn_predict_layers=1)
    assert own_mtp_depth(target) == 1
    assert not has_own_mtp(target)
    edit(target, num_nextn_predict_layers=None, text_config={"mtp_num_hidden_layers": 2})
    assert own_mtp_depth(target) == 2
    edit(target, text_config=None)
    layer = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    save_tensors(target, {f"model.layers.{layer}.eh_proj.weight": torch.zeros(2, 2)})
    assert has_own_mtp(target)
