"""The `outrider` command: answers help at once, otherwise parses, runs a verb, reports errors.

Exit codes: 0 done, 1 a check failed or a defect of ours, 2 bad input, 3 bad files or machine, 130
interrupted. A user's error is one block on stderr, never a traceback unless --debug asks for it.

Words on the command line that mean nothing, explained with the nearest that would.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from types import TracebackType
from typing import NoReturn

from outrider import __version__
from outrider.cli.gate import gate, gated
from outrider.cli.page import front_page, verb_page
from outrider.cli.verb import Verb
from outrider.cli.verbs import VERBS, find, names
from outrider.core.env import outrider_variables
from outrider.core.errors import ConfigError, OutriderError, nearest, out_of_memory
from outrider.core.foreign import hint_for

# How the parser says that words are left over.
_SURPLUS = re.compile(r"^Unused Tokens: \[([^,\]]*)")


def unknown_verb(word: str, verbs: Sequence[Verb], path: Sequence[str]) -> ConfigError:
    """`path` are the words before it."""
    page = f"`{' '.join(['outrider', *path])} --help` lists the verbs"
    return ConfigError(f"unknown verb {word!r}.", hint=nearest(word, names(verbs), page))


def bad_words(message: str, verb: Verb, path: Sequence[str], words: Sequence[str]) -> ConfigError:
    """An unknown flag if there is one, since the parser may stumble over its value first."""
    page = f"`outrider {' '.join(path)} --help` lists the options"
    known = verb.flags()
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.split("=", 1)[0]
        theirs = hint_for(flag)
        if flag not in known and (flag.startswith("--") or theirs):
            hint = theirs or nearest(flag, known, page)
            return ConfigError(f"unknown option {flag!r}.", hint=hint)
    surplus = _SURPLUS.search(message)
    if surplus:
        message = f"{surplus[1]}: one word too many."
    return ConfigError(message, hint=page)


INTERRUPTED = 130
PIPE_CLOSED = 141
# The parser reads a lone hyphen as a nameless option; this is its name.
STDIN_FLAG = "--stdin"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    given = sys.argv[1:] if arguments is None else list(arguments)
    sys.excepthook = _Defect(debug=_wants_debug(given))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    # For good: what nobody caught is reported when `run` is over.
    sys.stdout, sys.stderr = gated(sys.stdout), gated(sys.stderr)
    sys.exit(run(given))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
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
    except Exception as error:  # noqa: BLE001 - raised again unless a disk or a memory ended
        return _explained(error)
    return code


def _explained(error: Exception) -> int:
    """Report what a disk or a memory that ended means; the exit code. Others are raised again."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
        _drop_stdout()
        report(f"the output cannot be written: {error.strerror}.", "free some space")
        return 3
    ended = out_of_memory(error, "working")
    if ended is None:
        raise error
    report(str(ended), ended.hint)
    return ended.exit_code


def _drop_stdout() -> None:
    """Nobody can read it any more; keep the interpreter from flushing into it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(message: str, hint: str | None) -> None:
    """The one form in which errors reach a user."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"  try: {hint}", file=sys.stderr)


def _call(words: Sequence[str]) -> int:
    if not words or words[0] in ("--help", "-h"):
        print(front_page())
        return 0
    if words[0] == "--version":
        print(f"outrider {__version__}")
        return 0
    verb, path = _find_verb(words)
    rest = list(words[len(path) :])
    num_flags = rest.index("--") if "--" in rest else len(rest)
    flags = [STDIN_FLAG if word == "-" else word for word in rest[:num_flags]]
    rest[:num_flags] = flags
    if verb.parts or "--help" in flags or "-h" in flags:
        print(verb_page(verb, path))
        return 0
    return _parse_and_run(verb, path, rest)


def _find_verb(words: Sequence[str]) -> tuple[Verb, list[str]]:
    """The verb, and the words that name it. Raises ConfigError if there is none."""
    verb = find(VERBS, words[0])
    if verb is None:
        raise unknown_verb(words[0], VERBS, [])
    if not verb.parts or len(words) == 1 or words[1] in ("--help", "-h"):
        return verb, [words[0]]
    part = find(verb.parts, words[1])
    if part is None:
        raise unknown_verb(words[1], verb.parts, [words[0]])
    return part, list(words[:2])


def _parse_and_run(verb: Verb, path: Sequence[str], words: Sequence[str]) -> int:
    from cyclopts import CycloptsError

    from outrider.cli.call import run_verb

    try:
        return run_verb(verb, words)
    except CycloptsError as error:
        error.verbose = False
        raise bad_words(str(error), verb, path, words) from None


def _wants_debug(arguments: Sequence[str]) -> bool:
    if "--debug" in arguments:
        return True
    return outrider_variables().get("OUTRIDER_DEBUG", "").lower() in ("1", "true", "yes", "on")


class _Defect:
    """`sys.excepthook` for errors that no user should be able to cause."""

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
