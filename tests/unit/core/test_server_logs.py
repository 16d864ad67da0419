"""Logs of a server name errors and their places, and nothing that they say."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Generator

import pytest

from outrider.core.errors import Wordless, tell_of_task

CANARY = "what the user wrote"


@pytest.fixture
def written() -> Generator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(Wordless())
    logging.root.addHandler(handler)
    yield text
    logging.root.removeHandler(handler)


def raise_of_another() -> None:
    try:
        raise KeyError(CANARY)
    except KeyError as error:
        raise ValueError(f"{CANARY} is wrong") from error


def test_an_error_is_told_by_kind_and_place(written: io.StringIO) -> None:
    try:
        raise_of_another()
    except ValueError:
        logging.getLogger("outrider.x").exception("a defect")
    text = written.getvalue()
    assert CANARY not in text.replace("CANARY", "")
    assert text.startswith("a defect\n")
    assert "ValueError\nof\n" in text
    assert text.rstrip().endswith("KeyError")
    assert text.count("in raise_of_another") == 2


def test_a_task_that_nobody_waited_for_tells_no_values(written: io.StringIO) -> None:
    async def fail() -> None:
        raise ValueError(CANARY)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(tell_of_task)
        task = asyncio.ensure_future(fail())
        await asyncio.sleep(0)
        del task
        await asyncio.sleep(0)

    asyncio.run(run())
    text = written.getvalue()
    assert "never retrieved" in text
    assert "ValueError" in text
    assert CANARY not in text
