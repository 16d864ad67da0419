"""Lanes share one arena: its accounts are behind a lock, and its passes and copies are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from checks.threads import check_lanes
from doubles.stamped import StampedArena
from outrider.cache.pages import PagePool
from outrider.core.errors import ContractError
from outrider.core.protocols import StepRow

TOUCHING = ("find_prefix", "share", "require", "take", "release", "remember", "check")


def small_arena() -> StampedArena:
    """So small that pages change hands all the time."""
    return StampedArena(num_slots=20, page_size=1)


@pytest.mark.slow
def test_lanes_at_once_find_their_own_content_and_lose_no_page() -> None:
    for _ in range(3):
        check_lanes(small_arena())


@pytest.mark.slow
def test_without_the_lock_they_do_not() -> None:
    """So the test above tests something. One try in two goes wrong."""
    for _ in range(24):
        arena = small_arena()
        arena.state._lock = nullcontext()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        try:
            check_lanes(arena)
        except (AssertionError, LookupError, ContractError):
            return
    pytest.fail("the lock is not needed")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[StampedArena, list[str]]:
    """An arena that asserts its lock at every touch of the accounts, and the names of those."""
    arena, touched = StampedArena(num_slots=32, page_size=2), list[str]()
    store: Any = arena.state

    def under_lock(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(pool: PagePool, *args: Any) -> Any:
            # Engines of other tests may end meanwhile.
            if pool is store._pool:
                assert store._lock._lock._is_owned(), f"{name} outside of the lock"
                touched.append(name)
            return call(pool, *args)

        return called

    for name in TOUCHING:
        monkeypatch.setattr(PagePool, name, under_lock(name, getattr(PagePool, name)))
    return arena, touched


def test_every_touch_of_the_accounts_is_under_the_lock(
    watched: tuple[StampedArena, list[str]],
) -> None:
    arena, touched = watched
    arena.open(0, ())
    arena.step([StepRow.chain(0, [1, 2, 3, 4, 5])])
    arena.commit({0: range(5)})
    arena.open(1, [1, 2, 3, 4])
    arena.fork(0, 2)
    for seq_id in (0, 1, 2):
        arena.close(seq_id)
    arena.state.check()
    assert set(touched) == set(TOUCHING)


def test_rows_are_copied_outside_of_it(
    watched: tuple[StampedArena, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, _ = watched
    store: Any = arena.state
    copied: list[int] = []
    copy = store.copy_slots

    def at_copy(source: list[int], target: list[int]) -> None:
        assert not store._lock._lock._is_owned()
        copied.append(len(source))
        copy(source, target)

    monkeypatch.setattr(store, "copy_slots", at_copy)
    arena.open(0, ())
    arena.step([StepRow(0, (1, 2, 3, 4), (-1, -1, 1, 2))])
    arena.commit({0: (1, 2, 3)})
    arena.fork(0, 1)
    assert copied == [3, 1]
    for seq_id in (0, 1):
        arena.check(seq_id)
    assert not store._lock._lock._is_owned()
