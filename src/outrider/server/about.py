"""Routes about the server itself: its models, its tokenizer, its health, and the pages of the
playground and the dashboard.

Every file of `web/` and of the component that shows rounds is read once, when the server starts;
the path of a request is never opened as a file. The pages load nothing from other hosts, and the
content security policy of access.py forbids it (docs/playground.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from string import Template
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider import __version__
from outrider.api.result import token_text
from outrider.server.chat import check_ids
from outrider.server.errors import ApiError, invalid
from outrider.server.port import ChatPrompt, NotReadyError, decoded
from outrider.server.reply import Reply, json_response, read
from outrider.server.site import Site


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """The body of vLLM's /tokenize, and with `content` that of llama-server's."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


def model_routes(site: Site) -> list[Route]:
    async def models(_request: Request) -> Response:
        records = [model_record(one, name) for one in site.all for name in one.names]
        # Codex reads the second list.
        names = [record["id"] for record in records]
        also = [{"slug": name, "display_name": name, "id": name} for name in names]
        return json_response({"object": "list", "data": records, "models": also})

    async def one_model(request: Request) -> Response:
        asked = site.of(request.path_params["name"])
        return json_response(model_record(asked, asked.name))

    async def tokenize(request: Request) -> Response:
        body, _ = await read(TokenizeBody, request, site)
        asked = site.of(body.model)
        return Reply(asked, request, lambda: _tokenized(asked, body))

    async def detokenize(request: Request) -> Response:
        body, _ = await read(DetokenizeBody, request, site)
        asked = site.of(body.model)
        return Reply(asked, request, lambda: _detokenized(asked, body.tokens))

    async def tokenizer_info(request: Request) -> Response:
        card = site.of(request.query_params.get("model")).port.card
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": card.bos or None,
                "eos_token": card.eos or None,
                "chat_template": card.chat_template or None,
                "model_max_length": card.window,
                "vocab_size": card.vocab_size,
            }
        )

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]


def health_routes(site: Site) -> list[Route]:
    async def health(_request: Request) -> Response:
        state = site.port.status.state
        known = [one.port.status for one in site.all]
        if all(one.state == "failed" or one.is_overdue for one in known):
            away = any(one.is_overdue for one in known)
            what = "has ended and does not come back" if away else "has failed"
            raise ApiError(503, f"the engine {what}.", code="engine_failed")
        found = {
            "status": "ok",
            "engine": state,
            "restarts": sum(one.num_restarts for one in known),
        }
        warnings: list[str] = []
        if num := site.traffic.num_alarms:
            warnings.append(
                f"{num} audited requests had another text without speculation; the log says which."
            )
        if any(one.is_bounded for one in known):
            warnings.append(
                "an engine ended so often within a minute that its next start waits; the log says "
                "how, and requests that end it are kept out."
            )
        return json_response(found | ({"warning": " ".join(warnings)} if warnings else {}))

    async def ready(_request: Request) -> Response:
        if site.traffic.ending:
            raise ApiError(503, "the server is ending.", code="ending", retry_after=5)
        if not any(one.would_answer for one in site.all):
            raise NotReadyError(site.port.status.state)
        return json_response({"status": "ready"})

    async def version(_request: Request) -> Response:
        return json_response({"version": __version__, "name": "outrider"})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]


# Names of the states in llama-server's router.
_STATES = {"ready": "loaded", "restarting": "loading"}


def model_record(site: Site, name: str) -> dict[str, Any]:
    state = site.port.status.state
    if state == "unloaded" and not site.would_load():
        state = "failed"
    found: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": int(site.started),
        "owned_by": "outrider",
        "status": {"value": _STATES.get(state, state)},
    }
    try:
        card = site.port.card
    except NotReadyError:
        return found
    return found | {
        "root": card.model,
        "max_model_len": card.window,
        "meta": {
            "n_params": card.num_parameters,
            "n_vocab": card.vocab_size,
            "n_ctx_train": card.window,
            "drafter": card.drafter,
            "drafters": card.drafters,
            "k": card.k,
            "sampler": card.sampler,
            "exact": card.exact,
        },
    }


async def _tokenized(site: Site, body: TokenizeBody) -> Response:
    port, text = site.port, body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages.")
    if text is not None:
        special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        # llama-server's own default is without special tokens.
        usual = body.content is None
        ids = await port.encode(text, add_special=usual if special is None else special)
    else:
        chat = ChatPrompt(
            messages=body.messages or (),
            tools=body.tools or (),
            variables=body.chat_template_kwargs or {},
            continues=bool(body.continue_final_message),
        )
        ids = (await port.encode_chat(chat)).ids
    found: dict[str, Any] = {"count": len(ids), "max_model_len": port.card.window, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [token_text(port.decoder, token_id) for token_id in ids]
    if body.with_pieces:
        pieces = [{"id": i, "piece": token_text(port.decoder, i)} for i in ids]
        found["tokens"] = pieces
    return json_response(found)


async def _detokenized(site: Site, ids: Sequence[int]) -> Response:
    card = site.port.card
    if len(ids) > card.window:
        raise invalid(
            "tokens", f"{len(ids)} are more than the window of {card.window}. Send fewer."
        )
    check_ids(ids, card, "tokens")
    text = await decoded(site.port, ids) if ids else ""
    return json_response({"prompt": text, "content": text})


TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Values that differ between the pages: the script, and the text for browsers without scripts.
PAGES: Mapping[str, Mapping[str, str]] = {
    "/": {"name": "playground", "instead": "The API works without it."},
    "/dashboard": {"name": "dashboard", "instead": "/metrics has the same for Prometheus."},
}
_PAGE = "/web/page.html"
# Fields of a card that no page shows.
_LONG = ("chat_template", "tool_template", "response_template")


@cache
def web_routes() -> tuple[Route, ...]:
    """Return the routes of the playground, the dashboard, and their files below `/web/`. They
    contain no secret and need no key: pages ask for one when the API requires it."""
    found = _served()
    page = Template(found.pop(_PAGE).decode())
    routes = [_static(path, page.substitute(own).encode(), _PAGE) for path, own in PAGES.items()]
    routes += [_static(path, data, path) for path, data in found.items()]
    return tuple(routes)


def card_routes(site: Site) -> list[Route]:
    """Return the route `/outrider/v1/card`: facts about the engine, for the playground."""

    async def card(request: Request) -> Response:
        own = site.of(request.query_params.get("model"))
        known = msgspec.to_builtins(own.port.card) | {"sampling": own.sampling}
        return json_response({name: known[name] for name in known if name not in _LONG})

    return [Route("/outrider/v1/card", card, methods=["GET"])]


def _served() -> dict[str, bytes]:
    """Return each file by the path at which it is served."""
    package = files("outrider")
    found = _below(package / "server" / "web", "/web/")
    return found | _below(package / "api" / "assets", "/web/rounds/")


def _below(folder: Traversable, path: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _below(entry, f"{path}{entry.name}/")
        elif _kind(entry.name) in TYPES:
            found[f"{path}{entry.name}"] = entry.read_bytes()
    return found


def _kind(name: str) -> str:
    return name[name.rfind(".") :]


def _static(path: str, data: bytes, name: str) -> Route:
    """Return the route of a file as it was at the start, with an ETag of its content."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {"cache-control": "no-cache", "etag": tag, "content-type": TYPES[_kind(name)]}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers)

    return Route(path, answer, methods=["GET"])
