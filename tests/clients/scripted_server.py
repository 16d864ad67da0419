"""The server's own HTTP, templates, parsers and encoders before an engine that writes by rules.

A small model calls no tool of its own accord. RULES is a JSON list of pairs: a text to be found in
the prompt, and what is then written; the first pair that fits decides, and "" fits always. The
first token of an answer takes so many seconds as the list says after them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from doubles.scripted_port import CARD, ScriptedPort
from outrider.api.callers import ChatIds
from outrider.api.chat_messages import checked_messages, checked_tools
from outrider.api.chat_template import ChatTemplate
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import Address, DoorRules, reserved
from outrider.server.app import all_routes, make_app
from outrider.server.port import ChatPrompt, EngineCard, EngineRequest
from outrider.server.run import run_server
from outrider.server.site import Site

# A round brings so many characters, so that delimiters come in pieces.
_ROUND = 5


class RulesPort(ScriptedPort):
    """A token is a character; the prompt is what the template made of the conversation."""

    def __init__(self, template: str, rules: list[tuple[str, str]], first_seconds: float) -> None:
        super().__init__(self._written)
        self.first_seconds = first_seconds
        self._rules, self._source = rules, template
        self._template = ChatTemplate(template, {})

    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(CARD, window=200_000, chat_template=self._source)

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        messages, notes = checked_messages(chat.messages, continues=chat.continues)
        found = self._template.render(
            messages,
            tools=checked_tools(chat.tools),
            variables=chat.variables,
            continues=chat.continues,
        )
        return ChatIds([ord(letter) for letter in found.text], (*notes, *found.notes))

    def _written(self, request: EngineRequest) -> list[str]:
        prompt = "".join(map(chr, request.prompt_ids))
        text = next(text for needle, text in self._rules if needle in prompt)
        return [text[i : i + _ROUND] for i in range(0, len(text), _ROUND)]


async def main(template: str, rules: list[tuple[str, str]], first_seconds: float) -> None:
    port = RulesPort(template, rules, first_seconds)
    site = Site(port=port, names=("outrider/scripted",))
    metrics = Metrics(lambda: {"outrider/scripted": port.status})
    site.observers.append(metrics)
    address, held = reserved(Address(port=0))
    app = make_app(site, DoorRules(), all_routes(site, metric_routes(metrics)))

    def ready() -> None:
        sys.stdout.write(json.dumps({"url": address.url, "model": site.names[0]}) + "\n")
        sys.stdout.flush()

    with held:
        await run_server(app, site, address, load=lambda: asyncio.sleep(0), ready=ready)


asyncio.run(main(*json.loads(sys.argv[1])))
