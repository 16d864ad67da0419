"""A server of OpenAI's API in this process, over a toy model, which speculates as real ones do.

The model draws a token by the two before it from a distribution that a hash of them makes; the
drafter has the same logits with noise. Rounds follow the token rule, so an honest server keeps the
distribution exactly. Each name of FAULTS plants one fault, which acts on drafted tokens only.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

from outrider.core.errors import MachineError

FAULTS = (
    *("argmax", "zero_logprob", "off_by_one", "penalties", "min_p", "stop", "copies"),
    *("json", "one_seed", "draft_accepted"),
)
END = 0
NUM_TOP = 5
PIECES = ("", *(f" {a}{b}" for a in "bdklm" for b in ("an", "or", "ie", "ust")), ".", "\n", " é")
K = 4
_SHARPNESS, _DRAFT_NOISE, _END_BIAS = 1.6, 0.8, -1.5


class Row:
    """The target's logits for its next token, and what is shown of them."""

    def __init__(self, logits: Sequence[float]) -> None:
        self.logits = logits
        self.probs = _softmax(logits)

    @cached_property
    def tops(self) -> list[dict[str, Any]]:
        likeliest = sorted(range(len(self.logits)), key=self.logits.__getitem__)
        return [
            _entry(token, math.log(self.probs[token])) for token in likeliest[: -1 - NUM_TOP : -1]
        ]

    def entry(self, token: int) -> dict[str, Any]:
        return _entry(token, math.log(self.probs[token])) | {"top_logprobs": self.tops}


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": PIECES[token], "logprob": logprob, "bytes": [*PIECES[token].encode()]}


@lru_cache(1 << 14)
def _known(seed: int, context: tuple[int, int, int]) -> tuple[Row, list[float]]:
    """The target's row and the drafter's probabilities after a context: a prompt, and the last two
    tokens."""
    rng = random.Random(repr((seed, context)))
    own = [rng.gauss(0, _SHARPNESS) + (_END_BIAS if i == END else 0) for i in range(len(PIECES))]
    return Row(own), _softmax([value + rng.gauss(0, _DRAFT_NOISE) for value in own])


@dataclass(slots=True)
class Request:
    """A request's parameters, its random numbers and its text so far."""

    body: Mapping[str, Any]
    prompt: int
    rng: random.Random
    tokens: list[int] = field(default_factory=list[int])
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_drafted: int = 0

    @property
    def greedy(self) -> bool:
        return self.body.get("temperature", 1) == 0

    def context(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        before = (-1, -1, *tokens)
        return self.prompt, before[-2], before[-1]


@dataclass(slots=True)
class ToyEndpoint:
    """`rounding` is the standard deviation of the noise of logits in passes with drafts, and all
    logits are then rounded to multiples of `step`, as a number format of 16 bits does. Without
    `speculates` nothing is drafted, and the field `speculative` turns it off for a request."""

    seed: int = 0
    fault: str = ""
    rounding: float = 0.0
    step: float = 0.0
    speculates: bool = True
    shows_logprobs: bool = True
    shows_drafts: bool = True
    num_requests: int = 0
    lock: Lock = field(default_factory=Lock)

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": "toy"}]}
        asked: Mapping[str, Any] = body or {}
        chats = path == "/v1/chat/completions"
        prompt = asked["messages"][0]["content"] if chats else asked["prompt"]
        with self.lock:
            self.num_requests += 1
            seed = asked.get("seed", -self.num_requests)
        drafts = self.speculates and asked.get("speculative") is not False
        if self.fault == "one_seed" and drafts:
            seed = 1
        choices: list[dict[str, Any]] = []
        num_drafted = 0
        for index in range(asked.get("n", 1)):
            copied = index if not (self.fault == "copies" and drafts) else 0
            # Drafts take other numbers, so the sides do not share their texts.
            rng = random.Random(repr((self.seed, seed, copied, drafts)))
            request = Request(asked, zlib.crc32(prompt.encode()), rng)
            choices.append(self._choice(request, index, drafts, chats=chats))
            num_drafted += request.num_drafted
        reply: dict[str, Any] = {"choices": choices}
        if self.shows_drafts and drafts:
            reply["metrics"] = {"speculative_decoding": {"num_draft_tokens": num_drafted}}
        return reply

    def lines(self, path: str, body: Mapping[str, object] | None) -> Generator[str]:
        yield from ()
        raise MachineError(f"{path}: 404 {body or ''}")

    def _choice(self, request: Request, index: int, drafts: bool, *, chats: bool) -> dict[str, Any]:
        if request.body.get("response_format"):
            text, finish = self._json(request, drafts), "stop"
        else:
            text, finish = self._text(request, drafts)
        found: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
        found |= {"message": {"content": text}} if chats else {"text": text}
        if request.body.get("logprobs") and self.shows_logprobs:
            found["logprobs"] = {"content": request.entries} if chats else _flat(request.entries)
        return found

    def _text(self, request: Request, drafts: bool) -> tuple[str, str]:
        body = request.body
        most = body["max_tokens"]
        while True:
            start = len(request.tokens)
            self._round(request, K if drafts and start else 0)
            del request.tokens[most:], request.entries[most:]
            for num in range(start + 1, len(request.tokens) + 1):
                if request.tokens[num - 1] == END:
                    return self._closed(request, num - 1, "stop")
                text = "".join(PIECES[token] for token in request.tokens[:num])
                stop = next((s for s in body.get("stop", ()) if s in text), None)
                # The planted fault cuts after whole rounds, at the end of the last token.
                blind = self.fault == "stop" and drafts
                if stop and not (blind and num < len(request.tokens)):
                    del request.entries[num:]
                    return text if blind else text.partition(stop)[0], "stop"
            if len(request.tokens) >= most:
                return self._closed(request, most, "length")

    def _closed(self, request: Request, num: int, finish: str) -> tuple[str, str]:
        del request.entries[num:]
        return "".join(PIECES[token] for token in request.tokens[:num]), finish

    def _round(self, request: Request, k: int) -> None:
        """Draft up to `k` tokens, accept some of them, and append them and the target's own."""
        tokens, draft, reports = list(request.tokens), list[int](), list[list[float]]()
        for _ in range(k):
            reports.append(_known(self.seed, request.context(tokens))[1])
            token = _picked(request, reports[-1])
            draft.append(token)
            tokens.append(token)
        request.num_drafted += k
        for position, token in enumerate(draft):
            if END in request.tokens:
                return
            probs, row = self.target(request, draft[position:], drafted=True)
            own, accepted = self._judged(request, probs, reports[position], token)
            zero = accepted and self.fault == "zero_logprob"
            # Some servers leave the alternatives out as well.
            lists: dict[str, list[object]] = {"top_logprobs": []} if self.seed % 2 else {}
            self._append(request, row, own, {"logprob": 0.0, **lists} if zero else {})
            if not accepted:
                return
        probs, row = self.target(request, (), drafted=False)
        self._append(request, row, _picked(request, probs), {})

    def _append(self, request: Request, row: Row, token: int, wrong: Mapping[str, Any]) -> None:
        request.tokens.append(token)
        if request.body.get("logprobs") and self.shows_logprobs:
            request.entries.append({**row.entry(token), **wrong})

    def _judged(
        self, request: Request, probs: Sequence[float], report: Sequence[float], token: int
    ) -> tuple[int, bool]:
        """The token that is kept at a draft's position, and whether it is the draft's."""
        if self.fault == "draft_accepted" and request.rng.random() < 0.5:
            return token, True
        if request.greedy or self.fault == "argmax":
            best = _argmax(probs)
            return best, best == token
        if request.rng.random() * report[token] < probs[token]:
            return token, True
        rest = [max(p - q, 0.0) for p, q in zip(probs, report, strict=True)]
        return _draw(rest if sum(rest) > 0 else probs, request.rng), False

    def target(
        self, request: Request, ahead: Sequence[int], *, drafted: bool
    ) -> tuple[Sequence[float], Row]:
        """The distribution from which the next token is drawn, and the row behind it."""
        shifted = drafted and self.fault == "off_by_one"
        read = [*request.tokens, *ahead[:1]] if shifted else request.tokens
        row = _known(self.seed, request.context(read))[0]
        if drafted and self.rounding:
            row = Row([value + request.rng.gauss(0, self.rounding) for value in row.logits])
        if self.step:
            row = Row([self.step * round(value / self.step) for value in row.logits])
        body, probs = request.body, row.probs
        once, each = (body.get(f"{kind}_penalty", 0) for kind in ("presence", "frequency"))
        if (once or each) and not (drafted and self.fault == "penalties"):
            logits = list(row.logits)
            for token, count in Counter(request.tokens).items():
                logits[token] -= once + count * each
            probs = _softmax(logits)
        least = body.get("min_p", 0) * max(probs)
        if least and not (drafted and self.fault == "min_p"):
            left = sum(p for p in probs if p >= least)
            probs = [p / left if p >= least else 0.0 for p in probs]
        return probs, row

    def _json(self, request: Request, drafts: bool) -> str:
        colours = ["red", "green", "blue"]
        if drafts and self.fault == "json" and request.rng.random() < 0.5:
            colours = ["purple"]
        found = {"colour": request.rng.choice(colours), "sure": request.rng.random() < 0.5}
        return json.dumps(found)


def _flat(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            for entry in entries
        ],
    }


def _picked(request: Request, probs: Sequence[float]) -> int:
    return _argmax(probs) if request.greedy else _draw(probs, request.rng)


def _softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    weights = [math.exp(value - most) for value in logits]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _draw(weights: Sequence[float], rng: random.Random) -> int:
    return rng.choices(range(len(weights)), weights)[0]
