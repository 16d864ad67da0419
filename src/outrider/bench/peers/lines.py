"""How a peer is driven: one request a line on its stdin, one answer a line on its stdout, in JSON.

Each peer is a process of its own, so that its thread pool, its libraries and its version disturb
nobody, and it waits on a read while another is timed. It takes the time itself, around the call
that writes the tokens, so neither starting, nor loading, nor this protocol is in it.

    {"do": "about"}                      {"versions": {...}}
    {"do": "load", "setup": {...}}       {"notes": [...]}
    {"do": "run", "name": ..., "ids": [...], "text": ..., "max_tokens": 128, "temperature": 0,
     "seed": 1}                          {"ids": [...], "seconds": 1.5}
    {"do": "drop", "name": ...}          {}

What a peer cannot do it refuses with a reason: {"refused": "..."}. This file needs the standard
library alone: a peer may run in another environment, with another Python.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class RefusedError(Exception):
    """This peer cannot do what was asked, and the text says why."""


@dataclass(frozen=True)
class Setup:
    """What is loaded under a name. `target` and `draft` are what this peer reads: a folder, a file
    or an address; `drafter` is none, model or ngram; `options` are the peer's own."""

    name: str
    target: str
    draft: str
    form: str
    drafter: str
    k: int
    threads: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Ask:
    """One prompt, as token ids and as text, and how to go on."""

    name: str
    ids: list[int]
    text: str
    max_tokens: int
    temperature: float
    seed: int


class Side(Protocol):
    """What a peer implements.

    `run` answers with `ids` and `seconds`, and where it knows them with `drafted` and `accepted`
    tokens, with `arrivals` (seconds since the request, one a token) and with `usage`, the number of
    tokens that a server counted itself.
    """

    def about(self) -> dict[str, Any]: ...
    def load(self, setup: Setup) -> list[str]: ...
    def run(self, ask: Ask) -> dict[str, Any]: ...
    def drop(self, name: str) -> None: ...


def serve(side: Side) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    # Libraries may print: theirs goes to the log.
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(side, json.loads(line))) + "\n")
        answers.flush()


def answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    """What `side` says to one request, a refusal included."""
    try:
        return _answer(side, request)
    except (RefusedError, RuntimeError, ValueError, OSError) as error:
        return {"refused": str(error)[:2000]}


def _answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    match request.pop("do"):
        case "about":
            return side.about()
        case "load":
            return {"notes": side.load(Setup(**request["setup"]))}
        case "run":
            return side.run(Ask(**request))
        case "drop":
            side.drop(request["name"])
            return {}
        case strange:
            raise RefusedError(f"nobody knows how to {strange!r}")
