"""POST /v1/completions: texts go on from prompts, which may be ids, several at once.

`echo` with `logprobs` gives those of the prompt's own tokens, which scoring tools read; where the
engine cannot give them the request is refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.core.sampling import TokenLogprobs
from outrider.server.answers import Answer, Ask, metrics_of, open_answers, usage_of, written
from outrider.server.asking import Asked, params_of, structure_asked, traced, with_seed_rule
from outrider.server.chat import FINISH, prediction_text
from outrider.server.encoding import Frame, usage_record
from outrider.server.errors import ApiError, refused
from outrider.server.events import End, Step, TextDelta, Usage
from outrider.server.logprobs import completion_logprobs
from outrider.server.reply import EventReply, Reply
from outrider.server.site import Site, key_of
from outrider.server.wire import encode, json_response, read

MOST_PROMPTS = 128


class CompletionBody(Asked, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prediction: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


def completion_routes(site: Site) -> list[Route]:
    async def completions(request: Request) -> Response:
        body, warnings = await read(CompletionBody, request)
        model = site.model(body.model)
        _refuse(body)
        run = CompletionRun(site, body, model, warnings, key_of(request))
        if body.stream:
            return EventReply(request, run.stream)
        return Reply(request, run.whole)

    return [Route("/v1/completions", completions, methods=["POST"])]


def _refuse(body: CompletionBody) -> None:
    if body.suffix:
        raise refused("suffix", "texts only go on here. Leave it out.")
    if body.echo and body.stream and body.logprobs is not None:
        raise refused("stream", "with echo and logprobs: ask for them at once.")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", "0 only has a meaning with echo.")


def prompts_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """A prompt for each text or row of ids; a flat list of ids is one prompt."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt: there is none.", param="prompt", code="invalid_value")
    num_ids = sum(isinstance(item, int) for item in given)
    if num_ids == len(given):
        return [cast("list[int]", given)]
    if num_ids:
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


class CompletionRun:
    """One request, from its body to its answer."""

    def __init__(
        self, site: Site, body: CompletionBody, model: str, warnings: Sequence[str], key: str
    ) -> None:
        self._site, self._body, self._key = site, body, key
        self._warnings = list(warnings)
        name = f"cmpl-{uuid4().hex}"
        self._frame = Frame("text_completion", name, model, chunk_kind="text_completion")
        self._echoed: list[str] = []
        self._n = body.n or 1

    async def _open(self) -> list[Answer]:
        body, site = self._body, self._site
        num_top = body.logprobs or 0
        params = params_of(
            site,
            body,
            max_tokens=self._limit(),
            logprobs=body.logprobs is not None,
            top_logprobs=num_top,
            prediction=prediction_text(body.prediction),
        )
        self._n = params.n
        _check_number(len(prompts_of(body.prompt)) * params.n)
        params = with_seed_rule(params, site.port.card, asked=body.seed is not None)
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=num_top)
        prompts = [await self._ids(prompt) for prompt in prompts_of(body.prompt)]
        if body.echo:
            for ids in prompts:
                text = "".join(await site.port.decode(ids))
                self._echoed += [text] * params.n
        answers: list[Answer] = []
        try:
            for ids in prompts:
                ask = Ask(
                    prompt_ids=ids,
                    params=params,
                    structure=structure_asked(body),
                    trace=traced(body),
                    key=self._key,
                    api="completions",
                )
                answers += open_answers(site, ask)
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    def _limit(self) -> int:
        """OpenAI's own limit, where nobody names one."""
        given = self._body.max_tokens
        if given is None:
            return cast("int", self._site.defaults.get("max_tokens", 16))
        return given or 1

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            self._check(prompt)
            return prompt
        special = self._body.add_special_tokens is not False
        return await self._site.port.encode(prompt, add_special=special)

    def _check(self, ids: Sequence[int]) -> None:
        size = self._site.port.card.vocab_size
        bad = [token_id for token_id in ids if not 0 <= token_id < size]
        if bad or not ids:
            problem = f"{bad[0]} is outside the vocabulary of {size}" if bad else "it is empty"
            raise ApiError(400, f"prompt: {problem}.", param="prompt", code="invalid_value")

    async def whole(self) -> Response:
        answers = await self._open()
        texts: list[list[str]] = [[] for _ in answers]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in answers]
        async with aclosing(written(answers)) as steps:
            async for index, item in steps:
                if isinstance(item, Step):
                    texts[index].append(text_of(item))
                    logprobs[index] += item.logprobs
        ends = [answer.end for answer in answers]
        choices = [
            self._whole_choice(i, answers, "".join(text), logprobs[i])
            for i, text in enumerate(texts)
        ]
        record = self._frame.record() | {"choices": choices, "usage": self._usage(answers)}
        return json_response(record | self._extras(ends))

    def _whole_choice(
        self,
        index: int,
        answers: Sequence[Answer],
        text: str,
        logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        body, answer = self._body, answers[index]
        # Of several completions the first one tells of their prompt.
        first, end = answers[index - index % self._n], answer.end
        if body.max_tokens == 0:
            text, logprobs = "", []
        before = self._echoed[index] if self._echoed else ""
        told = None
        if body.logprobs is not None:
            items: list[TokenLogprobs | None] = list(logprobs)
            ids = [item.token_id for item in logprobs]
            if body.echo:
                items = [*first.prompt_logprobs, *items]
                ids = [*answer.request.prompt_ids, *ids]
            told = completion_logprobs(
                self._site.port.decoder, items, ids, 0 if body.echo else len(before)
            )
        found = _choice(index, before + text, FINISH[end.reason]) | {"logprobs": told}
        if len(answers) > 1:
            found["metrics"] = end.metrics
        return found

    async def stream(self) -> AsyncGenerator[bytes]:
        answers = await self._open()
        return self._pieces(answers)

    async def _pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        options, frame = self._body.stream_options, self._frame
        continuous = options is not None and options.continuous_usage_stats
        lengths = [len(text) for text in self._echoed] or [0] * len(answers)
        opened: set[int] = set()
        async with aclosing(written(answers)) as steps:
            async for index, item in steps:
                found = bytearray()
                if self._echoed and index not in opened:
                    opened.add(index)
                    found += frame.chunk(_choice(index, self._echoed[index], None))
                if isinstance(item, End):
                    found += self._last_chunk(index, item, answers)
                elif self._body.max_tokens != 0:
                    num_prompt = len(answers[index].request.prompt_ids)
                    more = frame.usage_so_far(num_prompt, item.num_tokens) if continuous else b""
                    found += self._step(index, item, lengths, more)
                yield bytes(found)
        if options is not None and options.include_usage:
            yield frame.usage_chunk(self._usage(answers))

    def _step(self, index: int, step: Step, lengths: list[int], more: bytes) -> bytes:
        text = text_of(step)
        if not (text or step.logprobs or step.rounds):
            return b""
        choice = _choice(index, text, None)
        if step.logprobs:
            ids = [item.token_id for item in step.logprobs]
            told = completion_logprobs(self._site.port.decoder, step.logprobs, ids, lengths[index])
            choice["logprobs"] = told
            lengths[index] += sum(map(len, told["tokens"]))
        if step.rounds:
            choice["outrider.round"] = step.rounds
        return self._frame.chunk(choice, more)

    def _last_chunk(self, index: int, end: End, answers: Sequence[Answer]) -> bytes:
        choice = _choice(index, "", FINISH[end.reason])
        if len(answers) > 1:
            choice["metrics"] = end.metrics
        return self._frame.chunk(choice, encode(self._extras([end]))[1:-1])

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Of all prompts."""
        ends = [answer.end for answer in answers]
        parts = [usage_of(ends[i : i + self._n]) for i in range(0, len(ends), self._n)]
        guessed = [part for part in parts if part.accepted_prediction_tokens is not None]
        return usage_record(
            Usage(
                prompt_tokens=sum(part.prompt_tokens for part in parts),
                completion_tokens=sum(part.completion_tokens for part in parts),
                cached_tokens=sum(part.cached_tokens for part in parts),
                accepted_prediction_tokens=sum(p.accepted_prediction_tokens or 0 for p in guessed)
                if guessed
                else None,
                rejected_prediction_tokens=sum(p.rejected_prediction_tokens or 0 for p in guessed)
                if guessed
                else None,
            )
        )

    def _extras(self, ends: Sequence[End]) -> dict[str, Any]:
        found: dict[str, Any] = {"metrics": metrics_of(ends)}
        if ends[0].seed is not None:
            found["seed"] = ends[0].seed
        notes = [note for end in ends for note in end.notes]
        warnings = list(dict.fromkeys([*self._warnings, *notes]))
        return found | ({"warnings": warnings} if warnings else {})


def text_of(step: Step) -> str:
    return "".join(part.text for part in step.parts if isinstance(part, TextDelta))


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
