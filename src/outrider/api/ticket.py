"""A request that was handed in to run beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.api.reader import Reader
from outrider.api.result import GenerationResult, TextEvent
from outrider.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ticket:
    """What `LLM.submit` gives. The request goes on while `LLM.advance` of its `owner` is called."""

    reader: Reader
    owner: object
    make_result: Callable[[Reader], GenerationResult]

    @property
    def done(self) -> bool:
        """Whether it has ended: well, with an error, or cancelled."""
        return self.reader.has_ended

    def events(self) -> Iterator[TextEvent]:
        """Yield and forget what it wrote since it was last asked."""
        yield from self.reader.events()

    def result(self) -> GenerationResult:
        """Raises what the engine gave the request up for, if it did, and ConfigError while it is
        still running."""
        self.reader.check()
        if not self.done:
            raise ConfigError("the request has not ended.", hint="call advance until it has")
        return self.make_result(self.reader)
