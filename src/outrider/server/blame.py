"""Which requests and prompts engines ended with: the second time, they and their like are kept out.

Several engines of one model share what they know, so that what ended one is not tried on all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from outrider.server.process_stream import ProcessStream

_LOG = logging.getLogger(__name__)
# What a crash adds to the blame of requests in flight that have written since they were handed in
# (each has a share of it), of one that has not, of one of which it is certain, and the blame with
# which a request is kept out.
_PROVEN, _UNPROVEN, _CERTAIN, _KEPT_OUT = 1, 3, 3, 6
_MOST_KNOWN = 1_000
T = TypeVar("T")


class Blame:
    """By kind of request. `kept_out` are those that nobody runs any more."""

    def __init__(self) -> None:
        # Of requests that have not come to an end since: blame from before their first token, and
        # from later on.
        self._blamed: dict[bytes, tuple[int, float]] = {}
        self.kept_out: dict[bytes, None] = {}

    def add(self, sent: Sequence[ProcessStream], *, is_certain: bool) -> None:
        """An engine ended with these; those whose readers left count too, for they may ask again.
        It is certain for one that was alone and is not tried again, as others are."""
        # Who has written nothing yet is likelier to have ended it.
        unproven = {stream.kind for stream in sent if not stream.is_proven}
        for kind in unproven.union(stream.kind for stream in sent):
            early, late = self._blamed.get(kind, (0, 0))
            if kind in unproven:
                early += _UNPROVEN
            else:
                late += _CERTAIN if is_certain else _PROVEN / len(sent)
            _remember(self._blamed, kind, (early, late))
            if early + late >= _KEPT_OUT:
                del self._blamed[kind]
                self.keep_out(kind)

    def prove(self, stream: ProcessStream) -> None:
        """It has written something: its beginning ended no engine."""
        if self._blamed and stream.kind in self._blamed:
            self._blamed[stream.kind] = 0, self._blamed[stream.kind][1]

    def clear(self, stream: ProcessStream) -> None:
        """It came to its end."""
        if self._blamed:
            self._blamed.pop(stream.kind, None)

    def keep_out(self, kind: bytes) -> None:
        _LOG.error("what the engine ended with twice is kept out from now on")
        _remember(self.kept_out, kind, None)


def _remember(known: dict[bytes, T], kind: bytes, value: T) -> None:
    known[kind] = value
    if len(known) > _MOST_KNOWN:
        del known[next(iter(known))]
