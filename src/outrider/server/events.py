"""The parts of an answer while it is written, in the common form that each API's encoder reads.

An answer comes as steps: the tokens of one round, or of several rounds merged. A step has the parts
that the parser of the model's output found in it. An encoder writes a whole step at once. It makes
its stream and its final object from the same parts, so they cannot differ.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from outrider.core.draft import TokenLogprobs

EndReason: TypeAlias = Literal["stop", "length", "tool_calls", "timeout"]


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


class Step(Struct, frozen=True):
    """The parts that a round added. `num_tokens` counts the answer's tokens so far. If requested,
    `logprobs` has an entry per token, `rounds` an entry per round (docs/rounds.md)."""

    parts: tuple[Part, ...]
    num_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()


class Usage(Struct, frozen=True):
    """Tokens of a request. `cached_tokens` of the prompt were in the prefix cache.
    `reasoning_tokens` is None for a model that does not reason; `budget_reached` says whether the
    thinking budget, if there was one, ended the reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None
    budget_reached: bool | None = None


class End(Struct, frozen=True):
    """The end of an answer without an error. `metrics` are those of speculation, under vLLM's
    names; None without drafts. `stop` is the stop string that ended the text, if any."""

    reason: EndReason
    usage: Usage
    seed: int | None = None
    stop: str | None = None
    metrics: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


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
