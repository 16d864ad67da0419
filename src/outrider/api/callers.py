"""Callers of one engine: their turns in it, and their prompts and keywords.

Two callers must never be inside the engine at once. Turns are granted in the order of requests, and
each turn drives the requests of all callers, so threads that generate at the same time share
passes. Three calls would wait for ever and are refused: a callback that calls back into the engine
that runs it, a signal handler whose thread waits for a turn, and a forked child, which has no
threads.

Prompts are text, ids, NumPy arrays or tensors of ids; keywords are sorted into options by kind.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import dropwhile
from operator import index
from threading import Condition, Lock, get_ident
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, cast

from outrider.api.chat_messages import checked_messages, checked_tools, checked_variables
from outrider.api.structure import OPTIONS, StructureOptions
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import (
    ConfigError,
    MachineError,
    OutriderError,
    PromptTooLongError,
    foreign,
    require_spare,
    within_memory,
)
from outrider.core.fields import BYTES_PER_TOKEN, MESSAGES, shown
from outrider.core.options import SamplingOptions
from outrider.core.process import breakable, deferred, deliver

# Interval at which a main thread that waits for its turn checks for Ctrl-C.
_LOOK_SECONDS = 0.1


class OfOneProcess:
    """Base of objects with threads, locks and mapped memory of the process that made them."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Called by pickle and by copy. Raises MachineError."""
        name = type(self).__name__
        raise MachineError(
            f"this {name} cannot be copied or sent to another process: its weights, memory and "
            "threads belong to the process that made it.",
            hint="send the model's name and options, and make the LLM in the process that uses it, "
            "once; for many processes `outrider serve` has one LLM",
        )


class Turns:
    """The order of the callers of one engine, which belongs to the process that made it. `is_lane`
    returns True if the calling thread runs jobs of that engine."""

    def __init__(self, is_lane: Callable[[], bool] = lambda: False) -> None:
        self._process = os.getpid()
        self._is_lane = is_lane
        self._lock = Lock()
        self._changed = Condition(self._lock)
        # The first one has the turn.
        self._callers: deque[object] = deque()
        self._threads: set[int] = set()

    @contextmanager
    def call(self) -> Generator[None]:
        """A call of the engine's owner: Ctrl-C is handled between its turns, or at its end. Raises
        the errors of `check`, and CapacityError if memory ends."""
        self.check()
        with within_memory("answering"), deferred():
            yield

    def check(self) -> None:
        """Raises MachineError in a forked child, ConfigError within a turn of the same thread."""
        if not self.at_home:
            raise MachineError(
                f"this LLM was made by process {self._process} and cannot be used in its fork "
                f"{os.getpid()}, which has none of its threads.",
                hint="make the LLM in the process that uses it: start that with multiprocessing's "
                '"spawn", or fork before the LLM is made',
            )
        if self.in_turn:
            raise ConfigError(
                "a callback called the LLM that runs it, which is in the midst of a job.",
                hint="let masks, observers and handlers of signals return, and call the LLM "
                "between its own calls",
            )

    @property
    def at_home(self) -> bool:
        """True in the process that made it."""
        return os.getpid() == self._process

    @property
    def in_turn(self) -> bool:
        """True if the calling thread has the turn, waits for it, or runs a job of its holder."""
        return get_ident() in self._threads or self._is_lane()

    def turn(self, *, now: bool = False) -> AbstractContextManager[bool]:
        """Keep others out of the engine, once it is free. Yields True if the turn was granted.

        With `now` it is granted only if no caller has or wants it: a finalizer, which may run in
        any thread, at any time and in a forked child, must not wait.
        """
        return self._turn_now() if now else _Turn(self)

    @contextmanager
    def _turn_now(self) -> Generator[bool]:
        with deferred(delivers=False):
            if not self._try():
                yield False
                return
            self._threads.add(get_ident())
            try:
                yield True
            finally:
                self.pass_on()

    def take(self) -> None:
        """Wait for a turn, and hold it until `pass_on`."""
        self._threads.add(get_ident())
        try:
            self._wait()
        except BaseException:
            self._threads.discard(get_ident())
            raise

    def _wait(self) -> None:
        me = object()
        with self._lock:
            self._callers.append(me)
            if len(self._callers) == 1:
                return
        try:
            while not self._is_first(me):
                # No other caller waits while a handler runs here.
                deliver()
        except BaseException:
            with self._changed:
                self._callers.remove(me)
                self._changed.notify_all()
            raise

    def _is_first(self, caller: object) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._callers[0] is caller, _LOOK_SECONDS)

    def _try(self) -> bool:
        # The collector may run within `_wait`, or in a lane, which would wait for itself.
        if not self.at_home or self.in_turn or not self._changed.acquire(blocking=False):
            return False
        try:
            if self._callers:
                return False
            self._callers.append(object())
            return True
        finally:
            self._changed.release()

    def pass_on(self) -> None:
        """Pass the turn to the caller that has waited longest."""
        self._threads.discard(get_ident())
        with self._lock:
            self._callers.popleft()
            if self._callers:
                self._changed.notify_all()


class _Turn(AbstractContextManager[bool]):
    """One turn of the calling thread. Every job has one, so this is no generator."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> bool:
        self._turns.take()
        return True

    def __exit__(self, *raised: object) -> None:
        self._turns.pass_on()


class HasToList(Protocol):
    """A NumPy array, a tensor, or another holder of ids in one or two dimensions."""

    def tolist(self) -> Any: ...


Prompt: TypeAlias = str | Sequence[int] | HasToList
Message: TypeAlias = Mapping[str, Any]


class ChatIds(NamedTuple):
    """Token ids of a conversation; `notes` list the changes from the sent one."""

    ids: list[int]
    notes: tuple[str, ...] = ()

    def logged(self) -> list[int]:
        """The ids; each note is logged as a warning."""
        for note in self.notes:
            _LOG.warning("%s", note)
        return self.ids


class RequestOptions(SamplingOptions, StructureOptions, total=False):
    """Keywords of a request: sampling parameters and structures."""


def sampling_of(options: RequestOptions) -> SamplingOptions:
    """The options that are fields of SamplingParams, and unknown ones."""
    return cast("SamplingOptions", {k: v for k, v in options.items() if k not in OPTIONS})


def structure_in(options: Mapping[str, object]) -> StructureOptions:
    given = {k: v for k, v in options.items() if k in OPTIONS}
    return cast("StructureOptions", given)


_LOG = logging.getLogger(__name__)
_FORMS = "give text, ids, or a list of either"


def one_prompt(given: object) -> str | list[int]:
    """A text, or ids as a list of int. Raises ConfigError for any other value."""
    plain = _plain(given)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, list) and _are_ids(cast("list[object]", plain)):
        return [index(cast("Any", item)) for item in cast("list[object]", plain)]
    raise ConfigError(f"a prompt is text or token ids, got {shown(given)}.", hint=_FORMS)


def several_prompts(given: object) -> list[str | list[int]]:
    """A prompt for each text or row of ids. A text and a flat list of ids are one prompt each.
    Raises ConfigError for other values."""
    plain = _plain(given)
    if isinstance(plain, str):
        return [plain]
    if not isinstance(plain, list):
        raise ConfigError(f"no prompts in {shown(given)}.", hint=_FORMS)
    items = cast("list[object]", plain)
    if items and _are_ids(items):
        return [one_prompt(items)]
    return [one_prompt(item) for item in items]


def conversation(given: object) -> Sequence[Message]:
    """Messages of a chat; a text is one message of the user. Raises ConfigError for others."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping):
        given = [cast("object", given)]
    items = list(cast("Iterable[object]", given)) if isinstance(given, Iterable) else [None]
    if not all(isinstance(item, Mapping) for item in items):
        raise ConfigError(
            f"a conversation is text or a list of messages, got {shown(cast('object', given))}.",
            hint='[{"role": "user", "content": "hello"}]',
        )
    return cast("Sequence[Message]", items)


def _plain(given: object) -> object:
    """Arrays and other iterables as lists; texts, mappings and other values unchanged."""
    if isinstance(given, str | bytes | Mapping | list):
        return cast("object", given)
    if hasattr(given, "tolist"):
        return cast("HasToList", given).tolist()
    return list(cast("Iterable[object]", given)) if isinstance(given, Iterable) else given


def _are_ids(items: list[object]) -> bool:
    """True if all are whole numbers: int, or a scalar of NumPy or PyTorch, but no bool."""
    return all(
        type(item) is int
        or (not isinstance(item, bool) and hasattr(item, "__index__") and _is_scalar(item))
        for item in items
    )


def _is_scalar(item: object) -> bool:
    return getattr(item, "ndim", 0) == 0 and "float" not in str(getattr(item, "dtype", ""))


class PromptReader:
    """Reads prompts for a window of so many tokens and a vocabulary of this size."""

    def __init__(self, tokenizer: Tokenizer, *, window: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._window, self._vocab_size = window, vocab_size

    @foreign()
    @breakable()
    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Ids of a prompt. Raises ConfigError for an empty prompt, for text that no window could
        hold (PromptTooLongError), and for ids that do not exist."""
        if isinstance(prompt, str):
            self.check_size(prompt)
            return self.checked(self.tokenizer.encode(prompt))
        return self.checked(prompt)

    def ids_of_text(self, text: str, *, add_special: bool = True) -> list[int]:
        """`ids` of a text; there may be none without special tokens."""
        if add_special:
            return self.ids(text)
        self.check_size(text)
        return self.tokenizer.encode(text, add_special=False)

    def ids_of_all(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int] | OutriderError]:
        """`ids` of every prompt, or its error; texts are tokenized together."""
        try:
            return [*self._ids_together(prompts)]
        except OutriderError:
            return [self._ids_or_error(prompt) for prompt in prompts]

    @foreign()
    @breakable()
    def _ids_together(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self.check_size(text)
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [self.checked(next(encoded) if isinstance(p, str) else p) for p in prompts]

    def _ids_or_error(self, prompt: str | Sequence[int]) -> list[int] | OutriderError:
        try:
            return self.ids(prompt)
        except OutriderError as error:
            return error

    @foreign()
    @breakable()
    def ids_of_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> ChatIds:
        """Ids of a conversation, through the chat template. Raises ConfigError if it is too long or
        malformed, and CheckpointError if no template accepts it."""
        if len(messages) > MESSAGES.most:
            raise ConfigError(
                f"a conversation of {len(messages)} messages; it may have {MESSAGES.most}.",
                hint="leave out the oldest messages",
            )
        given = [*messages, *tools, variables or {}]
        self.check_size(*(str(v) for entry in given for v in entry.values()))
        checked, notes = checked_messages(messages, continues=continues)
        rendered = self.tokenizer.chat(
            checked,
            tools=checked_tools(tools),
            variables=checked_variables(variables or {}),
            continues=continues,
        )
        self.check_size(rendered.text)
        # JSON of a call may have half of a surrogate pair.
        text = rendered.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._begun(self.tokenizer.encode(text, add_special=False))
        return ChatIds(self.checked(ids), (*notes, *rendered.notes))

    def _begun(self, ids: list[int]) -> list[int]:
        """`ids` of a chat with exactly one BOS if the checkpoint requests it."""
        bos = self.tokenizer.bos_id
        asks = self.tokenizer.begins_chats and self.tokenizer.encode("")[:1] == [bos]
        if bos is None or not asks:
            return ids
        return [bos, *dropwhile(bos.__eq__, ids)]

    def check_size(self, *texts: str) -> None:
        """Raises PromptTooLongError for text that is too long to tokenize: no window could hold it.
        Raises OSError if memory ends."""
        require_spare()
        size = self.size_beyond(*texts)
        if size:
            most = BYTES_PER_TOKEN.most
            raise PromptTooLongError(-(-size // most), self._window, size, most * self._window)

    def size_beyond(self, *texts: str) -> int:
        """The size of texts in bytes, or a lower bound, if no window could hold them; else 0."""
        most = BYTES_PER_TOKEN.most * self._window
        size = sum(map(len, texts))
        if size <= most:
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        return size if size > most else 0

    def checked(self, ids: Sequence[int]) -> list[int]:
        """`ids` as a list. Raises ConfigError if there are none, or some that do not exist."""
        if not ids:
            raise ConfigError("the prompt is empty.", hint="give at least one token of text")
        size = self._vocab_size
        foreign = [i for i in ids if type(i) is not int or not 0 <= i < size]
        if foreign:
            raise ConfigError(
                f"the prompt has ids outside the vocabulary of {size}: {foreign[:5]}."
            )
        return list(ids)
