"""Counts and lengths of scripted runs: which passes happen, and where every memory ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from checks.engine import (
    PROMPT,
    Kind,
    check_all_accepted,
    check_all_rejected,
    check_budget,
    check_budget_anywhere,
    check_greedy,
    check_one_pass_a_round,
    check_stop_and_budget,
    check_stop_anywhere,
    check_stop_strings,
    check_stop_tokens,
    check_traces,
    greedy,
    plain,
)
from checks.state import VOCAB
from doubles.counting import CountingLM, CyclingController
from doubles.drafters import oracle, random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.protocols import StepRow
from outrider.core.tree import ROOT
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.round import StepwiseLM

every_kind = pytest.mark.parametrize("kind", [ToyHybrid, TinyAttentionLM])


def test_clamp() -> None:
    check_budget()
    check_stop_tokens()
    check_stop_and_budget()
    check_stop_strings()


def test_all_accepted() -> None:
    check_all_accepted()


def test_all_rejected() -> None:
    check_all_rejected()


@every_kind
def test_a_stop_token_anywhere_ends_text_and_memory(kind: Kind) -> None:
    check_stop_anywhere(kind)


@every_kind
def test_a_budget_anywhere_ends_text_and_memory(kind: Kind) -> None:
    check_budget_anywhere(kind)


def test_the_remaining_budget_bounds_the_draft() -> None:
    """Six tokens by drafts of three: passes of four rows and two."""
    text = plain(ToyHybrid, PROMPT, 6)
    target = CountingLM(ToyHybrid(vocab_size=VOCAB))
    rig = Rig(target, oracle((*PROMPT, *text), VOCAB), k=3)
    rig.alone(Request(PROMPT, greedy(6)))
    assert [rows[0].num_logits for rows in target.steps] == [4, 2]


def test_a_rejection_ends_memory_before_it() -> None:
    """A prompt of ten; the draft for place 13 is refused: 13 tokens stay, the 14th is pending."""
    prompt = (*PROMPT, *PROMPT)
    text = (*prompt, *plain(ToyHybrid, prompt, 8))
    drafter = oracle(text, VOCAB, wrong_at=lambda place: place == 13)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, k=5)
    seq = rig.live(0, Request(prompt, greedy(8)))
    rig.target.state.open(0, ())
    outcome = rig.stages().run([seq], [])[0]
    assert outcome.num_accepted == 3
    assert rig.target.state.length(0) == 13
    assert tuple(seq.tokens) == text[:14]


@every_kind
def test_a_stop_string_across_rounds(kind: Kind) -> None:
    """A text-level stop ends exactly where its last token was emitted, at any draft depth."""
    text = plain(kind, PROMPT, 12)
    for length in range(2, 12):
        for k in (0, 2, 5):
            seen: list[int] = []

            def match(
                tokens: Sequence[int], seen: list[int] = seen, length: int = length
            ) -> int | None:
                seen.extend(tokens)
                return len(tokens) - (len(seen) - length) if len(seen) >= length else None

            rig = Rig(kind(vocab_size=VOCAB), oracle((*PROMPT, *text), VOCAB), k=k)
            seq = rig.alone(Request(PROMPT, greedy(12), match=match))
            assert (tuple(seq.tokens[len(PROMPT) :]), seq.finish) == (text[:length], "stop")
            rig.end()


def test_one_pass_a_round() -> None:
    check_one_pass_a_round()


def test_prompt_chunks_ride_with_verification() -> None:
    """A long prompt is read in chunks beside rounds, never more than a chunk a pass."""
    target = CountingLM(ToyHybrid(vocab_size=VOCAB))
    prompts = [(1, 2), (3, 4) * 8]
    rig = Rig(target, NgramDrafter(max_n=1, min_n=1), k=2, chunk=5)
    check_greedy(rig, ToyHybrid, prompts, 12)
    mixed = [rows for rows in target.steps if len({row.num_logits == 0 for row in rows}) == 2]
    assert len(mixed) >= 2
    for rows in target.steps:
        assert sum(row.logits_from for row in rows) <= 5
        assert [row.seq_id for row in rows if row.num_logits == 0] in ([], [1])


def test_a_first_round_reads_a_short_prompt_and_emits() -> None:
    target = CountingLM(ToyHybrid(vocab_size=VOCAB))
    rig = Rig(target, k=0, chunk=len(PROMPT))
    rig.outputs([PROMPT], greedy(1))
    assert target.steps == [(StepRow(0, PROMPT, tuple(range(ROOT, 4)), logits_from=4),)]
    assert rig.traces[0].num_prompt_tokens == 4


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_equal_to_the_target_is_always_accepted(k: int) -> None:
    """Off by one in memory, positions or counts would break the pattern."""
    for kind in (ToyHybrid, TinyAttentionLM):
        rig = Rig(kind(vocab_size=VOCAB), model_drafter(kind(vocab_size=VOCAB), chunk=2), k=k)
        rig.outputs([PROMPT, (0,)], greedy(4 * (k + 1)))
        assert [t.num_accepted for t in rig.traces] == [k] * 8
        assert [t.num_emitted for t in rig.traces] == [k + 1] * 8


def test_trees_copy_at_most_what_they_accept() -> None:
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), random_trees(VOCAB, num_nodes=6), k=3)
    rig.outputs([PROMPT, (3, 3)], greedy(30))
    by_pass = {trace.pass_index: trace for trace in rig.traces}
    copied = {index: trace.num_rows_copied for index, trace in by_pass.items()}
    for index, num_copied in copied.items():
        accepted = sum(t.num_accepted for t in rig.traces if t.pass_index == index)
        assert num_copied <= accepted
    assert any(copied.values())


def test_budgets_may_change_every_round() -> None:
    """A drafter that is not asked for some rounds catches up when it is."""
    for drafter in (model_drafter(ToyHybrid(vocab_size=VOCAB), chunk=3), NgramDrafter()):
        controller = CyclingController((3, 0, 0, 1, 0, 5))
        rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, controller=controller)
        check_greedy(rig, ToyHybrid, [PROMPT, (2, 2, 2)], 25)
        assert controller.observed == rig.traces
        assert any(trace.num_drafted == 0 < trace.num_emitted for trace in rig.traces)


def test_token_by_token_verification_counts_its_passes() -> None:
    text = plain(ToyHybrid, PROMPT, 8)
    inner = CountingLM(ToyHybrid(vocab_size=VOCAB))
    rig = Rig(StepwiseLM(inner), oracle((*PROMPT, *text), VOCAB), k=3)
    rig.outputs([PROMPT], greedy(8))
    assert [t.num_target_passes for t in rig.traces] == [4, 4]
    assert len(inner.steps) == 8
    assert check_traces(rig).num_target_passes == 8
