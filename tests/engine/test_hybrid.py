"""The engine over recurrent memory: whatever is drafted, the text of plain decoding."""

from __future__ import annotations

from itertools import product

import pytest

from checks.engine import check_greedy, greedy, plain
from doubles.drafters import RowDrafter, oracle, random_chains, random_trees
from doubles.rig import Rig, model_drafter
from doubles.tiny_hybrids import hybrid_kind, tiny_hybrid
from outrider.control.heuristics import FixedController
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.spec import RecurrentCapacity
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.build import history_note, within_history
from outrider.engine.round import StepwiseLM
from outrider.models.decoder import ModelCapacity
from outrider.plugins.hybrids.model import HybridModel
from outrider.verify.exact import TokenRule

KIND = hybrid_kind("qwen3_5", "replay")
MIXTURE = hybrid_kind("qwen3_next", "ring")
VOCAB = 96
PROMPTS = ((5, 9, 5, 9, 5), (60,), (7, 7, 1, 2, 3, 7, 7, 1, 2, 3, 7), (5, 9, 5, 9, 5, 80))
TREES = FixedController(Budget(5, num_nodes=6))
ROLLBACKS = ("ring", "replay")
both_ways = pytest.mark.parametrize("rollback", ROLLBACKS)


def _target(
    rollback: str, *, history: int = 8, num_slots: int = 512, name: str = "qwen3_5"
) -> HybridModel:
    states = RecurrentCapacity(
        rollback=rollback, history=history, num_sequences=8, num_checkpoints=4
    )
    return tiny_hybrid(
        name, capacity=ModelCapacity(num_slots=num_slots, page_size=4, max_rows=128, states=states)
    )


# Rollbacks by batches are covered in tests/state/test_hybrid_rollback.py. Other combinations are
# `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_chains_and_trees_leave_the_text_as_it_is(rollback: str, batch_size: int) -> None:
    target = _target(rollback)
    drafters: tuple[RowDrafter | NgramDrafter, ...] = (
        random_chains(VOCAB),
        random_trees(VOCAB, num_nodes=6),
        NgramDrafter(max_n=3, min_n=1),
    )
    for drafter, chunk in product(drafters, (3, 64)):
        rig = Rig(
            target, drafter, rule=TokenRule(), controller=TREES, chunk=chunk, batch_size=batch_size
        )
        check_greedy(rig, KIND, PROMPTS, 12)
        target.state.check()


@both_ways
def test_a_draft_that_is_right_is_accepted_whole(rollback: str) -> None:
    text = plain(KIND, PROMPTS[0], 16)
    rig = Rig(_target(rollback), oracle((*PROMPTS[0], *text), VOCAB), k=3)
    assert rig.outputs([PROMPTS[0]], greedy(16)) == [list(text)]
    assert {trace.num_accepted for trace in rig.traces} == {3}


@pytest.mark.slow
@both_ways
def test_memory_that_ends_before_its_time(rollback: str) -> None:
    """The youngest wait again, and read their text once more."""
    target = _target(rollback, num_slots=48)
    rig = Rig(target, random_trees(VOCAB), rule=TokenRule(), controller=TREES, chunk=5, reserve=0.3)
    outputs = rig.outputs(PROMPTS, greedy(14))
    assert outputs == [list(plain(KIND, prompt, 14)) for prompt in PROMPTS]
    assert any(seq.num_preempted for seq in rig.sequences)
    target.state.check()


@pytest.mark.slow
@both_ways
def test_a_hybrid_drafts_for_itself(rollback: str) -> None:
    draft = model_drafter(_target(rollback, history=4), chunk=3)
    rig = Rig(_target(rollback), draft, k=4, chunk=4, batch_size=3)
    check_greedy(rig, KIND, PROMPTS, 12)


@pytest.mark.slow
@both_ways
def test_token_by_token_verification_writes_the_same(rollback: str) -> None:
    rig = Rig(StepwiseLM(_target(rollback)), random_chains(VOCAB), k=5)
    check_greedy(rig, KIND, PROMPTS[:2], 10)


@pytest.mark.slow
def test_a_mixture_of_experts_writes_the_same() -> None:
    target = _target("ring", name="qwen3_next")
    rig = Rig(target, random_trees(VOCAB), rule=TokenRule(), controller=TREES, chunk=3)
    check_greedy(rig, MIXTURE, PROMPTS[:3], 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rollback"),
    [
        ("lfm2", "ring"),
        ("lfm2_moe", "replay"),
        ("granite_h", "replay"),
        ("bamba", "ring"),
        ("falcon_h1", "replay"),
        ("nemotron_h", "ring"),
        ("nemotron_h_latent", "replay"),
    ],
)
def test_every_kind_of_recurrence_writes_what_it_writes_alone(name: str, rollback: str) -> None:
    target, kind = _target(rollback, name=name), hybrid_kind(name, rollback)
    for drafter in (random_trees(VOCAB, num_nodes=6), NgramDrafter(max_n=3, min_n=1)):
        rig = Rig(target, drafter, rule=TokenRule(), controller=TREES, chunk=3, batch_size=3)
        check_greedy(rig, kind, PROMPTS, 12)
        target.state.check()
    draft = model_drafter(_target(rollback, history=4, name=name), chunk=3)
    check_greedy(Rig(target, draft, k=4, chunk=4, batch_size=3), kind, PROMPTS, 12)


@both_ways
def test_hidden_states_are_kept_and_returned_like_keys(rollback: str) -> None:
    states = RecurrentCapacity(rollback=rollback, history=8, num_sequences=2)
    capacity = ModelCapacity(num_slots=64, page_size=4, hidden_layers=(1, 4), states=states)
    model = tiny_hybrid(capacity=capacity)
    needs = DraftNeeds(hidden_layers=(1, 4))
    text = (5, 9, 5, 9, 5, 80, 3)
    for seq_id in (0, 1):
        model.state.open(seq_id, ())
    model.step([StepRow.chain(0, text)], needs)
    model.state.commit({0: range(len(text))})
    model.step([StepRow(1, (*text[:4], 1, *text[4:]), (-1, 0, 1, 2, 3, 3, 5, 6))], needs)
    model.state.commit({1: (0, 1, 2, 3, 5, 6, 7)})
    wanted, got = (model.state.hidden(seq_id, 0, len(text)) for seq_id in (0, 1))
    assert wanted.shape == (len(text), 2, 40)
    assert wanted.equal(got)


def test_drafts_are_cut_to_what_memory_returns_to() -> None:
    config = EngineConfig(k=6, tree_nodes=12, min_k=4)
    short, enough = _target("ring", history=2), _target("ring", history=12)
    cut = within_history(config, short)
    assert (cut.k, cut.min_k, cut.tree_nodes) == (2, 2, 2)
    note = history_note(config, short)
    assert note is not None
    assert "from 12 tokens a round to 2" in note
    assert "--state-history" in note
    assert within_history(config, enough) is config
    assert history_note(config, enough) is None
