"""POST /v1/chat/completions: OpenAI's chat API, as one answer or as a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.routing import Route

from outrider.server.answers import Answer
from outrider.server.encoding import ChoicesWriter, chat_logprobs
from outrider.server.errors import ApiError, refused
from outrider.server.events import Part, ReasoningDelta, Step, TextDelta, ToolDelta, ToolOpen
from outrider.server.exchange import Asked, Exchange, api_route, params_of
from outrider.server.port import ChatPrompt
from outrider.server.site import Site
from outrider.server.tools import tooling_of


class ChatBody(Asked, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None


def chat_routes(site: Site) -> list[Route]:
    def writer(exchange: Exchange[ChatBody]) -> ChoicesWriter:
        return ChoicesWriter(
            exchange,
            ChatChoices(exchange),
            name="chatcmpl",
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
        )

    return [api_route("/v1/chat/completions", ChatBody, _refuse, writer, site=site, api="chat")]


def _refuse(body: ChatBody) -> None:
    if body.functions or body.function_call is not None:
        raise refused("functions", "tools replaced them. Send tools and tool_choice.")
    if body.audio is not None or any(kind != "text" for kind in body.modalities or ()):
        raise refused("modalities", "this server only generates text.")
    if body.web_search_options is not None:
        raise refused("web_search_options", "this server does not search the web.")
    if not body.messages:
        raise ApiError(400, "messages: the list is empty.", param="messages", code="invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs: needs logprobs.", param="top_logprobs", code="invalid_value"
        )
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise refused("add_generation_prompt", "the next turn is always the assistant's.")


def template_variables(body: ChatBody) -> dict[str, Any]:
    found = dict(body.chat_template_kwargs or {})
    given = body.reasoning or {}
    effort = body.reasoning_effort or given.get("effort")
    if effort is None and given.get("enabled") is False:
        effort = "none"
    if effort is not None:
        found.setdefault("reasoning_effort", effort)
    return found


def prediction_text(given: Mapping[str, Any] | None) -> str:
    """Return the text of `{"type": "content", "content": text or text parts}`. Raises ApiError."""
    if given is None:
        return ""
    content: object = given.get("content")
    if isinstance(content, list):
        parts = cast("list[Mapping[str, object]]", content)
        content = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    if given.get("type", "content") != "content" or not isinstance(content, str):
        raise ApiError(
            400,
            'prediction: expected {"type": "content", "content": text}.',
            param="prediction",
            code="invalid_value",
        )
    return content


class ChatChoices:
    """The completions of one chat request."""

    def __init__(self, exchange: Exchange[ChatBody]) -> None:
        self._exchange = exchange
        self._gathered: defaultdict[int, Gathered] = defaultdict(Gathered)

    async def open(self) -> list[Answer]:
        body, site = self._exchange.body, self._exchange.site
        limit = body.max_completion_tokens
        params = params_of(
            site,
            body,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            prediction=prediction_text(body.prediction),
            thinking=("reasoning.max_tokens", (body.reasoning or {}).get("max_tokens")),
        )
        tooling = tooling_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        chat = ChatPrompt(
            messages=body.messages,
            tools=tooling.offered,
            variables=template_variables(body),
            continues=bool(body.continue_final_message),
        )
        return await self._exchange.converse(chat, tooling, params)

    def first(self, index: int) -> list[dict[str, Any]]:
        return [_choice(index, {"role": "assistant", "content": ""})]

    def deltas(self, index: int, step: Step) -> list[dict[str, Any]]:
        deltas = map(delta_of, self._shown(step))
        found = [_choice(index, delta) for delta in deltas if delta]
        extras: dict[str, Any] = {}
        if step.logprobs:
            extras["logprobs"] = {"content": self._logprobs(step)}
        if step.rounds:
            extras["outrider.round"] = step.rounds
        if extras:
            found = found or [self.last(index)]
            found[0] |= extras
        return found

    def last(self, index: int) -> dict[str, Any]:
        return _choice(index, {"content": ""})

    def take(self, index: int, step: Step) -> None:
        logprobs = self._logprobs(step) if step.logprobs else []
        self._gathered[index].take(self._shown(step), logprobs, step.rounds)

    def record(self, index: int, answer: Answer) -> dict[str, Any]:
        del answer
        return {"index": index, **self._gathered[index].record()}

    def _shown(self, step: Step) -> Sequence[Part]:
        """Return the parts of a step, without thoughts if the client excluded them."""
        body = self._exchange.body
        if body.include_reasoning is not False and not (body.reasoning or {}).get("exclude"):
            return step.parts
        return [part for part in step.parts if not isinstance(part, ReasoningDelta)]

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        decoder = self._exchange.site.port.decoder
        return chat_logprobs(decoder, step.logprobs, self._exchange.body.top_logprobs or 0)


def _choice(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def delta_of(part: Part) -> dict[str, Any] | None:
    """Return a part as the delta of a chunk. Each delta has `content`; only the first delta of a
    call has its id and name; thoughts have both names that clients read."""
    if isinstance(part, TextDelta):
        return {"content": part.text}
    if isinstance(part, ReasoningDelta):
        return {"content": "", "reasoning": part.text, "reasoning_content": part.text}
    if isinstance(part, ToolOpen):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        return {"content": "", "tool_calls": [call]}
    if isinstance(part, ToolDelta):
        call = {"index": part.index, "function": {"arguments": part.arguments}}
        return {"content": "", "tool_calls": [call]}
    return None


class Gathered:
    """One completion, gathered from its steps."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._rounds: list[dict[str, Any]] = []

    def take(
        self,
        parts: Sequence[Part],
        logprobs: Sequence[dict[str, Any]],
        rounds: Sequence[dict[str, Any]],
    ) -> None:
        for part in parts:
            self._part(part)
        self._logprobs += logprobs
        self._rounds += rounds

    def _part(self, part: Part) -> None:
        if isinstance(part, TextDelta):
            self._text.append(part.text)
        elif isinstance(part, ReasoningDelta):
            self._thought.append(part.text)
        elif isinstance(part, ToolOpen):
            function = {"name": part.name, "arguments": ""}
            self._calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, ToolDelta):
            self._calls[part.index]["function"]["arguments"] += part.arguments

    def record(self) -> dict[str, Any]:
        text, thought = "".join(self._text), "".join(self._thought)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message |= {"reasoning": thought, "reasoning_content": thought}
        if self._calls:
            message |= {"content": text or None, "tool_calls": list(self._calls.values())}
        found: dict[str, Any] = {
            "message": message,
            "logprobs": {"content": self._logprobs} if self._logprobs else None,
        }
        return found | ({"outrider.round": self._rounds} if self._rounds else {})
