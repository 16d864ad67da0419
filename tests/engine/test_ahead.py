"""Drafting ahead writes the text of drafting in turns, whatever was foreseen, and never fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.ahead import (
    PROMPTS,
    SLOTS,
    check_ahead_is_the_text_in_turns,
    no_places,
    requests,
    rig_ahead,
    text_in_turns,
)
from checks.effort import examples
from checks.engine import greedy
from doubles.ahead import AheadRig, Ways, ahead_drafter
from doubles.counting import CountingLM, CyclingController
from doubles.kinds import scripted
from doubles.rig import Request, live, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM, DraftRow
from outrider.engine.drafting import ahead_row
from outrider.plugins.lanes.ahead.drafter import AheadDrafter
from outrider.plugins.lanes.ahead.forecast import Policy, Saguaro
from outrider.testing import row
from outrider.verify.exact import BlockRule, TokenRule

Kind = Callable[..., CausalLM]
KINDS: dict[str, Kind] = {"hybrid": ToyHybrid, "attention": TinyAttentionLM, "scripted": scripted}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
RULES = {"token": TokenRule(), "block": BlockRule()}
POLICIES: tuple[Policy, ...] = ("top", "optimal", "geometric", "uniform")


def ahead_of(rig: AheadRig) -> AheadDrafter:
    assert isinstance(rig.drafter, AheadDrafter)
    return rig.drafter


# Any two of model, rule, temperature and length meet. Other combinations are `deep`.
@pytest.mark.sample(3)
@pytest.mark.covering(2)
@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_drafting_in_turns(
    kind: str, rule: str, temperature: float, k: int
) -> None:
    build, judge = KINDS[kind], RULES[rule]
    for batch in (1, 3):
        wanted = requests(temperature, batch, 15)
        rig = rig_ahead(build, judge, Ways(k=k, batch=batch))
        assert rig.run(wanted) == text_in_turns(build, judge, wanted, k)
        assert {None, True, False} >= set(rig.hits) > {None}


def test_branches_of_one_length_are_drawn_with_the_same_numbers() -> None:
    check_ahead_is_the_text_in_turns()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("policy", "share"), [("top", 0.0), ("top", 1.0), *((policy, 0.5) for policy in POLICIES)]
)
def test_whatever_counts_as_foreseen(policy: Policy, share: float) -> None:
    wanted = requests(0.8, 2)
    rig = rig_ahead(ToyHybrid, BlockRule(), Ways(policy=policy, force_hits=share))
    assert rig.run(wanted) == text_in_turns(ToyHybrid, BlockRule(), wanted, 4)
    hits = [hit for hit in rig.hits if hit is not None]
    if share in (0.0, 1.0):
        assert set(hits) == {bool(share)}
    else:
        assert 0.2 < sum(hits) / len(hits) < 0.8
    stats = ahead_of(rig).stats()
    assert (stats.num_made_good > 0) == (share > 0)
    assert stats.num_made_good <= stats.looks.asked - stats.looks.found


@pytest.mark.slow
@examples(10)
@given(
    k=st.integers(1, 6),
    fan_out=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    budgets=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    rounds=st.integers(1, 5),
)
def test_also_with_changing_budgets_and_rounds_without_time(
    k: int, fan_out: int, temperature: float, budgets: list[int], rounds: int
) -> None:
    """Budgets change under both alike, so the same drafts are asked for. Now and then a round has
    no time to draft ahead, and a budget of 0 asks for no draft."""
    depths = [min(budget, k) for budget in budgets]
    wanted = requests(temperature, 2, 12)
    target = partial(ToyHybrid, seed=0, num_slots=SLOTS)
    turns = AheadRig(target(), model_drafter(ToyHybrid(seed=7, num_slots=SLOTS)))
    turns.controller = CyclingController(tuple(depths))
    drafter = ahead_drafter(ToyHybrid(seed=7, num_slots=SLOTS), Ways(k=k, fan_out=fan_out))
    rig = AheadRig(target(), drafter, ahead=lambda index: index % rounds != 1)
    rig.controller = CyclingController(tuple(depths))
    if len(set(depths)) == 1 or temperature == 0:
        assert rig.run(wanted) == turns.run(wanted)
    else:
        # A draft made ahead may be shorter than the budget that its round then has.
        assert all(len(text) == 12 for text in rig.run(wanted))


def test_all_verdicts_are_foreseen_where_all_are_drafted_for() -> None:
    rig = rig_ahead(ToyHybrid, TokenRule(), Ways(k=2, fan_out=40))
    rig.run(requests(0.8))
    assert set(rig.hits) == {None, True}
    stats = ahead_of(rig).stats()
    assert stats.looks.share == 1
    assert sum(looks.asked for looks in stats.by_accepted.values()) == stats.looks.asked
    assert sum(stats.recovered_ranks) + sum(stats.bonus_ranks) == stats.looks.asked
    assert sum(stats.bonus_ranks) == stats.bonus.asked


def test_hits_make_no_pass_of_their_own() -> None:
    """Between verdicts the draft model reads one trunk and as many nodes as a draft has."""
    model = CountingLM(ToyHybrid(seed=7, num_slots=SLOTS))
    drafter = ahead_drafter(model, Ways(k=2, fan_out=40, batch=1))
    rig = AheadRig(ToyHybrid(num_slots=SLOTS), drafter, k=2)
    rig.run([Request((1, 2), greedy(12))])
    # The first draft was made in turns. The last round has no room for one.
    assert ahead_of(rig).stats().num_prepared == len(rig.traces) - 1
    assert len(model.steps) == 2 + 3 * (len(rig.traces) - 1)


def test_only_the_rows_that_missed_are_drafted_for_now() -> None:
    model = CountingLM(ToyHybrid(seed=7, num_slots=SLOTS))
    drafter = ahead_drafter(model, Ways(k=2, fan_out=40, batch=2))
    seqs = [live(i, Request(PROMPTS[i], greedy(20))) for i in (0, 1)]
    for seq in seqs:
        drafter.open(seq.seq_id, seq.tokens)
    drafts = drafter.propose([row(seq.seq_id, seq.tokens, depth=2) for seq in seqs])
    for seq, draft in zip(seqs, drafts, strict=True):
        seq.draft = draft
        seq.budget = Budget(2)
    drafter.propose_after([ahead_row(seqs[0])])
    rows = [_after(seq.seq_id, seq.tokens, draft) for seq, draft in zip(seqs, drafts, strict=True)]
    before = len(model.steps)
    found = drafter.propose(rows)
    assert [draft.hit for draft in found] == [True, False]
    assert {step.seq_id for steps in model.steps[before:] for step in steps} == {1}


def _after(seq_id: int, tokens: list[int], draft: Draft) -> DraftRow:
    """The first token was refused."""
    token = next(t for t in range(11) if t != draft.tokens[0])
    outcome = Outcome(seq_id, draft, Verdict((), token))
    return row(seq_id, [*tokens, token], depth=2, last=outcome)


# Texts are covered above. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("num_slots", [60, 90, 140])
def test_where_memory_ends_less_is_foreseen(kind: Kind, num_slots: int) -> None:
    """Texts of 30 tokens and their drafts fit; branches do in part or not at all."""
    wanted = requests(0.8, 1)
    drafter = ahead_drafter(kind(seed=7, num_slots=num_slots), Ways(batch=1, fan_out=30))
    rig = AheadRig(kind(seed=0, num_slots=SLOTS), drafter)
    assert rig.run(wanted) == text_in_turns(kind, BlockRule(), wanted, 4)


@pytest.mark.parametrize("batch", [1, 2])
def test_where_rows_end_less_is_foreseen(batch: int) -> None:
    """The model was given rows for fewer sequences than come."""
    wanted = requests(0.8)
    model = CountingLM(ToyHybrid(seed=7, num_slots=SLOTS))
    rig = AheadRig(ToyHybrid(num_slots=SLOTS), ahead_drafter(model, Ways(batch=batch)))
    assert rig.run(wanted) == text_in_turns(ToyHybrid, BlockRule(), wanted, 4)
    # Prompts are read outside of that room; the longest has five tokens.
    assert max(sum(len(s.tokens) for s in steps) for steps in model.steps) <= max(6 * batch, 9)
    assert ahead_of(rig).stats().num_prepared > 0


def test_memory_is_given_back() -> None:
    model = TinyAttentionLM(seed=7, num_slots=SLOTS)
    free = model.state.num_free_tokens
    AheadRig(TinyAttentionLM(num_slots=SLOTS), ahead_drafter(model, Ways())).run(requests(0.8))
    assert model.state.num_free_tokens == free
    model.state.check()


def test_requests_whose_logits_are_shaped_are_drafted_for_in_turns() -> None:
    params = SamplingParams(max_tokens=20, repetition_penalty=1.5)
    wanted = [Request((1, 2, 3), params, shaper=LogitsProcessor(params, 3))]
    rig = rig_ahead(ToyHybrid, BlockRule(), Ways())
    text = rig.run(wanted)
    assert set(rig.hits) == {None}
    assert ahead_of(rig).stats().num_prepared == 0
    again = [replace(wanted[0], shaper=LogitsProcessor(params, 3))]
    assert text == text_in_turns(ToyHybrid, BlockRule(), again, 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fallback", ["ngram", "none", "auto"])
def test_other_fallbacks_write_the_same_greedy_text(fallback: str) -> None:
    wanted = requests(0.0)
    rig = rig_ahead(ToyHybrid, BlockRule(), replace(Ways(), fallback=fallback))
    assert rig.run(wanted) == text_in_turns(ToyHybrid, BlockRule(), wanted, 4)
    assert True in rig.hits


@pytest.mark.slow
def test_an_unmasked_fork_foresees_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refused token cannot come, and takes the best place of every list."""
    ways = Ways(k=4, fan_out=10, policy="uniform")
    wanted = requests(0.8)
    masked = rig_ahead(ToyHybrid, BlockRule(), ways)
    text = masked.run(wanted)
    monkeypatch.setattr("outrider.plugins.lanes.ahead.table.masked_positions", no_places)
    unmasked = rig_ahead(ToyHybrid, BlockRule(), ways)
    assert unmasked.run(wanted) == text
    found, less = ahead_of(masked).stats().looks.share, ahead_of(unmasked).stats().looks.share
    assert less < found - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_saguaro_drafts_are_the_same_ahead_and_in_turns(weight: float) -> None:
    change = Saguaro.planned(weight, budget=8, depth=3)
    wanted = requests(1.0)
    rig = rig_ahead(ToyHybrid, BlockRule(), Ways(k=3, fan_out=8), change)
    text = rig.run(wanted)
    assert text == text_in_turns(ToyHybrid, BlockRule(), wanted, 3, change)
    assert True in rig.hits


def test_rounds_that_are_not_ours_are_left_alone() -> None:
    """A draft that was not given here, a tree, an unknown sequence, another round."""
    drafter = ahead_drafter(ToyHybrid(seed=7, num_slots=SLOTS), Ways())
    seq = live(0, Request((1, 2, 3), greedy(9)))
    seq.budget = Budget(2)
    drafter.open(0, seq.tokens)
    drafter.propose_after([ahead_row(seq)])
    seq.draft = drafter.propose([row(0, seq.tokens, depth=2)])[0]
    whole = ahead_row(seq)
    drafter.propose_after([replace(whole, start=4)])
    drafter.propose_after([replace(whole, pending=9)])
    drafter.propose_after([replace(whole, seq_id=5)])
    drafter.propose_after([replace(whole, draft=Draft((1, 2), (-1, -1)))])
    drafter.propose_after([replace(whole, budget=Budget(0))])
    drafter.propose_after([])
    assert drafter.stats().num_prepared == 0
    drafter.propose_after([whole])
    assert drafter.stats().num_prepared == 1
    drafter.close(0)
