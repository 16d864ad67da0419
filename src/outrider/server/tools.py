"""Tools of a request: those that were offered or required, and the parser and grammar of an answer
that may call them.

The three APIs have three formats of tools. Each is parsed into a `Tooling`; `read_with` chooses the
parser of the model's text, and the grammar that the text must follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, cast

from msgspec import Struct

from outrider.api.chat_template import PromptEnd
from outrider.api.structure import StructureOptions, chosen
from outrider.core.params import SamplingParams
from outrider.server.errors import ApiError, refused
from outrider.server.events import OutputParser, PlainParser
from outrider.server.parsing import (
    form_of,
    format_of,
    grammar_for,
    offered_tool,
    parser_for,
    shows_special,
)
from outrider.server.parsing.grammar import AnswerGrammar
from outrider.server.port import EngineCard
from outrider.server.site import Site
from outrider.server.wire import encode

Tool: TypeAlias = Mapping[str, Any]
Choice: TypeAlias = Literal["none", "auto", "required"]
# Schemas are processed in this thread, one at a time: 10,000 nodes take 0.2 s, which must not block
# streams.
_SCHEMAS = ThreadPoolExecutor(1, "outrider-schemas")


class Tooling(Struct, frozen=True, kw_only=True):
    """The tools of a request, in the form that templates expect. `named` is the tool that must be
    called; `parallel` allows several calls in one answer. If `allowed` is set, only the tools with
    these names may be called, and the model sees no others."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the template shows to the model."""
        if self.choice == "none":
            return ()
        if self.allowed is None:
            return self.tools
        return tuple(tool for tool in self.tools if _function(tool).get("name") in self.allowed)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.named is None:
            return self.offered
        return tuple(tool for tool in self.tools if _function(tool).get("name") == self.named)

    @property
    def is_strict(self) -> bool:
        return any(_function(tool).get("strict") is True for tool in self.offered)


class Reading(Struct, frozen=True, kw_only=True):
    """The parameters with which an answer is generated, and its parser."""

    make_parser: Callable[[], OutputParser]
    params: SamplingParams
    structure: StructureOptions
    warnings: tuple[str, ...] = ()


def tooling_of(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> Tooling:
    """Return the tooling of OpenAI's parameters, in either of its APIs. Raises ApiError."""
    found = tuple(tools or ())
    named: str | None = None
    allowed: tuple[str, ...] | None = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice, found)
    elif isinstance(choice, Mapping):
        named = str(_function(choice).get("name", ""))
        if choice.get("type") != "function" or not named:
            raise refused("tool_choice", 'send "none", "auto", "required" or a function.')
        choice = "required"
    choice = choice or "auto"
    if choice not in ("none", "auto", "required"):
        raise refused("tool_choice", 'send "none", "auto", "required" or a function.')
    given = Tooling(
        tools=found,
        choice=choice,
        named=named,
        parallel=parallel is not False and named is None,
        allowed=allowed,
    )
    if choice == "required" and not given.callable:
        raise ApiError(
            400,
            f"tool_choice: there is no tool {named!r}." if named else "tool_choice: no tools.",
            param="tool_choice",
            code="invalid_value",
        )
    return given


def _allowed(choice: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, tuple[str, ...]]:
    """Return mode and names of `allowed_tools`, which chat completions nest deeper."""
    inner: object = choice.get("allowed_tools", choice)
    said = cast("Mapping[str, object]", inner if isinstance(inner, Mapping) else {})
    given = said.get("tools")
    entries = cast("list[object]", given) if isinstance(given, list) else []
    names = tuple(
        str(_function(cast("Tool", entry)).get("name", ""))
        for entry in entries
        if isinstance(entry, Mapping)
    )
    if not names or len(names) < len(entries):
        raise refused("tool_choice", "allowed_tools has tools, each with the name of a function.")
    known = {_function(tool).get("name") for tool in tools}
    for name in names:
        if name not in known:
            raise refused("tool_choice", f"there is no tool {name[:64]!r} to allow.")
    return str(said.get("mode") or "auto"), names


def schema_paths(given: Sequence[Tool] | None) -> dict[str, str]:
    """Return for each tool's name the path of its schema in the request, for error messages."""
    found: dict[str, str] = {}
    for i, tool in enumerate(given or ()):
        function = _function(tool)
        key = "input_schema" if "input_schema" in function else "parameters"
        inner = "function." if "function" in tool else ""
        found[str(function.get("name"))] = f"tools[{i}].{inner}{key}"
    return found


async def read_with(
    site: Site,
    prompt_ids: Sequence[int],
    tooling: Tooling,
    params: SamplingParams,
    structure: StructureOptions,
    paths: Mapping[str, str],
) -> Reading:
    """Choose the parser and the grammar of an answer. Raises ApiError for requirements that this
    model cannot satisfy, ConfigError for schemas that cannot be enforced."""
    card, tools = site.port.card, tooling.offered
    end = PromptEnd.of(site.port.decoder, prompt_ids)
    warnings: list[str] = []
    given = format_of(card)
    if tools and (given is None or not given.has_calls):
        warnings.append("calls of tools cannot be distinguished from text in this model's output")
    required = tooling.choice == "required"
    has_form = chosen(structure) is not None and not required
    wanted = required or tooling.is_strict or not tooling.parallel or has_form
    wanted |= tooling.allowed is not None
    grammar = None
    if wanted:
        loop, given = asyncio.get_running_loop(), structure if has_form else None
        grammar = await loop.run_in_executor(_SCHEMAS, _grammar, card, tooling, given, paths, end)
    if grammar is not None:
        structure = grammar.structure
        warnings += grammar.notes
    elif required:
        raise refused("tool_choice", "this model's calls cannot be enforced. Send auto.")
    elif has_form:
        if tools:
            warnings.append("tools: none is called, as this form of the text excludes calls")
        return Reading(
            make_parser=PlainParser, params=params, structure=structure, warnings=tuple(warnings)
        )
    elif tools and wanted:
        warnings.append(
            "strict, parallel_tool_calls, allowed_tools: this model's calls have no grammar"
        )
    if shows_special(card, tools):
        params = replace(params, skip_special_tokens=False)
    return Reading(
        make_parser=partial(parser_for, card, tools, prompt=end, has_form=has_form),
        params=params,
        structure=structure,
        warnings=tuple(warnings),
    )


def _grammar(
    card: EngineCard,
    tooling: Tooling,
    structure: StructureOptions | None,
    paths: Mapping[str, str],
    end: PromptEnd,
) -> AnswerGrammar | None:
    """Return the grammar of calls, and of the form of a `structure`; None if none applies."""
    form = None if structure is None else form_of(structure)
    # A grammar of the client's own cannot be embedded in another grammar.
    if structure is not None and form is None:
        return None
    return grammar_for(
        card,
        [offered_tool(tool, paths.get(_name(tool), "tools")) for tool in tooling.callable],
        choice="required" if tooling.choice == "required" else "auto",
        parallel=tooling.parallel,
        prompt=end,
        form=form,
    )


def _name(tool: Tool) -> str:
    return str(_function(tool).get("name"))


def _function(tool: Tool) -> Mapping[str, Any]:
    inner: object = tool.get("function")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else tool


# Messages for chat templates, built from the items and blocks of other APIs.
#
# Templates expect one system message, at the beginning, and turns that alternate. Instructions are
# therefore joined, and all items of an assistant's turn (thoughts, text, calls) become one message.
# Agents send several user messages in a row, and instructions in the middle of a conversation,
# which templates reject: these become one user message.
Message: TypeAlias = dict[str, Any]
_SYSTEM = ("system", "developer")


class Turns:
    """The messages so far, and notes about parts of the request that were changed or left out."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.notes: list[str] = []

    def system(self, text: str) -> None:
        """Add instructions: to the system message at the beginning, later to a user message."""
        if text:
            begins = not self.messages or self.messages[-1]["role"] == "system"
            self._join("system" if begins else "user", text)
            if not begins:
                self.notes.append("instructions within the conversation became user messages")

    def skip(self, where: str, kind: object) -> None:
        """Leave out an item that cannot be read, such as a search that OpenAI's server ran."""
        self.notes.append(f"{where}: an item of type {str(kind)[:40]!r} was left out")

    def text(self, content: object, where: str) -> str:
        """Return the text of a tool's output or of an earlier answer, which may have any form: for
        a list, the texts of its parts; for other values, their JSON. Parts without text are left
        out."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            return encode(content).decode()
        found: list[str] = []
        for part in cast("list[object]", content):
            entry = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {"text": part})
            text = entry.get("text", entry.get("refusal"))
            if not isinstance(text, str) and "type" not in entry:
                text = encode(entry).decode()
            elif not isinstance(text, str):
                self.notes.append(
                    f"{where}: a part of type {str(entry.get('type'))[:40]!r} was left out"
                )
                text = f"[{str(entry.get('type'))[:40]} left out]"
            found.append(text)
        return "".join(found)

    def say(self, role: str, text: str) -> None:
        if role in _SYSTEM:
            self.system(text)
        elif role == "assistant":
            message = self._assistant()
            message["content"] = (message["content"] or "") + text
        elif role == "user":
            self._join(role, text)
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Add the assistant's thoughts, which come before its text and calls."""
        message = self._assistant(anew=True)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: object) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """Add a tool's output, with the name from its call."""
        calls = (call for message in self.messages for call in message.get("tool_calls", ()))
        name = next((one["function"]["name"] for one in calls if one["id"] == call_id), None)
        found: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
        self.messages.append(found if name is None else found | {"name": name})

    def done(self) -> list[Message]:
        """Return all messages; an empty conversation, which is a probe, has an empty one."""
        for message in self.messages:
            if message["content"] is None and not message.get("tool_calls"):
                message["content"] = ""
        if not self.messages:
            return [{"role": "user", "content": ""}]
        return self.messages

    def _join(self, role: str, text: str) -> None:
        """Append to the last message if it has this role, else add a message."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role:
            last["content"] += "\n\n" + text
        else:
            self.messages.append({"role": role, "content": text})

    def _assistant(self, *, anew: bool = False) -> Message:
        """Return the last, assistant's message, or a new one; with `anew`, never one with text."""
        last = self.messages[-1] if self.messages else None
        said = last is not None and (last.get("content") or last.get("tool_calls"))
        if last is None or last["role"] != "assistant" or (anew and said):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def text_of(content: object, where: str) -> str:
    """Return text, or the joined text of a list of parts. Raises ApiError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "text or a list of parts")
    return "".join(_part(part, where) for part in cast("list[object]", content))


def _part(part: object, where: str) -> str:
    entry = mapping(part, where)
    text = entry.get("text", entry.get("refusal"))
    if not isinstance(text, str):
        raise ApiError(
            400,
            f"{where}: a part of type {str(entry.get('type'))[:40]!r}; only text can be read.",
            param=where,
            code="unsupported_parameter",
        )
    return text


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """Return `value` as a mapping. Raises ApiError if it is not an object."""
    if not isinstance(value, Mapping):
        raise wrong(where, "an object")
    return cast("Mapping[str, Any]", value)


def named(entry: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string field `name` of an object. Raises ApiError if it is missing."""
    value = entry.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "text")
    return value


def wrong(where: str, wanted: str) -> ApiError:
    return ApiError(400, f"{where}: expected {wanted}.", param=where, code="invalid_type")
