"""The document of the server's paths: all of them are in it, with the bodies that they read, the
bounds of their values, and what is answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask, site_with
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.app import ANSWERS, JSON, all_routes, own_bodies


def document() -> dict[str, Any]:
    return ask(ScriptedPort(), "/openapi.json").json()


def test_every_path_is_told() -> None:
    told = document()["paths"]
    site = site_with(ScriptedPort())
    routes = all_routes(site, metric_routes(Metrics(lambda: {"scripted": site.port.status})))
    paths = {getattr(route, "path", "") for route in routes}
    wanted = {path.replace(":path", "") for path in paths if not path.startswith("/web/")}
    assert set(told) == wanted - {"/openapi.json"}
    posted = {path for path in told if "post" in told[path]}
    assert posted == set(own_bodies())
    for path in posted:
        assert told[path]["post"]["requestBody"]


def test_its_schemas_say_what_the_server_reads() -> None:
    told = document()
    schemas = told["components"]["schemas"]
    for path, asked in ASKED.items():
        kind = own_bodies()[path]
        body = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = schemas[body["$ref"].rpartition("/")[2]]
        assert set(schema["properties"]) == set(kind.__struct_encode_fields__)
        for name in schema.get("required", ()):
            rest = {key: asked[key] for key in asked if key != name}
            words = ask(ScriptedPort(), path, rest).json()["error"]["message"]
            assert words == f"{name}: it is missing. GET /openapi.json lists all fields."
    assert schemas["Speculative"]["additionalProperties"] is False


SAY = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": SAY, "logprobs": True},
    "/v1/completions": {"prompt": "hi", "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": SAY, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": SAY},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", list(ANSWERS))
def test_answers_have_what_the_document_says(path: str) -> None:
    method = "post" if path in own_bodies() else "get"
    told = document()["paths"][path][method]["responses"]["200"]["content"]
    got = ask(ScriptedPort(), path.replace("{name}", "scripted"), ASKED.get(path))
    kind = got.headers["content-type"].partition(";")[0]
    assert got.status == 200
    assert kind in told
    if kind == JSON:
        assert not differs(got.json(), told[kind]["schema"])


@pytest.mark.parametrize("path", ASKED)
def test_errors_have_what_the_document_says(path: str) -> None:
    told = document()
    content = told["paths"][path]["post"]["responses"]["4XX"]["content"][JSON]
    schema = told["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert not differs(ask(ScriptedPort(), path, []).json(), schema)


def test_bounds_are_those_that_requests_are_held_to() -> None:
    told = document()["components"]["schemas"]["ChatBody"]["properties"]
    for name, least, most in [("temperature", 0, 100), ("n", 1, 16), ("top_p", 0, 1)]:
        assert (told[name]["minimum"], told[name]["maximum"]) == (least, most)
        for value in (least - 1, most + 1):
            body = {"messages": SAY, name: value}
            assert ask(ScriptedPort(), "/v1/chat/completions", body).status == 400


TOOL: dict[str, object] = {"name": "f"}
NOTHING: list[object] = []
HI: dict[str, object] = {"messages": SAY}
HELD: list[tuple[str, str, object, object, dict[str, object]]] = [
    # Path, member, a value that is answered, one that is refused, and the rest of the body.
    ("/v1/chat/completions", "messages", SAY, NOTHING, {}),
    ("/v1/chat/completions", "max_tokens", 1, 0, HI),
    ("/v1/chat/completions", "max_completion_tokens", 1, 0, HI),
    ("/v1/chat/completions", "functions", NOTHING, [TOOL], HI),
    ("/v1/chat/completions", "function_call", None, "auto", HI),
    ("/v1/chat/completions", "audio", None, TOOL, HI),
    ("/v1/chat/completions", "modalities", ["text"], ["audio"], HI),
    ("/v1/chat/completions", "web_search_options", None, TOOL, HI),
    ("/v1/chat/completions", "chat_template", None, "x", HI),
    ("/v1/completions", "prompt", ["a"], NOTHING, {}),
    ("/v1/completions", "suffix", "", "x", {"prompt": "a"}),
    ("/v1/completions", "logprobs", 2, 65, {"prompt": "a"}),
    ("/v1/responses", "truncation", "disabled", "auto", {"input": "a"}),
    ("/v1/responses", "background", False, True, {"input": "a"}),
    ("/v1/responses", "previous_response_id", None, "resp_1", {"input": "a"}),
    ("/v1/responses", "conversation", None, TOOL, {"input": "a"}),
    ("/v1/responses", "prompt", None, TOOL, {"input": "a"}),
    ("/v1/responses", "n", 1, 2, {"input": "a"}),
    ("/v1/responses", "max_output_tokens", 1, 0, {"input": "a"}),
    ("/v1/responses", "top_logprobs", 1, 65, {"input": "a"}),
    ("/v1/responses/input_tokens", "top_logprobs", 1, 65, {"input": "a"}),
    ("/v1/responses/input_tokens", "truncation", "disabled", "auto", {"input": "a"}),
    ("/v1/responses/input_tokens", "temperature", 1, 101, {"input": "a"}),
    ("/v1/messages", "n", 1, 2, {**HI, "max_tokens": 1}),
    ("/v1/messages", "mcp_servers", NOTHING, [TOOL], {**HI, "max_tokens": 1}),
    ("/v1/messages", "container", None, "x", {**HI, "max_tokens": 1}),
    ("/v1/messages/count_tokens", "top_p", 1, 1.5, HI),
    ("/detokenize", "tokens", [1], [-1], {}),
]


@pytest.mark.parametrize(("path", "name", "right", "wrong", "body"), HELD)
def test_what_is_refused_is_outside_of_the_document(
    path: str, name: str, right: object, wrong: object, body: dict[str, object]
) -> None:
    told = document()
    ref = told["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]["$ref"]
    schema = told["components"]["schemas"][ref.rpartition("/")[2]]["properties"][name]
    for value, status in ((right, 200), (wrong, 400)):
        assert ask(ScriptedPort(), path, {**body, name: value}).status == status
        assert bool(differs(value, schema)) is (status == 400)


def differs(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Where a value is not as a schema of the document says, in the words that they use."""
    if "anyOf" in schema and all(differs(value, one) for one in schema["anyOf"]):
        return [place]
    size = size_of(value)
    for least, most in BOUNDS if size is not None else ():
        if not schema.get(least, size) <= size <= schema.get(most, size):
            return [f"{place}: {value!r}"]
    allowed = schema.get("enum", [schema.get("const", value)])
    if value not in allowed or not isinstance(value, KINDS[schema.get("type", "")]):
        return [f"{place}: {value!r}"]
    parts = [(value, one, place) for one in schema.get("allOf", ())]
    if "items" in schema:
        parts += [(item, schema["items"], f"{place}[]") for item in value]
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            parts.append((value[name], inner, f"{place}.{name}"))
    lacking = [f"{place}.{name} lacks" for name in schema.get("required", ()) if name not in value]
    return [*lacking, *(found for part in parts for found in differs(*part))]


BOUNDS = (("minimum", "maximum"), ("minItems", "maxItems"), ("minLength", "maxLength"))


def size_of(value: object) -> float | None:
    """What bounds hold: a number, or how long a text or a list is."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return len(cast("list[object]", value))
    return value if isinstance(value, (int, float)) else None


KINDS: dict[str, type | tuple[type, ...]] = {
    "": object,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
