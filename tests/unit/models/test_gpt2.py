"""GPT-2's own ways: names of tensors, stored masks, learned positions.

Shapes:  N = tokens, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.tiny_checkpoints import random_tensors, save_tensors, variant, write_checkpoint
from outrider.core.errors import CheckpointError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from parity.feeding import feed

TEXT = [(5 * i * i + 7 * i + 1) % 96 for i in range(256)]
TENSORS = random_tensors(variant("gpt2").config, seed=0)


def load(
    folder: Path, tensors: dict[str, Tensor], *, capacity: ModelCapacity | None = None
) -> Decoder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(variant("gpt2").config))
    save_tensors(folder / "model.safetensors", tensors)
    capacity = capacity or ModelCapacity(num_slots=512, max_rows=256, max_logits=256)
    return load_model(folder, LoadOptions(capacity=capacity, device="cpu"))


def bare(name: str) -> str:
    return name.removeprefix("transformer.")


@pytest.fixture
def expected(tmp_path: Path) -> Tensor:
    return feed(load(tmp_path / "plain", TENSORS), TEXT[:20], [20])


def test_names_may_lack_their_prefix(tmp_path: Path, expected: Tensor) -> None:
    model = load(tmp_path / "bare", {bare(name): value for name, value in TENSORS.items()})
    assert torch.equal(feed(model, TEXT[:20], [20]), expected)


@pytest.mark.parametrize("rename", [str, bare])
def test_stored_masks_are_no_weights(
    rename: Callable[[str], str], tmp_path: Path, expected: Tensor
) -> None:
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).tril().bool(),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    tensors = {rename(name): value for name, value in {**TENSORS, **masks}.items()}
    assert torch.equal(feed(load(tmp_path / "masks", tensors), TEXT[:20], [20]), expected)


def test_a_head_that_is_stored_wins_over_tying(tmp_path: Path, expected: Tensor) -> None:
    head = TENSORS["transformer.wte.weight"]
    same = load(tmp_path / "same", {**TENSORS, "lm_head.weight": head.clone()})
    assert torch.equal(feed(same, TEXT[:20], [20]), expected)
    other = load(tmp_path / "other", {**TENSORS, "lm_head.weight": 2 * head})
    assert torch.equal(feed(other, TEXT[:20], [20]), 2 * expected)


def test_other_tensors_are_not_dropped_silently(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"h\.2\.ln_1\.weight is not part"):
        load(tmp_path / "more", {**TENSORS, "transformer.h.2.ln_1.weight": torch.ones(64)})
    fewer = {name: value for name, value in TENSORS.items() if "wpe" not in name}
    with pytest.raises(CheckpointError, match=r"wpe\.weight, of shape \[256, 64\], is missing"):
        load(tmp_path / "fewer", fewer)


def test_weights_are_stored_inputs_by_outputs(tmp_path: Path) -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    turned = {**TENSORS, name: TENSORS[name].T.contiguous()}
    with pytest.raises(CheckpointError, match=r"has shape \[96, 64\].*implies \[64, 96\]"):
        load(tmp_path / "turned", turned)


def test_the_whole_window_can_be_read_and_a_tree_may_grow_at_its_end(tmp_path: Path) -> None:
    model = load(tmp_path / "plain", TENSORS)
    whole_NV = feed(model, TEXT, [256])
    model.state.open(1, ())
    model.step([StepRow.chain(1, TEXT[:254], logits_from=254)], DraftNeeds())
    model.state.commit({1: range(254)})
    tree = StepRow(1, (TEXT[254], 3, 5, 7, TEXT[255]), (-1, -1, -1, -1, 0))
    logits_MV = model.step([tree], DraftNeeds()).logits_MV
    torch.testing.assert_close(logits_MV[[0, 4]], whole_NV[254:], atol=1e-5, rtol=1e-5)


def test_a_node_past_the_window_does_no_harm(tmp_path: Path) -> None:
    """Nothing that is kept reads it, so what it holds does not matter; it must be readable."""
    model = load(tmp_path / "plain", TENSORS)
    whole_NV = feed(model, TEXT, [256]).clone()
    model.state.open(1, ())
    model.step([StepRow.chain(1, TEXT[:250], logits_from=250)], DraftNeeds())
    model.state.commit({1: range(250)})
    logits_MV = model.step([StepRow.chain(1, [*TEXT[250:], 1, 2, 3])], DraftNeeds()).logits_MV
    torch.testing.assert_close(logits_MV[:6], whole_NV[250:], atol=1e-5, rtol=1e-5)


def test_the_published_window_of_1024_tokens_fits(tmp_path: Path) -> None:
    item = variant("gpt2")
    item = type(item)("long", {"n_positions": 1024}, base=item.base)
    capacity = ModelCapacity(num_slots=1024, max_rows=256, max_logits=1)
    model = load_model(
        write_checkpoint(tmp_path, item), LoadOptions(capacity=capacity, device="cpu")
    )
    assert model.spec.max_tokens == 1024
    model.state.open(1, ())
    for start in range(0, 1024, 256):
        row = StepRow.chain(1, TEXT, logits_from=255)
        logits_MV = model.step([row], DraftNeeds()).logits_MV
        model.state.commit({1: range(256)})
        assert model.state.length(1) == start + 256
        assert logits_MV.isfinite().all()
