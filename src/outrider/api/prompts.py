"""Prompts and keywords of callers: text, ids, NumPy arrays and tensors of ids; options by kind."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile
from operator import index
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from outrider.api.chat_messages import checked_messages, checked_tools, checked_variables
from outrider.api.structure import OPTIONS, StructureOptions
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import (
    ConfigError,
    OutriderError,
    PromptTooLongError,
    foreign,
    require_spare,
)
from outrider.core.fields import BYTES_PER_TOKEN, MESSAGES, shown
from outrider.core.interrupts import breakable
from outrider.core.options import SamplingOptions


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
