"""Checks with everything chosen: fixed cases, models and drafters, nothing to pass in."""

from __future__ import annotations

from functools import partial

from checks.drafters import GREEDY, VOCAB, check_memory
from checks.engine import PROMPT, check_greedy
from checks.engine_law import (
    FILTERS,
    check_drafting_law,
    check_hybrid_engine_law,
    check_reported_law,
)
from checks.law import check_acceptance, check_greedy_walk, check_law_cases
from checks.state import PagedRollback, PoisonedRollback, check_rollback
from doubles.drafters import random_trees
from doubles.rig import Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.engine.stepwise import StepwiseLM
from outrider.verify.match import MatchRule
from outrider.verify.token import TokenRule


def exact_law() -> None:
    check_law_cases(TokenRule())


def acceptance() -> None:
    check_acceptance(TokenRule())


def match_law() -> None:
    check_law_cases(MatchRule())


def greedy_walks() -> None:
    check_greedy_walk(TokenRule())
    check_greedy_walk(MatchRule())


def engine_law() -> None:
    for params in FILTERS:
        check_hybrid_engine_law(TokenRule(), "model", params)


def reported_law() -> None:
    for params in FILTERS:
        check_reported_law(lambda: model_drafter(ToyHybrid(vocab_size=3, seed=7)), params)


def drafting_law() -> None:
    for params in FILTERS:
        check_drafting_law(params)


def drafter_memory() -> None:
    model = partial(ToyHybrid, vocab_size=VOCAB, seed=5, num_slots=2048)
    check_memory(lambda: model_drafter(model(), chunk=3), GREEDY)


def rollback() -> None:
    check_rollback(PagedRollback, percent=15)


def poisoned_rollback() -> None:
    check_rollback(PoisonedRollback, percent=5)


def greedy_batch() -> None:
    prompts = [PROMPT, (0,), (4, 4, 4), (2, 1) * 5]
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), random_trees(VOCAB), k=3, chunk=4)
    check_greedy(rig, TinyAttentionLM, prompts, 9)


def stepwise_batch() -> None:
    target = StepwiseLM(TinyAttentionLM(vocab_size=VOCAB))
    rig = Rig(target, model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5)), k=3, chunk=4)
    check_greedy(rig, TinyAttentionLM, [PROMPT, (0,), (4, 4, 4)], 9)
