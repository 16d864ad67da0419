"""Medusa heads in training do what the engine's drafter does with what is exported of them."""

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
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.drafters.medusa import MedusaConfig, load_medusa, read_medusa_config
from outrider.drafters.parallel_heads import MedusaDrafter, ParallelHeadSampler
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model
from outrider.train.exam import Exam, HeldOut, rounds
from outrider.train.folder import fill
from outrider.train.loop import Batch
from outrider.train.medusa import HeadInit, MedusaHeads, MedusaRecipe, RankTally
from outrider.train.target import FrozenTarget

CPU = torch.device("cpu")
ROOM = Room(num_slots=512, page_size=4, max_rows=128, max_logits=64, hidden_layers=(2,))
PROMPT = (5, 17, 3, 80)


def recipe(init: HeadInit = "tie", texts: tuple[HeldOut, ...] = ()) -> MedusaRecipe:
    target = FrozenTarget(stored("llama2", 0), device=CPU, max_tokens=64)
    return MedusaRecipe(
        target=target,
        config=MedusaConfig(num_heads=3, num_layers=2),
        spec=target.config.spec("", bytes_per_weight=4, bytes_per_kv=4),
        exam=Exam(texts, CPU, k=3),
        init=init,
        dtype=torch.float32,
    )


def built(own: MedusaRecipe, noise: float = 0.02) -> MedusaHeads:
    """Away from where training begins, so that each weight matters."""
    generator = torch.Generator().manual_seed(4)
    net = own.build(generator)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return net.eval()


def engine_target() -> LlamaModel:
    target = load_model(stored("llama2", 0), LoadOptions(room=ROOM, device="cpu"))
    assert isinstance(target, LlamaModel)
    return target


@pytest.mark.parametrize("init", ["tie", "copy", "random"])
def test_an_exported_folder_computes_the_same(tmp_path: Path, init: HeadInit) -> None:
    own = recipe(init)
    net = built(own)
    fill(tmp_path, own.export(net), "", {})
    target = engine_target()
    read = read_medusa_config(tmp_path, target.spec)
    heads = load_medusa(tmp_path, read, target)
    ids_1T = torch.tensor([PROMPT])
    last_TD = own.target.read(ids_1T).last_BTD[0]
    target.state.open(0, ())
    target.step([StepRow.chain(0, PROMPT)], DraftNeeds(hidden_layers=(2,)))
    target.state.commit({0: range(len(PROMPT))})
    hidden_TD = target.state.hidden(0, 0, len(PROMPT))[:, 0]
    close_to(hidden_TD, last_TD)
    normed_TD = torch.nn.functional.rms_norm(
        last_TD, last_TD.shape[1:], own.target.norm, own.target.config.rms_norm_eps
    )
    wanted = torch.stack([net.logits(head, normed_TD, own.target.head) for head in range(3)])
    close_to(heads.logits(hidden_TD, 3), wanted.detach())


def test_the_figure_is_what_the_engine_does(tmp_path: Path) -> None:
    """Round by round, after the first one, in which the target has not read the prompt yet."""
    target = engine_target()
    plain = Rig(target, page_size=4).run([Request(PROMPT, SamplingParams(max_tokens=40))])[0]
    text = HeldOut((*PROMPT, *plain), len(PROMPT))
    own = recipe(texts=(text,))
    net = built(own)
    fill(tmp_path, own.export(net), "", {})
    heads = load_medusa(tmp_path, read_medusa_config(tmp_path, target.spec), target)
    drafter = MedusaDrafter(heads, ParallelHeadSampler(SAMPLER))
    rig = Rig(target, drafter, controller=FixedController(Budget(3)), page_size=4)
    assert rig.run([Request(PROMPT, SamplingParams(max_tokens=40))])[0] == plain
    emitted = [trace.num_emitted for trace in rig.traces if trace.num_emitted]
    told: list[list[int]] = []

    def note(ids_T: torch.Tensor, k: int) -> torch.Tensor:
        accepted_T = own.accepted(net, ids_T, k)
        told.append(rounds(host_ints(accepted_T), len(PROMPT) + emitted[0], len(text.ids)))
        return accepted_T

    own.exam.tokens_per_round(note)
    assert told == [emitted[1:]]
    assert max(emitted) > 1


@pytest.mark.slow
def test_training_lowers_the_loss_and_counts_the_ranks() -> None:
    target = engine_target()
    plain = Rig(target, page_size=4).run([Request(PROMPT, SamplingParams(max_tokens=40))])[0]
    own = recipe(texts=(HeldOut((*PROMPT, *plain), len(PROMPT)),))
    net = own.build(torch.Generator().manual_seed(0))
    ids_BT = torch.tensor([[*PROMPT, *plain]])
    # Untyped in PyTorch.
    optimiser = cast("Any", torch.optim.AdamW(net.parameters(), lr=3e-3))
    before = own.measure(net)
    losses: list[float] = []
    for step in range(60):
        loss = own.loss(net, Batch(ids_BT, (0,), step, 0))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    after = own.measure(net)
    assert after["tokens_per_round"] > max(before["tokens_per_round"], 1.5)
    assert after["tokens_per_round_of_trees"] >= after["tokens_per_round"]
    first, second, third = own.chances(net)
    assert first[0] > 0.5
    for shares in (first, second, third):
        assert list(shares) == sorted(shares, reverse=True)


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
