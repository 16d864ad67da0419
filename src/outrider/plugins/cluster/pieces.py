"""Messages between gateway and engines: these structs travel through Ray as bytes of msgpack.

Ray pickles arguments and results. It only gets bytes and numbers to pickle, and unpickling those
runs no code (ADR 0015).
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from outrider.api.result import GenerationResult, TextEvent
from outrider.core.draft import RoundTrace
from outrider.server.frames import Failure, Submit
from outrider.server.port import EngineCard


class Handed(Struct, frozen=True):
    """A request for an engine. `numerics` is set for a text that is continued: it names the
    arithmetic of the engine that began the text, as another one would write a different text."""

    submit: Submit
    numerics: str = ""


class Piece(Struct, frozen=True, omit_defaults=True):
    """A part of an answer: an event with its rounds, or the end of the request. The first piece
    only identifies the replica: its `numerics`, number and name."""

    event: TextEvent | None = None
    rounds: list[RoundTrace] = []
    result: GenerationResult | None = None
    failure: Failure | None = None
    numerics: str = ""
    engine: int = 0
    replica: str = ""


_encoder = msgspec.msgpack.Encoder()
HANDED: msgspec.msgpack.Decoder[Handed] = msgspec.msgpack.Decoder(Handed)
PIECES: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)
CARDS: msgspec.msgpack.Decoder[EngineCard] = msgspec.msgpack.Decoder(EngineCard)


def packed(message: Handed | Piece | EngineCard) -> bytes:
    return _encoder.encode(message)
