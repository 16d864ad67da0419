"""`train mtp` for a hybrid: what the block begins with, learns and drafts; refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doubles.repeating import Repeating
from doubles.tiny_hybrids import hybrid_config, write_hybrid
from outrider.core.errors import CheckpointError, ConfigError
from outrider.models.configs import HybridConfig
from outrider.models.rope_config import Rope
from outrider.plugins.heads.mtp import read_mtp_config
from outrider_lab.train.folder import fill
from outrider_lab.train.hybrid_module import Hybrid, HybridDecoder, fresh_hybrid
from outrider_lab.train.llama_module import as_dtype
from outrider_lab.train.loop import Export, Trainer, TrainJob, TrainPlan
from outrider_lab.train.mtp import GatedMtpRecipe, block_beside
from outrider_lab.train.shapes import config_json, small_hybrid
from outrider_lab.train.target import Exam, FrozenTarget, HeldOut, read_decoder_config

pytestmark = pytest.mark.wide

CPU = torch.device("cpu")
CONFIG = small_hybrid(vocab_size=50, hidden_size=64, num_layers=3, max_tokens=64, stop_ids=(0,))
TEXT = Repeating(vocab_size=50)


def written(folder: Path, net: torch.nn.Module, config: HybridConfig = CONFIG) -> Path:
    state = as_dtype(net.state_dict(), torch.float32)
    fill(folder, Export(state, config_json(config, torch.float32)), "", {})
    return folder


def whole() -> Hybrid:
    """With weights that all matter."""
    generator = torch.Generator().manual_seed(5)
    net = fresh_hybrid(CONFIG, 64, generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return net.eval()


def recipe(folder: Path) -> GatedMtpRecipe:
    target = FrozenTarget(folder, device=CPU, max_tokens=64)
    config = target.config
    assert isinstance(config, HybridConfig)
    exam = Exam((HeldOut(tuple(range(1, 20)), 4),), CPU)
    return GatedMtpRecipe(
        target=target,
        exam=exam,
        window=24,
        dtype=torch.float32,
        block=block_beside(config, 1),
        num_turns=2,
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return written(folder, whole())


def test_a_frozen_hybrid_says_what_its_module_says(target: Path) -> None:
    own = FrozenTarget(target, device=CPU, max_tokens=64)
    net = whole()
    ids_BT = TEXT.windows
    with torch.no_grad():
        last_BTD, hidden_BTKD = net.model(ids_BT, (0, 2))
        reading = own.read(ids_BT, (0, 2))
        torch.testing.assert_close(reading.last_BTD, last_BTD)
        torch.testing.assert_close(reading.hidden_BTKD, hidden_BTKD)
        torch.testing.assert_close(own.logits(last_BTD), net.logits(last_BTD))
        # The last norm scales by what `norm` says.
        plain_BTD = torch.nn.functional.rms_norm(last_BTD, (64,), own.norm, CONFIG.rms_norm_eps)
        torch.testing.assert_close(own.normed(last_BTD), plain_BTD)


def test_a_block_begins_as_the_one_in_the_targets_files(target: Path, tmp_path: Path) -> None:
    theirs = whole().state_dict()
    own = recipe(target).build(torch.Generator().manual_seed(1)).state_dict()
    assert own
    assert all(torch.equal(value, theirs[name]) for name, value in own.items())
    bare = tmp_path / "bare"
    bare.mkdir()
    written(bare, HybridDecoder(CONFIG, 64))
    noise = recipe(bare).build(torch.Generator().manual_seed(1)).state_dict()
    assert noise.keys() == own.keys()
    assert not torch.equal(noise["mtp.fc.weight"], own["mtp.fc.weight"])


@pytest.mark.slow
def test_a_short_run_learns_and_its_folder_is_read(target: Path, tmp_path: Path) -> None:
    own = recipe(target)
    plan = TrainPlan(steps=25, learning_rate=5e-3, warmup_steps=5)
    job = TrainJob(recipe=own, batches=TEXT, plan=plan, file=tmp_path / "state", device=CPU)
    trainer = Trainer(job)
    losses = [progress.loss for progress in trainer.run()]
    assert losses[-1] < 0.6 * losses[0]
    made = tmp_path / "made"
    made.mkdir()
    fill(made, trainer.export(), "", {})
    read = read_mtp_config(made, own.spec)
    assert (read.depth, read.reads_normed, read.gives_normed) == (1, True, True)
    block = read.block
    assert isinstance(block, HybridConfig)
    assert (block.num_heads, block.head_dim, block.rope) == (1, 64, CONFIG.rope)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one layer"):
        block_beside(CONFIG, 2)
    with pytest.raises(ConfigError, match="stretched by 'yarn'"):
        block_beside(replace(CONFIG, rope=Rope(kind="yarn")), 1)
    write_hybrid(tmp_path, hybrid_config("qwen3_5_moe"))
    with pytest.raises(CheckpointError, match="a hybrid with experts"):
        read_decoder_config(tmp_path)
