"""The page pool: a ring of free pages, counted holders, and content that is findable once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from checks.memory import (
    check_forgetting,
    check_generations,
    check_holders,
    check_opening,
    check_poorer_twins,
    check_prefixes,
    check_remembering_again,
    check_requirements,
    check_ring,
    check_rows,
    check_twins,
)
from outrider.cache.pages import PagePool
from outrider.cache.pool import OpenPages
from outrider.core.errors import ContractError

CHECKS = (
    check_ring,
    check_rows,
    check_opening,
    check_prefixes,
    check_holders,
    check_generations,
    check_forgetting,
    check_twins,
    check_poorer_twins,
    check_remembering_again,
    check_requirements,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pool(check: Callable[[], None]) -> None:
    check()


def test_the_check_notices_a_leak_and_a_page_counted_twice() -> None:
    pool = PagePool(2, 4)
    page = pool.take()
    pool.check([[page]])
    for wrong in ([], [[page], [page]], [[1]]):
        with pytest.raises(ContractError):
            pool.check(wrong)


@pytest.mark.parametrize("num_pages", [1, 2, 7, 16, 23])
def test_the_longest_run_of_open_pages_is_known(num_pages: int) -> None:
    rng, pages, held = random.Random(num_pages), OpenPages(num_pages), set(range(num_pages))
    for _ in range(200):
        page = rng.randrange(num_pages)
        (pages.remove if page in held else pages.add)(page)
        held ^= {page}
        runs = [
            range(start, stop)
            for start in range(num_pages)
            for stop in range(start, num_pages + 1)
            if held.issuperset(range(start, stop))
        ]
        length = max(map(len, runs))
        assert len(pages) == len(held)
        assert (page in pages) == (page in held)
        assert len(pages.longest) == length
        assert not length or pages.longest == next(run for run in runs if len(run) == length)
