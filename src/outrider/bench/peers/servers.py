"""Servers that run already, as a user names them: `NAME[+DRAFTER][@FORMAT][/MODEL]=URL`.

    vllm@bf16=http://localhost:8000,vllm+model@bf16=http://localhost:8001

are a plain server and one that speculates with a draft model, compared with each other and with
ours. What a server speculates with and in which number format is its owner's word: it is set where
the server was started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.api.clients import Server
from outrider.core.errors import ConfigError, did_you_mean

_NAMED = re.compile(
    r"(?P<peer>[A-Za-z][\w.-]*)(\+(?P<drafter>[\w-]+))?(@(?P<form>\w+))?(/(?P<model>[^=]+))?"
)
_EXAMPLE = "--servers vllm=http://localhost:8000,vllm+model=http://localhost:8001"


@dataclass(frozen=True, slots=True)
class Served:
    """One server: who it is in tables, how it drafts, its number format, its model (the first one
    that it serves if empty) and its address."""

    peer: str
    drafter: str
    form: str
    model: str
    url: str


def parse_servers(
    text: str, *, drafters: Sequence[str], forms: Sequence[str], taken: Sequence[str]
) -> list[Served]:
    """Those named in `text`, between commas. A server without a format is compared in the first of
    `forms`. Raises ConfigError for a word that names none, or one of the names `taken`."""
    found = [
        _server(word.strip(), drafters, forms, taken) for word in text.split(",") if word.strip()
    ]
    places = [(one.peer, one.drafter, one.form) for one in found]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(
                f"--servers names {'+'.join(place[:2])} twice in {place[2]}.",
                hint="give each server a name of its own",
            )
    return found


def _server(
    word: str, drafters: Sequence[str], forms: Sequence[str], taken: Sequence[str]
) -> Served:
    name, equals, url = word.partition("=")
    match = _NAMED.fullmatch(name)
    if not equals or match is None:
        raise ConfigError(f"{word!r} does not name a server.", hint=_EXAMPLE)
    peer, drafter = match["peer"], match["drafter"] or "none"
    form = match["form"] or forms[0]
    if peer in taken:
        raise ConfigError(f"{peer!r} is started here, it is no server.", hint=_EXAMPLE)
    for value, known in ((drafter, drafters), (form, forms)):
        if value not in known:
            raise ConfigError(f"{word!r}: no {value!r} here.", hint=did_you_mean(value, known))
    Server(url=url)
    return Served(peer, drafter, form, match["model"] or "", url)
