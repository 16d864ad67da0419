"""EAGLE heads in training do what the engine's drafter does with what is exported of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from doubles.kinds import stored
from doubles.repeating import Repeating
from doubles.rig import first_maximum
from outrider.core.budget import Budget
from outrider.core.clock import host_ints
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng
from outrider.drafters.eagle import EagleConfig, load_eagle
from outrider.drafters.growth import DraftSampler
from outrider.drafters.hidden import HeadLimits, HiddenDrafter
from outrider.models.decoder import Room
from outrider.models.heads import HeadsToLoad, hidden_layers_of, kind_of
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model
from outrider.train.eagle import Eagle, EagleRecipe, fused_layers
from outrider.train.exam import Exam, HeldOut
from outrider.train.folder import fill
from outrider.train.loop import Trainer, TrainJob, TrainPlan
from outrider.train.target import FrozenTarget
from outrider.train.tokens import frequent_ids

LAYERS = fused_layers(2)
ROOM = Room(num_slots=128, page_size=4, max_rows=64, max_logits=64, hidden_layers=LAYERS)
TEXT = (5, 17, 3, 3, 80, 41, 5, 17)
IDS = tuple(range(0, 96, 2))
CPU = torch.device("cpu")


def frozen() -> FrozenTarget:
    return FrozenTarget(stored("llama2", 0), device=CPU, max_tokens=64)


def recipe(
    *, ids: tuple[int, ...] = IDS, turns: int = 3, texts: tuple[HeldOut, ...] = ()
) -> EagleRecipe:
    target = frozen()
    layer = replace(target.config, num_layers=1, ffn_size=80)
    return EagleRecipe(
        target=target,
        config=EagleConfig(layer, fused=True, draft_vocab_size=len(ids)),
        hidden_layers=LAYERS,
        ids_W=torch.tensor(ids),
        exam=Exam(texts, CPU, k=5),
        window=32,
        num_turns=turns,
        dtype=torch.float32,
    )


def random_heads(own: EagleRecipe) -> Eagle:
    """With larger weights than training begins with, so that each of them matters."""
    generator = torch.Generator().manual_seed(4)
    net = own.build(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return net.eval()


def drafted(folder: Path, text: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the engine's drafter makes of a folder of heads."""
    assert kind_of(folder) == "eagle"
    assert hidden_layers_of(folder, "eagle", 2) == LAYERS
    target = load_model(stored("llama2", 0), LoadOptions(room=ROOM, device="cpu"))
    assert isinstance(target, LlamaModel)
    target.state.open(0, ())
    target.step([StepRow.chain(0, text[:-1])], DraftNeeds(hidden_layers=LAYERS))
    target.state.commit({0: range(len(text) - 1)})
    net = load_eagle(HeadsToLoad(folder, "eagle", ROOM), target)
    limits = HeadLimits(chunk=64, reach=8, window=256, first=1)
    drafter = HiddenDrafter("eagle", [net], DraftSampler(first_maximum, "it"), limits)
    drafter.open(0, text)
    hidden = HiddenStates(len(text) - 1, partial(target.state.hidden, 0))
    asked = DraftRow(
        0, text, None, Budget(count), SamplingParams(), KeyedRng(0, 0, 0), hidden=hidden
    )
    return drafter.propose([asked])[0].tokens


def test_turns_choose_what_the_drafter_drafts(tmp_path: Path) -> None:
    own = recipe()
    net = random_heads(own)
    fill(tmp_path, own.export(net), "", {})
    drafts = drafted(tmp_path, TEXT, 5)
    assert len(set(drafts)) > 1
    assert set(drafts) <= set(IDS)
    ids_1T = torch.tensor([[*TEXT, *drafts]])
    hidden_1TKD = own.target.read(ids_1T, LAYERS).hidden_BTKD
    embedded_1TD = functional.embedding(ids_1T[:, 1:], own.target.embedding)
    with torch.no_grad():
        found = net(embedded_1TD, hidden_1TKD[:, :-1], 5)
    entry = len(TEXT) - 2
    chosen = [IDS[int(logits[0, entry + turn].argmax())] for turn, logits in enumerate(found)]
    assert tuple(chosen) == drafts


def test_the_exam_counts_what_the_drafter_would_get_right(tmp_path: Path) -> None:
    """A text that goes on with five drafts, the last two changed: three are right at its prompt."""
    own = recipe()
    net = random_heads(own)
    fill(tmp_path, own.export(net), "", {})
    drafts = drafted(tmp_path, TEXT, 5)
    wrong = tuple((token + 1) % 96 for token in drafts[3:])
    text = HeldOut((*TEXT, *drafts[:3], *wrong[:1]), len(TEXT))
    with torch.no_grad():
        figures = replace(own, exam=Exam((text,), CPU, k=5)).measure(net)
    # One round emits the three drafts and the token after them, which ends the text.
    assert figures == {"tokens_per_round": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("ids", [IDS, tuple(range(96))], ids=["some ids", "all ids"])
def test_a_short_run_learns_and_its_folder_drafts(ids: tuple[int, ...], tmp_path: Path) -> None:
    own = recipe(ids=ids)
    plan = TrainPlan(steps=40, learning_rate=5e-3, warmup_steps=5)
    job = TrainJob(recipe=own, batches=Repeating(), plan=plan, file=tmp_path / "state", device=CPU)
    trainer = Trainer(job)
    losses = [progress.loss for progress in trainer.run()]
    assert losses[-1] < 0.6 * losses[0]
    fill(tmp_path, trainer.export(), "", {})
    assert len(drafted(tmp_path, TEXT, 4)) == 4


def test_frequent_ids_are_counted_and_stop_ids_are_among_them() -> None:
    config = replace(frozen().config, stop_ids=(90,))
    tokens = np.array([7, 7, 7, 3, 3, 50, 50, 50, 50, 11], dtype=np.int32)
    assert host_ints(frequent_ids(tokens, config, 3)) == [7, 50, 90]
    assert host_ints(frequent_ids(tokens, config, 96)) == list(range(96))


@pytest.mark.parametrize(("num_layers", "wanted"), [(2, (0, 1, 2)), (8, (2, 5, 8)), (3, (0, 1, 3))])
def test_the_layers_that_are_fused(num_layers: int, wanted: tuple[int, ...]) -> None:
    assert fused_layers(num_layers) == wanted
