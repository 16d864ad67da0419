"""Prompts in the forms of callers: text, ids, NumPy arrays and tensors of ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from outrider.core.errors import ConfigError
from outrider.core.fields import shown


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
