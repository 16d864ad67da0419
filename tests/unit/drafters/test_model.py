"""The model drafter's economy: nothing is fed twice, and passes are as few as can be."""

from __future__ import annotations

from doubles.counting import CountingLM
from doubles.rig import model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.core.protocols import StepRow
from outrider.testing import VOCAB, row


def counting() -> CountingLM:
    return CountingLM(ToyHybrid(vocab_size=VOCAB, seed=5))


def test_a_chain_takes_one_pass_a_token_for_the_whole_batch() -> None:
    model = counting()
    drafter = model_drafter(model)
    for seq_id, text in enumerate(([1], [2, 3])):
        drafter.open(seq_id, text)
    drafter.propose([row(0, [1], depth=4), row(1, [2, 3], depth=2)])
    assert [len(rows) for rows in model.steps] == [2, 2, 1, 1]


def test_prompts_are_read_in_chunks() -> None:
    model = counting()
    drafter = model_drafter(model, chunk=3)
    text = [1, 2, 3, 4] * 2
    drafter.open(0, text)
    drafter.propose([row(0, text, depth=1)])
    # Three chunks of what comes before the last token, then that token, whose logits count.
    assert [rows[0].tokens for rows in model.steps] == [(1, 2, 3), (4, 1, 2), (3,), (4,)]
    assert [rows[0].num_logits for rows in model.steps] == [0, 0, 0, 1]


def test_an_accepted_draft_is_not_fed_again() -> None:
    """After a fully accepted draft only its last token and the bonus are new."""
    model = counting()
    drafter = model_drafter(model)
    text = [1, 2, 0]
    drafter.open(0, text)
    draft = drafter.propose([row(0, text, depth=3)])[0]
    text += [*draft.tokens, 4]
    model.steps.clear()
    drafter.propose([row(0, text, depth=1)])
    assert model.steps == [(StepRow(0, (draft.tokens[-1], 4), (-1, 0), logits_from=1),)]


def test_a_rejection_costs_one_new_token() -> None:
    model = counting()
    drafter = model_drafter(model)
    text = [1, 2, 0]
    drafter.open(0, text)
    draft = drafter.propose([row(0, text, depth=4)])[0]
    text += [draft.tokens[0], (draft.tokens[1] + 1) % VOCAB]
    model.steps.clear()
    drafter.propose([row(0, text, depth=1)])
    assert model.steps == [(StepRow(0, (text[-1],), (-1,), logits_from=0),)]


def test_no_budget_means_no_pass() -> None:
    model = counting()
    drafter = model_drafter(model)
    drafter.open(0, [1, 2])
    assert len(drafter.propose([row(0, [1, 2], depth=0)])[0]) == 0
    assert drafter.propose([]) == []
    assert not model.steps


def test_asking_twice_at_the_same_place_gives_the_same_draft() -> None:
    """A round that failed after drafting may be tried again."""
    model = counting()
    drafter = model_drafter(model)
    text = [1, 2, 0]
    drafter.open(0, text)
    asked = [row(0, text, depth=3)]
    assert drafter.propose(asked)[0].tokens == drafter.propose(asked)[0].tokens
