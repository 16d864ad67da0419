"""Server logs: the type of an error and its location, without its message, which may quote a
request."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_MOST_CAUSES = 8


# Progress of what is compiled at first use.
compilers = logging.getLogger("outrider.compilers")


def hear_compilers() -> None:
    """Log the compilers' progress at any log level: compiling takes a while."""
    compilers.setLevel(logging.INFO)


class Wordless(logging.Filter):
    """Log filter: reduces a record's error to its type, its causes and their locations in code."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = locations_of(record.exc_info[1])
        return True


def locations_of(error: BaseException) -> str:
    """The stack of an error and of its causes."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < _MOST_CAUSES:
        parts.append("".join(traceback.format_tb(cause.__traceback__)) + type(cause).__name__)
        unspoken = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or unspoken
    return "\nof\n".join(parts)


def tell_of_task(_loop: AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's handler of errors that no code awaits: asyncio's own one logs whole values."""
    words, error = context.get("message", "a task failed"), context.get("exception")
    logging.getLogger(__name__).error("%s", words, exc_info=error)
