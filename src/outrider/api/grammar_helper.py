"""Helper process that reads grammars for a trial; it may be killed at any time.

The library counts no steps of some kinds of reading, and nothing stops it within a process: thirty
thousand optional letters take half a minute. This script, which imports nothing of the package,
limits its own memory and processor time, and answers one JSON line with one JSON line.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_BYTES = 1 << 30


def _answer() -> None:
    sys.stdout.write("{}\n")
    sys.stdout.flush()


def main() -> None:
    # It ends with its input; Ctrl-C is for the calling process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The cost of reading hardly depends on the vocabulary: this one has a token per byte.
    vocabulary = LLTokenizer("byte")
    # Some systems refuse this limit.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _answer()
    for line in sys.stdin:
        request = json.loads(line)
        # Its signal ends the process immediately, even in the midst of native code.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        limits = LLParserLimits(**request["limits"])
        matcher = LLMatcher(vocabulary, request["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer()


if __name__ == "__main__":
    main()
