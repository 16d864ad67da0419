"""The page pool: a ring of free pages, counted holders, and content that is findable once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from checks.memory import (
    check_forgetting,
    check_generations,
    check_holders,
    check_prefixes,
    check_remembering_again,
    check_requirements,
    check_ring,
    check_twins,
)
from outrider.cache.pages import PagePool
from outrider.core.errors import ContractError

CHECKS = (
    check_ring,
    check_prefixes,
    check_holders,
    check_generations,
    check_forgetting,
    check_twins,
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
