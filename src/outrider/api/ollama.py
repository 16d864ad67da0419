"""An Ollama server next door: is it there, what has it, does it answer.

For validation only: a look at whether a model gives sensible text at all. Ollama gives neither
logits nor control of the KV memory, so nothing here can verify a draft and no benchmark uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from outrider.api.remote import Server, number, objects
from outrider.core.errors import MachineError

DEFAULT_URL = "http://localhost:11434"
# A first request also loads the model.
_GENERATE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model that the server has; `parameters` and `quantization` as it writes them, "8.0B"."""

    name: str
    parameters: str
    quantization: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OllamaReply:
    """`seconds` is the server's own figure for writing `num_tokens`, without prompt and loading."""

    text: str
    num_tokens: int
    seconds: float


class Ollama:
    """Raises ConfigError for a bad `url`; every call raises MachineError without a server."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        self._server = Server(url=url, timeout_seconds=5.0)
        self._writer = Server(url=url, timeout_seconds=_GENERATE_SECONDS)

    def models(self) -> list[OllamaModel]:
        """What the server has, in its order."""
        try:
            answer = self._server.ask("/api/tags")
        except MachineError as error:
            raise MachineError(
                f"Ollama is not running at {self._server.url}: {error}",
                hint="start it with `ollama serve`, or name another --host",
            ) from None
        return [_model(entry) for entry in objects(answer.get("models"))]

    def generate(self, model: str, prompt: str, *, max_tokens: int) -> OllamaReply:
        """One greedy completion."""
        options = {"num_predict": max_tokens, "temperature": 0}
        body = {"model": model, "prompt": prompt, "stream": False, "options": options}
        answer = self._writer.ask("/api/generate", body)
        return OllamaReply(
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
