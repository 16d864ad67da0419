"""When traces are wanted, and what happens where they cannot be made.

tests/clients/test_otel.py has what a collector gets."""

from __future__ import annotations

import logging
import sys

import pytest
from starlette.types import Receive, Scope, Send

from outrider.core.env import wants_traces
from outrider.plugins.spans import traced

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Never called."""


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://collector:4318", "OTEL_SDK_DISABLED": "True"}, False),
        ({ENDPOINT: "http://collector:4318", "OTEL_SDK_DISABLED": "false"}, True),
        ({ENDPOINT: "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
    ids=str,
)
def test_opentelemetrys_own_variables_ask_for_traces(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_traces() is wanted


def test_a_missing_extra_is_named_and_the_server_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    for name in ("opentelemetry", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING), traced(app) as given:
        assert given is app
    assert "pip install 'opentelemetry-exporter-otlp-proto-http<" in caplog.text
