from __future__ import annotations

import pytest
import torch

from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider_lab.models.scripted import Script, ScriptedLM
from parity.feeding import feed, greedy

TEXT = [(3 * i * i + i) % 64 for i in range(30)]


def test_chunks_do_not_matter() -> None:
    model = ScriptedLM(Script(spread=2.0))
    expected = feed(model, TEXT, [30])
    assert torch.equal(feed(model, TEXT, [1] * 30), expected)
    assert torch.equal(feed(model, TEXT, [13, 1, 16]), expected)


def test_only_the_last_tokens_matter() -> None:
    model = ScriptedLM(Script(order=2, spread=1.0))
    a, b = feed(model, [9, 1, 2], [3]), feed(model, [8, 7, 1, 2], [4])
    assert torch.equal(a[-1], b[-1])
    assert not torch.equal(a[-2], b[-2])


def test_a_tree_is_its_paths() -> None:
    model = ScriptedLM(Script(spread=1.0))
    model.state.open(1, ())
    model.step([StepRow.chain(1, (4, 5), logits_from=2)], DraftNeeds())
    model.state.commit({1: (0, 1)})
    tree = model.step([StepRow(1, (6, 7, 8), (-1, -1, 0))], DraftNeeds()).logits_MV
    assert torch.equal(tree[2], feed(model, [4, 5, 6, 8], [4])[-1])
    assert torch.equal(tree[1], feed(model, [4, 5, 7], [3])[-1])


def test_seeds_speak_differently_and_repeat_themselves() -> None:
    texts = [greedy(ScriptedLM(Script(seed=seed)), TEXT[:3], 40) for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
def test_agreement_is_the_share_of_equal_choices(agreement: float) -> None:
    target, draft = Script(seed=5), Script(seed=5, agreement=agreement)
    contexts = [(i, j, (i * j) % 64) for i in range(64) for j in range(40)]
    same = [target.preferred(context) == draft.preferred(context) for context in contexts]
    assert sum(same) / len(same) == pytest.approx(agreement, abs=0.03)


def test_the_preferred_token_leads_by_the_gap() -> None:
    script = Script(gap=1.5, spread=3.0)
    logits_V = script.logits((1, 2, 3))
    best_2 = logits_V.topk(2).values
    assert logits_V.dtype == torch.float32
    assert int(logits_V.argmax()) == script.preferred((1, 2, 3))
    assert float(best_2[0]) == 4.5
    assert 1.5 <= float(best_2[0] - best_2[1]) < 2.0
    sharp_V = Script(gap=8.0).logits((1, 2, 3))
    assert {float(logit) for logit in sharp_V} == {0.0, 8.0}


def test_logits_come_only_where_asked_and_passes_are_counted() -> None:
    model = ScriptedLM(Script(stop_ids=(2,)))
    model.state.open(1, ())
    model.state.open(2, ())
    rows = [StepRow.chain(1, (1, 2, 3), logits_from=3), StepRow.chain(2, (1, 2), logits_from=1)]
    assert model.step(rows[:1], DraftNeeds()).logits_MV.shape == (0, 64)
    assert model.step(rows[1:], DraftNeeds()).logits_MV.shape == (1, 64)
    assert (model.num_steps, model.num_rows) == (2, 5)
    assert model.spec.stop_ids == (2,)


def test_misuse_is_caught() -> None:
    model = ScriptedLM(Script())
    model.state.open(1, ())
    for token in (-1, 64):
        with pytest.raises(ContractError):
            model.step([StepRow.chain(1, (token,))], DraftNeeds())
    with pytest.raises(ContractError):
        model.step([StepRow.chain(1, (1,))], DraftNeeds(hidden_layers=(0,)))
