"""POST /v1/chat/completions and /v1/completions of OpenAI, as one answer or as a stream."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.routing import Route

from outrider.api.result import chat_logprobs, completion_logprobs
from outrider.core.draft import TokenLogprobs
from outrider.server.answers import Answer, cancel
from outrider.server.encoding import ChoicesWriter
from outrider.server.errors import ApiError, refused
from outrider.server.events import Part, ReasoningDelta, Step, TextDelta, ToolDelta, ToolOpen
from outrider.server.exchange import Asked, Exchange, api_route, params_of, structure_asked
from outrider.server.port import ChatPrompt
from outrider.server.site import MOST_PROMPTS, Site
from outrider.server.tokens import check_ids
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


# POST /v1/completions: continues one or several prompts, given as text or token ids.
#
# `echo` with `logprobs` returns the log-probabilities of the prompt's own tokens, which scoring
# tools use. If the engine cannot compute them, the request is refused.
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


class CompletionBody(Asked, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prediction: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


def completion_routes(site: Site) -> list[Route]:
    def writer(exchange: Exchange[CompletionBody]) -> ChoicesWriter:
        kind = "text_completion"
        choices = CompletionChoices(exchange)
        return ChoicesWriter(exchange, choices, name="cmpl", kind=kind, chunk_kind=kind)

    path = "/v1/completions"
    return [api_route(path, CompletionBody, _refuse_text, writer, site=site, api="completions")]


def _refuse_text(body: CompletionBody) -> None:
    if body.suffix:
        raise refused("suffix", "this server only continues prompts. Leave it out.")
    if body.echo and body.stream and body.logprobs is not None:
        raise refused("stream", "not allowed with echo and logprobs. Leave it out.")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", "0 is only allowed with echo.")


def prompts_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts of a request: each text or list of ids is one. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt: the list is empty.", param="prompt", code="invalid_value")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast("list[int]", given)]
    if int in kinds:
        raise ApiError(
            400,
            "prompt: a list of ids is one prompt, a list of prompts has texts or lists of ids.",
            param="prompt",
            code="invalid_type",
        )
    return cast("list[str | list[int]]", given)


def _check_number(num_completions: int) -> None:
    if num_completions > MOST_PROMPTS:
        raise ApiError(
            400,
            f"prompt: {num_completions} completions; one request may have {MOST_PROMPTS}.",
            param="prompt",
            code="invalid_value",
        )


class CompletionChoices:
    """The completions of all prompts of one request."""

    def __init__(self, exchange: Exchange[CompletionBody]) -> None:
        self._exchange, self._body = exchange, exchange.body
        self._answers: list[Answer] = []
        self._echoed: list[str] = []
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        # The length of each streamed text so far.
        self._lengths: Counter[int] = Counter()

    async def open(self) -> list[Answer]:
        body, site = self._body, self._exchange.site
        num_top = body.logprobs or 0
        params = params_of(
            site,
            body,
            max_tokens=self._limit(),
            logprobs=body.logprobs is not None,
            top_logprobs=num_top,
            prediction=prediction_text(body.prediction),
        )
        _check_number(len(prompts_of(body.prompt)) * params.n)
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=num_top)
        prompts = [await self._ids(prompt) for prompt in prompts_of(body.prompt)]
        if body.echo:
            for ids in prompts:
                text = "".join(await site.port.decode(ids))
                self._echoed += [text] * params.n
        try:
            for ids in prompts:
                self._answers += self._exchange.complete(
                    ids, params, structure_asked(body), only_prompt=body.max_tokens == 0
                )
        except BaseException:
            cancel(self._answers)
            raise
        return self._answers

    def _limit(self) -> int:
        """Return max_tokens; the default is that of OpenAI's API."""
        given = self._body.max_tokens
        if given is None:
            return cast("int", self._exchange.site.defaults.get("max_tokens", 16))
        return given or 1

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        port = self._exchange.site.port
        if not isinstance(prompt, str):
            if not prompt:
                raise ApiError(400, "prompt: it is empty.", param="prompt", code="invalid_value")
            check_ids(prompt, port.card, "prompt")
            return prompt
        return await port.encode(prompt, add_special=self._body.add_special_tokens is not False)

    def first(self, index: int) -> list[dict[str, Any]] | None:
        if not self._body.echo:
            return []
        if index >= len(self._echoed):
            return None
        self._lengths[index] = len(self._echoed[index])
        return [_completion_choice(index, self._echoed[index])]

    def deltas(self, index: int, step: Step) -> list[dict[str, Any]]:
        text = text_of(step)
        if not (text or step.logprobs or step.rounds):
            return []
        choice = _completion_choice(index, text)
        if step.logprobs:
            ids = [item.token_id for item in step.logprobs]
            logprobs = self._shown(step.logprobs, ids, self._lengths[index])
            choice["logprobs"] = logprobs
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
        if step.rounds:
            choice["outrider.round"] = step.rounds
        return [choice]

    def last(self, index: int) -> dict[str, Any]:
        return _completion_choice(index, "")

    def take(self, index: int, step: Step) -> None:
        self._texts[index] += text_of(step)
        self._logprobs[index] += step.logprobs

    def record(self, index: int, answer: Answer) -> dict[str, Any]:
        before = self._echoed[index] if self._echoed else ""
        choice = _completion_choice(index, before + self._texts[index])
        if self._body.logprobs is not None:
            items: list[TokenLogprobs | None] = [*self._logprobs[index]]
            ids = [item.token_id for item in self._logprobs[index]]
            if self._body.echo:
                # Of several completions, only the first has the log-probabilities of the prompt.
                first = self._answers[index - answer.request.sample]
                items = [*first.prompt_logprobs, *items]
                ids = [*answer.request.prompt_ids, *ids]
            choice["logprobs"] = self._shown(items, ids, 0)
        return choice

    def _shown(
        self, items: Sequence[TokenLogprobs | None], ids: Sequence[int], start: int
    ) -> dict[str, Any]:
        return completion_logprobs(self._exchange.site.port.decoder, items, ids, start)


def text_of(step: Step) -> str:
    return "".join(part.text for part in step.parts if isinstance(part, TextDelta))


def _completion_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
