"""Which replica a request goes to, by what Ray asks a router of requests."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from outrider.plugins.cluster.prefix_router import PrefixRouter
from outrider.sched.admission import blocks_of

REPLICAS: Any = [SimpleNamespace(replica_id=name) for name in "abc"]


def router() -> PrefixRouter:
    """Without the rest of what Ray makes it of."""
    found = object.__new__(PrefixRouter)
    found.initialize_state()
    return found


def request(number: int, *, family: int) -> Any:
    blocks = list(blocks_of([family] * 32 + [number] * 16))
    context = SimpleNamespace(should_backoff=False)
    metadata = SimpleNamespace(internal_request_id=f"{family}-{number}")
    return SimpleNamespace(
        kwargs={"blocks": blocks}, routing_context=context, metadata=metadata, future=Future()
    )


def ranks(of: PrefixRouter, asked: Any, replicas: Any = REPLICAS) -> list[list[str]]:
    found = asyncio.run(of.choose_replicas(list(replicas), asked))
    return [[one.replica_id for one in rank] for rank in found]


def test_a_family_goes_where_its_beginning_was_read() -> None:
    routes = router()
    first = request(0, family=1)
    (two,) = ranks(routes, first)
    assert len(set(two)) == 2
    assert first.routing_context.should_backoff
    routes.on_request_routed(first, "b", None)
    for number in range(1, 3):
        asked = request(number, family=1)
        assert ranks(routes, asked)[0] == ["b"]
        routes.on_request_routed(asked, "b", None)
    # Of another family two are tried, wherever they are.
    assert len(ranks(routes, request(0, family=2))) == 1


def test_it_does_not_wait_where_others_are_idle() -> None:
    routes = router()
    for number in range(4):
        routes.on_request_routed(request(number, family=1), "b", None)
    assert ranks(routes, request(9, family=1))[0] != ["b"]
    for number in range(4):
        routes.on_request_completed("b", f"1-{number}")
        # Ray tells of a request that a replica refused as well, which was not routed.
        routes.on_request_completed("b", "1-refused")
    assert ranks(routes, request(9, family=1))[0] == ["b"]


def test_a_burst_counts_before_it_arrives() -> None:
    routes = router()
    routes.on_request_routed(request(0, family=1), "b", None)
    burst = [request(number, family=1) for number in range(1, 5)]
    first = [ranks(routes, asked)[0] for asked in burst]
    assert first[:2] == [["b"], ["b"]]
    assert all(rank != ["b"] for rank in first[2:])
    # Who has left on the way is none, and who is asked for again is one.
    burst[0].future.cancel()
    assert ranks(routes, burst[1])[0] == ["b"]
    assert ranks(routes, request(9, family=1))[0] == ["b"]
    assert ranks(routes, request(10, family=1))[0] != ["b"]


def test_a_replica_that_is_gone_is_forgotten() -> None:
    routes = router()
    routes.on_request_routed(request(0, family=1), "b", None)
    without = [one for one in REPLICAS if one.replica_id != "b"]
    assert len(ranks(routes, request(1, family=1), without)) == 1
    assert len(ranks(routes, request(1, family=1))) == 1


def test_calls_that_are_no_requests_go_anywhere() -> None:
    card = request(0, family=1)
    card.kwargs = {}
    assert len(ranks(router(), card)) == 1
    assert ranks(router(), None, REPLICAS[:1]) == [["a"]]
