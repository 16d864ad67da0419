"""Page accounts: what is shared, what is free, and what may still be found by its content."""

from __future__ import annotations

import pytest

from outrider.cache.pages import PagePool
from outrider.core.errors import CapacityError

SIZE = 2


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """The pages of a sequence that committed `tokens`, sharing what the pool still knows."""
    pages = pool.find_prefix(tokens)
    for page in pages:
        pool.share(page)
    for index in range(len(pages), len(tokens) // SIZE):
        pages.append(pool.take())
        pool.remember(pages, tokens, index)
    return pages


def check_ring() -> None:
    """Pages are taken in the order in which they became free; of one sequence, the last first."""
    pool = PagePool(4, SIZE)
    first, second = [pool.take(), pool.take()], [pool.take()]
    assert (first, second) == ([0, 1], [2])
    pool.release(second)
    pool.release(first)
    assert [pool.take() for _ in range(4)] == [3, 2, 1, 0]
    with pytest.raises(CapacityError):
        pool.take()
    pool.check([[0, 1, 2, 3]])


def check_prefixes() -> None:
    """Full pages are found by content from the start on, used or free, until taken again."""
    pool = PagePool(3, SIZE)
    held = fill(pool, [1, 2, 3, 4])
    assert pool.find_prefix([1, 2, 3, 4, 5]) == held
    assert pool.find_prefix([1, 2, 3]) == held[:1]
    assert pool.find_prefix([3, 4]) == []
    assert pool.find_prefix([1]) == []
    pool.release(held)
    assert pool.num_free == 3
    assert fill(pool, [1, 2, 3, 4]) == held
    pool.check([held])
    assert pool.num_free == 1


def check_holders() -> None:
    """A shared page stays taken until its last holder lets go."""
    pool = PagePool(3, SIZE)
    first = fill(pool, [1, 2, 3, 4])
    second = fill(pool, [1, 2, 5, 6])
    assert (first, second) == ([0, 1], [0, 2])
    assert pool.num_free == 0
    pool.release(first)
    pool.check([second])
    assert pool.num_free == 1
    pool.release(second)
    pool.check([])
    assert pool.num_free == 3


def check_generations() -> None:
    """A page found by its predecessor is not found by what that predecessor holds later.

    Pages 0 and 1 hold [1 2][3 4]. Page 0 is freed and filled anew with [9 9]; page 1 keeps its
    content and its entry, which must not pass for the continuation [9 9][3 4].
    """
    pool = PagePool(2, SIZE)
    fill(pool, [1, 2, 3, 4])
    pool.release([0])
    assert fill(pool, [9, 9]) == [0]
    assert pool.find_prefix([9, 9, 3, 4]) == [0]
    assert pool.find_prefix([1, 2, 3, 4]) == []


def check_forgetting() -> None:
    """A page that is taken again no longer answers to its old content."""
    pool = PagePool(1, SIZE)
    pool.release(fill(pool, [1, 2]))
    assert pool.find_prefix([1, 2]) == [0]
    assert pool.take() == 0
    assert pool.find_prefix([1, 2]) == []
    pool.release([0])
    assert pool.find_prefix([1, 2]) == []


def check_twins() -> None:
    """Two pages with the same content: one answers, and freeing either breaks nothing."""
    pool = PagePool(4, SIZE)
    tokens = [1, 2, 3, 4]
    left, right = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for pages in (left, right):
        for index in range(2):
            pool.remember(pages, tokens, index)
    assert pool.find_prefix(tokens) == left
    pool.release(left)
    assert [pool.take(), pool.take()] == left[::-1]
    assert set(pool.find_prefix(tokens)).isdisjoint(left)
    pool.check([left, right])


def check_remembering_again() -> None:
    """A page keeps the name it has while it is held; being told of it again changes nothing."""
    pool = PagePool(2, SIZE)
    pages = fill(pool, [1, 2])
    pool.remember(pages, [7, 7], 0)
    assert pool.find_prefix([7, 7]) == []
    assert pool.find_prefix([1, 2]) == pages


def check_requirements() -> None:
    pool = PagePool(2, SIZE)
    pool.require(2)
    with pytest.raises(CapacityError, match="3 more pages"):
        pool.require(3)
    assert pool.num_free == 2


def check_pages() -> None:
    check_ring()
    check_prefixes()
    check_holders()
    check_generations()
    check_forgetting()
    check_twins()
    check_remembering_again()
    check_requirements()
