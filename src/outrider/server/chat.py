"""POST /v1/chat/completions: OpenAI's chat, at once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.server.answers import Answer, Ask, metrics_of, open_answers, usage_of, written
from outrider.server.asking import (
    Asked,
    params_of,
    structure_asked,
    traced,
    with_seed_rule,
)
from outrider.server.encoding import Frame, usage_record
from outrider.server.errors import ApiError, refused
from outrider.server.events import (
    End,
    Part,
    ReasoningDelta,
    Step,
    TextDelta,
    ToolDelta,
    ToolOpen,
)
from outrider.server.logprobs import chat_logprobs
from outrider.server.port import ChatPrompt
from outrider.server.reply import EventReply, Reply
from outrider.server.site import Site, key_of
from outrider.server.tools import read_with, tooling_of
from outrider.server.wire import encode, json_response, read

FINISH = {"stop": "stop", "length": "length", "timeout": "length", "tool_calls": "tool_calls"}


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
    async def chat(request: Request) -> Response:
        body, warnings = await read(ChatBody, request)
        model = site.model(body.model)
        _refuse(body)
        run = ChatRun(site, body, model, warnings, key_of(request))
        if body.stream:
            return EventReply(request, run.stream)
        return Reply(request, run.whole)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def _refuse(body: ChatBody) -> None:
    if body.functions or body.function_call is not None:
        raise refused("functions", "they became tools. Send tools and tool_choice.")
    if body.audio is not None or any(kind != "text" for kind in body.modalities or ()):
        raise refused("modalities", "only text is written here.")
    if body.web_search_options is not None:
        raise refused("web_search_options", "this server asks nobody else.")
    if not body.messages:
        raise ApiError(400, "messages: there is none.", param="messages", code="invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs: needs logprobs.", param="top_logprobs", code="invalid_value"
        )
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise refused("add_generation_prompt", "the next turn is always the assistant's.")


def template_variables(body: ChatBody) -> dict[str, Any]:
    found = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        found.setdefault("reasoning_effort", body.reasoning_effort)
    return found


def prediction_text(given: Mapping[str, Any] | None) -> str:
    """Of `{"type": "content", "content": text or text parts}`."""
    if given is None:
        return ""
    content: object = given.get("content")
    if isinstance(content, list):
        parts = cast("list[Mapping[str, object]]", content)
        content = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    if given.get("type", "content") != "content" or not isinstance(content, str):
        raise ApiError(
            400,
            'prediction: wanted is {"type": "content", "content": text}.',
            param="prediction",
            code="invalid_value",
        )
    return content


class ChatRun:
    """One request, from its body to its answer."""

    def __init__(
        self, site: Site, body: ChatBody, model: str, warnings: Sequence[str], key: str
    ) -> None:
        self._site, self._body, self._key = site, body, key
        self._warnings = list(warnings)
        self._frame = Frame("chat.completion", f"chatcmpl-{uuid4().hex}", model)

    async def _open(self) -> list[Answer]:
        body, site = self._body, self._site
        limit = body.max_completion_tokens
        params = params_of(
            site,
            body,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            prediction=prediction_text(body.prediction),
        )
        params = with_seed_rule(params, site.port.card, asked=body.seed is not None)
        tooling = tooling_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        chat = ChatPrompt(
            messages=body.messages,
            tools=tooling.offered,
            variables=template_variables(body),
            continues=bool(body.continue_final_message),
        )
        ids = await site.port.encode_chat(chat)
        reading = await read_with(site, ids, tooling, params, structure_asked(body))
        self._warnings += reading.warnings
        return open_answers(
            site,
            Ask(
                prompt_ids=ids,
                params=reading.params,
                structure=reading.structure,
                make_parser=reading.make_parser,
                trace=traced(body),
                key=self._key,
                api="chat",
            ),
        )

    async def whole(self) -> Response:
        answers = await self._open()
        choices = [Choice() for _ in answers]
        async with aclosing(written(answers)) as steps:
            async for index, item in steps:
                choices[index].take(item, self)
        ends = [answer.end for answer in answers]
        several = len(answers) > 1
        record = self._frame.record() | {
            "choices": [choice.record(i, several) for i, choice in enumerate(choices)],
            "usage": usage_record(usage_of(ends)),
        }
        return json_response(record | self.extras(ends))

    async def stream(self) -> AsyncGenerator[bytes]:
        answers = await self._open()
        return self._pieces(answers)

    async def _pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        options = self._body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        frame, opened = self._frame, set[int]()
        num_prompt = len(answers[0].request.prompt_ids)
        async with aclosing(written(answers)) as steps:
            async for index, item in steps:
                found = bytearray()
                if index not in opened:
                    opened.add(index)
                    found += frame.chunk(_choice(index, {"role": "assistant", "content": ""}))
                if isinstance(item, End):
                    found += self._last_chunk(index, item, answers)
                else:
                    extra = frame.usage_so_far(num_prompt, item.num_tokens) if continuous else b""
                    for choice in self._deltas(index, item):
                        found += frame.chunk(choice, extra)
                yield bytes(found)
        if options is not None and options.include_usage:
            usage = usage_record(usage_of([answer.end for answer in answers]))
            yield frame.usage_chunk(usage)

    def _last_chunk(self, index: int, end: End, answers: Sequence[Answer]) -> bytes:
        choice = _choice(index, {"content": ""}) | {"finish_reason": FINISH[end.reason]}
        if len(answers) > 1:
            choice["metrics"] = end.metrics
        return self._frame.chunk(choice, encode(self.extras([end]))[1:-1])

    def _deltas(self, index: int, step: Step) -> list[dict[str, Any]]:
        found = [_choice(index, delta) for delta in map(delta_of, step.parts) if delta]
        told: dict[str, Any] = {}
        if step.logprobs:
            told["logprobs"] = {"content": self.logprobs(step)}
        if step.rounds:
            told["outrider.round"] = step.rounds
        if told:
            found = found or [_choice(index, {"content": ""})]
            found[0] |= told
        return found

    def logprobs(self, step: Step) -> list[dict[str, Any]]:
        decoder = self._site.port.decoder
        return chat_logprobs(decoder, step.logprobs, self._body.top_logprobs or 0)

    def extras(self, ends: Sequence[End]) -> dict[str, Any]:
        """What we tell beyond OpenAI's fields."""
        found: dict[str, Any] = {"metrics": metrics_of(ends)}
        seed = ends[0].seed
        if seed is not None:
            found["seed"] = seed
        notes = [note for end in ends for note in end.notes]
        warnings = list(dict.fromkeys([*self._warnings, *notes]))
        return found | ({"warnings": warnings} if warnings else {})


def _choice(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def delta_of(part: Part) -> dict[str, Any] | None:
    """As a delta of a chunk: with `content` in each, the id and name of a call in its first one
    alone, and what was thought under both names that clients read."""
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


class Choice:
    """One completion, gathered."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._rounds: list[dict[str, Any]] = []
        self._end: End | None = None

    def take(self, item: Step | End, run: ChatRun) -> None:
        if isinstance(item, End):
            self._end = item
            return
        for part in item.parts:
            self._part(part)
        if item.logprobs:
            self._logprobs += run.logprobs(item)
        self._rounds += item.rounds

    def _part(self, part: Part) -> None:
        if isinstance(part, TextDelta):
            self._text.append(part.text)
        elif isinstance(part, ReasoningDelta):
            self._thought.append(part.text)
        elif isinstance(part, ToolOpen):
            function = {"name": part.name, "arguments": ""}
            self._calls[part.index] = {
                "id": part.call_id,
                "type": "function",
                "function": function,
            }
        elif isinstance(part, ToolDelta):
            self._calls[part.index]["function"]["arguments"] += part.arguments

    def record(self, index: int, several: bool) -> dict[str, Any]:
        text, thought = "".join(self._text), "".join(self._thought)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message |= {"reasoning": thought, "reasoning_content": thought}
        if self._calls:
            message |= {"content": text or None, "tool_calls": list(self._calls.values())}
        end = self._end
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs} if self._logprobs else None,
            "finish_reason": FINISH[end.reason] if end is not None else None,
        }
        if self._rounds:
            found["outrider.round"] = self._rounds
        if several and end is not None:
            found["metrics"] = end.metrics
        return found
