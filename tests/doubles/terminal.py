"""A stream that says it is a terminal and keeps what it shows."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from io import StringIO


class Terminal(StringIO):
    """Both streams at once, within `watched`."""

    def isatty(self) -> bool:
        return True

    @contextmanager
    def watched(self) -> Generator[None]:
        before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
