"""Whatever is asked and whatever runs beside it, answers over HTTP are the library's own, written
without speculation.

A case is a sampling, what drafts, a form of answer and a way to read it. Cases are asked one by
one, 32 at once, and 32 at once while the engine is killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import cycle, islice, product
from threading import Semaphore
from typing import Any, NamedTuple, TypeAlias

import pytest

from checks.effort import covering
from doubles.served import SECONDS, Served, events, served
from outrider import LLM, SamplingParams
from outrider.api.result import GenerationResult
from outrider.plugins.tools.formats import format_of, parser_for
from outrider.plugins.tools.grammar import answer_grammar, offered_tool
from outrider.server.chat import FINISH
from outrider.server.parts import Part, TextDelta, ToolDelta, ToolOpen
from outrider.server.thread_port import card_of

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

NUM_AT_ONCE = 32
# Answers that have begun, or chunks of them that have come, when the engine is killed.
NUM_BEGUN = 6
SAMPLINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
}
DRAFTERS = ("model", "none", "ngram", "prediction", "suffix", "recycling", "lookup")
# As the server has it, no draft at all, and every drafter that a request may choose.
SPECULATION: Mapping[str, object] = {
    "default": None,
    "off": False,
    **{name: {"drafter": name} for name in DRAFTERS},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a town.", "parameters": SCHEMA},
}
CHAT = [{"role": "user", "content": "Write a function that adds two numbers."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS: Mapping[str, dict[str, Any]] = {
    "text": {"prompt": "def quicksort(items):", "max_tokens": 32},
    "stops": {"prompt": "class Stack:", "max_tokens": 32},
    "several": {"prompt": "Once upon a time", "max_tokens": 16, "n": 3},
    "schema": {"messages": CHAT, "max_tokens": 60, "response_format": FORMAT},
    "tools": {
        "messages": CHAT,
        "max_tokens": 80,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}
LOADS = ("alone", "among", "killed")
# Of each choice: its text, its calls as name and arguments, and why it ended.
Told: TypeAlias = list[tuple[str, list[list[str]], str]]
# The same from its pieces, calls by their place.
Pieces: TypeAlias = tuple[list[str], dict[int, list[str]], list[str]]
Asking: TypeAlias = Sequence[Future[Told]]


class Case(NamedTuple):
    sampling: str
    speculation: str
    form: str
    stream: bool


CASES = [Case(*values) for values in product(SAMPLINGS, SPECULATION, FORMS, (False, True))]


def covered(load: str) -> list[Case]:
    """Those under this load, of a set in which any two values of a case or a load meet."""
    rows = list(product(CASES, LOADS))
    named = [[*case._asdict().items(), ("load", one)] for case, one in rows]
    return [rows[i][0] for i in sorted(covering(named, 2)) if rows[i][1] == load]


def in_portions(cases: Sequence[Case]) -> list[list[Case]]:
    """So many at once; the last ones are filled up."""
    starts = range(0, len(cases), NUM_AT_ONCE)
    return [list(islice(cycle(cases[i : i + NUM_AT_ONCE]), NUM_AT_ONCE)) for i in starts]


class Library:
    """What the library says to a case, and the body of its request."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.told = cache(self._told)

    def body(self, case: Case, number: int) -> dict[str, Any]:
        body: dict[str, Any] = FORMS[case.form] | SAMPLINGS[case.sampling]
        if case.form == "stops":
            body["stop"] = self._stops(case.sampling)
        if case.speculation == "prediction":
            guess = self.told(case.sampling, case.form)[0][0]
            body["prediction"] = {"type": "content", "content": guess[: len(guess) // 2] + "no"}
        # No two requests are alike: the engine may be killed beside each of them.
        more = {"speculative": SPECULATION[case.speculation], "max_time": 1_000 + number}
        return body | more | {"stream": case.stream}

    def _told(self, sampling: str, form: str) -> Told:
        match form:
            case "schema":
                found = self._written(self._llm.encode_chat(CHAT), sampling, form, schema=SCHEMA)
            case "tools":
                ids = self._llm.encode_chat(CHAT, tools=[TOOL])
                tools = [offered_tool(TOOL, "tools")]
                given = format_of(card_of(self._llm))
                grammar = answer_grammar(given, tools, choice="required", parallel=False)
                assert grammar is not None
                found = self._written(ids, sampling, form, **grammar.structure)
                return [self._called(found[0])]
            case "stops":
                stop = self._stops(sampling)
                found = self._written(FORMS[form]["prompt"], sampling, form, stop=stop)
            case _:
                found = self._written(FORMS[form]["prompt"], sampling, form)
        return [(one.text, [], FINISH[str(one.finish_reason)]) for one in found]

    def _written(
        self, prompt: Any, sampling: str, form: str, stop: Sequence[str] = (), **structure: Any
    ) -> list[GenerationResult]:
        body, how = FORMS[form], SAMPLINGS[sampling]
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            n=body.get("n", 1),
            stop=stop,
            sampler="coupled" if "seed" in how else None,
            **how,
        )
        return self._llm.generate([prompt], params, speculative=False, **structure)

    def _stops(self, sampling: str) -> list[str]:
        """One that never comes, and letters from the middle of the text."""
        text = self._written(FORMS["stops"]["prompt"], sampling, "stops")[0].text
        middle = len(text) // 2
        return ["never written", text[middle : middle + 3]]

    def _called(self, found: GenerationResult) -> tuple[str, list[list[str]], str]:
        parser = parser_for(format_of(card_of(self._llm)), [TOOL])
        text, calls = "", list[list[str]]()
        parts: list[Part] = [*parser.feed(found.text), *parser.finish()]
        for part in parts:
            if isinstance(part, TextDelta):
                text += part.text
            elif isinstance(part, ToolOpen):
                calls.append([part.name, ""])
            elif isinstance(part, ToolDelta):
                calls[-1][1] += part.arguments
        ended = "tool_calls" if calls and found.finish_reason == "stop" else found.finish_reason
        return text, calls, FINISH[str(ended)]


def asked(server: Served, body: Mapping[str, Any], begun: Callable[[], object]) -> Told:
    """The choices of an answer, put together from its chunks where it is a stream. A client asks
    again where it is told that the engine is not there at the moment."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    choices: defaultdict[int, Pieces] = defaultdict(lambda: ([], {}, []))
    while True:
        with server.client.stream("POST", path, json=body) as got:
            if got.status_code == 503:
                time.sleep(float(got.headers["retry-after"]))
                continue
            assert got.status_code == 200, got.read()
            for event in events(got) if body["stream"] else [json.loads(got.read())]:
                begun()
                for choice in event["choices"]:
                    take(choice, choices[choice["index"]])
            told = [choices[i] for i in range(len(choices))]
            return [("".join(text), list(calls.values()), end) for text, calls, (end,) in told]


def take(choice: dict[str, Any], into: Pieces) -> None:
    text, calls, ends = into
    said: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
    text.append(choice.get("text") or said.get("content") or "")
    given: list[dict[str, Any]] = said.get("tool_calls") or []
    for place, call in enumerate(given):
        known = calls.setdefault(call.get("index", place), ["", ""])
        known[0] += call["function"].get("name", "")
        known[1] += call["function"]["arguments"]
    if choice["finish_reason"] is not None:
        ends.append(choice["finish_reason"])


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found
        assert found.end() == 0


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with LLM("outrider/embedded", threads=1) as llm:
        yield Library(llm)


def at_once(
    server: Served, library: Library, cases: Sequence[Case], *, killed: bool = False
) -> None:
    begun = Semaphore(0)
    bodies = [library.body(case, number) for number, case in enumerate(cases)]
    wanted = [library.told(case.sampling, case.form) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        texts = [pool.submit(asked, server, body, begun.release) for body in bodies]
        if killed:
            kill(server, begun, texts)
        found = [text.result(SECONDS) for text in texts]
    for case, told, want in zip(cases, found, wanted, strict=True):
        assert told == want, case
    assert server.gauge("outrider_engine_restarts_total") == killed


def kill(server: Served, begun: Semaphore, texts: Asking) -> None:
    """The engine, once some answers have begun and while most have not ended."""
    for _ in range(NUM_BEGUN):
        assert begun.acquire(timeout=SECONDS)
    os.kill(server.engine_id(), signal.SIGKILL)
    assert sum(text.done() for text in texts) < len(texts) // 2


def test_every_drafter_is_asked_for(server: Served) -> None:
    told = server.client.get("/v1/models").json()["data"][0]["meta"]["drafters"]
    assert told[0] == DRAFTERS[0], "the drafter of the engine comes first"
    assert sorted(told) == sorted(DRAFTERS)


@pytest.mark.parametrize("cases", [covered("alone"), pytest.param(CASES, marks=pytest.mark.deep)])
def test_alone(server: Served, library: Library, cases: Sequence[Case]) -> None:
    for number, case in enumerate(cases):
        told = asked(server, library.body(case, number), bool)
        assert told == library.told(case.sampling, case.form), case


@pytest.mark.parametrize("cases", [covered("among"), pytest.param(CASES, marks=pytest.mark.deep)])
def test_among_others(server: Served, library: Library, cases: Sequence[Case]) -> None:
    for some in in_portions(cases):
        at_once(server, library, some)


def test_while_the_engine_is_killed(server: Served, library: Library) -> None:
    (cases,) = in_portions(covered("killed"))
    at_once(server, library, cases, killed=True)


@pytest.mark.deep
@pytest.mark.parametrize("cases", in_portions(CASES))
def test_every_case_while_the_engine_is_killed(library: Library, cases: Sequence[Case]) -> None:
    with served() as server:
        at_once(server, library, cases, killed=True)
        assert server.end() == 0
