"""What gateway and engines tell each other through Ray: bytes of msgpack, made of these structs.

Ray pickles arguments and results; of ours it pickles nothing but bytes and numbers, which run no
code when they are read (ADR 0015).
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from outrider.api.result import GenerationResult, TextEvent
from outrider.core.budget import RoundTrace
from outrider.server.frames import Failure, Submit
from outrider.server.port import EngineCard


class Handed(Struct, frozen=True):
    """A request for an engine. Of a text that goes on, `numerics` are those that it was begun
    with: others would write another text."""

    submit: Submit
    numerics: str = ""


class Piece(Struct, frozen=True, omit_defaults=True):
    """What became of a request since the last one: an event with its rounds, or its end. The first
    of all tells who writes: its `numerics`, its number and its name, and nothing else."""

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
