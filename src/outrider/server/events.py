"""What an answer is made of while it is written: the one form that each API's encoder reads.

The engine writes some tokens a round, so an answer comes as steps, one a round or several merged,
each with the parts that the parser of the model's output found in it. Every encoder writes a step
at once, and its stream and its final object are made from the same parts, so they cannot differ.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from outrider.core.draft import TokenLogprobs

EndReason: TypeAlias = Literal["stop", "length", "tool_calls", "timeout"]


class TextDelta(Struct, frozen=True):
    """Text that the reader is shown."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """Text that the model thinks with, where its format tells that apart."""

    text: str


class ToolOpen(Struct, frozen=True):
    """A call of a tool begins: its place among the calls of this answer, its id and full name."""

    index: int
    call_id: str
    name: str


class ToolDelta(Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    arguments: str


class ToolClose(Struct, frozen=True):
    """A call has ended. It is `whole` if its arguments are one JSON object; else they are as far
    as the model wrote them."""

    index: int
    whole: bool = True


Part: TypeAlias = TextDelta | ReasoningDelta | ToolOpen | ToolDelta | ToolClose


class Step(Struct, frozen=True):
    """What a round added. `num_tokens` counts the tokens of the answer so far; `logprobs` has an
    entry a token and `rounds` an entry a round (docs/rounds.md), where the request asked for
    them."""

    parts: tuple[Part, ...]
    num_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()


class Usage(Struct, frozen=True):
    """Tokens of a request. `cached_tokens` of the prompt were read before, for another request.
    `reasoning_tokens` are thoughts, None of a model without; `budget_reached` says whether the
    thinking budget ended them, if there was one."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None
    budget_reached: bool | None = None


class End(Struct, frozen=True):
    """The last of an answer that ended well. `metrics` are of speculation, under vLLM's names;
    None where nothing was drafted. `stop` is the stop string that ended it, if one did."""

    reason: EndReason
    usage: Usage
    seed: int | None = None
    stop: str | None = None
    metrics: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


class OutputParser(Protocol):
    """Tells text, reasoning and calls of tools apart. However its text is cut into pieces, the
    joined parts are the same (tests/unit/server hold each parser to that)."""

    @property
    def is_cut(self) -> bool:
        """True if the text ended amid a call, which is part of the text as it was written."""
        ...

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, once no more text comes."""
        ...


class PlainParser:
    """All of it is text."""

    is_cut = False

    def feed(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Part]:
        return []
