"""Checks with everything chosen: fixed cases, models and drafters, nothing to pass in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from checks.distribution import (
    CASES,
    TreeCase,
    best_acceptance,
    check_acceptance,
    check_distribution_cases,
    check_greedy_walk,
    check_tree_distribution,
    num_accepted,
)
from checks.engine import PROMPT, check_greedy
from checks.engine_distribution import (
    FILTERS,
    check_drafting_distribution,
    check_hybrid_engine_distribution,
    check_reported_distribution,
    distribution_drafters,
)
from checks.state import PagedRollback, PoisonedRollback, check_rollback
from doubles.drafters import random_trees
from doubles.own_target import Poisoned, self_drafter
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.rng import draw_for, race_node
from outrider.engine.round import StepwiseLM
from outrider.testing import GREEDY, VOCAB, check_memory, row
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule
from outrider.verify.rules import EXACT, rule_for


def self_drafting() -> None:
    """All that a copy drafted in the target's memory is dead space before the target's pass."""
    target = TinyAttentionLM(vocab_size=VOCAB)
    drafter = Poisoned(target, self_drafter(target))
    rig = Rig(target, drafter, TokenRule(), k=3, chunk=3)
    check_greedy(rig, TinyAttentionLM, [PROMPT, (4,), (0, 1, 0)], 9)


def self_drafts_at_once() -> None:
    """From the first round on, for before it the target reads the rest of the prompt; what the
    target itself would write is always kept."""
    target = TinyAttentionLM(vocab_size=VOCAB)
    rig = Rig(target, self_drafter(target, seed=0), k=3)
    rig.outputs([PROMPT, (0,), PROMPT[1:]], SamplingParams(max_tokens=16))
    rounds = [trace for trace in rig.traces if trace.num_emitted]
    assert [trace.num_accepted for trace in rounds] == [3] * 12
    assert not any(trace.num_prompt_tokens for trace in rounds)


def half_read_text() -> None:
    """No copy drafts for a text that its target has not read to the pending token."""
    target = TinyAttentionLM(vocab_size=VOCAB)
    drafter = self_drafter(target)
    target.state.open(0, PROMPT[:-1])
    drafter.open(0, PROMPT)
    target.step([StepRow.chain(0, PROMPT[:3])], DraftNeeds())
    target.state.commit({0: range(3)})
    assert not drafter.propose([row(0, PROMPT, depth=3)])[0].tokens
    assert len(drafter.propose([row(0, PROMPT[:4], depth=3)])[0]) == 3
    assert (target.state.length(0), target.state.num_staged(0)) == (3, 0)


def exact_distribution() -> None:
    check_distribution_cases(TokenRule())


def acceptance() -> None:
    check_acceptance(TokenRule())


def match_distribution() -> None:
    check_distribution_cases(MatchRule())


def block_distribution() -> None:
    check_distribution_cases(BlockRule())


def block_acceptance() -> None:
    """No exact rule accepts more of these chains."""
    for case in (CASES[0], CASES[6], TreeCase((-1, 0), ((1, 2),) * 3, ((2, 1),) * 2)):
        assert abs(num_accepted(BlockRule(), case) - best_acceptance(case)) <= 1e-9


def table_distribution() -> None:
    """Every rule that ships as exact."""
    for name in EXACT:
        check_distribution_cases(rule_for(name))


def coupled_distribution() -> None:
    """Of drafts that race along."""
    check_tree_distribution(CoupledRule(), replace(CASES[0], races=True))
    check_tree_distribution(CoupledRule(), replace(CASES[6], races=True))


def greedy_walks() -> None:
    for rule in (TokenRule(), BlockRule(), MatchRule(), CoupledRule()):
        check_greedy_walk(rule)


def engine_distribution() -> None:
    """Under the default rule."""
    for params in FILTERS:
        check_hybrid_engine_distribution(BlockRule(), distribution_drafters()["model"](), params)


def racing_along() -> None:
    """A drafter with the target's own model, drawing with its numbers, is always right."""
    drafter = model_drafter(ToyHybrid(vocab_size=VOCAB), draw=race_node)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, CoupledRule(), k=3)
    rig.run([Request(PROMPT, SamplingParams(temperature=4.0, max_tokens=40))])
    assert all(trace.num_accepted == trace.num_drafted == 3 for trace in rig.traces)


def rules_of_requests() -> None:
    """A request that chooses a rule has, drafts and all, the text of an engine with that rule."""
    params = SamplingParams(temperature=3.0, max_tokens=24, seed=5)
    names = list(EXACT)
    own = [_ruled(name).outputs([PROMPT], params) for name in names]
    assert len({str(texts) for texts in own}) == len(names)
    for engine in names:
        each = [Request(PROMPT, replace(params, sampler=name)) for name in names]
        rig = _ruled(engine)
        assert [[text] for text in rig.run(each)] == own


def _ruled(name: str) -> Rig:
    drafter = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=7), draw=draw_for(name))
    return Rig(ToyHybrid(vocab_size=VOCAB), drafter, rule_for(name), k=3)


def reported_distribution() -> None:
    for params in FILTERS:
        check_reported_distribution(lambda: model_drafter(ToyHybrid(vocab_size=3, seed=7)), params)


def drafting_distribution() -> None:
    for params in FILTERS:
        check_drafting_distribution(params)


def drafter_memory() -> None:
    model = partial(ToyHybrid, vocab_size=VOCAB, seed=5, num_slots=2048)
    check_memory(lambda: model_drafter(model(), chunk=3), GREEDY)


def rollback() -> None:
    check_rollback(PagedRollback, percent=15)


def poisoned_rollback() -> None:
    check_rollback(PoisonedRollback, percent=10)


def greedy_batch() -> None:
    prompts = [PROMPT, (0,), (4, 4, 4), (2, 1) * 5]
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), random_trees(VOCAB), k=3, chunk=4)
    check_greedy(rig, TinyAttentionLM, prompts, 9)


def stepwise_batch() -> None:
    target = StepwiseLM(TinyAttentionLM(vocab_size=VOCAB))
    rig = Rig(target, model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5)), k=3, chunk=4)
    check_greedy(rig, TinyAttentionLM, [PROMPT, (0,), (4, 4, 4)], 9)
