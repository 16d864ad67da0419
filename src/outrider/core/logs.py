"""Logs of a server: what kind of error came and where, without its words, which may quote a
request."""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import Any

_MOST_CAUSES = 8


# Loggers of what is compiled at the first use.
COMPILERS = ("outrider.kernels.native.build", "outrider.plugins.gpu.kernels.trial")


def hear_compilers() -> None:
    """Log their progress, whatever else is logged: compiling takes a while."""
    for name in COMPILERS:
        logging.getLogger(name).setLevel(logging.INFO)


class Wordless(logging.Filter):
    """On a handler: leaves of each record's error its kind, its causes and their places in code."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = places_of(record.exc_info[1])
        return True


def places_of(error: BaseException) -> str:
    """The stack of an error and of those that it came of."""
    told: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(told) < _MOST_CAUSES:
        told.append("".join(traceback.format_tb(cause.__traceback__)) + type(cause).__name__)
        unspoken = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or unspoken
    return "\nof\n".join(told)


def tell_of_task(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's handler of what nobody waited for: asyncio's own one shows whole values."""
    words, error = context.get("message", "a task failed"), context.get("exception")
    logging.getLogger(__name__).error("%s", words, exc_info=error)
