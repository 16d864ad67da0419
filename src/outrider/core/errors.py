"""Errors that a user can cause. Each says what is wrong, why, and what to try next.

Also the closest valid name to what a user typed, for error messages, and how errors are logged: a
server logs an error's type and its location without its message, which may quote a request.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import resource
import traceback
from collections.abc import Generator, Iterable, Mapping
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.core.env import PREFIX
from outrider.core.process import is_interrupt

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

T = TypeVar("T")

# Messages with which PyTorch, safetensors, C++ and the dynamic loader report that memory ended;
# none has its own type for it on every device.
_NO_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "failed to map segment",
    "can't start new thread",
)
_ADDRESS_LIMITS = (("RLIMIT_AS", "ulimit -v", b"VmSize"), ("RLIMIT_DATA", "ulimit -d", b"VmData"))
# RLIM_INFINITY is negative in Python; some shells set a number that no process reaches.
_NO_LIMIT = 1 << 60
# Kernel workspaces, a tokenizer's texts and a round's lists grow by less at a time.
_SPARE_BYTES = 2 << 20
_LESS_MEMORY = (
    "lower --batch-size, --arena-tokens or --context, try --quantise int8, or a smaller model"
)


class OutriderError(Exception):
    """Base of every error raised on purpose.

    `hint` is the next thing to try: a command, a flag or a file to look at.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            # For tracebacks, notebooks and logs.
            self.add_note(f"try: {hint}")


def with_hint(error: Exception) -> str:
    """The message of an error, followed by its hint if it has one."""
    hint = getattr(error, "hint", None)
    return f"{error} Try: {hint}" if hint else str(error)


def defect_in(error: Exception) -> Exception | None:
    """`error` if it is not one of ours, so that a log has its stack; else its message says all."""
    return None if isinstance(error, OutriderError) else error


class ConfigError(OutriderError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2


class CapacityError(OutriderError):
    """The arena has too little free memory for the requested work."""

    exit_code = 3


def out_of_memory(
    error: BaseException | None, doing: str, *, parts: str = ""
) -> CapacityError | None:
    """`error` as a CapacityError, if it says that memory ended, else None. `doing` is the work that
    needed the memory, as in "loading"; `parts` is a table of the planned memory."""
    if error is None or isinstance(error, OutriderError) or not _says_no_memory(error):
        return None
    lines = _text_of(error).strip().splitlines()
    reason = f" ({lines[0][:200]})" if lines else ""
    planned = f" Planned were:\n{parts}" if parts else ""
    limits = [f" under `{name}` of {most / 1e6:.0f} MB" for _, name, _, most in address_limits()]
    bounds = "".join(limits[:1])
    hint = f"raise the limit, or {_LESS_MEMORY}" if bounds else _LESS_MEMORY
    return CapacityError(f"memory ended while {doing}{bounds}{reason}.{planned}", hint=hint)


def address_limits() -> list[tuple[str, str, bytes, int]]:
    """Limits of the process's address space that are set: the name, the shell command that sets it,
    the field of /proc/self/status that counts against it, and the limit in bytes."""
    found = [(*one, resource.getrlimit(getattr(resource, one[0]))[0]) for one in _ADDRESS_LIMITS]
    return [one for one in found if 0 <= one[-1] < _NO_LIMIT]


@contextmanager
def within_memory(doing: str, *, parts: str = "") -> Generator[None]:
    """Raises CapacityError if memory ends within the block."""
    try:
        yield
    except Exception as error:
        ended = out_of_memory(error, doing, parts=parts)
        if ended is None:
            raise
        raise ended from error


def require_spare(num_bytes: int = _SPARE_BYTES) -> None:
    """Raises OSError (ENOMEM) if the address space is limited and fewer than `num_bytes` are left:
    kernels, and libraries in Rust, end the process when they get no memory."""
    if address_limits():
        mmap(-1, num_bytes).close()


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = _text_of(error) if isinstance(error, Exception) else ""
    return any(words in text for words in _NO_MEMORY)


class QueueFullError(CapacityError):
    """The queue is full: a new request was refused, and nothing else changed."""

    def __init__(self, num_waiting: int, num_rejected: int) -> None:
        super().__init__(
            f"{num_waiting} requests wait already; this is refusal {num_rejected} so far.",
            hint="try again later, or raise --max-waiting",
        )
        self.numbers = num_waiting, num_rejected


class PromptTooLongError(ConfigError):
    """A prompt that the window cannot hold. If it was refused by its size, `num_bytes` of at most
    `most_bytes`, then `num_tokens` is an estimate.
    Clients recognise the case by the first words, which are those of OpenAI's API."""

    def __init__(
        self, num_tokens: int, window: int, num_bytes: int = 0, most_bytes: int = 0
    ) -> None:
        size = f"{num_tokens} tokens"
        if num_bytes:
            size = f"{num_bytes:,} bytes or more; it may have {most_bytes:,}"
        super().__init__(
            f"This model's maximum context length is {window} tokens, and the prompt has {size}.",
            hint="reduce the length of the messages, or raise --context if the models allow it",
        )
        self.numbers = num_tokens, window, num_bytes, most_bytes


class CheckpointError(OutriderError):
    """A model folder that is missing, incomplete, damaged or of an unsupported kind."""

    exit_code = 3


class VocabularyError(CheckpointError):
    """Target and draft do not share one vocabulary, so a draft's ids mean other text."""


class MachineError(OutriderError):
    """The machine lacks something: a compiler, a writable folder, a device."""

    exit_code = 3


class SilentError(MachineError):
    """A server that did not answer in the time that it had."""


class DrafterError(OutriderError):
    """A drafter broke its contract: too many tokens, or ids outside the vocabulary."""


class NumericsError(OutriderError):
    """A model's logits are not numbers: damaged weights, or an overflow of a narrow dtype."""

    exit_code = 3

    def __init__(self, whose: str) -> None:
        super().__init__(
            f"{whose} gave logits that are not numbers (NaN), so no token can be chosen.",
            hint="--dtype float32; if that fails too, download the weights again",
        )


def reason_of(error: BaseException) -> str:
    """The message of an error, without the path that an OSError's text repeats."""
    return str(getattr(error, "strerror", None) or error)


# Characters that are repeated of a third-party error's message.
MOST_WORDS = 300


def words_of(error: BaseException) -> str:
    """The message of an error of any code, or its type if it has none."""
    return _text_of(error)[:MOST_WORDS] or type(error).__name__


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - third-party errors may fail to print
        return ""


class CallbackError(OutriderError):
    """Code of a caller, a checkpoint or a drafter raised something other than an Exception:
    SystemExit, say, or the panic of a library. That is this error's cause."""

    def __init__(self, cause: BaseException) -> None:
        kind, words = type(cause).__name__, words_of(cause)
        super().__init__(
            f"a callback raised {kind}" + (f": {words}" if words != kind else "."),
            hint="a mask, tokenizer, drafter or observer must return, or raise an Exception",
        )
        self.__cause__ = cause


def ordinary(error: BaseException) -> Exception:
    """`error` as an Exception, which ends a request and not the program."""
    return error if isinstance(error, Exception) else CallbackError(error)


class foreign(ContextDecorator):  # noqa: N801 - every round enters several: no generator
    """A context in which any error becomes an Exception, except the user's Ctrl-C."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None and not isinstance(error, Exception) and not is_interrupt(error):
            raise CallbackError(error) from error


class ContractError(RuntimeError):
    """Our own code broke the contract of a function it called. That is a defect and no user's
    mistake; unlike an assertion it is found under `python -O` as well."""


def given(value: T | None, what: str) -> T:
    """`value`, which must not be None. Raises ContractError if it is."""
    if value is None:
        raise ContractError(f"there is no {what}")
    return value


class SequenceError(Exception):
    """One sequence of a batch failed; the reason is this error's cause. Engines remove the sequence
    from the batch; its reader raises the cause. Users never see this error itself."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(f"sequence {seq_id} failed")
        self.seq_id = seq_id


@contextmanager
def blaming(seq_id: int) -> Generator[None]:
    """A context in which any error becomes a SequenceError, except the user's Ctrl-C."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise SequenceError(seq_id) from ordinary(error)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """One sentence naming the nearest of `known`, then all of them."""
    names = sorted(known)
    return nearest(name, names, f"Known: {', '.join(names)}.")


# How much two words must have in common for one to be meant by the other (difflib's ratio); words
# of up to `_SHORT` letters share some by chance, so they need more.
_ALIKE, _SHORT_ALIKE, _SHORT = 0.5, 0.65, 4


def nearest(name: str, known: Iterable[str], where: str) -> str:
    """A hint that names the nearest of `known`, if one is near, and then `where` all are listed. A
    word with half of its letters changed counts as another word, unless it only continues."""
    cutoff = _SHORT_ALIKE if len(name) <= _SHORT else _ALIKE
    words = list(known)
    alike = difflib.get_close_matches(name, words, n=3, cutoff=cutoff)
    close = [
        one
        for one in alike
        if name.startswith(one) or 2 * _num_edits(name, one) < min(len(name), len(one))
    ]
    close = close or [one for one in words if len(name) > 1 and one.startswith(name)]
    return f"did you mean {close[0]!r}? {where}" if close else where


def _num_edits(one: str, other: str) -> int:
    """Edit distance: letters inserted, deleted, replaced or swapped (optimal string alignment)."""
    before, row = list[int](), list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        older, before, row = before, row, [number]
        for at, theirs in enumerate(other, start=1):
            least = min(row[at - 1] + 1, before[at] + 1, before[at - 1] + (letter != theirs))
            swapped = number > 1 and at > 1 and one[number - 2 : number] == theirs + other[at - 2]
            row.append(min(least, older[at - 2] + 1) if swapped else least)
    return row[-1]


# Names of our settings in other speculative-decoding projects (names_of_others.json), for hints and
# the settings page.
#
# In files, variables and Python, a name of another project is never accepted: two names for one
# setting are two sources of a mistake. It is recognised, and the error gives the name used here. On
# the command line, flags that take the very same values are read, with a note (cli/verbs.py).
VARIABLES_OF_OTHERS = ("SPECDEC_", "SHARPI_")


@dataclass(frozen=True, slots=True)
class Foreign:
    """`name` is spelled as a variable, a flag or a key is; `here` is our setting, or "" if there is
    none, for the reason in `note`."""

    name: str
    here: str
    note: str = ""

    @property
    def spelled(self) -> str:
        """`here` in the form of `name`; "" if there is none."""
        if not self.here:
            return ""
        if self.name.startswith("-"):
            return self.spelled_flag
        return PREFIX + self.here.upper() if self.name.isupper() else self.here

    @property
    def spelled_flag(self) -> str:
        return "--" + self.here.replace("_", "-")

    @property
    def hint(self) -> str:
        note = f": {self.note}" if self.note else ""
        if self.spelled:
            return f"did you mean {self.spelled!r}? {self.name} is another project's name{note}."
        return f"{self.name} is another project's name and has no counterpart here{note}."


@cache
def foreign_names() -> Mapping[str, Foreign]:
    """Names of other projects, from rows of our setting, their names and a note."""
    rows = json.loads(Path(__file__).with_name("names_of_others.json").read_text("utf-8"))
    return {name: Foreign(name, here, note) for here, names, note in rows for name in names.split()}


def hint_for(name: str) -> str | None:
    """A hint with our name for a name of another project; None if no project has that name."""
    key, known = name.removeprefix(PREFIX).lower(), foreign_names()
    item = known.get(name) or known.get(key)
    key = key.lstrip("-").replace("-", "_")
    for other in (key, "--" + key.replace("_", "-")):
        if item is None and other in known:
            item = replace(known[other], name=name)
    return item.hint if item else None


def notes_on(variables: Iterable[str]) -> list[str]:
    """A sentence for each variable of the environment that other projects read and we do not."""
    found = [(name, hint_for(name)) for name in sorted(variables)]
    return [
        f"{name} is set, which is not read here; {hint or '`outrider config` lists what is.'}"
        for name, hint in found
        if name.startswith(VARIABLES_OF_OTHERS)
    ]


_MOST_CAUSES = 8


# Progress of what is compiled at first use.
progress = logging.getLogger("outrider.progress")


def hear_compilers() -> None:
    """Log the progress of compilers at any log level: compiling takes a while."""
    progress.setLevel(logging.INFO)


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
