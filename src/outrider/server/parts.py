"""Parts of an answer: text, reasoning and tool calls, from which each API makes its stream and its
final object. A parser gets the model's text in pieces and returns them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from msgspec import Struct


class TextDelta(Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """Text of the model's reasoning, if its format separates reasoning from the answer."""

    text: str


class ToolOpen(Struct, frozen=True):
    """The begin of a tool call: its index among the calls of this answer, its id and full name."""

    index: int
    call_id: str
    name: str


class ToolDelta(Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    arguments: str


class ToolClose(Struct, frozen=True):
    """The end of a tool call. It is `whole` if its arguments are one complete JSON object."""

    index: int
    whole: bool = True


Part: TypeAlias = TextDelta | ReasoningDelta | ToolOpen | ToolDelta | ToolClose


class OutputParser(Protocol):
    """Separates text, reasoning and tool calls. The joined parts do not depend on how the text is
    cut into pieces (tests/unit/server check this for each parser)."""

    @property
    def is_cut(self) -> bool:
        """True if the text ended inside a call; that call is then part of the text, unparsed."""
        ...

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        ...

    def finish(self) -> list[Part]:
        """The remaining parts, once the text has ended."""
        ...


class PlainParser:
    """A parser for which everything is text."""

    is_cut = False

    def feed(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Part]:
        return []
