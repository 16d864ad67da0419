"""What a batch asks of whatever answers its lines: an `LLM`, or several engines in processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from outrider.api.prompts import Message, Prompt
from outrider.api.result import GenerationResult, TextEvent
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams


class Handle(Protocol):
    """A request. `has_read` says that its prompt is in memory, where others find it."""

    @property
    def done(self) -> bool: ...

    @property
    def has_read(self) -> bool: ...

    def events(self) -> Iterable[TextEvent]:
        """What it wrote since it was last asked; nobody keeps it then."""
        ...

    def result(self) -> GenerationResult:
        """Raises what the request failed of."""
        ...


class BatchEngine(Protocol):
    """Runs requests beside each other."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def has_free_place(self) -> bool: ...

    def encode(self, prompt: Prompt, /) -> list[int]: ...

    def encode_chat(self, messages: str | Sequence[Message], /) -> list[int]: ...

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        /,
        *,
        sample: int,
        **structure: Any,
    ) -> Handle:
        """`structure` are StructureOptions."""
        ...

    def advance(self) -> object:
        """Returns when something may have changed."""
        ...
