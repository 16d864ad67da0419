"""The target's last state, carried on in a straight line, against that line written out."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

from doubles.rig import first_maximum
from doubles.tiny_checkpoints import random_llama, random_tensors, variant
from outrider.core.draft import Budget, Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng
from outrider.drafters.common.growth import DraftSampler
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider_lab.drafters.eagle_lite import ALPHA, MAX_DRAFT, LiteDrafter

CAPACITY = ModelCapacity(num_slots=64, page_size=4, hidden_layers=(2,))
TEXT = (5, 12, 0, 77, 31, 5, 90)


@pytest.fixture
def target() -> LlamaModel:
    """With all of the text but its last token in memory."""
    model = random_llama(capacity=CAPACITY)
    model.state.open(0, ())
    model.step([StepRow.chain(0, TEXT[:-1])], DraftNeeds(hidden_layers=(2,)))
    model.state.commit({0: range(len(TEXT) - 1)})
    return model


def row(target: LlamaModel, *, depth: int = 4, text: tuple[int, ...] = TEXT) -> DraftRow:
    hidden = HiddenStates(target.state.length(0), partial(target.state.hidden, 0))
    return DraftRow(
        0, text, None, Budget(depth), SamplingParams(), KeyedRng(0, 0, 0), hidden=hidden
    )


def drafter(target: LlamaModel, alpha: float = ALPHA) -> LiteDrafter:
    return LiteDrafter(target, DraftSampler(first_maximum, "it"), alpha=alpha)


def best_of(state_D: Tensor) -> int:
    """What the target's norm and head would choose."""
    config = variant("llama2").config
    tensors = random_tensors(config, seed=0)
    scale = (state_D.square().mean() + config["rms_norm_eps"]).sqrt()
    logits_V = tensors["lm_head.weight"] @ (state_D / scale * tensors["model.norm.weight"])
    return int(logits_V.argmax())


@pytest.mark.parametrize("alpha", [0.0, ALPHA, 1.5])
def test_drafts_lie_on_the_line(target: LlamaModel, alpha: float) -> None:
    before_D, now_D = target.state.hidden(0, 4, 6)[:, 0]
    wanted: list[int] = []
    for _ in range(MAX_DRAFT):
        before_D, now_D = now_D, now_D + alpha * (now_D - before_D)
        wanted.append(best_of(now_D))
    own = drafter(target, alpha)
    assert own.needs.hidden_layers == (2,)
    assert own.propose([row(target)]) == [Draft.chain(wanted)]
    assert own.propose([row(target, depth=1)]) == [Draft.chain(wanted[:1])]


def test_nothing_is_drafted_without_two_states(target: LlamaModel) -> None:
    own = drafter(target)
    for text in (TEXT[:1], TEXT[:2], (*TEXT, 3)):
        assert own.propose([row(target, text=text)]) == [Draft.empty()]
    assert len(own.propose([row(target, text=TEXT[:3])])[0]) == MAX_DRAFT
    assert own.propose([row(target, depth=0)]) == [Draft.empty()]
    bare = DraftRow(0, TEXT, None, Budget(2), SamplingParams(), KeyedRng(0, 0, 0))
    assert own.propose([bare]) == [Draft.empty()]


def test_rows_are_drafted_independently(target: LlamaModel) -> None:
    """A batch of rows of different depths gives each what it gets alone."""
    own = drafter(target)
    rows = [row(target, depth=2), row(target, depth=0), row(target, depth=1)]
    both = own.propose(rows)
    assert [len(draft) for draft in both] == [2, 0, 1]
    assert both == [own.propose([one])[0] for one in rows]
