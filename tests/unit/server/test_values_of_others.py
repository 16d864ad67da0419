"""Values that clients of other servers send: read as those mean them, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask, site_with
from outrider.server.exchange import salt_of
from outrider.server.port import EngineRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    CHAT: HELLO,
    COMPLETIONS: {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": HELLO | {"max_tokens": 9},
}


def sent(more: dict[str, Any], path: str = CHAT) -> EngineRequest:
    port = ScriptedPort()
    got = ask(port, path, BODIES[path] | more)
    assert got.status == 200, got.body
    return port.requests[0]


def test_all_tokens_are_minus_one() -> None:
    assert sent({"top_k": -1}).params.top_k == 0


def test_a_seed_of_minus_one_is_drawn() -> None:
    drawn = {sent({"seed": -1, "temperature": 1}).params.seed for _ in range(3)}
    assert len(drawn) == 3


@pytest.mark.parametrize("seed", [-2, -5, -(2**63)])
def test_other_seeds_below_zero_are_seeds(seed: int) -> None:
    first, again, other = (sent({"seed": one}).params.seed for one in (seed, seed, seed + 10))
    assert first == again != other
    assert first is not None
    assert 0 <= first < 2**63


@pytest.mark.parametrize("path", BODIES)
def test_whole_numbers_may_have_a_point(path: str) -> None:
    params = sent({"max_tokens": 4.0, "seed": 1.0, "top_k": 5.0, "min_tokens": 2e0}, path).params
    assert (params.max_tokens, params.seed, params.top_k, params.min_tokens) == (4, 1, 5, 2)
    assert type(params.max_tokens) is int


@pytest.mark.parametrize("value", [4.5, 1e300, "4", True, -3.0])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    got = ask(ScriptedPort(), CHAT, HELLO | {"max_tokens": value})
    assert got.status == 400
    assert got.json()["error"]["param"] == "max_tokens"


def test_options_of_streams_may_be_null() -> None:
    for name in ("include_usage", "continuous_usage_stats"):
        body = HELLO | {"stream": True, "stream_options": {name: None}}
        events = ask(ScriptedPort(), CHAT, body).events
        assert events[-1] == "[DONE]"
        assert not any("usage" in event for event in events[:-1])


def test_structures_by_the_names_of_sglang() -> None:
    assert sent({"regex": "[ab]+"}).structure == {"regex": "[ab]+"}
    assert sent({"ebnf": 'root ::= "a"'}).structure == {"grammar": 'root ::= "a"'}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "more",
    [
        {"include_stop_str_in_output": True},
        {"truncate_prompt_tokens": 5},
        {"truncate_prompt_tokens": -1},
        {"cache_salt": ""},
    ],
)
def test_what_would_change_a_text_is_refused_by_name(path: str, more: dict[str, Any]) -> None:
    port = ScriptedPort()
    got = ask(port, path, BODIES[path] | more)
    assert got.status == 400
    assert next(iter(more)) in got.json()["error"]["message"]
    assert not port.requests


@pytest.mark.parametrize("name", ["truncate_prompt_tokens", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", [None, False, []])
def test_what_changes_nothing_is_taken(name: str, value: object) -> None:
    assert sent({name: value}).params.stop == ()


@pytest.mark.parametrize(("value", "ids"), [(None, ()), ([], ()), ([2, 7, 2], (2, 7))])
@pytest.mark.parametrize("path", BODIES)
def test_tokens_that_end_a_text_are_taken(path: str, value: object, ids: tuple[int]) -> None:
    assert sent({"stop_token_ids": value}, path).params.stop_token_ids == ids


@pytest.mark.parametrize("path", BODIES)
def test_requests_of_one_salt_share_what_was_read(path: str) -> None:
    plain = sent({}, path).cache_salt
    one, same, other = (sent({"cache_salt": salt}, path).cache_salt for salt in ("a", "a", "b"))
    assert one == same
    assert len({plain, one, other}) == 3
    assert len(sent({"cache_salt": "x" * 100_000}, path).cache_salt) < 100


def test_salts_do_not_join_keys() -> None:
    site, names = site_with(ScriptedPort()), ("", "k", "l")
    salts = {salt_of(site, key, given) for key in names for given in names}
    assert len(salts) == 9


def test_nothing_is_asked_without_an_input() -> None:
    got = ask(ScriptedPort(), "/v1/responses", {"max_output_tokens": 1})
    assert (got.status, got.json()["error"]["param"]) == (400, "input")
    assert ask(ScriptedPort(), "/v1/responses/input_tokens", {}).status == 400


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/audio/speech"])
def test_clients_do_not_ask_again_for_what_is_not_there(path: str) -> None:
    got = ask(ScriptedPort(), path, {})
    assert got.status == 501
    assert got.headers["x-should-retry"] == "false"
    assert got.json()["error"]["code"] == "not_supported"
