"""MTP blocks in training do what the engine's drafter does with what is exported of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from doubles.kinds import stored
from doubles.repeating import Repeating
from doubles.rig import SAMPLER
from doubles.tiny_mtp import block_like, llama_block
from outrider.core.budget import Budget
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng
from outrider.drafters.mtp import mtp_drafter
from outrider.models.decoder import Room
from outrider.models.heads import HeadsToLoad
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model
from outrider.train.exam import Exam, HeldOut
from outrider.train.folder import fill
from outrider.train.loop import Trainer, TrainJob, TrainPlan
from outrider.train.mtp import Mtp, MtpRecipe
from outrider.train.target import FrozenTarget

ROOM = Room(num_slots=128, page_size=4, max_rows=64, max_logits=64, hidden_layers=(2,))
TEXT = (5, 17, 3, 3, 80, 41, 5, 17)
CPU = torch.device("cpu")


def frozen() -> FrozenTarget:
    return FrozenTarget(stored("llama2", 0), device=CPU, max_tokens=64)


def recipe(depth: int, *, turns: int = 3, texts: tuple[HeldOut, ...] = ()) -> MtpRecipe:
    target = frozen()
    return MtpRecipe(
        target=target,
        block=llama_block(block_like(target.config, depth=depth)),
        exam=Exam(texts, CPU, k=5),
        window=32,
        num_turns=turns,
        dtype=torch.float32,
    )


def random_blocks(own: MtpRecipe) -> Mtp:
    """With larger weights than training begins with, so that each of them matters."""
    generator = torch.Generator().manual_seed(4)
    net = own.build(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return net.eval()


def drafted(folder: Path, text: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the engine's drafter makes of a folder of blocks."""
    target = load_model(stored("llama2", 0), LoadOptions(room=ROOM, device="cpu"))
    assert isinstance(target, LlamaModel)
    target.state.open(0, ())
    row = StepRow.chain(0, text[:-1])
    target.step([row], DraftNeeds(hidden_layers=(2,)))
    target.state.commit({0: range(len(text) - 1)})
    drafter = mtp_drafter(
        HeadsToLoad(folder, "mtp", ROOM),
        target,
        SAMPLER,
        chunk=64,
        batch_size=4,
    )
    drafter.open(0, text)
    hidden = HiddenStates(len(text) - 1, partial(target.state.hidden, 0))
    asked = DraftRow(
        0, text, None, Budget(count), SamplingParams(), KeyedRng(0, 0, 0), hidden=hidden
    )
    return drafter.propose([asked])[0].tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_turns_choose_what_the_drafter_drafts(tmp_path: Path, depth: int) -> None:
    own = recipe(depth)
    net = random_blocks(own)
    fill(tmp_path, own.export(net), "", {})
    drafts = drafted(tmp_path, TEXT, 5)
    assert len(set(drafts)) > 1
    ids_1T = torch.tensor([[*TEXT, *drafts]])
    last_1TD = own.target.read(ids_1T).last_BTD
    embedded_1TD = functional.embedding(ids_1T, own.target.embedding)
    with torch.no_grad():
        found = net(embedded_1TD, last_1TD, 5)
    pending = len(TEXT) - 1
    chosen = [
        int(functional.linear(own_1TD[0, pending + turn], own.target.head).argmax())
        for turn, own_1TD in enumerate(found)
    ]
    assert tuple(chosen) == drafts


def test_the_exam_counts_what_the_drafter_would_get_right(tmp_path: Path) -> None:
    """A text that goes on with five drafts, the last two changed: three are right at its prompt."""
    own = recipe(2)
    net = random_blocks(own)
    fill(tmp_path, own.export(net), "", {})
    drafts = drafted(tmp_path, TEXT, 5)
    wrong = tuple((token + 1) % 96 for token in drafts[3:])
    text = HeldOut((*TEXT, *drafts[:3], *wrong[:1]), len(TEXT))
    with torch.no_grad():
        figures = replace(own, exam=Exam((text,), CPU, k=5)).measure(net)
    # One round emits the three drafts and the token after them, which ends the text.
    assert figures == {"tokens_per_round": 4.0}


@pytest.mark.slow
def test_a_short_run_learns_and_its_folder_drafts(tmp_path: Path) -> None:
    """The target's own law at every place is learned in all turns."""
    own = recipe(1)
    plan = TrainPlan(steps=40, learning_rate=5e-3, warmup_steps=5)
    job = TrainJob(recipe=own, batches=Repeating(), plan=plan, file=tmp_path / "state", device=CPU)
    trainer = Trainer(job)
    losses = [progress.loss for progress in trainer.run()]
    assert losses[-1] < 0.6 * losses[0]
    fill(tmp_path, trainer.export(), "", {})
    assert len(drafted(tmp_path, TEXT, 4)) == 4
