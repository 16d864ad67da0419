"""Near-ties and bugs are told apart on a model whose packed passes are off by a known amount."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from outrider.core.protocols import CacheStore, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider_lab.models.scripted import Script, ScriptedLM
from outrider_lab.proof.parity_part import Divergence, look_into, replay

# Its two best tokens after CONTEXT are 0.01 apart, its best and worst 3.7.
SCRIPT = Script(vocab_size=8, seed=341, gap=0.01, spread=4.0)
CONTEXT = (1, 2, 3, 4, 5, 6, 7, 0, 1)


@dataclass(frozen=True, slots=True)
class Shaky:
    """A model whose logits move by `size`, up and down by turns, in passes of several tokens."""

    model: ScriptedLM
    size: float

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        out = self.model.step(rows, needs)
        if sum(len(row.tokens) for row in rows) == 1:
            return out
        signs_V = torch.ones(SCRIPT.vocab_size)
        signs_V[::2] = -1
        return StepOutput(out.logits_MV + self.size * signs_V)


def best(logits_V: Tensor) -> int:
    return int(logits_V.argmax())


def divergence() -> Divergence:
    """The two best tokens of the context, and shapes of two rows and of four sequences."""
    order = torch.argsort(SCRIPT.logits(CONTEXT[-3:]), descending=True)
    return Divergence(CONTEXT, 4, int(order[0]), int(order[1]), shapes=((2, 1), (2, 4)))


def margin() -> float:
    logits_V = SCRIPT.logits(CONTEXT[-3:]).sort().values
    return float(logits_V[-1] - logits_V[-2])


@pytest.mark.parametrize("width", range(1, 12))
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("prompt_length", [1, 4, 9])
def test_replays_read_the_whole_context(width: int, copies: int, prompt_length: int) -> None:
    model = ScriptedLM(SCRIPT)
    free = model.state.num_free_tokens
    where = replace(divergence(), prompt_length=prompt_length)
    logits_V = replay(model, where, width=width, copies=copies)
    assert torch.equal(logits_V, SCRIPT.logits(CONTEXT[-3:]))
    assert model.num_rows == copies * len(CONTEXT)
    assert model.state.num_free_tokens == free


def test_an_error_as_large_as_half_the_margin_makes_a_near_tie() -> None:
    found = look_into(Shaky(ScriptedLM(SCRIPT), 0.51 * margin()), divergence(), best)
    assert found.near_tie
    assert found.margin == pytest.approx(margin())
    assert found.error == pytest.approx(0.51 * margin(), rel=1e-3)
    assert str(found).startswith("near-tie: margin ")


def test_a_smaller_error_does_not_explain_it() -> None:
    found = look_into(Shaky(ScriptedLM(SCRIPT), 0.49 * margin()), divergence(), best)
    assert not found.near_tie
    assert "too small" in found.reason


def test_no_error_at_all_is_a_bug() -> None:
    found = look_into(ScriptedLM(SCRIPT), divergence(), best)
    assert (found.near_tie, found.error) == (False, 0.0)
    assert str(found).startswith("BUG: ")


def test_an_error_beyond_rounding_is_a_bug() -> None:
    found = look_into(Shaky(ScriptedLM(SCRIPT), 0.2), divergence(), best)
    assert not found.near_tie
    assert "more than rounding" in found.reason


def test_plain_decoding_must_be_repeatable() -> None:
    where = divergence()
    found = look_into(ScriptedLM(SCRIPT), replace(where, plain=where.speculative), best)
    assert not found.near_tie
    assert "cannot be repeated" in found.reason


def test_a_draw_at_the_edge_of_a_running_sum_is_a_near_tie() -> None:
    """Here the two tokens are no neighbours in probability, but mass moves over the edge."""
    probs_V = SCRIPT.logits(CONTEXT[-3:]).softmax(-1)
    edge = float(probs_V[:5].sum()) - 1e-4

    def drawn(logits_V: Tensor) -> int:
        return int((logits_V.softmax(-1).cumsum(0) <= edge).sum())

    where = replace(divergence(), plain=4, speculative=5)
    assert look_into(Shaky(ScriptedLM(SCRIPT), 1e-3), where, drawn).near_tie
    assert not look_into(Shaky(ScriptedLM(SCRIPT), 1e-5), where, drawn).near_tie
