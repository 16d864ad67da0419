"""Rollback as a state machine, for every kind of memory."""

from __future__ import annotations

import pytest

from checks.runs import poisoned_rollback, rollback
from checks.state import HybridRollback, LlamaRollback, Rollback, ScriptedRollback, check_rollback


def test_any_interleaving_equals_feeding_only_what_was_kept() -> None:
    check_rollback(HybridRollback)


def test_the_same_holds_for_pages() -> None:
    rollback()


def test_the_same_holds_where_dead_space_is_poisoned() -> None:
    poisoned_rollback()


@pytest.mark.parametrize("machine", [ScriptedRollback, LlamaRollback])
def test_the_same_holds_for_the_models(machine: type[Rollback]) -> None:
    check_rollback(machine, percent=10)
