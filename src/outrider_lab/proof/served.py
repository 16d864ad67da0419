"""Texts of a server that answers OpenAI's API, with and without speculation: what it shows of them.

Fields that OpenAI's API does not have are left out if the server refuses them. Numbers of drafted
tokens are read under the names of vLLM, SGLang, llama-server and LM Studio.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any, Protocol

from outrider.core.errors import ConfigError, MachineError, SilentError
from outrider.plugins.proof.check import PROMPTS

NUM_TOP, AT_ONCE = 5, 4
# No filter and no penalty: servers and checkpoints have their own defaults.
NEUTRAL: Mapping[str, object] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1,
    "repeat_penalty": 1,
}
# Fields of a request that turn speculation off: of Outrider, and of older llama-servers.
SWITCHES: Sequence[Mapping[str, object]] = ({"speculative": False}, {"speculative.n_max": 0})
_DRAFTED = ("num_draft_tokens", "draft_n", "spec_draft_token_num", "total_draft_tokens_count")
_COUNTER = re.compile(r"[\w:]*spec_decode_num_draft_tokens(?:_total)?(?:\{.*\})? ([\d.e+]+)$")


class RefusedError(MachineError):
    """A request that `side` did not answer with texts."""

    def __init__(self, side: Side, error: MachineError) -> None:
        super().__init__(str(error), hint=error.hint)
        self.side = side


class Endpoint(Protocol):
    """HTTP of one server: JSON in, JSON or lines out. Both methods raise MachineError."""

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]: ...

    def lines(self, path: str, body: Mapping[str, object] | None) -> Generator[str]: ...


@dataclass(frozen=True, slots=True)
class Token:
    """A token's bytes, its log-probability (None if unknown), and those of the likeliest tokens."""

    piece: bytes
    logprob: float | None
    top: Mapping[bytes, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One text. `tokens` is None if the server shows none, `drafted` if it does not count drafts.

    A token behind the end of the text, such as the end-of-turn token, has an empty piece."""

    text: str
    finish: str
    tokens: tuple[Token, ...] | None
    drafted: int | None

    @property
    def ended(self) -> bool:
        return self.finish != "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A server as one side of the comparison; `fields` are added to every request."""

    server: Endpoint
    model: str
    chats: bool = False
    fields: Mapping[str, object] = field(default_factory=dict[str, object])

    def write(self, prompt: str, *, logprobs: bool = False, **params: object) -> list[Answer]:
        """Return the choices of one request, by their index. Raises RefusedError, SilentError."""
        body = {"model": self.model, **self.fields, **params}
        if self.chats:
            body["messages"] = [{"role": "user", "content": prompt}]
            if logprobs:
                body |= {"logprobs": True, "top_logprobs": NUM_TOP}
        else:
            body["prompt"] = prompt
            if logprobs:
                body["logprobs"] = NUM_TOP
        path = "/v1/chat/completions" if self.chats else "/v1/completions"
        try:
            return answers_of(self.server.ask(path, body))
        except SilentError:
            raise
        except MachineError as error:
            raise RefusedError(self, error) from None

    def all(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Answer]:
        """Return the first choice of each request, in order; some run at once."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = [pool.submit(self.write, prompt, **params) for prompt, params in requests]
            return [one.result()[0] for one in running]

    def drafted(self, answers: Sequence[Answer], before: float | None = None) -> float | None:
        """Return the number of tokens drafted for `answers`, or since the counter of /metrics was
        `before`; None if the server does not show it."""
        shown = [one.drafted for one in answers if one.drafted is not None]
        if shown:
            return sum(shown)
        after = self.counter()
        return None if after is None or before is None else after - before

    def counter(self) -> float | None:
        """Return the sum of vLLM's counters of drafted tokens; None without any."""
        try:
            found = [_COUNTER.match(line) for line in self.server.lines("/metrics", None)]
        except MachineError:
            return None
        values = [float(match[1]) for match in found if match]
        return sum(values) if values else None


def answers_of(reply: Mapping[str, Any]) -> list[Answer]:
    """Return the texts of a reply of completions or chat, at least one. Raises MachineError."""
    answers: list[Answer] = []
    with suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
        drafted = _drafted({key: value for key, value in reply.items() if key != "choices"})
        choices = sorted(reply["choices"], key=lambda choice: choice.get("index", 0))
        answers = [_answer(choice, drafted) for choice in choices]
    if not answers:
        why = "the server's answer has no texts in OpenAI's format."
        raise MachineError(why, hint="name a server's address")
    return answers


def _answer(choice: Mapping[str, Any], drafted: int | None) -> Answer:
    text = choice.get("text")
    if text is None:
        message = choice["message"]
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        text = thought + (message.get("content") or "")
    text = text.encode(errors="replace").decode()  # half of a pair of UTF-16 is no character
    tokens = _tokens(choice.get("logprobs"))
    if tokens is not None:
        size = len(text.encode())
        starts = accumulate((len(token.piece) for token in tokens), initial=0)
        tokens = [
            token if start < size else replace(token, piece=b"")
            for token, start in zip(tokens, starts, strict=False)
        ]
    finish = choice.get("finish_reason") or "stop"
    return Answer(text, finish, None if tokens is None else tuple(tokens), drafted)


def _tokens(found: Any) -> list[Token] | None:
    if not found:
        return None
    if "content" in found:
        return [
            Token(_piece(item), _number(item["logprob"]), _listed(item))
            for item in found["content"] or ()
        ]
    tokens: list[str] = found["tokens"]
    tops: list[dict[str, float] | None] = found.get("top_logprobs") or [None] * len(tokens)
    return [
        Token(text.encode(), _number(value), _numbers((top or {}).items()))
        for text, value, top in zip(tokens, found["token_logprobs"], tops, strict=True)
    ]


def _listed(item: Mapping[str, Any]) -> dict[bytes, float]:
    listed = item.get("top_logprobs") or ()
    return _numbers((_piece(other), other["logprob"]) for other in listed)


def _numbers(listed: Iterable[tuple[str | bytes, Any]]) -> dict[bytes, float]:
    numbers = ((piece, _number(value)) for piece, value in listed)
    return {
        piece.encode() if isinstance(piece, str) else piece: value
        for piece, value in numbers
        if value is not None
    }


def _number(value: Any) -> float | None:
    """Return a log-probability, perhaps rounded; None for what cannot be one."""
    return value if isinstance(value, int | float) and -math.inf < value < 1 else None


def _piece(item: Mapping[str, Any]) -> bytes:
    data = item.get("bytes")
    return item["token"].encode() if data is None else bytes(data)


def _drafted(value: Any) -> int | None:
    """Return the number of drafted tokens anywhere in a reply; None if it is not shown."""
    found = [value[name] for name in _DRAFTED if type(value.get(name)) is int]
    inner = (_drafted(part) for part in value.values() if isinstance(part, dict))
    found += [number for number in inner if number is not None]
    return max(found, default=None)


def sides_of(
    server: Endpoint, other: Endpoint | None, *, model: str = "", draft: str = ""
) -> tuple[Side, Side]:
    """Return the sides without and with speculation: `other`, or a field of the request to `server`
    that turns speculation off, and `server`. `draft` is sent as `draft_model`, LM Studio's field,
    with speculation only. An empty `model` is the first one that a server lists.

    Raises ConfigError if no field turns speculation off, MachineError if a server does not answer.
    """
    drafted = _opened(server, model, {"draft_model": draft} if draft else {})
    if other is not None:
        return _opened(other, model, {}), drafted
    if draft:
        return _opened(server, model, {}), drafted
    for switch in SWITCHES if _num_probed(drafted) else ():
        plain = replace(drafted, fields={**drafted.fields, **switch})
        if not _num_probed(plain):
            return plain, drafted
    raise ConfigError(
        "the server shows no field that turns speculation off for one request.",
        hint="start the same model without speculation, and name that server with --plain",
    )


def _num_probed(side: Side) -> int:
    """Return the number of tokens drafted for some texts; 0 if none are shown."""
    params = {"max_tokens": 32, "temperature": 0}
    try:
        return sum(one.drafted or 0 for one in side.all([(text, params) for text in PROMPTS[::3]]))
    except MachineError:
        return 0


def _opened(server: Endpoint, model: str, fields: Mapping[str, object]) -> Side:
    """Return the side with the API and the fields that its server takes; completions are preferred,
    because no template changes their prompt. Raises MachineError."""
    if not model:
        with suppress(KeyError, TypeError):
            model = str(next(iter(server.ask("/v1/models")["data"] or ()), {"id": ""})["id"])
    first: MachineError | None = None
    for chats, neutral in product((False, True), (NEUTRAL, {"top_p": 1})):
        side = Side(server=server, model=model, chats=chats, fields={**neutral, **fields})
        try:
            side.write("Hello", max_tokens=1, temperature=0)
        except RefusedError as refusal:
            first = first or refusal
        else:
            return side
    raise first or MachineError("no answer.")
