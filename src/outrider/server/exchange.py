"""One request of any API, from its body to its answer: the code that all APIs share.

An API is an `api_route`: the type of its bodies, a function that refuses bodies, and the `Writer`
of an exchange, which knows this API's format of prompts and answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.api.chat_messages import switched
from outrider.api.structure import StructureOptions
from outrider.core.fields import shown
from outrider.core.params import SamplingParams
from outrider.server.answers import Answer, Ask, metrics_of, open_answers
from outrider.server.asking import Asked, ignored_fields, kept, structure_asked, traced
from outrider.server.events import End, OutputParser, PlainParser
from outrider.server.port import ChatPrompt
from outrider.server.reply import EventReply, Reply, Waiting
from outrider.server.site import Api, Site, key_of, request_id_of
from outrider.server.tools import Tooling, read_with, schema_paths
from outrider.server.wire import MOST_WARNINGS, json_response, read

B = TypeVar("B", bound=Asked)


@dataclass(slots=True, kw_only=True)
class Exchange(Generic[B]):
    """A parsed body, and the name of its API `key`. `warnings` report ignored fields."""

    site: Site
    body: B
    key: str
    request_id: str
    trace_parent: str
    api: Api
    warnings: list[str]

    async def converse(
        self,
        chat: ChatPrompt,
        tooling: Tooling,
        params: SamplingParams,
        form: Mapping[str, Any] | None = None,
        form_name: str = "response_format",
    ) -> list[Answer]:
        """Start completions of a conversation. `form` is the required format of the answer, if the
        API has its own parameter for it; `form_name` is that parameter's name."""
        ids, notes = await self.site.port.encode_chat(chat)
        structure = structure_asked(self.body, form, name=form_name)
        paths = schema_paths(getattr(self.body, "tools", None))
        reading = await read_with(self.site, ids, tooling, params, structure, paths)
        template = self.site.port.card.chat_template
        known = switched(template, chat.variables)[0]
        unknown = (name for name in known if name not in template)
        few = islice(unknown, MOST_WARNINGS)
        self.warnings += [f"{shown(name)}: the chat template has no such variable" for name in few]
        self.warnings += [*chat.notes, *notes, *reading.warnings]
        return self.complete(ids, reading.params, reading.structure, reading.make_parser)

    def complete(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        structure: StructureOptions,
        make_parser: Callable[[], OutputParser] = PlainParser,
        *,
        only_prompt: bool = False,
    ) -> list[Answer]:
        """Start completions of a prompt."""
        ask = Ask(
            prompt_ids=ids,
            params=params,
            structure=structure,
            make_parser=make_parser,
            trace=traced(self.body),
            key=self.key,
            request_id=self.request_id,
            trace_parent=self.trace_parent,
            api=self.api,
            only_prompt=only_prompt,
        )
        return open_answers(self.site, ask)

    def extras(self, ends: Sequence[End]) -> dict[str, Any]:
        """Return the fields of an answer that the original APIs do not have."""
        found: dict[str, Any] = {"metrics": metrics_of(ends)}
        if ends[0].seed is not None:
            found["seed"] = ends[0].seed
        notes = [note for end in ends for note in end.notes]
        warnings = list(dict.fromkeys([*self.warnings, *notes]))
        return found | ({"warnings": warnings} if warnings else {})


class Writer(Waiting, Protocol):
    """Writes the answer of one exchange."""

    async def open(self) -> list[Answer]:
        """Submit the request. Raises ApiError and the errors of the port."""
        ...

    async def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]: ...

    def pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]: ...


def api_route(
    path: str,
    kind: type[B],
    check: Callable[[B], None],
    writer_of: Callable[[Exchange[B]], Writer],
    *,
    site: Site,
    api: Api,
) -> Route:
    """Return the route POST `path`."""

    async def answer(request: Request) -> Response:
        body, warnings = await read(kind, request, site)
        asked = site.of(body.model)
        check(body)
        warnings += ignored_fields(body)
        asked = kept(asked, body, warnings)
        writer = writer_of(
            Exchange(
                site=asked,
                body=body,
                key=key_of(request),
                request_id=request_id_of(request),
                trace_parent=request.headers.get("traceparent", ""),
                api=api,
                warnings=warnings,
            )
        )

        async def opened() -> list[Answer]:
            # Middleware, such as spans.py, reads the answers from the scope.
            answers = request.scope["outrider.answers"] = await writer.open()
            # A function, as the engine may not be known before the answer begins.
            request.scope["outrider.engine"] = lambda: answers[0].engine
            return answers

        async def whole() -> Response:
            return json_response(await writer.whole(await opened()))

        async def stream() -> AsyncGenerator[bytes]:
            return writer.pieces(await opened())

        if body.stream:
            return EventReply(asked, request, stream, writer)
        return Reply(asked, request, whole)

    return Route(path, answer, methods=["POST"])
