"""A client for servers that speak OpenAI's completions, such as vLLM: baselines to compare with.

Only what a comparison needs: which models there are, and one greedy completion with its time as
the client sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

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
