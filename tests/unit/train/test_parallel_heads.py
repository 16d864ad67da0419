"""Heads in training do what the engine's drafters do with their export: Medusa, block, DFlash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from doubles.kinds import close_to, stored
from doubles.rig import SAMPLER, Request, Rig
from outrider.control.heuristics import FixedController
from outrider.core.clock import host_ints
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.plugins import KINDS
from outrider.core.protocols import Drafter, DraftNeeds, StepRow
from outrider.drafters.common.context import BuildContext, LoadedModels
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad, hidden_layers_of, kind_of
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.block_heads import read_block_config as read_block_layers
from outrider.plugins.heads.blocks import Sight
from outrider.plugins.heads.medusa import (
    MedusaConfig,
    MedusaDrafter,
    ParallelHeadSampler,
    load_medusa,
    read_medusa_config,
)
from outrider_lab.models.block_net import BlockContext, BlockDrafter, load_block, read_block_config
from outrider_lab.train.block import BlockRecipe, block_sizes, check_window
from outrider_lab.train.dflash import DFlashRecipe
from outrider_lab.train.folder import fill
from outrider_lab.train.loop import Batch
from outrider_lab.train.medusa import HeadInit, MedusaRecipe, RankTally
from outrider_lab.train.recipe import DrafterRecipe
from outrider_lab.train.shapes import plain_layers
from outrider_lab.train.target import Exam, FrozenTarget, HeldOut, rounds

pytestmark = pytest.mark.wide

CPU = torch.device("cpu")
PROMPT = (5, 17, 3, 80)
PARAMS = SamplingParams(max_tokens=40)


def shared(texts: tuple[HeldOut, ...]) -> dict[str, Any]:
    target = FrozenTarget(stored("llama2", 0), device=CPU, max_tokens=64)
    return {"target": target, "exam": Exam(texts, CPU, k=3), "dtype": torch.float32}


def medusa(init: HeadInit = "tie", texts: tuple[HeldOut, ...] = ()) -> MedusaRecipe:
    return MedusaRecipe(**shared(texts), config=MedusaConfig(num_heads=3, num_layers=2), init=init)


def block(texts: tuple[HeldOut, ...] = ()) -> BlockRecipe:
    fields = shared(texts)
    sizes = block_sizes(fields["target"].config, num_places=3, num_context=2, num_layers=1)
    return BlockRecipe(**fields, config=sizes)


def dflash(texts: tuple[HeldOut, ...] = ()) -> DFlashRecipe:
    fields = shared(texts)
    layers = plain_layers(fields["target"].config, 2)
    return DFlashRecipe(
        **fields,
        config=replace(layers, qk_norm=True),
        hidden_layers=(0, 1, 2),
        block_size=4,
        mask_token=95,
    )


def built(own: DrafterRecipe[Any], rng: float) -> nn.Module:
    """Away from where training begins, so that each weight matters."""
    generator = torch.Generator().manual_seed(4)
    net: nn.Module = own.build(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=rng)
    return net.eval()


def engine_capacity(*layers: int) -> ModelCapacity:
    return ModelCapacity(
        num_slots=512, page_size=4, max_rows=128, max_logits=64, hidden_layers=layers
    )


def engine_target(*layers: int) -> LlamaModel:
    options = LoadOptions(capacity=engine_capacity(*layers), device="cpu")
    target = load_model(stored("llama2", 0), options)
    assert isinstance(target, LlamaModel)
    return target


def read(target: LlamaModel, tokens: tuple[int, ...], *layers: int) -> None:
    target.state.open(0, ())
    target.step([StepRow.chain(0, tokens)], DraftNeeds(hidden_layers=layers))
    target.state.commit({0: range(len(tokens))})


@pytest.mark.parametrize("init", ["tie", "copy", "random"])
def test_exported_medusa_heads_compute_the_same(tmp_path: Path, init: HeadInit) -> None:
    own = medusa(init)
    net = cast("Any", built(own, 0.02))
    fill(tmp_path, own.export(net), "", {})
    target = engine_target(2)
    heads = load_medusa(tmp_path, read_medusa_config(tmp_path, target.spec), target)
    last_TD = own.target.read(torch.tensor([PROMPT])).last_BTD[0]
    read(target, PROMPT, 2)
    hidden_TD = target.state.hidden(0, 0, len(PROMPT))[:, 0]
    close_to(hidden_TD, last_TD)
    normed_TD = torch.nn.functional.rms_norm(
        last_TD, last_TD.shape[1:], own.target.norm, own.target.config.rms_norm_eps
    )
    wanted = torch.stack([net.logits(head, normed_TD, own.target.head) for head in range(3)])
    close_to(heads.logits(hidden_TD, 3), wanted.detach())


def test_an_exported_block_computes_the_same(tmp_path: Path) -> None:
    own = block()
    net = cast("Any", built(own, 0.1))
    fill(tmp_path, own.export(net), "", {})
    target = engine_target(1, 2)
    loaded = load_block(tmp_path, read_block_config(tmp_path, target.spec), target)
    read(target, PROMPT[:-1], 1, 2)
    context = BlockContext(target.state.hidden(0, 1, 3), PROMPT[2:])
    guess = loaded.guess([context], 3)
    next_CD = own.target.embedding[list(PROMPT[2:])]
    read_CLD = torch.cat([context.hidden_CLD, next_CD[:, None]], dim=1)
    x_1KD, sure_1K = net(read_CLD[None])
    close_to(guess.logits_BKV, (x_1KD @ own.target.head.T).detach())
    close_to(guess.confidence_BK, sure_1K.sigmoid().detach())


def medusa_drafter(folder: Path, target: LlamaModel) -> Drafter:
    heads = load_medusa(folder, read_medusa_config(folder, target.spec), target)
    return MedusaDrafter(heads, ParallelHeadSampler(SAMPLER))


def block_drafter(folder: Path, target: LlamaModel) -> Drafter:
    loaded = load_block(folder, read_block_config(folder, target.spec), target)
    return BlockDrafter(loaded, ParallelHeadSampler(SAMPLER))


def dflash_drafter(folder: Path, target: LlamaModel) -> Drafter:
    config = EngineConfig(drafter="dflash", k=3, batch_size=1, page_size=4, prefill_chunk=16)
    heads = HeadsToLoad(folder, "dflash", replace(engine_capacity(0, 1, 2), max_rows=32))
    models = LoadedModels(target, None, target.kernels.argmax, heads=(heads,))
    return BuildContext(models.resolve(config), models, KINDS["dflash"]).build()


def test_a_dflash_folder_reads_the_layers_that_were_trained(tmp_path: Path) -> None:
    own = dflash()
    fill(tmp_path, own.export(cast("Any", built(own, 0.1))), "", {})
    assert kind_of(tmp_path) == "dflash"
    assert hidden_layers_of(tmp_path, "dflash", 2) == (0, 1, 2)
    config = read_block_layers(tmp_path, engine_target().spec, from_anchor=False)
    assert (config.block_size, config.most, config.mask_token) == (4, 3, 95)
    assert all(sight == Sight() for sight in config.sights)


@dataclass(frozen=True)
class Kind:
    make: Callable[[tuple[HeldOut, ...]], DrafterRecipe[Any]]
    layers: tuple[int, ...]
    drafter: Callable[[Path, LlamaModel], Drafter]


def learned(own: DrafterRecipe[Any], ids_BT: torch.Tensor, steps: int) -> nn.Module:
    """The loss falls to half of what it was."""
    net: nn.Module = own.build(torch.Generator().manual_seed(0))
    # Untyped in PyTorch.
    optimiser = cast("Any", torch.optim.AdamW(net.parameters(), lr=3e-3))
    losses: list[float] = []
    for step in range(steps):
        loss = own.loss(net, Batch(ids_BT, (0,), step))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    return net.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        Kind(partial(medusa, "tie"), (2,), medusa_drafter),
        Kind(block, (1, 2), block_drafter),
        Kind(dflash, (0, 1, 2), dflash_drafter),
    ],
    ids=["medusa", "block", "dflash"],
)
def test_what_was_learned_is_what_the_engine_drafts(tmp_path: Path, kind: Kind) -> None:
    """Round by round the figure is the engine's, after the first one, in which the target has not
    read the prompt yet."""
    target = engine_target(*kind.layers)
    plain = Rig(target, page_size=4).run([Request(PROMPT, PARAMS)])[0]
    text = HeldOut((*PROMPT, *plain), len(PROMPT))
    own = kind.make((text,))
    net = learned(own, torch.tensor([text.ids]), 60)
    fill(tmp_path, own.export(net), "", {})
    rig = Rig(
        target, kind.drafter(tmp_path, target), controller=FixedController(Budget(3)), page_size=4
    )
    assert rig.run([Request(PROMPT, PARAMS)])[0] == plain
    emitted = [trace.num_emitted for trace in rig.traces if trace.num_emitted]
    accepted_T = own.accepted(net, torch.tensor(text.ids), 3)
    told = rounds(host_ints(accepted_T), len(PROMPT) + emitted[0], len(text.ids))
    assert told == emitted[1:]
    figures = own.measure(net)
    assert figures["tokens_per_round"] > 1.5
    if isinstance(own, MedusaRecipe):
        assert figures["tokens_per_round_of_trees"] >= figures["tokens_per_round"]
        chances = own.chances(cast("Any", net))
        assert chances[0][0] > 0.5
        assert all(list(shares) == sorted(shares, reverse=True) for shares in chances)


def test_a_tally_counts_places_behind_candidates_alone() -> None:
    tally = RankTally(2, 3)
    for ranks in ([0, 0], [0, 1], [1, None], [None, 0]):
        tally.note(ranks)
    # The last position's second place is behind a token that was no candidate.
    assert tally.chances() == [(0.5, 0.25, 0.0), (1 / 3, 1 / 3, 0.0)]


def test_shares_do_not_rise_with_the_rank() -> None:
    tally = RankTally(1, 3)
    for rank in (0, 2, 2, 2):
        tally.note([rank])
    assert tally.chances() == [(0.25, 0.0, 0.0)]
    assert RankTally(1, 2).chances() == [(0.0, 0.0)]


def test_a_window_that_holds_no_round_is_refused() -> None:
    config = block().config
    with pytest.raises(ConfigError, match="holds no round") as caught:
        check_window(8, config)
    assert "--window 9" in (caught.value.hint or "")
    check_window(9, config)
