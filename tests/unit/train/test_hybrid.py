"""The recipe of hybrids: what its loss reaches, what a teacher gives, and a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from doubles.repeating import Repeating
from outrider_lab.train.folder import fill
from outrider_lab.train.hybrid import NUM_KEPT, HybridRecipe, Teacher, begin_as
from outrider_lab.train.hybrid_module import TrainedHybridLayer
from outrider_lab.train.llama_module import Llama, TrainedLlamaLayer, as_dtype, fresh_llama
from outrider_lab.train.loop import Export, Trainer, TrainJob, TrainPlan
from outrider_lab.train.losses import DistributionCache, distillation, next_token, top_distributions
from outrider_lab.train.shapes import config_json, small_hybrid, small_llama
from outrider_lab.train.target import FrozenTarget

pytestmark = pytest.mark.wide

CPU = torch.device("cpu")
VOCAB, WINDOW = 50, 24
CONFIG = small_hybrid(vocab_size=VOCAB, hidden_size=64, num_layers=3, max_tokens=64, stop_ids=(0,))
TEXT = Repeating(vocab_size=VOCAB)
IDS_BT = TEXT.windows


def recipe(teacher: Teacher | None = None) -> HybridRecipe:
    return HybridRecipe(
        config=CONFIG,
        held_out_BT=IDS_BT[:2],
        window=WINDOW,
        teacher=teacher,
        dtype=torch.float32,
    )


def teacher_net(num_layers: int = 5) -> Llama:
    config = small_llama(
        vocab_size=VOCAB, hidden_size=64, num_layers=num_layers, max_tokens=64, stop_ids=(0,)
    )
    net = fresh_llama(config, WINDOW, torch.Generator().manual_seed(8))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return net


def taught_in(folder: Path) -> Teacher:
    net, kind = teacher_net(), torch.float32
    folder.mkdir()
    fill(folder, Export(as_dtype(net.state_dict(), kind), config_json(net.config, kind)), "", {})
    target = FrozenTarget(folder, device=CPU, max_tokens=WINDOW)
    cache = DistributionCache(
        folder, "distributions", num_windows=4, window=WINDOW, num_kept=NUM_KEPT
    )
    return Teacher(target, cache)


def test_the_loss_is_the_models_and_a_share_of_the_blocks() -> None:
    """As the sum over turns, each at every third place, said without slices."""
    own = recipe()
    net = own.build(torch.Generator().manual_seed(1))
    batch = TEXT.batch(2, CPU)
    loss = own.loss(net, batch)
    with torch.no_grad():
        last_BTD, _ = net.model(IDS_BT)
        logits_BTV = net.logits(last_BTD)
        states_BTD = net.model.norm(last_BTD)
        wanted = next_token(logits_BTV, IDS_BT)
        for turn, draft_BTD in enumerate(net.drafts(IDS_BT, states_BTD, 3)):
            places = slice(turn + 2, WINDOW - 1, 3)
            distributions = top_distributions(logits_BTV[:, places].flatten(0, 1), NUM_KEPT)
            draft_PD = draft_BTD[:, places].flatten(0, 1)
            part = distillation(functional.linear(draft_PD, net.head), distributions)
            wanted = wanted + 0.3 * 0.8**turn / (1 + 0.8 + 0.64) * part
    torch.testing.assert_close(loss.detach(), wanted, atol=1e-4, rtol=0)


def test_every_weight_learns() -> None:
    own = recipe()
    net = own.build(torch.Generator().manual_seed(1))
    torch.autograd.backward(own.loss(net, TEXT.batch(0, CPU)))
    still = [name for name, one in net.named_parameters() if one.grad is None or not one.grad.any()]
    assert still == []


def test_a_teacher_of_the_same_sizes_gives_its_layers() -> None:
    teacher = teacher_net()
    net = recipe().build(torch.Generator().manual_seed(1))
    begin_as(net, teacher)
    own, theirs = net.state_dict(), teacher.state_dict()
    assert torch.equal(own["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    torch.testing.assert_close(own["model.norm.weight"] + 1, theirs["model.norm.weight"])
    # Of five layers the first, the middle one and the last; the block begins as the last.
    pairs = [("model.layers.0", 0), ("model.layers.1", 2), ("model.layers.2", 4)]
    for name, number in [*pairs, ("mtp.layers.0", 4)]:
        weight = own[f"{name}.mlp.down_proj.weight"]
        assert torch.equal(weight, theirs[f"model.layers.{number}.mlp.down_proj.weight"])
    heads, taught = "model.layers.2.self_attn", "model.layers.4.self_attn"
    queries = own[f"{heads}.q_proj.weight"].unflatten(0, (-1, 2, 64))[:, 0].flatten(0, 1)
    assert torch.equal(queries, theirs[f"{taught}.q_proj.weight"])
    assert torch.equal(own[f"{heads}.o_proj.weight"], 2 * theirs[f"{taught}.o_proj.weight"])


def test_heads_of_a_teacher_attend_alike() -> None:
    """What an attending layer finds at first is close to what its teacher's layer finds."""
    teacher = teacher_net(3)
    with torch.no_grad():
        # Such that all queries and keys are about as long as on the whole.
        cast("TrainedLlamaLayer", teacher.model.layers[2]).self_attn.q_proj.weight.mul_(2)
    net = recipe().build(torch.Generator().manual_seed(1))
    begin_as(net, teacher)
    x_BTD = torch.randn(2, WINDOW, 64, generator=torch.Generator().manual_seed(2))
    layer = cast("TrainedHybridLayer", net.model.layers[2])
    taught = cast("TrainedLlamaLayer", teacher.model.layers[2])
    with torch.no_grad():
        found: Tensor = layer.self_attn(layer.input_layernorm(x_BTD), net.model.turns, [])
        wanted: Tensor = taught.self_attn(taught.input_layernorm(x_BTD), teacher.model.turns)
    alike = torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0)
    assert alike > 0.9


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("taught", [False, True])
def test_a_short_run_learns_text_and_drafts(tmp_path: Path, taught: bool) -> None:
    teacher = taught_in(tmp_path / "teacher") if taught else None
    own = recipe(teacher)
    plan = TrainPlan(steps=15, learning_rate=1e-2, warmup_steps=3)
    job = TrainJob(recipe=own, batches=TEXT, plan=plan, file=tmp_path / "state", device=CPU)
    trainer = Trainer(job)
    losses = [progress.loss for progress in trainer.run()]
    before, after = trainer.standing.history[0].figures, trainer.standing.history[-1].figures
    assert losses[-1] < 0.8 * losses[0]
    assert after["first_drafts_right"] > before["first_drafts_right"]
    if teacher is None:
        assert after["held_out_loss"] < 0.8 * before["held_out_loss"]
        return
    # The teacher's table is not learned.
    embedding: Tensor = trainer.module.model.embed_tokens.weight
    assert torch.equal(embedding, teacher.target.embedding)
    assert own.facts["teacher"] == str(tmp_path / "teacher")
