"""Traces of a real server, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from clients.conftest import PYTHON

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

KEY = "k" * 32
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "Mnemosyne"
# The server finds the SDK here: it is no part of the program's own environment.
SDK = {"PYTHONPATH": sysconfig.get_path("purelib")}


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        self.bodies = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def spans(self):
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = values(resource.resource.attributes)
                found += [(names, span) for scope in resource.scope_spans for span in scope.spans]
        return found

    def wait_for(self, count):
        until = time.monotonic() + 60
        while len(self.spans) < count and time.monotonic() < until:
            time.sleep(0.05)
        assert len(self.spans) == count
        return self.spans


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces"
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def values(attributes):
    """Attributes of the protocol, as what they mean."""
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def listening():
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def collector(listening):
    """It has heard nothing."""
    listening.bodies.clear()
    return listening


@pytest.fixture(scope="module")
def traced(started, listening):
    return started(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{listening.server_port}",
        OTEL_BSP_SCHEDULE_DELAY="50",
        OTEL_SERVICE_NAME="ours",
        OUTRIDER_API_KEY=KEY,
        **SDK,
    )


def ask(served, path="/v1/completions", key=KEY, **body):
    headers = {"content-type": "application/json", "x-api-key": key}
    headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
    body = {"prompt": SECRET, "temperature": 0, "max_tokens": 8} | body
    if path != "/v1/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    request = urllib.request.Request(served.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as got:
        return got.read()


def test_a_span_says_what_the_answer_says(traced, collector):
    answer = json.loads(ask(traced, n=2))
    ((resource, span),) = collector.wait_for(1)
    assert (resource["service.name"], span.kind) == ("ours", 2)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == f"text_completion {traced.model}"
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    drafts = answer["metrics"]["speculative_decoding"]
    assert values(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": traced.model,
        "gen_ai.response.model": traced.model,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "outrider.speculation.num_spec_steps": drafts["num_spec_steps"],
        "outrider.speculation.num_draft_tokens": drafts["num_draft_tokens"],
        "outrider.speculation.num_accepted_draft_tokens": drafts["num_accepted_draft_tokens"],
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert answer["usage"]["completion_tokens"] == 16
    assert not any(SECRET.encode() in body or KEY.encode() in body for body in collector.bodies)


def test_streams_refusals_and_those_who_leave_have_spans_and_strangers_none(traced, collector):
    stream = ask(traced, "/v1/chat/completions", stream=True)
    assert stream.endswith(b"data: [DONE]\n\n")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(traced, key="x" * 32)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(traced, temperature=-1)
    leave(traced)
    spans = [span for _, span in collector.wait_for(3)]
    found = [(span.name, values(span.attributes), span.status.code) for span in spans]
    assert found[0][0] == f"chat {traced.model}"
    assert found[0][1]["gen_ai.usage.output_tokens"] == 8
    assert "error.type" not in found[0][1]
    assert (found[1][0], found[1][1]["error.type"]) == ("text_completion", "400")
    assert found[2][1]["error.type"] == "client_disconnected"
    assert "gen_ai.usage.output_tokens" not in found[2][1]
    # None of it was the server's fault.
    assert [status for _, _, status in found] == [0, 0, 0]


def leave(served):
    """Asks for a long stream, reads of it, and breaks off."""
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "def", "stream": True, "max_tokens": 1500, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += f"x-api-key: {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + body).encode())
        connection.recv(1000)
        # A reset, which is told at once.
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def test_a_collector_that_is_away_harms_no_answer_and_no_end(started):
    served = started(
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_BSP_SCHEDULE_DELAY="50",
        **SDK,
    )
    for _ in range(3):
        assert json.loads(ask(served))["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    "more", [{}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}]
)
def test_nothing_of_it_is_imported_where_nobody_asks(more):
    program = """
import sys
import outrider.cli.serve, outrider.server.app
from outrider.plugins.spans import traced
with traced(print) as app:
    assert app is print, app
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    environment = os.environ | SDK | more  # noqa: TID251 - a child's
    environment.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
    if more:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    done = subprocess.run(
        [PYTHON, "-c", program],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
