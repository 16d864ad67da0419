"""POST /v1/completions: continues one or several prompts, given as text or token ids.

`echo` with `logprobs` returns the log-probabilities of the prompt's own tokens, which scoring tools
use. If the engine cannot compute them, the request is refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.routing import Route

from outrider.core.draft import TokenLogprobs
from outrider.server.answers import Answer, cancel
from outrider.server.chat import prediction_text
from outrider.server.encoding import ChoicesWriter, completion_logprobs
from outrider.server.errors import ApiError, refused
from outrider.server.events import Step, TextDelta
from outrider.server.exchange import Asked, Exchange, api_route, params_of, structure_asked
from outrider.server.site import MOST_PROMPTS, Site
from outrider.server.tokens import check_ids


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
    return [api_route(path, CompletionBody, _refuse, writer, site=site, api="completions")]


def _refuse(body: CompletionBody) -> None:
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
        return [_choice(index, self._echoed[index])]

    def deltas(self, index: int, step: Step) -> list[dict[str, Any]]:
        text = text_of(step)
        if not (text or step.logprobs or step.rounds):
            return []
        choice = _choice(index, text)
        if step.logprobs:
            ids = [item.token_id for item in step.logprobs]
            logprobs = self._shown(step.logprobs, ids, self._lengths[index])
            choice["logprobs"] = logprobs
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
        if step.rounds:
            choice["outrider.round"] = step.rounds
        return [choice]

    def last(self, index: int) -> dict[str, Any]:
        return _choice(index, "")

    def take(self, index: int, step: Step) -> None:
        self._texts[index] += text_of(step)
        self._logprobs[index] += step.logprobs

    def record(self, index: int, answer: Answer) -> dict[str, Any]:
        before = self._echoed[index] if self._echoed else ""
        choice = _choice(index, before + self._texts[index])
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


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
