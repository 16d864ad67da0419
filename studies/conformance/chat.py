"""llama.cpp's chat cases (`tests/test-chat.cpp`): what models write, read as its tests expect.

Each case is read whole, character by character and in random pieces. A case that is read in another
way counts as warned where a request with tools would be told that calls cannot be read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.counts import Suite
from conformance.cpp import Call, Reader, UnreadableError, tokens

from outrider.api.chat_template import ChatTemplate
from outrider.core.errors import CheckpointError
from outrider.plugins.tools.formats import format_of, parser_for
from outrider.server.parts import OutputParser, ReasoningDelta, TextDelta, ToolDelta, ToolOpen
from outrider.server.port import EngineCard

_NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
_CONTINUED = "continuations: an answer that goes on from thoughts of the client's"
_FUNCTIONS = ("test_lfm2_parser", "test_template_output_peg_parsers")
_IN_TEXT = "thoughts that stay in the text"
_CUT = "calls that the text ends amid: they are text, with a warning"
_UNREAD = "families that are not read: with tools the answer has a warning"
# Differences that are meant, by a part of the model's text.
_DOCUMENTED: Mapping[str, str] = {
    "<think>\n\n</think>\n\n<tool_call>": "<think> once more: it is no thought",
}


@dataclass
class Case:
    template: str
    text: str
    given: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Answer:
    """Blanks at the edges of text do not count."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def suites(source: Path) -> Iterator[Suite]:
    """`source` is llama.cpp's tree."""
    suite = Suite("chat cases")
    templates: dict[str, ChatTemplate] = {}
    for case in cases((source / "tests" / "test-chat.cpp").read_text("utf-8")):
        name = Path(case.template).stem
        if (reason := _not_run(case)) is not None:
            suite.refuse(f"{name}: {reason}", reason)
            continue
        if case.template not in templates:
            templates[case.template] = ChatTemplate(
                (source / case.template).read_text("utf-8"), _NAMES
            )
        _count(suite, case, templates[case.template])
    for template in templates.values():
        template.close()
    yield suite


def _count(suite: Suite, case: Case, template: ChatTemplate) -> None:
    name = Path(case.template).stem
    tools = [_tool(one) for one in case.given.get("tools", ())]
    try:
        messages = [_message(one) for one in case.given.get("messages", ())]
        prompt = template.render(
            messages or [{"role": "user", "content": "Hey there!"}],
            tools=tools,
            variables={"enable_thinking": case.given.get("enable_thinking", True)},
            continues="continue_final_message" in case.given,
        ).text
    except CheckpointError as error:
        suite.refuse(f"{name}: {error}"[:200], str(error))
        return
    card = _card(template.source)
    given = format_of(card)
    unread = "NONE" in getattr(case.given.get("reasoning_format"), "name", "NONE")
    if unread and given is not None and given.begun(prompt) is not None:
        suite.refuse(f"{name}: {_IN_TEXT}", _IN_TEXT)
        return
    wanted = _wanted(case)
    if "continue_final_message" in case.given:
        # Ours answers with what is new.
        begun = messages[-1]["content"]
        wanted = Answer(wanted.content.removeprefix(begun.strip()).strip(), "", wanted.calls)
    parsers = [(parser_for(given, tools, prompt=prompt), pieces) for pieces in _cuts(case.text)]
    found = {_read(parser, pieces) for parser, pieces in parsers}
    reason = next((why for text, why in _DOCUMENTED.items() if text in case.text), None)
    if all(parser.is_cut for parser, _ in parsers):
        reason = _CUT
    if given is None or not given.has_calls:
        reason = _UNREAD
    shown = f"{case.text!r} is {found} for {wanted}"
    suite.count(name, found == {wanted}, shown, reason)


def _card(source: str) -> EngineCard:
    return EngineCard(
        model="m",
        window=9,
        vocab_size=9,
        num_parameters=1,
        drafters=("none",),
        drafter="none",
        k=0,
        sampler="match",
        exact=True,
        chat_template=source,
    )


def _not_run(case: Case) -> str | None:
    given = case.given
    if "REASONING" in getattr(given.get("continue_final_message"), "name", ""):
        return _CONTINUED
    if "json_schema" in given:
        return "schemas: the text has a form"
    wanted = given.get("expect") or {}
    unread = "NONE" in getattr(given.get("reasoning_format"), "name", "NONE")
    if unread and ("THINK" in case.text.upper() or wanted.get("reasoning_content")):
        return _IN_TEXT
    return None


def _cuts(text: str) -> Iterator[list[str]]:
    """The text whole, in characters and in random pieces."""
    yield [text]
    yield [*text]
    chance = random.Random(text)
    for _ in range(3):
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(5))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _read(parser: OutputParser, pieces: Sequence[str]) -> Answer:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    content, reasoning, calls = "", "", list[list[str]]()
    for part in [*parts, *parser.finish()]:
        match part:
            case TextDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolOpen(name=name):
                calls.append([name, ""])
            case ToolDelta(arguments=arguments):
                calls[-1][1] += arguments
            case _:
                pass
    made = tuple((name, _plain(arguments)) for name, arguments in calls)
    return Answer(content.strip(), reasoning.strip(), made)


def _plain(arguments: str) -> str:
    """The same text for the same object; one that is cut off as it is."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except ValueError:
        return arguments.rstrip()


def _wanted(case: Case) -> Answer:
    given = dict(case.given.get("expect") or {})
    content = case.given.get("expect_content", given.get("content", ""))
    reasoning = case.given.get("expect_reasoning", given.get("reasoning_content", ""))
    calls = case.given.get("expect_tool_calls", given.get("tool_calls", ()))
    made = tuple((one[0], _plain(one[1])) for one in calls)
    return Answer(content.strip(), reasoning.strip(), made)


def _tool(value: Sequence[str]) -> dict[str, Any]:
    name, description, parameters = value
    function = {
        "name": name,
        "description": description,
        "parameters": json.loads(parameters or "{}"),
    }
    return {"type": "function", "function": function}


def _message(value: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        value = {"role": value[0], "content": value[1]}
    message = {"role": value["role"], "content": value.get("content", "")}
    if value.get("reasoning_content"):
        message["reasoning_content"] = value["reasoning_content"]
    for name, arguments, *more in value.get("tool_calls", ()):
        function = {"name": name, "arguments": json.loads(arguments)}
        call = {"id": "".join(more), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    if value.get("tool_call_id"):
        message["tool_call_id"] = value["tool_call_id"]
    return message


def cases(source: str) -> Iterator[Case]:
    """The cases of the source of `test-chat.cpp`."""
    reader = Reader(tokens(source))
    _Walk(reader).globals()
    for name in _FUNCTIONS:
        body = _body(reader, name)
        if name == _FUNCTIONS[0]:
            for path in _paths(source):
                inner = Reader(body, {**reader.names, "template_path": path})
                yield from _Walk(inner).block()
        else:
            yield from _Walk(Reader(body, dict(reader.names))).block()


def _paths(source: str) -> list[str]:
    """The templates that the first function is called with."""
    before = source[: source.index("test_lfm2_parser(tmpl")]
    return [f"models/templates/{one}" for one in _quoted(before[before.rindex("for (") :])]


def _quoted(source: str) -> list[str]:
    return [token.text.rpartition("/")[2] for token in tokens(source) if token.kind == "text"]


def _body(reader: Reader, name: str) -> list[Any]:
    reader.at = 0
    while not reader.take("static", "void", name):
        reader.at += 1
    while not reader.take("{"):
        reader.at += 1
    begin = reader.at
    depth = 1
    while depth:
        token = reader.tokens[reader.at]
        if token.kind == "sign":
            depth += (token.text == "{") - (token.text == "}")
        reader.at += 1
    return reader.tokens[begin : reader.at - 1]


@dataclass
class _Walk:
    """Goes through statements: definitions of values, loops over texts, and tests."""

    reader: Reader
    template: str = ""
    templates: dict[str, str] = field(default_factory=dict[str, str])

    def globals(self) -> None:
        """Messages and tools that cases share."""
        reader = self.reader
        kinds = ("common_chat_tool", "common_chat_msg")
        while reader.at < len(reader.tokens):
            if reader.peek() in kinds and reader.peek(2) in ("{", "="):
                name = reader.peek(1)
                reader.at += 2
                self._define(name)
            else:
                reader.at += 1

    def block(self) -> Iterator[Case]:
        reader = self.reader
        while reader.at < len(reader.tokens):
            if reader.take("{") or reader.take("}"):
                continue
            if reader.take("for", "("):
                yield from self._loop()
            elif reader.peek(1) == "." and reader.peek(2) == "test":
                yield from self._case()
            elif (name := self._defined()) is not None:
                self._define(name)
            elif not self._member():
                reader.skip()

    def _loop(self) -> Iterator[Case]:
        reader = self.reader
        while not reader.take(":"):
            reader.at += 1
        name = reader.peek(-2)
        texts = reader.value()
        reader.expect(")")
        begin = reader.at
        for text in texts:
            reader.at = begin
            reader.names[name] = text
            reader.skip()
            inner = Reader(reader.tokens[begin + 1 : reader.at - 1], dict(reader.names))
            yield from _Walk(inner).block()

    def _defined(self) -> str | None:
        """The name that a definition gives, left before its value."""
        reader = self.reader
        for i in range(5):
            if reader.peek(i) in ("=", "{", ";") and i >= 2:
                types = [reader.peek(j) for j in range(i - 1)]
                if not any(
                    one in ("auto", "common_chat_msg", "common_chat_tool", "std::string")
                    for one in types
                ):
                    return None
                name = reader.peek(i - 1)
                reader.at += i
                return name
            if reader.at + i < len(reader.tokens) and reader.tokens[reader.at + i].kind == "text":
                return None
        return None

    def _define(self, name: str) -> None:
        reader = self.reader
        if reader.take(";"):
            reader.names[name] = {"role": "assistant"}
            return
        reader.take("=")
        begin = reader.at
        try:
            value = reader.value()
            reader.expect(";")
        except (UnreadableError, TypeError):
            reader.at = begin
            reader.skip()
            return
        if isinstance(value, Call) and value.name == "peg_tester":
            self.templates[name] = value.arguments[0]
        else:
            reader.names[name] = _made(value)

    def _member(self) -> bool:
        """`name.member = value;` of a message."""
        reader = self.reader
        name, member = reader.peek(), reader.peek(2)
        if reader.peek(1) != "." or reader.peek(3) != "=" or name not in reader.names:
            return False
        begin = reader.at
        reader.at += 4
        try:
            reader.names[name] = {**reader.names[name], member: reader.value()}
            reader.expect(";")
        except (UnreadableError, TypeError):
            reader.at = begin
            return False
        return True

    def _case(self) -> Iterator[Case]:
        reader = self.reader
        template = self.templates.get(reader.peek(), "")
        begin = reader.at
        reader.at += 2
        given: dict[str, Any] = {}
        try:
            while not reader.take(";"):
                name = reader.peek()
                reader.at += 1
                reader.expect("(")
                given[name] = [_made(one) for one in reader.values(")")]
                reader.take(".")
        except (UnreadableError, TypeError) as error:
            reader.at = begin
            reader.skip()
            raise UnreadableError(f"a case of {template} that is not read: {error}") from error
        text = given.pop("test")[0]
        yield Case(template, text, {name: one[0] if one else None for name, one in given.items()})


def _made(value: Any) -> Any:
    """A value with the messages that its calls make."""
    if isinstance(value, list):
        return [_made(one) for one in value]
    if not isinstance(value, Call) or not value.arguments:
        return value
    arguments = [_made(one) for one in value.arguments]
    padded = [*arguments, *[""] * 5]
    message = dict(zip(("content", "reasoning_content"), padded, strict=False))
    match value.name:
        case "simple_assist_msg":
            calls = [padded[2:5]] if padded[2] or padded[4] else []
        case "message_with_tool_calls":
            message, calls = {}, [padded[:2]]
        case "message_with_tool_calls_and_reasoning":
            message, calls = {"reasoning_content": padded[2]}, [padded[:2]]
        case "message_with_content_and_tool_call":
            message, calls = {"content": padded[0]}, [padded[1:3]]
        case "message_with_reasoning_and_tool_call":
            message, calls = {"reasoning_content": padded[0]}, [padded[1:3]]
        case "message_with_reasoning_content_and_multiple_tool_calls":
            message, calls = {"reasoning_content": padded[0], "content": padded[1]}, padded[2]
        case _:
            return value
    return {"role": "assistant", **message, "tool_calls": calls}
