"""The module that trains is the decoder that runs: same logits and states from one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from doubles.tiny_checkpoints import VARIANTS, Variant, variant, write_checkpoint
from outrider.core.errors import CheckpointError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.loading import load_model
from outrider_lab.train.folder import fill
from outrider_lab.train.llama_module import as_dtype, fresh_llama, read_llama
from outrider_lab.train.loop import Export
from outrider_lab.train.shapes import config_json, small_llama

NATIVE = [item for item in VARIANTS if item.name != "gpt2" and not item.name.startswith("phi3")]
IDS = [5, 17, 2, 90, 33, 33, 8, 61, 40]


def decoder_logits(folder: Path, layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    model = load_model(
        folder, LoadOptions(capacity=ModelCapacity(num_slots=64), dtype="float32", device="cpu")
    )
    model.state.open(1, [])
    model.state.reserve({1: len(IDS)})
    out = model.step([StepRow.chain(1, IDS)], DraftNeeds(hidden_layers=layers))
    hidden = out.hidden_NKD if out.hidden_NKD is not None else torch.empty(0)
    return out.logits_MV.clone(), hidden.clone()


@pytest.mark.parametrize("item", NATIVE, ids=lambda item: item.name)
def test_logits_and_states_are_those_of_the_decoder(item: Variant, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, item)
    net = read_llama(folder, len(IDS))
    with torch.no_grad():
        x_BTD, kept_BTKD = net.model(torch.tensor([IDS]), (0, 1, 2))
        logits_TV = net.logits(x_BTD)[0]
    theirs_TV, hidden_TKD = decoder_logits(folder, (0, 1, 2))
    torch.testing.assert_close(logits_TV, theirs_TV, atol=1e-4, rtol=0)
    torch.testing.assert_close(kept_BTKD[0], hidden_TKD, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_exported_is_what_was_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    config = small_llama(vocab_size=96, hidden_size=128, num_layers=2, max_tokens=64, stop_ids=(3,))
    net = fresh_llama(config, len(IDS), torch.Generator().manual_seed(4))
    state = as_dtype(net.state_dict(), dtype)
    fill(tmp_path, Export(state, config_json(config, dtype)), "# card\n", {})
    read = read_native_config(tmp_path)
    assert isinstance(read, LlamaConfig)
    assert (read.num_layers, read.stop_ids, read.max_tokens) == (2, (3,), 64)
    net.load_state_dict(state)
    with torch.no_grad():
        logits_TV = net(torch.tensor([IDS]))[0]
    theirs_TV, _ = decoder_logits(tmp_path)
    torch.testing.assert_close(logits_TV, theirs_TV, atol=1e-4, rtol=0)


def test_first_weights_are_a_function_of_the_seed() -> None:
    config = small_llama(vocab_size=50, hidden_size=64, num_layers=1, max_tokens=64, stop_ids=())
    first, again, other = (
        fresh_llama(config, 8, torch.Generator().manual_seed(seed)).state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_family_without_a_module_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("gpt2"))
    with pytest.raises(CheckpointError, match="gpt2") as caught:
        read_llama(folder, 8)
    assert "llama" in (caught.value.hint or "")


def test_a_head_that_is_stored_wins_over_tying(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("tied"))
    net = read_llama(folder, len(IDS))
    head = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    save_file({**net.state_dict(), "lm_head.weight": head}, folder / "model.safetensors")
    assert torch.equal(read_llama(folder, len(IDS)).head, head)
