"""Clients of other servers: Ollama, and servers of OpenAI's completions API such as vLLM.

They serve comparisons and health checks only: the models of a server, one greedy completion with
its time, a completion in pieces with the time of each arrival.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any, cast

from outrider.core.errors import ConfigError, MachineError
from outrider.plugins.running.clients import Server


def number(value: object) -> float:
    """A number that a server sent; 0 for any other value."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def objects(value: object) -> list[dict[str, Any]]:
    """The objects in a list that a server sent; other entries are left out."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


DEFAULT_URL = "http://localhost:11434"
# The first request also loads the model.
_GENERATE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model of the server; `parameters` and `quantization` as it writes them, such as "8.0B"."""

    name: str
    parameters: str
    quantization: str
    num_bytes: int


class Ollama:
    """Client of Ollama. Raises ConfigError for a bad `url`; calls raise MachineError without a
    server.

    Ollama gives neither logits nor control of its KV cache, so no draft can be verified with it.
    """

    def __init__(self, url: str = DEFAULT_URL) -> None:
        self._server = Server(url=url, timeout_seconds=5.0)
        self._writer = Server(url=url, timeout_seconds=_GENERATE_SECONDS)

    def models(self) -> list[OllamaModel]:
        """The models of the server, in its order."""
        try:
            answer = self._server.ask("/api/tags")
        except MachineError as error:
            raise MachineError(
                f"Ollama is not running at {self._server.url}: {error}",
                hint="start it with `ollama serve`, or name another --host",
            ) from None
        return [_model(entry) for entry in objects(answer.get("models"))]

    def generate(self, model: str, prompt: str, *, max_tokens: int) -> Completion:
        """One greedy completion, with the server's time of writing, without prompt and loading."""
        options = {"num_predict": max_tokens, "temperature": 0}
        body = {"model": model, "prompt": prompt, "stream": False, "options": options}
        answer = self._writer.ask("/api/generate", body)
        return Completion(
            text=str(answer.get("response", "")),
            num_tokens=int(number(answer.get("eval_count"))),
            seconds=number(answer.get("eval_duration")) / 1e9,
        )


def _model(entry: dict[str, Any]) -> OllamaModel:
    found: object = entry.get("details")
    details = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return OllamaModel(
        name=str(entry.get("name", "?")),
        parameters=str(details.get("parameter_size") or "?"),
        quantization=str(details.get("quantization_level") or "?"),
        num_bytes=int(number(entry.get("size"))),
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion. `seconds` is from sending the request to the end of the answer, unless the
    server reports a time of its own."""

    text: str
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a completion, `seconds` after the request was sent. `num_tokens` is the server's
    own count for the whole text, if it reports one."""

    text: str
    seconds: float
    num_tokens: int | None = None


class OpenAIClient:
    """Client of OpenAI's API. Calls raise MachineError if the server answers unexpectedly."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def models(self) -> list[str]:
        """Ids of the served models."""
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
        self,
        model: str,
        prompt: str | list[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> Generator[Piece]:
        """A completion as it arrives, of a text or of token ids; above temperature 0 from the whole
        distribution, by `seed`. `more` are further members of the request that a server knows."""
        body: dict[str, object] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
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
