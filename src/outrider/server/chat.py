"""POST /v1/chat/completions and /v1/completions of OpenAI, as one answer or as a stream of chunks.

Both answer with choices: one object has all of them, a chunk a part of one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, ClassVar, cast
from uuid import uuid4

from starlette.requests import Request

from outrider.api.result import chat_logprobs, completion_logprobs
from outrider.core.draft import TokenLogprobs
from outrider.core.params import SamplingParams
from outrider.server.errors import ApiError, error_body, invalid, refused
from outrider.server.exchange import Answer, B, Event, Exchange, cancel, thought_details, usage_of
from outrider.server.params import Asked, Tooling, params_of, structure_asked, tooling_of
from outrider.server.parts import Part, ReasoningDelta, TextDelta, ToolDelta, ToolOpen
from outrider.server.port import ChatPrompt, EngineCard, decoded
from outrider.server.reply import encode
from outrider.server.site import MOST_PROMPTS, End, Site, Step, Usage

FINISH = {"stop": "stop", "length": "length", "timeout": "length", "tool_calls": "tool_calls"}


class Choices(Exchange[B]):
    """An exchange whose answer is choices, by their index. The field "object" is `object_kind`, and
    in streams `chunk_kind`."""

    name: ClassVar[str]
    object_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, site: Site, body: B, request: Request, warnings: list[str]) -> None:
        super().__init__(site, body, request, warnings)
        name = f"{self.name}-{uuid4().hex}"
        common = {"id": name, "created": int(time.time()), "model": site.name}
        self._fields = {**common, "object": self.object_kind}
        # Equal in each chunk of a stream, so it is encoded only once.
        shown = encode({**common, "object": self.chunk_kind})
        self._before = b"data: " + shown[:-1] + b","

    def deltas(self, index: int, step: Step) -> list[dict[str, Any]]:
        raise NotImplementedError

    def empty(self, index: int) -> dict[str, Any]:
        """Return a delta that adds nothing."""
        raise NotImplementedError

    def choice(self, found: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a whole choice. `found` has all its deltas together."""
        raise NotImplementedError

    def more(self, index: int, step: Step) -> list[Event]:
        options, usage = self.body.stream_options, dict[str, Any]()
        if options is not None and options.continuous_usage_stats:
            so_far = Usage(len(self.answers[index].request.prompt_ids), step.num_tokens)
            usage = {"usage": usage_record(so_far)}
        return [{"choices": [delta], **usage} for delta in self.deltas(index, step)]

    def last(self, index: int, end: End) -> list[Event]:
        several = {"metrics": end.metrics} if len(self.answers) > 1 else {}
        choice = self.empty(index) | {"finish_reason": FINISH[end.reason]} | several
        return [{"choices": [choice], **self.extras([end])}]

    def idle(self, index: int) -> Event:
        return {"choices": [self.empty(index)]}

    def framed(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._before + encode(event)[1:] + b"\n\n" for event in events)

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + encode(error_body(error)) + b"\n\n"

    def done(self) -> bytes:
        options, usage = self.body.stream_options, b""
        if options is not None and options.include_usage:
            usage = self.framed([{"choices": [], "usage": usage_record(usage_of(self.answers))}])
        return usage + b"data: [DONE]\n\n"

    async def whole(self) -> Mapping[str, Any]:
        deltas: list[list[dict[str, Any]]] = [[] for _ in self.answers]
        async with aclosing(self.steps()) as steps:
            async for events in steps:
                for event in events:
                    choice: dict[str, Any] = event["choices"][0]
                    deltas[int(choice["index"])].append(choice)
        choices = [self.choice(folded(found), index) for index, found in enumerate(deltas)]
        own = {"choices": choices, "usage": usage_record(usage_of(self.answers))}
        return {**self._fields, **own, **self.extras([one.end for one in self.answers])}


def folded(deltas: Sequence[Any]) -> Any:
    """Return deltas as one value: texts and lists are joined, objects key by key, and of other
    values the last one counts."""
    known = [delta for delta in deltas if delta is not None]
    match known[0] if known else None:
        case str():
            return "".join(known)
        case list() | tuple():
            return [*chain.from_iterable(known)]
        case dict():
            names = dict.fromkeys(chain.from_iterable(known))
            return {name: folded([one[name] for one in known if name in one]) for name in names}
        case _:
            return known[-1] if known else None


def usage_record(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    details: dict[str, Any] = thought_details(usage, "reasoning_tokens")
    if usage.accepted_prediction_tokens is not None:
        details |= {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        }
    return found | ({"completion_tokens_details": details} if details else {})


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
        raise invalid("prediction", 'expected {"type": "content", "content": text}.')
    return content


class ChatExchange(Choices[ChatBody]):
    """The completions of one chat request."""

    kind = ChatBody
    api = "chat"
    name, object_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @staticmethod
    def refuse(body: ChatBody) -> None:
        if body.functions or body.function_call is not None:
            raise refused("functions", "tools replaced them. Send tools and tool_choice.")
        if body.audio is not None or any(kind != "text" for kind in body.modalities or ()):
            raise refused("modalities", "this server only generates text.")
        if body.web_search_options is not None:
            raise refused("web_search_options", "this server does not search the web.")
        if not body.messages:
            raise invalid("messages", "the list is empty.")
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "needs logprobs.")
        if body.add_generation_prompt is False and not body.continue_final_message:
            raise refused("add_generation_prompt", "the next turn is always the assistant's.")

    def params(self) -> SamplingParams:
        body, limit = self.body, self.body.max_completion_tokens
        return params_of(
            self.site,
            body,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            prediction=prediction_text(body.prediction),
            thinking=("reasoning.max_tokens", (body.reasoning or {}).get("max_tokens")),
        )

    def tooling(self) -> Tooling:
        body = self.body
        return tooling_of(body.tools, body.tool_choice, body.parallel_tool_calls)

    def chat(self, tooling: Tooling) -> ChatPrompt:
        return ChatPrompt(
            messages=self.body.messages,
            tools=tooling.offered,
            variables=template_variables(self.body),
            continues=bool(self.body.continue_final_message),
        )

    def first(self, index: int) -> list[Event]:
        return [{"choices": [_choice(index, {"role": "assistant", "content": ""})]}]

    def deltas(self, index: int, step: Step) -> list[dict[str, Any]]:
        deltas = map(delta_of, self._shown(step))
        found = [_choice(index, delta) for delta in deltas if delta]
        extras: dict[str, Any] = {}
        if step.logprobs:
            extras["logprobs"] = {"content": self._logprobs(step)}
        if step.rounds:
            extras["outrider.round"] = step.rounds
        if extras:
            found = found or [self.empty(index)]
            found[0] |= extras
        return found

    def empty(self, index: int) -> dict[str, Any]:
        return _choice(index, {"content": ""})

    def choice(self, found: dict[str, Any], index: int) -> dict[str, Any]:
        del index
        message = found.pop("delta")
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            calls = defaultdict[int, list[dict[str, Any]]](list)
            for call in message["tool_calls"]:
                calls[call.pop("index")].append(call)
            message["tool_calls"] = [folded(of_one) for of_one in calls.values()]
        return {"index": found.pop("index"), "message": message, **found}

    def _shown(self, step: Step) -> Sequence[Part]:
        """Return the parts of a step, without thoughts if the client excluded them."""
        body = self.body
        if body.include_reasoning is not False and not (body.reasoning or {}).get("exclude"):
            return step.parts
        return [part for part in step.parts if not isinstance(part, ReasoningDelta)]

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        return chat_logprobs(self.site.port.decoder, step.logprobs, self.body.top_logprobs or 0)


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
        call = {"index": part.index, "id": part.call_id, "type": "function"}
        function = {"name": part.name, "arguments": ""}
        return {"content": "", "tool_calls": [call | {"function": function}]}
    if isinstance(part, ToolDelta):
        call = {"index": part.index, "function": {"arguments": part.arguments}}
        return {"content": "", "tool_calls": [call]}
    return None


class CompletionBody(Asked, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prediction: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


def prompts_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts of a request: each text or list of ids is one. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("prompt", "the list is empty.")
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


def check_ids(ids: Sequence[int], card: EngineCard, param: str) -> None:
    """Check that all ids are in the vocabulary. Raises ApiError."""
    if (bad := min(ids, default=0)) >= 0:
        bad = max(ids, default=0)
    if not 0 <= bad < card.vocab_size:
        words = f"{param}: {bad} is outside the vocabulary of {card.vocab_size}."
        raise ApiError(400, words, param=param, code="invalid_value")


# `echo` with `logprobs` returns the log-probabilities of the prompt's own tokens, which scoring
# tools use. If the engine cannot compute them, the request is refused.
class CompletionExchange(Choices[CompletionBody]):
    """The completions of all prompts of one request, given as text or token ids."""

    kind = CompletionBody
    api = "completions"
    name, object_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, site: Site, body: CompletionBody, request: Request, warnings: list[str]
    ) -> None:
        super().__init__(site, body, request, warnings)
        self._echoed: list[str] = []
        # The length of each streamed text so far.
        self._lengths: Counter[int] = Counter()

    @staticmethod
    def refuse(body: CompletionBody) -> None:
        if body.suffix:
            raise refused("suffix", "this server only continues prompts. Leave it out.")
        if body.echo and body.stream and body.logprobs is not None:
            raise refused("stream", "not allowed with echo and logprobs. Leave it out.")
        if body.max_tokens == 0 and not body.echo:
            raise refused("max_tokens", "0 is only allowed with echo.")

    def params(self) -> SamplingParams:
        body = self.body
        num_top, limit = body.logprobs or 0, body.max_tokens
        if limit is None:
            # The default of OpenAI's API.
            limit = cast("int", self.site.defaults.get("max_tokens", 16))
        params = params_of(
            self.site,
            body,
            max_tokens=limit or 1,
            logprobs=body.logprobs is not None,
            top_logprobs=num_top,
            prediction=prediction_text(body.prediction),
        )
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=num_top)
        return params

    async def open(self) -> list[Answer]:
        body, params, prompts = self.body, self.params(), prompts_of(self.body.prompt)
        if (num_completions := len(prompts) * params.n) > MOST_PROMPTS:
            words = f"{num_completions} completions; one request may have {MOST_PROMPTS}."
            raise invalid("prompt", words)
        ids_of = [await self._ids(prompt) for prompt in prompts]
        if body.echo:
            for ids in ids_of:
                text = await decoded(self.site.port, ids)
                self._echoed += [text] * params.n
        structure, only_prompt = structure_asked(body), body.max_tokens == 0
        found: list[Answer] = []
        try:
            for ids in ids_of:
                found += self.complete(ids, params, structure, only_prompt=only_prompt)
        except BaseException:
            cancel(found)
            raise
        return found

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        port = self.site.port
        if not isinstance(prompt, str):
            if not prompt:
                raise invalid("prompt", "it is empty.")
            check_ids(prompt, port.card, "prompt")
            return prompt
        return await port.encode(prompt, add_special=self.body.add_special_tokens is not False)

    def first(self, index: int) -> list[Event] | None:
        if not self.body.echo:
            return []
        if index >= len(self._echoed):
            return None
        self._lengths[index] = len(self._echoed[index])
        return [{"choices": [_completion_choice(index, self._echoed[index])]}]

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

    def empty(self, index: int) -> dict[str, Any]:
        return _completion_choice(index, "")

    def choice(self, found: dict[str, Any], index: int) -> dict[str, Any]:
        if self.body.logprobs is not None:
            items, ids = list[TokenLogprobs | None](), list[int]()
            if self.body.echo:
                # Of several completions, only the first has the log-probabilities of the prompt.
                request = self.answers[index].request
                items += self.answers[index - request.sample].prompt_logprobs
                ids += request.prompt_ids
            own = [found["logprobs"]] if found["logprobs"] else []
            whole = folded([self._shown(items, ids, 0), *own])
            ends = accumulate(map(len, whole["tokens"]), initial=0)
            found["logprobs"] = whole | {"text_offset": list(ends)[:-1]}
        return found

    def _shown(
        self, items: Sequence[TokenLogprobs | None], ids: Sequence[int], start: int
    ) -> dict[str, Any]:
        return completion_logprobs(self.site.port.decoder, items, ids, start)


def text_of(step: Step) -> str:
    return "".join(part.text for part in step.parts if isinstance(part, TextDelta))


def _completion_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
