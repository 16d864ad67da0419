"""Rollback as a state machine, for every kind of memory."""

from __future__ import annotations

import pytest

from checks.state import (
    HybridRollback,
    LlamaRollback,
    PagedRollback,
    PoisonedRollback,
    Rollback,
    ScriptedRollback,
    check_rollback,
)


@pytest.mark.parametrize("machine", [HybridRollback, PagedRollback, PoisonedRollback])
def test_any_interleaving_equals_feeding_only_what_was_kept(machine: type[Rollback]) -> None:
    check_rollback(machine)


@pytest.mark.parametrize("machine", [ScriptedRollback, LlamaRollback])
def test_the_same_holds_for_the_models(machine: type[Rollback]) -> None:
    check_rollback(machine, percent=10)
