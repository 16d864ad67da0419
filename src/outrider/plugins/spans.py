# pyright: basic, reportMissingImports=false
"""OpenTelemetry spans, one per admitted request: its model, its tokens, its drafts.

OpenTelemetry's own environment variables enable them (docs/server.md); without those variables its
SDK is not imported and no middleware is added. Attributes follow its conventions for generative AI.
No attribute contains a prompt, a text, a key, or a name that a request chose.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider import __version__
from outrider.core.env import wants_traces
from outrider.core.plugins import install_command
from outrider.server.exchange import Answer, metrics_of, usage_of

_log = logging.getLogger(__name__)
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
_DRAFTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


@contextmanager
def traced(app: ASGIApp) -> Generator[ASGIApp]:
    """Return `app`, with spans of its requests if the environment enables them."""
    if not wants_traces():
        yield app
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("no traces, though OTEL_* asks for them: %s", install_command("otel"))
        yield app
        return
    own = Resource({"service.name": "outrider", "service.version": __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield Spans(app, provider.get_tracer("outrider", __version__))
    finally:
        provider.shutdown()


class Spans:
    """An ASGI middleware that records a span for each answer."""

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        began, status, is_whole = time.time_ns(), 0, False

        async def observed(message: Message) -> None:
            nonlocal status, is_whole
            await send(message)
            status = message.get("status", status)
            is_whole = message["type"].endswith("body") and not message.get("more_body", False)

        try:
            await self._app(scope, receive, observed)
        finally:
            # A refused request gets no span, not even if it sends a traceparent.
            if "outrider.key" in scope:
                self._record(scope, began, status, is_whole=is_whole)

    def _record(self, scope: Scope, began: int, status: int, *, is_whole: bool) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        answers: Sequence[Answer] = scope.get("outrider.answers", ())
        operation = _OPERATIONS[scope["path"]]
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "http.response.status_code": status,
        }
        problem = _problem(answers, status, is_whole=is_whole)
        if problem:
            found["error.type"] = problem
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        span = self._tracer.start_span(
            f"{operation} {answers[0].model}" if answers else operation,
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=found | _attributes(answers),
            start_time=began,
        )
        if status >= 500 or problem == "stream_error":
            span.set_status(StatusCode.ERROR)
        span.end()


def _problem(answers: Sequence[Answer], status: int, *, is_whole: bool) -> str:
    if status >= 400:
        return str(status)
    if not is_whole:
        return "client_disconnected"
    return "" if answers and all(answer.has_ended for answer in answers) else "stream_error"


def _attributes(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the attributes of a request's completions, as far as they have ended."""
    ended = [answer for answer in answers if answer.has_ended]
    if not answers:
        return {}
    model = answers[0].model
    found: dict[str, Any] = {"gen_ai.request.model": model, "gen_ai.response.model": model}
    if ended:
        usage, ends = usage_of(ended), [answer.end for answer in ended]
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        found["gen_ai.response.finish_reasons"] = [end.reason for end in ends]
        drafts = (metrics_of(ends) or {}).get("speculative_decoding", {})
        found |= {f"outrider.speculation.{name}": drafts.get(name, 0) for name in _DRAFTS}
    return found
