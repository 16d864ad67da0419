"""A server that speaks OpenAI's completions, as vLLM, SGLang, llama.cpp and Ollama do.

It gets the prompt as text and streams its answer. Tokens are counted as everybody's are: the ids
that our tokenizer makes of the text; the server's own count is kept beside it. Seconds go from
sending the request to its last piece, so the way over HTTP is in them. Pieces arrive as the server
sends them, several tokens at once where it speculates; each piece's tokens share its moment.

A setup's target is the address; how the server speculates is its own affair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outrider.api.clients import OpenAIClient, Piece, Server
from outrider.api.tokenizer import Tokenizer
from outrider.bench.peers.lines import Ask, RefusedError, Setup, serve
from outrider.core.errors import OutriderError

ANSWER_SECONDS = 600.0


class HttpSide:
    """`count` makes ids of a text."""

    def __init__(self, count: Callable[[str], Sequence[int]]) -> None:
        self._count = count
        self._loaded: dict[str, tuple[OpenAIClient, str]] = {}

    def about(self) -> dict[str, Any]:
        return {"versions": {}}

    def load(self, setup: Setup) -> list[str]:
        """Asks which models there are; the first one if none is named."""
        try:
            client = OpenAIClient(Server(url=setup.target, timeout_seconds=ANSWER_SECONDS))
            served = client.models()
        except OutriderError as error:
            raise RefusedError(_told(error)) from error
        model = str(setup.options.get("model") or next(iter(served), ""))
        if model not in served:
            there = ", ".join(served) or "none"
            raise RefusedError(f"{setup.target} has no model {model!r}; it serves: {there}")
        self._loaded[setup.name] = client, model
        return [f"{setup.target} serves {model}"]

    def run(self, ask: Ask) -> dict[str, Any]:
        client, model = self._loaded[ask.name]
        try:
            pieces = list(
                client.stream(
                    model,
                    ask.text,
                    max_tokens=ask.max_tokens,
                    temperature=ask.temperature,
                    seed=ask.seed,
                )
            )
        except OutriderError as error:
            raise RefusedError(_told(error)) from error
        if not pieces:
            raise RefusedError(f"{model} answered with nothing")
        found: dict[str, Any] = {
            "ids": list(self._count("".join(piece.text for piece in pieces))),
            "seconds": pieces[-1].seconds,
            "arrivals": arrivals(pieces, self._count),
        }
        usage = [piece.num_tokens for piece in pieces if piece.num_tokens is not None]
        return found | ({"usage": usage[-1]} if usage else {})

    def drop(self, name: str) -> None:
        del self._loaded[name]


def arrivals(pieces: Iterable[Piece], count: Callable[[str], Sequence[int]]) -> list[float]:
    """When each token of the text so far was there, in seconds. A later piece may join tokens of an
    earlier one; a token that has arrived stays so."""
    text, found = "", list[float]()
    for piece in pieces:
        text += piece.text
        found += [piece.seconds] * (len(count(text)) - len(found))
    return found[: len(count(text))]


def _told(error: OutriderError) -> str:
    return f"{error} {error.hint}" if error.hint else str(error)


def main() -> None:
    tokenizer = Tokenizer.load(Path(sys.argv[1]))
    serve(HttpSide(lambda text: tokenizer.encode(text, add_special=False)))


if __name__ == "__main__":
    main()
