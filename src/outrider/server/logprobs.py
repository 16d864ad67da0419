"""Log-probabilities in the formats of OpenAI's two older APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.api.stream import TokenDecoder
from outrider.core.draft import TokenLogprobs

# JSON has no infinity.
_LEAST = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def token_text(decoder: TokenDecoder, token_id: int) -> str:
    return decoder.decode([token_id], skip_special=False)


def chat_logprobs(
    decoder: TokenDecoder, items: Iterable[TokenLogprobs], num_top: int
) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = decoder.token_bytes(token_id)
        values = None if data is None else list(data)
        text = token_text(decoder, token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": values}

    return [
        entry(item.token_id, item.logprob)
        | {"top_logprobs": [entry(*pair) for pair in item.top[:num_top]]}
        for item in items
    ]


def completion_logprobs(
    decoder: TokenDecoder, items: Sequence[TokenLogprobs | None], ids: Sequence[int], start: int
) -> dict[str, Any]:
    """Return the format of /v1/completions. An item is None if unknown, such as that of a prompt's
    first token; `start` is the number of characters before the first token."""
    tokens = [token_text(decoder, token_id) for token_id in ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if item is None else finite(item.logprob) for item in items],
        "top_logprobs": [
            None
            if item is None
            else {token_text(decoder, token_id): finite(p) for token_id, p in item.top}
            for item in items
        ],
        "text_offset": offsets,
    }
