"""The bridge: what it asks of the draft model, and where it stops asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from doubles.counting import CountingLM
from doubles.rig import SAMPLER, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from doubles.vocabularies import Digits, Mute, Renaming
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM, DraftRow
from outrider.drafters.bridge import BridgeDrafter
from outrider.drafters.common.context import Translator
from outrider.plugins.proof.reports import SAMPLED
from outrider.testing import GREEDY, VOCAB, row


def small(num_slots: int = 256) -> CountingLM:
    return CountingLM(ToyHybrid(vocab_size=VOCAB, seed=5, num_slots=num_slots))


def bridge(model: CausalLM, translator: Translator, *, page_size: int = 1) -> BridgeDrafter:
    return BridgeDrafter(model, SAMPLER, translator, chunk=64, page_size=page_size)


def opened(drafter: BridgeDrafter, rows: Sequence[DraftRow]) -> BridgeDrafter:
    for asked in rows:
        drafter.open(asked.seq_id, asked.tokens)
    return drafter


def test_with_one_vocabulary_it_drafts_what_the_model_drafter_drafts() -> None:
    text = [1, 2, 0, 1]
    bridged, plain = bridge(small(), Renaming(VOCAB)), model_drafter(small())
    for drafter in (bridged, plain):
        drafter.open(0, text)
    for depth in (4, 1, 3):
        asked = [row(0, text, depth=depth)]
        draft = plain.propose(asked)[0]
        assert bridged.propose(asked) == [draft]
        text += [*draft.tokens[:2], 3]


def test_a_batch_is_one_pass_a_draft_token() -> None:
    model = small()
    rows = [row(0, [1], depth=2), row(1, [2, 3], depth=1), row(2, [4], depth=0)]
    opened(bridge(model, Digits(VOCAB, base=3)), rows).propose(rows)
    # Two digits a token: the first two passes end a prompt and draft for both.
    assert [len(step) for step in model.steps if step[0].num_logits] == [2, 2, 1, 1]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_is_chosen_and_not_drawn(params: SamplingParams) -> None:
    """The draft model's distributions are over other ids: none of them may reach the rule."""
    drafts = [
        opened(bridge(small(), Renaming(VOCAB, shift=1)), [asked]).propose([asked])[0]
        for asked in (row(0, [1, 2], depth=3, params=params), row(0, [1, 2], depth=3))
    ]
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 3
    assert drafts[0].probs_NV is None


def test_shaping_is_not_carried_to_other_ids() -> None:
    shaper = LogitsProcessor(SamplingParams(logit_bias={1: 100.0}), 2)
    plain = row(0, [1, 2], depth=3)
    shaped = DraftRow(0, [1, 2], None, plain.budget, plain.params, plain.rng, shaper=shaper)
    drafts = [
        opened(bridge(small(), Renaming(VOCAB)), [asked]).propose([asked])
        for asked in (plain, shaped)
    ]
    assert drafts[0] == drafts[1]


def test_passes_have_an_end_however_long_a_token_is() -> None:
    class Long(Mute):
        def to_draft(self, tokens: Sequence[int]) -> list[int]:
            return [1] * 50 * len(tokens)

    model = small()
    rows = [row(0, [1], depth=3)]
    opened(bridge(model, Long()), rows).propose(rows)
    assert sum(step[0].num_logits for step in model.steps) == 3 * 4


def test_what_a_draft_says_beyond_the_budget_is_cut() -> None:
    """Where draft ids are the longer ones, a rounded number of passes says too much."""

    class Short(Renaming):
        def to_target(self, drafted: Sequence[int]) -> list[int]:
            return [token for token in drafted for _ in range(3)]

    rows = [row(0, [1, 2], depth=4)]
    assert len(opened(bridge(small(), Short(VOCAB)), rows).propose(rows)[0]) == 4


def test_without_text_there_is_no_pass() -> None:
    model = small()
    rows = [row(0, [1, 2], depth=3)]
    assert len(opened(bridge(model, Mute()), rows).propose(rows)[0]) == 0
    assert not model.steps


def test_what_does_not_fit_the_draft_model_goes_without() -> None:
    """The arena has room for one of two texts, as it may when they are longer in draft ids."""
    model = TinyAttentionLM(vocab_size=VOCAB, seed=5, num_slots=48, page_size=4)
    rows = [row(0, [1] * 22, depth=4), row(1, [2] * 22, depth=4)]
    drafter = opened(bridge(model, Renaming(VOCAB), page_size=4), rows)
    drafts = drafter.propose(rows)
    assert [len(draft) for draft in drafts] == [4, 0]
    assert drafter.propose(rows)[0] == drafts[0]
    drafter.close(0)
    assert len(drafter.propose(rows[1:])[0]) == 4
    drafter.close(1)
    assert model.state.num_free_tokens == 48


def test_the_draft_models_window_ends_drafts_and_not_the_text() -> None:
    model = TinyAttentionLM(vocab_size=VOCAB, seed=5)
    model.spec = replace(model.spec, max_tokens=20)
    drafter = bridge(model, Renaming(VOCAB))
    drafter.open(0, [1] * 18)
    for length, drafted in ((18, 2), (19, 1), (20, 0), (29, 0)):
        draft = drafter.propose([row(0, [1] * length, depth=4)])[0]
        assert len(draft) == drafted
