"""A drafter that is a function: the same text as without it, whatever the function does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from outrider import LLM
from outrider.core.errors import ConfigError
from outrider.core.options import EngineOptions
from outrider.core.plugins import KINDS

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("no_plugin_stays")]
PROMPT = "x = 1\nx = 1\nx ="
SAMPLED = {"temperature": 1.0, "seed": 5, "sampler": "coupled"}


def follow(ids: list[int], most: int) -> list[int]:
    """What came after the last occurrence of the last token, however long."""
    last = ids[-1]
    at = next((i for i in range(len(ids) - 2, -1, -1) if ids[i] == last), None)
    return [] if at is None else ids[at + 1 :] * most


def careless(ids: list[int], most: int) -> Iterable[int]:
    """NumPy's integers, one by one, from a list that it spoils."""
    guess = np.array(follow(ids, most))
    ids.clear()
    yield from guess


def endless(ids: list[int], most: int) -> Iterator[int]:
    while most:
        yield ids[-1]


def beyond(ids: list[int], most: int) -> list[int]:
    return [10**6] * min(most, len(ids))


def silent(ids: list[int], most: int) -> None:
    del ids[most:]


def broken(ids: list[int], most: int) -> list[int]:
    raise ZeroDivisionError(ids[-1] / most)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(drafter="none", context=256) as llm:
        yield llm


def texts(llm: LLM) -> list[tuple[int, ...]]:
    return [
        result.token_ids
        for asked in ({}, SAMPLED)
        for result in llm.generate([PROMPT, "def f(x):"], max_tokens=24, **asked)  # pyright: ignore[reportArgumentType]
    ]


@pytest.mark.parametrize("function", [follow, careless, endless, beyond, silent, broken])
def test_a_function_drafts_and_changes_no_text(function: Any, plain: LLM) -> None:
    with LLM(drafter=function, k=4, context=256) as llm:
        assert llm.drafter == function.__name__
        assert texts(llm) == texts(plain)
        (result,) = llm.generate(PROMPT, max_tokens=24)
        assert result.drafter_failed == (function in (beyond, broken))
        if function in (follow, careless):
            assert result.stats.num_accepted > 4
            assert result.stats.num_drafted > 0


def test_a_request_of_any_engine_may_name_it() -> None:
    with LLM(drafter=follow, k=4, context=256) as llm:
        assert llm.drafters[0] == "follow"
        assert llm.generate(PROMPT, max_tokens=8, drafter="ngram")[0].stats.drafter == "ngram"
    with LLM(drafter="ngram", k=4, context=256) as llm:
        (result,) = llm.generate(PROMPT, max_tokens=24, drafter="follow")
        assert (result.stats.drafter, result.stats.num_accepted > 4) == ("follow", True)


NAMELESS: list[Callable[[list[int], int], list[int]]] = [
    lambda ids, most: ids[:most],
    partial(follow),
]


@pytest.mark.parametrize("function", NAMELESS)
def test_a_function_without_a_name_of_its_own(function: Any) -> None:
    with LLM(drafter=function, context=128) as llm:
        assert llm.drafter == ("function" if "lambda" in repr(function) else "partial")


def test_a_built_in_name_is_not_taken() -> None:
    def suffix(ids: list[int], most: int) -> list[int]:
        return ids[:most]

    options: EngineOptions = {"drafter": suffix, "context": 128}
    with LLM(**options) as llm:
        assert llm.drafter == "function"
    assert "suffix" in KINDS
    with pytest.raises(ConfigError, match="drafter"):
        LLM(drafter=3)  # pyright: ignore[reportArgumentType]
