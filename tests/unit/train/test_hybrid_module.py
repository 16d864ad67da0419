"""The hybrid that trains is the one that runs: its logits, its block's drafts, its files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from doubles.kinds import stored
from doubles.rig import SAMPLER
from outrider.core.draft import Budget
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng
from outrider.models.configs import HybridConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.heads import HeadsToLoad
from outrider.models.loading import load_model
from outrider.plugins.heads.mtp import mtp_drafter
from outrider.plugins.hybrids.model import HybridModel
from outrider_lab.train.folder import fill
from outrider_lab.train.hybrid import begin_as
from outrider_lab.train.hybrid_module import Hybrid, fresh_hybrid
from outrider_lab.train.llama_module import as_dtype, read_llama
from outrider_lab.train.loop import Export
from outrider_lab.train.shapes import config_json, small_hybrid

LAYERS = 3
CAPACITY = ModelCapacity(
    num_slots=128, page_size=4, max_rows=64, max_logits=64, hidden_layers=(LAYERS,)
)
TEXT = (5, 17, 3, 3, 80, 41, 5, 17)


def small(hidden_size: int = 128, num_layers: int = LAYERS) -> HybridConfig:
    return small_hybrid(
        vocab_size=96,
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_tokens=64,
        stop_ids=(3,),
    )


def random_hybrid(config: HybridConfig) -> Hybrid:
    """With larger weights than training begins with, so that each of them matters."""
    generator = torch.Generator().manual_seed(5)
    net = fresh_hybrid(config, 64, generator)
    with torch.no_grad():
        for parameter in net.parameters():
            alpha = 0.2 if parameter.ndim == 1 else 0.08
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=alpha)
    return net.eval()


def write(net: Hybrid, folder: Path, dtype: torch.dtype = torch.float32) -> HybridModel:
    state = as_dtype(net.state_dict(), dtype)
    fill(folder, Export(state, config_json(net.config, dtype)), "# card\n", {})
    net.load_state_dict(state)
    model = load_model(folder, LoadOptions(capacity=CAPACITY, dtype="float32", device="cpu"))
    assert isinstance(model, HybridModel)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_decoder(dtype: torch.dtype, tmp_path: Path) -> None:
    net = random_hybrid(small())
    ids_T = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(1))
    model = write(net, tmp_path, dtype)
    model.state.open(0, ())
    theirs_TV = model.step([StepRow.chain(0, [int(one) for one in ids_T])], DraftNeeds()).logits_MV
    with torch.no_grad():
        logits_TV = net.logits(net.model(ids_T[None])[0])[0]
    torch.testing.assert_close(logits_TV, theirs_TV, atol=1e-4, rtol=0)


def test_turns_choose_what_the_drafter_drafts(tmp_path: Path) -> None:
    net = random_hybrid(small())
    target = write(net, tmp_path)
    target.state.open(0, ())
    target.step([StepRow.chain(0, TEXT[:-1])], DraftNeeds(hidden_layers=(LAYERS,)))
    target.state.commit({0: range(len(TEXT) - 1)})
    drafter = mtp_drafter(
        HeadsToLoad(tmp_path, "mtp", CAPACITY),
        target,
        SAMPLER,
        chunk=64,
        batch_size=4,
    )
    drafter.open(0, TEXT)
    hidden = HiddenStates(len(TEXT) - 1, partial(target.state.hidden, 0))
    asked = DraftRow(0, TEXT, None, Budget(5), SamplingParams(), KeyedRng(0, 0, 0), hidden=hidden)
    drafts = drafter.propose([asked])[0].tokens
    assert len(set(drafts)) > 1
    ids_1T = torch.tensor([[*TEXT, *drafts]])
    with torch.no_grad():
        found = net.drafts(ids_1T, net.model.norm(net.model(ids_1T)[0]), 5)
        pending = len(TEXT) - 1
        chosen = [int((net.head @ own[0, pending + n]).argmax()) for n, own in enumerate(found)]
    assert tuple(chosen) == drafts


def test_config_says_what_was_trained(tmp_path: Path) -> None:
    for number, config in enumerate((small(), small(64, 1), small(256, 7))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_json(config, torch.float32)))
        read = read_native_config(folder)
        assert isinstance(read, HybridConfig)
        for name in ("attention_layers", "delta", "ffn_size", "num_kv_heads", "stop_ids", "rope"):
            assert getattr(read, name) == getattr(config, name)
        assert read.tie_word_embeddings
    assert small(256, 7).attention_layers == (2, 6)
    assert small(64, 1).attention_layers == (0,)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="no multiple of 64") as caught:
        small(200)
    assert "--hidden 192" in (caught.value.hint or "")


def test_first_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (
        fresh_hybrid(small(64, 2), 8, torch.Generator().manual_seed(seed)).state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in ("model.embed_tokens.weight", "model.layers.0.linear_attn.A_log"):
        assert not torch.equal(first[name], other[name])


def test_a_head_forgets_neither_at_once_nor_never_at_first() -> None:
    net = fresh_hybrid(small(), 8, torch.Generator().manual_seed(0))
    state = net.state_dict()
    for layer in (0, 1):
        name = f"model.layers.{layer}.linear_attn."
        step_H = torch.nn.functional.softplus(state[f"{name}dt_bias"])
        decay_H = torch.exp(-state[f"{name}A_log"].exp() * step_H)
        assert ((decay_H > 0.2) & (decay_H < 0.9995)).all()


def test_a_teacher_of_other_sizes_gives_its_embedding_alone() -> None:
    """Two Llama layers of 64; a hybrid of 128 takes the principal components."""
    teacher = read_llama(stored("llama2", 0), 8)
    config = small_hybrid(
        vocab_size=teacher.config.vocab_size,
        hidden_size=128,
        num_layers=2,
        max_tokens=64,
        stop_ids=(),
    )
    net = fresh_hybrid(config, 8, torch.Generator().manual_seed(0))
    before = net.model.embed_tokens.weight.clone()
    begin_as(net, teacher)
    size = teacher.config.hidden_size
    after = net.model.embed_tokens.weight
    assert not torch.equal(after[:, :size], before[:, :size])
    assert torch.equal(after[:, size:], before[:, size:])
    assert after.requires_grad
