"""Quarantine: after a request's second crash of an engine, the request and its like are refused.

Several engines of one model share this knowledge, so that such a request does not crash them all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from outrider.server.process_stream import ProcessStream

_LOG = logging.getLogger(__name__)
# The points that a crash adds to a request in flight: if it has written tokens since it was
# submitted (the requests share these points), if it has written none, and if it is certainly the
# cause. The last number is the sum of points at which a request is refused.
_PROVEN, _UNPROVEN, _CERTAIN, _KEPT_OUT = 1, 3, 3, 6
_MOST_KNOWN = 1_000
T = TypeVar("T")


class Blame:
    """Crash points by kind of request. The kinds in `kept_out` are refused from now on."""

    def __init__(self) -> None:
        # For requests that have not completed since: points from crashes before their first token,
        # and from later crashes.
        self._blamed: dict[bytes, tuple[int, float]] = {}
        self.kept_out: dict[bytes, None] = {}

    def add(self, sent: Sequence[ProcessStream], *, is_certain: bool) -> None:
        """Count a crash against the requests in flight, even if their clients left: these may
        repeat them. `is_certain` means that a request was alone and will not be tried again."""
        # A request that has written nothing yet is the likelier cause.
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
        """Clear the early points of a request that has written something."""
        if self._blamed and stream.kind in self._blamed:
            self._blamed[stream.kind] = 0, self._blamed[stream.kind][1]

    def clear(self, stream: ProcessStream) -> None:
        """Clear all points of a request that has completed."""
        if self._blamed:
            self._blamed.pop(stream.kind, None)

    def keep_out(self, kind: bytes) -> None:
        _LOG.error("a request with which the engine ended twice is kept out from now on")
        _remember(self.kept_out, kind, None)


def _remember(known: dict[bytes, T], kind: bytes, value: T) -> None:
    known[kind] = value
    if len(known) > _MOST_KNOWN:
        del known[next(iter(known))]
