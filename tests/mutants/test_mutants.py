"""Every planted bug must be caught, by the same checks that the ordinary tests run.

A mutant is one line of shipped code, changed. Its `caught_by` names the check that has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mutants import (
    ahead,
    captured,
    drafters,
    fourteen,
    grammars,
    lookups,
    memory,
    recurrent,
    rng,
    rounds,
    rules,
    sched,
)
from mutants.planting import Mutant, planted
from outrider.core.errors import OutriderError

pytestmark = pytest.mark.wide

MUTANTS = (
    *fourteen.MUTANTS,
    *rules.MUTANTS,
    *rng.MUTANTS,
    *memory.MUTANTS,
    *recurrent.MUTANTS,
    *sched.MUTANTS,
    *rounds.MUTANTS,
    *drafters.MUTANTS,
    *lookups.MUTANTS,
    *ahead.MUTANTS,
    *captured.MUTANTS,
    *grammars.MUTANTS,
)
CHECKS = dict.fromkeys(mutant.caught_by for mutant in MUTANTS)
TESTS = Path(__file__).parents[1]
# Checks of seconds that a test has for itself, so that they need not run here once more.
PASSES_IN = {
    "check_ahead_is_exact": "distribution/test_ahead_distribution.py",
    "check_saguaro_is_exact": "distribution/test_ahead_distribution.py",
    "check_ahead_is_the_text_in_turns": "engine/test_ahead.py",
    "check_batched_token": "distribution/test_batched.py",
    "check_batched_block": "distribution/test_batched.py",
    "check_penalised_engine_distribution": "distribution/test_engine_distribution.py",
    "check_grammar_distribution": "distribution/test_grammar_distribution.py",
    "check_each_emitted_token_has_its_own_race": "distribution/test_coupled.py",
    "check_keys_do_not_meet": "distribution/test_rng.py",
    "check_no_number_is_used_twice": "engine/test_invariance.py",
    "check_admission": "engine/test_admission.py",
    "check_rows_in_turn": "engine/test_graph_rows.py",
    "check_memory_of_host_rounds": "engine/test_graph_rows.py",
    "check_numbers_of_a_request": "engine/test_graph_rows.py",
    "check_cancelling": "engine/test_admission.py",
    "histories": "state/test_machine.py",
    "rollback": "state/test_rollback.py",
    "poisoned_rollback": "state/test_rollback.py",
}
# How a check may fail under a mutant: its own assertion, or the broken code falling over.
FAILURES = (
    AssertionError,
    LookupError,
    RuntimeError,
    ValueError,
    OutriderError,
    pytest.fail.Exception,
)


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check.__name__ not in PASSES_IN],
    ids=lambda check: check.__name__,
)
def test_the_check_passes_on_what_is_shipped(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("name", "file"), PASSES_IN.items())
def test_the_check_has_a_test_for_itself(name: str, file: str) -> None:
    assert name in {check.__name__ for check in CHECKS}
    assert f"    {name}(" in (TESTS / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    with planted(mutant) as num_changed:
        assert num_changed == 1
        assert fails(mutant.caught_by), f"{mutant.caught_by.__name__} passes with it"


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except FAILURES:
        return True
    return False


def test_a_mutant_is_gone_after_its_test() -> None:
    mutant = MUTANTS[0]
    with planted(mutant):
        assert fails(mutant.caught_by)
    mutant.caught_by()


def test_a_mutant_that_no_longer_fits_the_source_is_an_error() -> None:
    stale = Mutant("stale", "outrider.verify.exact", "no such line", "", lambda: None)
    with pytest.raises(AssertionError, match="must occur once"), planted(stale):
        pass


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
