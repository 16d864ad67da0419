"""EAGLE heads and MTP blocks in training do what the engine's drafters do with what is exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from doubles.kinds import stored
from doubles.repeating import Repeating
from doubles.rig import SAMPLER, first_maximum
from doubles.tiny_mtp import block_like, llama_block
from outrider.core.clock import host_ints
from outrider.core.draft import Budget
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng
from outrider.drafters.common.growth import DraftSampler
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad, hidden_layers_of, kind_of
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.eagle import EagleConfig, load_eagle
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
from outrider.plugins.heads.mtp import mtp_drafter
from outrider_lab.train.eagle import EagleRecipe, fused_layers
from outrider_lab.train.folder import fill
from outrider_lab.train.loop import Trainer, TrainJob, TrainPlan
from outrider_lab.train.mtp import MtpRecipe
from outrider_lab.train.recipe import DrafterRecipe
from outrider_lab.train.target import Exam, FrozenTarget, HeldOut
from outrider_lab.train.tokens import frequent_ids

pytestmark = pytest.mark.wide

LAYERS = fused_layers(2)
TEXT = (5, 17, 3, 3, 80, 41, 5, 17)
IDS = tuple(range(0, 96, 2))
CPU = torch.device("cpu")
AnyRecipe = DrafterRecipe[Any]


def shared() -> dict[str, Any]:
    target = FrozenTarget(stored("llama2", 0), device=CPU, max_tokens=64)
    return {"target": target, "exam": Exam((), CPU, k=5), "window": 32, "dtype": torch.float32}


def eagle(ids: tuple[int, ...]) -> EagleRecipe:
    fields = shared()
    layer = replace(fields["target"].config, num_layers=1, ffn_size=80)
    return EagleRecipe(
        **fields,
        config=EagleConfig(layer, fused=True, draft_vocab_size=len(ids)),
        hidden_layers=LAYERS,
        ids_W=torch.tensor(ids),
        num_turns=3,
    )


def mtp(depth: int) -> MtpRecipe:
    fields = shared()
    block = llama_block(block_like(fields["target"].config, depth=depth))
    return MtpRecipe(**fields, block=block, num_turns=3)


def eagle_drafter(heads: HeadsToLoad, target: LlamaModel) -> Drafter:
    assert kind_of(heads.folder) == "eagle"
    assert hidden_layers_of(heads.folder, "eagle", 2) == LAYERS
    limits = HeadLimits(chunk=64, reach=8, window=256, first=1)
    net = load_eagle(heads, target)
    return HiddenDrafter("eagle", [net], DraftSampler(first_maximum, "it"), limits)


@dataclass(frozen=True)
class Kind:
    """Heads of one kind: what trains them, and what drafts with them in the engine."""

    name: str
    make: Callable[[], AnyRecipe]
    layers: tuple[int, ...]
    drafter: Callable[[HeadsToLoad, LlamaModel], Drafter]

    def drafted(self, folder: Path, text: tuple[int, ...], count: int) -> tuple[int, ...]:
        """What the engine's drafter makes of a folder of heads."""
        capacity = ModelCapacity(
            num_slots=128, page_size=4, max_rows=64, max_logits=64, hidden_layers=self.layers
        )
        target = load_model(stored("llama2", 0), LoadOptions(capacity=capacity, device="cpu"))
        assert isinstance(target, LlamaModel)
        target.state.open(0, ())
        target.step([StepRow.chain(0, text[:-1])], DraftNeeds(hidden_layers=self.layers))
        target.state.commit({0: range(len(text) - 1)})
        drafter = self.drafter(HeadsToLoad(folder, self.name, capacity), target)
        drafter.open(0, text)
        hidden = HiddenStates(len(text) - 1, partial(target.state.hidden, 0))
        asked = DraftRow(
            0, text, None, Budget(count), SamplingParams(), KeyedRng(0, 0, 0), hidden=hidden
        )
        return drafter.propose([asked])[0].tokens


MTP = partial(mtp_drafter, sampler=SAMPLER, chunk=64, batch_size=4)
KINDS = {
    "eagle, some ids": Kind("eagle", partial(eagle, IDS), LAYERS, eagle_drafter),
    "eagle, all ids": Kind("eagle", partial(eagle, tuple(range(96))), LAYERS, eagle_drafter),
    **{f"mtp, {n} blocks": Kind("mtp", partial(mtp, n), (2,), MTP) for n in (1, 2, 3)},
}


def random_net(own: AnyRecipe) -> nn.Module:
    """With larger weights than training begins with, so that each of them matters."""
    generator = torch.Generator().manual_seed(4)
    net: nn.Module = own.build(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return net.eval()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "eagle, all ids"])
def test_turns_choose_what_the_drafter_drafts(tmp_path: Path, name: str) -> None:
    """In a text that goes on with five drafts all of them are right, and with the last two changed
    the first three: such a round emits these and the token after them."""
    kind = KINDS[name]
    own = kind.make()
    net = cast("Any", random_net(own))
    fill(tmp_path, own.export(net), "", {})
    drafts = kind.drafted(tmp_path, TEXT, 5)
    assert len(set(drafts)) > 1
    if isinstance(own, EagleRecipe):
        assert set(drafts) <= set(host_ints(own.ids_W))
    pending = len(TEXT) - 1
    wrong = tuple((token + 1) % 96 for token in drafts[3:])
    with torch.no_grad():
        for goes_on, right in ((drafts, 5), ((*drafts[:3], *wrong), 3)):
            accepted_T = own.accepted(net, torch.tensor([*TEXT, *goes_on]), 5)
            assert host_ints(accepted_T)[pending] == right
        text = HeldOut((*TEXT, *drafts[:3], *wrong[:1]), len(TEXT))
        figures = replace(own, exam=Exam((text,), CPU, k=5)).measure(net)
    assert figures == {"tokens_per_round": 4.0}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle, some ids", "eagle, all ids", "mtp, 1 blocks"])
def test_a_short_run_learns_and_its_folder_drafts(tmp_path: Path, name: str) -> None:
    own = KINDS[name].make()
    plan = TrainPlan(steps=40, learning_rate=5e-3, warmup_steps=5)
    job = TrainJob(recipe=own, batches=Repeating(), plan=plan, file=tmp_path / "state", device=CPU)
    trainer = Trainer(job)
    losses = [progress.loss for progress in trainer.run()]
    assert losses[-1] < 0.6 * losses[0]
    fill(tmp_path, trainer.export(), "", {})
    assert len(KINDS[name].drafted(tmp_path, TEXT, 4)) == 4


def test_frequent_ids_are_counted_and_stop_ids_are_among_them() -> None:
    config = replace(eagle(IDS).target.config, stop_ids=(90,))
    tokens = np.array([7, 7, 7, 3, 3, 50, 50, 50, 50, 11], dtype=np.int32)
    assert host_ints(frequent_ids(tokens, config, 3)) == [7, 50, 90]
    assert host_ints(frequent_ids(tokens, config, 96)) == list(range(96))


@pytest.mark.parametrize(("num_layers", "wanted"), [(2, (0, 1, 2)), (8, (2, 5, 8)), (3, (0, 1, 3))])
def test_the_layers_that_are_fused(num_layers: int, wanted: tuple[int, ...]) -> None:
    assert fused_layers(num_layers) == wanted
