"""The document of the server's paths: all of them are in it, with the bodies that they read."""

from __future__ import annotations

from typing import Any

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask, site_with
from outrider.server.app import all_routes
from outrider.server.metrics import Metrics
from outrider.server.openapi import BODIES


def document() -> dict[str, Any]:
    return ask(ScriptedPort(), "/openapi.json").json()


def test_every_path_is_told() -> None:
    told = document()["paths"]
    site = site_with(ScriptedPort())
    routes = all_routes(site, Metrics(lambda: {"scripted": site.port.status}))
    paths = {getattr(route, "path", "") for route in routes}
    wanted = {path.replace(":path", "") for path in paths if not path.startswith("/web/")}
    assert set(told) == wanted - {"/openapi.json"}
    posted = {path for path in told if "post" in told[path]}
    assert posted == set(BODIES)
    for path in posted:
        assert told[path]["post"]["requestBody"]


def test_its_schemas_say_what_the_server_reads() -> None:
    told = document()
    schemas = told["components"]["schemas"]
    for path, kind in BODIES.items():
        body = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = schemas[body["$ref"].rpartition("/")[2]]
        assert set(schema["properties"]) == set(kind.__struct_encode_fields__)
        for name in schema.get("required", ()):
            assert ask(ScriptedPort(), path, {}).json()["error"]["message"].count(f"`{name}`")
    assert schemas["Speculative"]["additionalProperties"] is False
