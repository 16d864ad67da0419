"""The `outrider` command: it prints help, or parses the command line, runs a verb and reports
errors.

Exit codes: 0 done, 1 a check failed or a defect of outrider, 2 bad input, 3 bad files or machine,
130 interrupted. A user's error is one block on stderr; only --debug adds a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from io import StringIO, TextIOWrapper
from types import TracebackType
from typing import NoReturn, TextIO

from outrider import __version__
from outrider.cli.gate import gate, gated
from outrider.core.env import outrider_variables
from outrider.core.errors import MachineError, OutriderError, out_of_memory

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    given = sys.argv[1:] if arguments is None else list(arguments)
    sys.excepthook = _Defect(debug=_wants_debug(given))
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Until the process ends: uncaught errors are reported after `run`.
    sys.stdout, sys.stderr = gated(sys.stdout), gated(sys.stderr)
    sys.exit(run(given))


class _Nowhere(StringIO):
    def write(self, text: str) -> int:
        return len(text)


class _ClosedOutput(StringIO):
    """Standard output that was closed at the start, as by `>&-`: a write is an error."""

    def write(self, text: str) -> int:
        raise MachineError(
            f"standard output is closed, so {len(text)} characters cannot be written.",
            hint="leave it open, or send it to a file: > FILE, or > /dev/null",
        )


def _open_closed() -> None:
    """Replace closed standard streams: stdin is empty, stderr ignored, stdout an error."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # This takes the lowest free descriptor, so that no other file gets its number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    given: tuple[TextIO | None, TextIO | None, TextIO | None] = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = StringIO() if given[0] is None else given[0]
    sys.stdout = _ClosedOutput() if given[1] is None else given[1]
    sys.stderr = _Nowhere() if given[2] is None else given[2]


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit code."""
    with gate():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = _call(arguments)
        sys.stdout.flush()
    except OutriderError as error:
        if _wants_debug(arguments):
            traceback.print_exc()
        report(str(error), error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001 - raised again unless disk or memory is exhausted
        return _explained(error, debug=_wants_debug(arguments))
    return code


def _explained(error: Exception, *, debug: bool) -> int:
    """Report that disk or memory is exhausted; return the exit code. Raises other errors."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
        _drop_stdout()
        report(f"the output cannot be written: {error.strerror}.", "free some space")
        return 3
    ended = out_of_memory(error, "working")
    if ended is None:
        raise error
    if debug:
        traceback.print_exception(error)
    report(str(ended), ended.hint)
    return ended.exit_code


def _drop_stdout() -> None:
    """Redirect stdout, whose reader is gone, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(message: str, hint: str | None) -> None:
    """Print an error for the user."""
    # Imported here: help does not need it.
    from outrider.cli.output import say

    sys.stdout.flush()
    say(f"error: {message}")
    if hint:
        say(f"  try: {hint}")


def _call(words: Sequence[str]) -> int:
    if words and words[0] == "--version":
        print(f"outrider {__version__}")
        return 0
    # Imported here: the version needs no verbs.
    from outrider.cli.options import ASKS, STDIN_FLAG
    from outrider.cli.page import front_page, help_page, search_page
    from outrider.cli.verbs import flags_read, verb_named

    if not words or words[0] in ASKS:
        print(search_page(words[1], None, []) if len(words) > 1 else front_page())
        return 0
    verb, num_words, path, note = verb_named(words)
    rest = list(words[num_words:])
    num_flags = rest.index("--") if "--" in rest else len(rest)
    flags = [STDIN_FLAG if word == "-" else word for word in rest[:num_flags]]
    asked = next((index for index, word in enumerate(flags) if word in ASKS), None)
    if verb.parts or asked is not None:
        print(help_page(verb, path, flags[asked or 0 :]))
        return 0
    from outrider.cli.call import run_verb
    from outrider.cli.output import say

    rest[:num_flags], more = flags_read(verb, flags)
    for text in filter(None, (note, more)):
        say(f"note: {text}")
    return run_verb(verb, path, rest)


def _wants_debug(arguments: Sequence[str]) -> bool:
    if "--debug" in arguments:
        return True
    return outrider_variables().get("OUTRIDER_DEBUG", "").lower() in ("1", "true", "yes", "on")


class _Defect:
    """The `sys.excepthook` for errors that no user should be able to cause."""

    def __init__(self, *, debug: bool) -> None:
        self._debug = debug

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        if self._debug:
            sys.__excepthook__(kind, error, trace)
        report(
            f"a defect in outrider: {kind.__name__}: {error}",
            "the same command with --debug shows where; please report it",
        )
