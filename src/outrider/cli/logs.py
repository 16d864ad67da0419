"""Where events of the program go: stderr, as lines for people or as JSON objects for programs.

A JSON line has `time` (UTC, ISO 8601), `level`, `logger` and `message`, and `error` with the
traceback where an event carries one.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys

from outrider.core.env import variables_with
from outrider.core.foreign import VARIABLES_OF_OTHERS, notes_on
from outrider.core.settings import ProgramConfig


def start_logging(program: ProgramConfig) -> None:
    """Log from `log_level` on, unless the caller's program logs already."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("outrider: %(message)s")
    handler.setFormatter(JsonLines() if program.log_format == "json" else text)
    logging.basicConfig(level=program.log_level.upper(), handlers=[handler])
    if sys.stderr.isatty():
        # The first run compiles, which takes a while; whoever waits is told.
        logging.getLogger("outrider.kernels.native.build").setLevel(logging.INFO)
    for note in notes_on(variables_with(VARIABLES_OF_OTHERS)):
        logging.getLogger(__name__).warning(note)


class JsonLines(logging.Formatter):
    """One object an event, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        event = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["error"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)
