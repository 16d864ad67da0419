"""A client for servers that speak OpenAI's completions, such as vLLM: baselines to compare with.

Only what a comparison needs: which models there are, one greedy completion with its time as the
client sees it, and a completion in pieces, each with the moment of its arrival.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from outrider.api.remote import Server, number, objects
from outrider.core.errors import ConfigError, MachineError


@dataclass(frozen=True, slots=True)
class Completion:
    """`seconds` is from sending the request to having all of the answer."""

    text: str
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a completion, `seconds` after the request was sent. `num_tokens` is the server's
    own count of the whole, where it tells one."""

    text: str
    seconds: float
    num_tokens: int | None = None


class OpenAIClient:
    """Calls raise MachineError when the server does not answer as expected."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def models(self) -> list[str]:
        """Ids of the models served."""
        answer = self._server.ask("/v1/models")
        if not isinstance(answer.get("data"), list):
            raise MachineError(
                f"{self._server.url} does not list models as OpenAI's servers do.",
                hint="name the address before /v1",
            )
        return [str(entry.get("id", "?")) for entry in objects(answer["data"])]

    def complete(self, model: str, prompt: str, *, max_tokens: int) -> Completion:
        """One greedy completion; an empty `model` takes the server's first."""
        if not model:
            served = self.models()
            if not served:
                raise ConfigError(f"{self._server.url} serves no model.", hint="name one")
            model = served[0]
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        started = perf_counter()
        answer = self._server.ask("/v1/completions", body)
        seconds = perf_counter() - started
        choices = objects(answer.get("choices"))
        usage = objects([answer.get("usage")])
        if not choices:
            raise MachineError(f"{self._server.url} answered without a completion.")
        num_tokens = int(number(usage[0].get("completion_tokens"))) if usage else 0
        return Completion(str(choices[0].get("text", "")), num_tokens, seconds)

    def stream(
        self, model: str, prompt: str, *, max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Generator[Piece]:
        """A completion as it comes; above temperature 0 from the whole law, by `seed`."""
        body: dict[str, object] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if temperature:
            body |= {"top_p": 1.0, "seed": seed}
        started = perf_counter()
        for line in self._server.lines("/v1/completions", body):
            kind, _, data = line.partition(":")
            if kind == "data" and data.strip() != "[DONE]":
                yield self._piece(data, perf_counter() - started)

    def _piece(self, data: str, seconds: float) -> Piece:
        try:
            found: object = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or "error" in found:
            raise MachineError(f"{self._server.url} broke off: {data.strip()[:300]}")
        event = cast("dict[str, Any]", found)
        choices, usage = objects(event.get("choices")), objects([event.get("usage")])
        text = str(choices[0].get("text") or "") if choices else ""
        counted = int(number(usage[0].get("completion_tokens"))) if usage else None
        return Piece(text, seconds, counted)
