"""The `outrider` command: answers help at once, otherwise parses, runs a verb, reports errors.

Exit codes: 0 done, 1 a check failed or a defect of ours, 2 bad input, 3 bad files or machine, 130
interrupted. A user's error is one block on stderr, never a traceback unless --debug asks for it.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from types import TracebackType
from typing import NoReturn

from outrider import __version__
from outrider.cli.gate import gate, gated
from outrider.cli.options import HELP_FLAGS, Verb
from outrider.cli.page import front_page, search_page, verb_page
from outrider.cli.verbs import VERBS, find, names
from outrider.core.env import outrider_variables
from outrider.core.errors import ConfigError, OutriderError, nearest, out_of_memory

# Verbs of other tools, and what does the same here.
_WORDS_OF_OTHERS = {
    "complete": "`outrider generate PROMPT`",
    "cp": "models are folders: copy them as such",
    "create": "`outrider train --help` makes drafters; models come by `outrider pull`",
    "help": "`outrider --help`, or `outrider VERB --help`",
    "launch": "`outrider chat`; nothing runs in the background",
    "ps": "nothing runs in the background; `outrider list` shows the models of this machine",
    "run-batch": "`outrider batch INPUT OUTPUT`",
    "rm": "models lie in the hub cache: `hf cache rm`, or delete the folder",
    "serve": "there is no server yet; `outrider chat` and `outrider generate` run here and now",
    "show": "`outrider models inspect MODEL`",
    "stop": "nothing runs in the background; Ctrl-C ends what runs",
}


def unknown_verb(word: str, verbs: Sequence[Verb], path: Sequence[str]) -> ConfigError:
    """`path` are the words before it."""
    page = f"`{' '.join(['outrider', *path])} --help` lists the verbs"
    hint = None if path else _WORDS_OF_OTHERS.get(word)
    return ConfigError(f"unknown verb {word!r}.", hint=hint or nearest(word, names(verbs), page))


INTERRUPTED = 130
PIPE_CLOSED = 141
# The parser reads a lone hyphen as a nameless option; this is its name.
STDIN_FLAG = "--stdin"
ASKS = ("-h", *HELP_FLAGS)


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
    if words and words[0] == "--version":
        print(f"outrider {__version__}")
        return 0
    if not words or words[0] in ASKS:
        print(search_page(words[1], None, []) if len(words) > 1 else front_page())
        return 0
    verb, path = _find_verb(words)
    rest = list(words[len(path) :])
    num_flags = rest.index("--") if "--" in rest else len(rest)
    flags = [STDIN_FLAG if word == "-" else word for word in rest[:num_flags]]
    rest[:num_flags] = flags
    asked = next((index for index, word in enumerate(flags) if word in ASKS), None)
    if verb.parts or asked is not None:
        print(_page(verb, path, flags[asked or 0 :]))
        return 0
    from outrider.cli.call import run_verb

    return run_verb(verb, path, rest)


def _page(verb: Verb, path: Sequence[str], asked: Sequence[str]) -> str:
    """What is asked for by a flag of help and the word after it."""
    word = next(iter(asked[1:]), "-")
    if word.startswith("-"):
        return verb_page(verb, path, everything=asked[:1] == ["--help-all"])
    return search_page(word, verb, path)


def _find_verb(words: Sequence[str]) -> tuple[Verb, list[str]]:
    """The verb, and the words that name it. Raises ConfigError if there is none."""
    verb = find(VERBS, words[0])
    if verb is None:
        raise unknown_verb(words[0], VERBS, [])
    if not verb.parts or len(words) == 1 or words[1] in ASKS:
        return verb, [words[0]]
    part = find(verb.parts, words[1])
    if part is None:
        raise unknown_verb(words[1], verb.parts, [words[0]])
    return part, list(words[:2])


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
