"""Error responses: a status, a sentence, and the parameter that caused the error.

Each API has its own format for them. Every exception becomes such a response. If only a defect of
this program can raise it, it is logged, and the client does not see its message.
"""

from __future__ import annotations

import logging
import re
from dataclasses import fields

import msgspec
from starlette.responses import Response

from outrider.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutriderError,
    PromptTooLongError,
    QueueFullError,
    with_hint,
)
from outrider.core.params import SamplingParams
from outrider.server.port import EngineLostError, NotReadyError

_LOG = logging.getLogger(__name__)
_PARAMS = frozenset(item.name for item in fields(SamplingParams)) | {"keep_alive"}
_FIRST_NAME = re.compile(r"([a-z_]+)(?:\[\d+\])?(?:\.[a-z_]+)*")
# Further parameters, which hold schemas.
_SCHEMAS = frozenset(
    {
        *("response_format", "text", "output_config", "tools", "json_schema", "guided_json"),
        *("structured_outputs", "grammar"),
    }
)
# Error types by status: OpenAI's, and Anthropic's where they differ.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
_ANTHROPIC = {500: "api_error"}
ANTHROPIC_PATHS = "/v1/messages"
# By the beginning of a path: the parameter that holds the prompt.
_PROMPTS = {"/v1/chat": "messages", "/v1/responses": "input"}
# Retry-After in seconds, unless a better value is known.
ASK_AGAIN = 1


class ApiError(Exception):
    """An error response. `message` says what is wrong, why, and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error")


def refused(param: str, why: str) -> ApiError:
    """Return the error for a parameter that cannot be honoured, which is never ignored."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    """Return the error for a parameter of a wrong value."""
    return ApiError(400, f"{param}: {why}", param=param, code="invalid_value")


def overloaded(words: str) -> ApiError:
    return ApiError(503, words, code="overloaded", retry_after=ASK_AGAIN)


def api_error(error: BaseException, path: str = "") -> ApiError:
    """Return the response of the API at `path` to any exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return overloaded("too many requests wait already. Ask again later.")
    if isinstance(error, NotReadyError | EngineLostError):
        code = "not_ready" if isinstance(error, NotReadyError) else "engine_lost"
        return ApiError(503, with_hint(error), code=code, retry_after=error.seconds)
    if isinstance(error, ConfigError | CapacityError | CheckpointError):
        return _bad_request(error, path)
    if isinstance(error, OutriderError):
        # The request failed, but its author made no mistake.
        return ApiError(500, with_hint(error), code=type(error).__name__)
    _LOG.error("a defect: %s", type(error).__name__, exc_info=error)
    return ApiError(500, "the server has a defect; its log says more.", code="internal_error")


def _bad_request(error: OutriderError, path: str) -> ApiError:
    """Return the response to a mistake in the request, or to a request that the checkpoint cannot
    serve, such as a chat without a chat template."""
    if isinstance(error, PromptTooLongError):
        words = with_hint(error)
        if path.startswith(ANTHROPIC_PATHS):
            # Claude Code recognises these words and shortens its conversation.
            num_tokens, window, num_bytes, _ = error.numbers
            least = "at least " if num_bytes else ""
            words = f"prompt is too long: {least}{num_tokens} tokens > {window} maximum. {words}"
        starts = (name for start, name in _PROMPTS.items() if path.startswith(start))
        param = next(starts, "prompt")
        return ApiError(400, words, param=param, code="context_length_exceeded")
    return ApiError(400, with_hint(error), param=_param_of(error), code="invalid_value")


def _param_of(error: OutriderError) -> str | None:
    """Return the parameter, or the path of a schema, with which the error's message begins."""
    name = _FIRST_NAME.match(str(error))
    return name[0] if name and name[1] in _PARAMS | _SCHEMAS else None


def error_body(error: ApiError, path: str = "") -> dict[str, object]:
    """Return the body of the response in the format of the API that `path` belongs to."""
    if path.startswith(ANTHROPIC_PATHS):
        kind = _ANTHROPIC.get(error.status, error.kind)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: BaseException, path: str = "") -> Response:
    known = api_error(error, path)
    headers = {} if known.retry_after is None else {"retry-after": str(known.retry_after)}
    if known.status == 401:
        headers["www-authenticate"] = "Bearer"
    if known.status == 501:
        # Without this header, OpenAI's and Anthropic's clients repeat the request.
        headers["x-should-retry"] = "false"
    body = msgspec.json.encode(error_body(known, path))
    return Response(body, known.status, headers, "application/json")
