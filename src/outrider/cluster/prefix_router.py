# pyright: basic, reportMissingImports=false
"""Which replica gets a request: one that has read its beginning, else the less busy of two.

Ray's router of requests with our policy in it (sched/routing.py): the prompt's blocks are known at
the gateway, which has its ids. Ray asks for ranks: a replica of a later one is taken where those of
the ranks before it are full.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.sched.routing import KnownBlocks, best_known


class Seen:
    """A replica as this router has seen it."""

    def __init__(self) -> None:
        self.known = KnownBlocks()
        self.requests: set[str] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self.requests)


class PrefixRouter(RequestRouter):
    """Without Ray's order of arrival: a request is given to the replica that was chosen for it."""

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
        # What is remembered of replicas that are gone goes with them.
        self._seen = present
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        pending_request.routing_context.should_backoff = True
        blocks = _blocks(pending_request)
        chosen = best_known(list(present.values()), blocks)
        if not chosen.known.num_known(blocks):
            return [two]
        first = [one for one in candidate_replicas if present[one.replica_id] is chosen]
        return [first, two]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        del result
        seen = self._seen.setdefault(replica_id, Seen())
        seen.known.note(_blocks(pending_request))
        seen.requests.add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if (seen := self._seen.get(replica_id)) is not None:
            seen.requests.discard(internal_request_id)


def _blocks(request: PendingRequest) -> Sequence[int]:
    """Of calls of an engine's other methods there are none."""
    return request.kwargs.get("blocks", ())
