# pyright: basic, reportMissingImports=false
"""Prefix-aware routing: a request goes to a replica that has cached its beginning, if there is one,
and otherwise to the less busy of two random replicas.

This is a router of Ray Serve with the policy of sched/admission.py. The gateway has the token ids
of the prompt and hashes them by block. The router returns replicas by rank: Ray takes one of a
later rank if those of the earlier ranks are full.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.sched.admission import KnownBlocks, best_known


class Seen:
    """This router's knowledge of a replica: the requests that it runs, and those that were routed
    to it and have not arrived, which may be many in a burst."""

    def __init__(self) -> None:
        self.known = KnownBlocks()
        self.running: set[str] = set()
        self.coming: dict[str, PendingRequest] = {}

    @property
    def num_in_flight(self) -> int:
        coming = self.coming.values()
        return len(self.running) + sum(not one.future.cancelled() for one in coming)

    def forget(self, request_id: str) -> None:
        self.running.discard(request_id)
        self.coming.pop(request_id, None)
        self.coming = {n: one for n, one in self.coming.items() if not one.future.cancelled()}


class PrefixRouter(RequestRouter):
    """A router that sends each request to the replica chosen for it. Ray's own router would give
    a free replica to the oldest request."""

    def initialize_state(self, **_: object) -> None:
        self._seen: dict[ReplicaID, Seen] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        present = {
            one.replica_id: self._seen.get(one.replica_id) or Seen() for one in candidate_replicas
        }
        # Replicas that are gone are forgotten.
        self._seen = present
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        pending_request.routing_context.should_backoff = True
        blocks, request_id = _blocks(pending_request), _id(pending_request)
        for seen in present.values():
            # A replica may have refused this request: Ray then asks for it a second time.
            seen.forget(request_id)
        chosen = best_known(list(present.values()), blocks)
        if not chosen.known.num_known(blocks):
            return [two]
        chosen.coming[request_id] = pending_request
        first = [one for one in candidate_replicas if present[one.replica_id] is chosen]
        return [first, two]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        del result
        for one in self._seen.values():
            one.forget(_id(pending_request))
        seen = self._seen.setdefault(replica_id, Seen())
        seen.known.note(_blocks(pending_request))
        seen.running.add(_id(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if (seen := self._seen.get(replica_id)) is not None:
            seen.forget(internal_request_id)


def _id(request: PendingRequest) -> str:
    return request.metadata.internal_request_id


def _blocks(request: PendingRequest) -> Sequence[int]:
    """The prompt's blocks; none for calls of the engine's other methods."""
    return request.kwargs.get("blocks", ())
