"""An engine's process for ports to be tested with: a test says what it tells, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

from doubles.scripted_port import CARD, Letters, trace
from outrider.api.callers import ChatIds
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.tokenizer import Tokenizer
from outrider.metrics import summarise
from outrider.server.engine_child import EngineChild
from outrider.server.port import (
    COMMANDS,
    Command,
    Encode,
    EngineStatus,
    Load,
    Part,
    Submit,
    Update,
    frame,
)

C = TypeVar("C", bound=Command)


class ScriptedChild:
    """Stands where an EngineChild would. Tokens are characters."""

    card, process_id = CARD, 1

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.was_aborted = False
        self._updates: asyncio.Queue[Update | None] = asyncio.Queue()
        self._rounds: dict[int, list[str]] = {}

    async def updates(self) -> AsyncIterator[Update]:
        while (update := await self._updates.get()) is not None:
            yield update

    def send(self, command: Command) -> None:
        # As it is by now: the port goes on with its lists.
        self.commands.append(COMMANDS.decode(frame(command)[4:]))

    def kill(self) -> None:
        self._updates.put_nowait(None)

    def abort(self) -> None:
        self.was_aborted = True
        self.kill()

    async def how_it_ended(self) -> str:
        return "SIGKILL"

    async def end(self) -> None:
        self.kill()

    def asked(self, kind: type[C]) -> list[C]:
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def prompts(self) -> list[str]:
        return [asked.text for asked in self.asked(Encode)]

    @property
    def requests(self) -> list[Submit]:
        return self.asked(Submit)

    def encoded(self, text: str) -> None:
        """Answer the prompt that says so."""
        (number,) = {asked.number for asked in self.asked(Encode) if asked.text == text}
        self._report(Part(number, ids=ChatIds([ord(letter) for letter in text])))

    def wrote(self, asked: Submit, *rounds: str, ends: bool = False) -> None:
        """One frame: rounds of a request, and perhaps its end."""
        parts: list[Part] = []
        for text in rounds:
            told = self._rounds.setdefault(asked.number, [])
            ids = tuple(map(ord, text))
            event = TextEvent(ids, ("plain",) * len(ids), tuple(text))
            parts.append(Part(asked.number, event, [trace(len(told), text)]))
            told.append(text)
        if ends:
            parts.append(Part(asked.number, result=self._result(asked)))
        self._report(*parts)

    def _report(self, *parts: Part) -> None:
        self._updates.put_nowait(Update(list(parts), EngineStatus(state="ready"), 0.0))

    def _result(self, asked: Submit) -> GenerationResult:
        rounds = self._rounds[asked.number]
        traces = [trace(index, text) for index, text in enumerate(rounds)]
        before = "".join(map(chr, asked.request.written))
        text = before + "".join(rounds)
        return GenerationResult(
            text,
            tuple(map(ord, text)),
            "length",
            summarise(traces, drafter="ngram", k=CARD.k, total_seconds=1.0),
            token_seconds=tuple(0.5 for text in rounds for _ in text),
        )


def scripted_children(patch: pytest.MonkeyPatch) -> list[ScriptedChild]:
    """Those that ports start from now on, the present one last."""
    found: list[ScriptedChild] = []

    async def started(
        _load: Load, *, hang_seconds: float, load_seconds: float | None
    ) -> ScriptedChild:
        del hang_seconds, load_seconds
        found.append(ScriptedChild())
        return found[-1]

    def loaded(_folder: Path) -> Letters:
        return Letters()

    patch.setattr(EngineChild, "started", started)
    patch.setattr(Tokenizer, "load", loaded)
    return found
