"""A block net in training does what the engine's drafter does with what is exported of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from doubles.kinds import close_to, stored
from doubles.rig import SAMPLER, Request, Rig
from outrider.control.heuristics import FixedController
from outrider.core.budget import Budget
from outrider.core.clock import host_ints
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.drafters.block import BlockContext, load_block, read_block_config
from outrider.drafters.parallel_heads import BlockDrafter, ParallelHeadSampler
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model
from outrider.train.block import BlockRecipe, TrainedBlock, block_sizes, check_window
from outrider.train.exam import Exam, HeldOut, rounds
from outrider.train.folder import fill
from outrider.train.loop import Batch
from outrider.train.target import FrozenTarget

CPU = torch.device("cpu")
ROOM = Room(num_slots=512, page_size=4, max_rows=128, max_logits=64, hidden_layers=(1, 2))
PROMPT = (5, 17, 3, 80)


def recipe(texts: tuple[HeldOut, ...] = ()) -> BlockRecipe:
    target = FrozenTarget(stored("llama2", 0), device=CPU, max_tokens=64)
    return BlockRecipe(
        target=target,
        config=block_sizes(target.config, num_places=3, num_context=2, num_layers=1),
        spec=target.config.spec("", bytes_per_weight=4, bytes_per_kv=4),
        exam=Exam(texts, CPU, k=3),
        dtype=torch.float32,
    )


def built(own: BlockRecipe) -> TrainedBlock:
    generator = torch.Generator().manual_seed(4)
    net = own.build(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return net.eval()


def engine_target() -> LlamaModel:
    target = load_model(stored("llama2", 0), LoadOptions(room=ROOM, device="cpu"))
    assert isinstance(target, LlamaModel)
    return target


def test_an_exported_folder_computes_the_same(tmp_path: Path) -> None:
    own = recipe()
    net = built(own)
    fill(tmp_path, own.export(net), "", {})
    target = engine_target()
    block = load_block(tmp_path, read_block_config(tmp_path, target.spec), target)
    target.state.open(0, ())
    target.step([StepRow.chain(0, PROMPT[:-1])], DraftNeeds(hidden_layers=(1, 2)))
    target.state.commit({0: range(3)})
    context = BlockContext(target.state.hidden(0, 1, 3), PROMPT[2:])
    guess = block.guess([context], 3)
    next_CD = own.target.embedding[list(PROMPT[2:])]
    read_CLD = torch.cat([context.hidden_CLD, next_CD[:, None]], dim=1)
    x_1KD, sure_1K = net(read_CLD[None])
    close_to(guess.logits_BKV, (x_1KD @ own.target.head.T).detach())
    close_to(guess.confidence_BK, sure_1K.sigmoid().detach())


def train(own: BlockRecipe, ids_BT: torch.Tensor, steps: int) -> tuple[TrainedBlock, list[float]]:
    net = own.build(torch.Generator().manual_seed(0))
    # Untyped in PyTorch.
    optimiser = cast("Any", torch.optim.AdamW(net.parameters(), lr=3e-3))
    losses: list[float] = []
    for step in range(steps):
        loss = own.loss(net, Batch(ids_BT, (0,), step, 0))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(float(loss.detach()))
    return net.eval(), losses


@pytest.mark.slow
def test_what_was_learned_is_what_the_engine_drafts(tmp_path: Path) -> None:
    """The loss falls, and round by round the figure is the engine's, after the first one, in which
    the target has not read the prompt yet."""
    target = engine_target()
    params = SamplingParams(max_tokens=40)
    plain = Rig(target, page_size=4).run([Request(PROMPT, params)])[0]
    text = HeldOut((*PROMPT, *plain), len(PROMPT))
    own = recipe((text,))
    net, losses = train(own, torch.tensor([text.ids]), 60)
    assert losses[-1] < losses[0] / 2
    fill(tmp_path, own.export(net), "", {})
    block = load_block(tmp_path, read_block_config(tmp_path, target.spec), target)
    drafter = BlockDrafter(block, ParallelHeadSampler(SAMPLER))
    rig = Rig(target, drafter, controller=FixedController(Budget(3)), page_size=4)
    assert rig.run([Request(PROMPT, params)])[0] == plain
    emitted = [trace.num_emitted for trace in rig.traces if trace.num_emitted]
    accepted_T = own.accepted(net, torch.tensor(text.ids), 3)
    told = rounds(host_ints(accepted_T), len(PROMPT) + emitted[0], len(text.ids))
    assert told == emitted[1:]
    assert own.measure(net)["tokens_per_round"] > 1.5


def test_a_window_that_holds_no_round_is_refused() -> None:
    own = recipe()
    with pytest.raises(ConfigError, match="holds no round") as caught:
        check_window(8, own.config)
    assert "--window 9" in (caught.value.hint or "")
    check_window(9, own.config)
