"""Messages and tools of a conversation: checked, and in the form that chat templates expect.

Callers write them as OpenAI's API does: content is text or a list of text parts, arguments of a
call are JSON text. Published templates want one text and objects, and have several names for the
model's thoughts. Clients send an assistant's turns and results of tools again with every request,
so odd ones are read as far as possible, with a note; a mistake elsewhere raises ConfigError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict, cast

from outrider.api.stream import TokenDecoder
from outrider.core.errors import ConfigError
from outrider.core.fields import MESSAGES, shown

REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "refusal")
_THOUGHT_PARTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
# Roles of turns that a client did not write itself, and cannot correct.
_GIVEN_ROLES = ("assistant", "tool", "function")
# Names that a template always gets; a variable of such a name would change the conversation.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatOptions(TypedDict, total=False):
    """Options of a chat template. With `continues` the prompt ends within the last message, which
    must be the assistant's; `variables` are names that the template knows, such as
    `enable_thinking` and `reasoning_effort`."""

    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    continues: bool


def checked_messages(
    messages: Sequence[Mapping[str, Any]], *, continues: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages in the templates' form, and notes on those read in another form than written."""
    notes: list[str] = []
    found = [_message(one, f"messages[{i}]", notes) for i, one in enumerate(messages)]
    if continues and not (found and found[-1]["role"] == "assistant"):
        raise ConfigError(
            "only a last message of the assistant's can be continued.",
            hint="end the conversation with it, or request a new turn",
        )
    return found, notes


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each `{"type": "function", "function": {"name", "description", "parameters"}}`;
    the short form that is the function alone is wrapped."""
    if len(tools) > MESSAGES.most:
        raise ConfigError(
            f"{len(tools)} tools; a conversation may offer {MESSAGES.most}.", hint="offer fewer"
        )
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables; none may replace another name of the template."""
    taken = sorted(name for name in variables if name in _RESERVED or name.endswith("_token"))
    if taken:
        raise ConfigError(
            f"the chat template's {taken[0]} cannot be set by a variable.", hint="leave it out"
        )
    return dict(variables)


def content_text(content: object, where: str) -> str:
    """A text, or the text of a list of text parts; "" for None."""
    return _content({"content": content}, where, [])[0]


def _message(message: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    role = _text(message.get("role"), f"{where}.role")
    content, thought = _content(message, where, notes)
    found = {**message, "role": role, "content": content}
    calls = _calls(message, where)
    for name in ("tool_calls", "function_call", "refusal", *REASONING):
        found.pop(name, None)
    if calls:
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]", notes) for i, call in enumerate(calls)
        ]
    thought = _reasoning(message, where) or thought
    if thought:
        found["reasoning_content"] = thought
    if not (calls or thought or content) and message.get("content") is None:
        if role not in _GIVEN_ROLES:
            raise ConfigError(f"{where}: a message has content, or calls of tools.")
        notes.append(f"{where} ({role[:40]}): a message without content was read as an empty one")
    if message.get("tool_call_id") is not None:
        _text(message["tool_call_id"], f"{where}.tool_call_id")
    return found


def _content(message: Mapping[str, Any], where: str, notes: list[str]) -> tuple[str, str]:
    """The text of a message, and the thoughts among its parts. Parts of other types are left out of
    turns that are not the client's own words."""
    content: Any = message.get("content")
    if content is None:
        return _text(message.get("refusal") or "", f"{where}.refusal"), ""
    if not isinstance(content, list | tuple):
        if isinstance(content, dict) and message.get("role") in _GIVEN_ROLES:
            notes.append(f"{where}.content: an object was read as its JSON")
            return json.dumps(content, ensure_ascii=False), ""
        return _text(cast("object", content), f"{where}.content"), ""
    found: dict[bool, list[str]] = {False: [], True: []}
    for part in cast("Sequence[object]", content):
        entry = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {"type": None})
        kind = entry.get("type", "text")
        text = _part(entry)
        if text is not None:
            found[kind in _THOUGHT_PARTS].append(text)
        elif message.get("role") in _GIVEN_ROLES:
            found[False].append(f"[{str(kind)[:40]} left out]")
            notes.append(f"{where}.content: a part of type {shown(kind)} was left out")
        else:
            raise ConfigError(f"{where}.content: only text can be read.", hint="parts of type text")
    return "".join(found[False]), "".join(found[True])


def _part(part: Mapping[str, Any]) -> str | None:
    """The text of a part, or its thought; None for a part of another type."""
    kind = part.get("type", "text")
    if kind not in (*_TEXT_PARTS, *_THOUGHT_PARTS):
        return None
    for name in ("text", "refusal", "thinking", "reasoning", "data"):
        given = part.get(name)
        if isinstance(given, str):
            return "" if name == "data" else given
        if isinstance(given, list):
            return "".join(_part(_object(one, name)) or "" for one in cast("list[object]", given))
    return None


def _reasoning(message: Mapping[str, Any], where: str) -> str:
    """The model's thoughts, from the first name with a value."""
    for name in REASONING:
        if message.get(name) is not None:
            return _text(message[name], f"{where}.{name}")
    return ""


def _calls(message: Mapping[str, Any], where: str) -> Sequence[object]:
    """Calls of a message, including a single one in the old form, `function_call`."""
    calls: object = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [{"function": message["function_call"]}]
    if calls and not isinstance(calls, list | tuple):
        raise ConfigError(f"{where}.tool_calls: expected a list, got {shown(calls)}.")
    return cast("Sequence[object]", calls or ())


def _call(call: object, where: str, notes: list[str]) -> dict[str, Any]:
    entry = _object(call, where)
    if "function" not in entry and isinstance(entry.get("custom"), Mapping):
        custom = cast("Mapping[str, Any]", entry.pop("custom"))
        entry["function"] = {
            "name": custom.get("name"),
            "arguments": {"input": custom.get("input")},
        }
    function = _object(entry.get("function"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str):
        notes.append(f"{where}.function.name: {shown(name)} is no name; none was given")
        name = ""
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments", notes)
    return {**entry, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: object, where: str, notes: list[str]) -> dict[str, Any]:
    """Arguments as an object, which templates write in their own form. Any other value, such as the
    text of a call that was cut off, becomes the only entry of an object."""
    value: Any = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            value = given
    if value is None:
        value = {}
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    notes.append(f"{where}: {shown(given)} is no JSON object; it was put into one")
    return {"arguments": value}


def _tool(tool: object, where: str) -> dict[str, Any]:
    entry = _object(tool, where)
    if "function" not in entry and "name" in entry:
        entry = {"type": "function", "function": {k: v for k, v in entry.items() if k != "type"}}
    if entry.get("type", "function") != "function":
        raise ConfigError(
            f"{where}: a tool of type {shown(entry['type'])}; only functions can be called.",
            hint='{"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    function = _object(entry.get("function"), f"{where}.function")
    if not _text(function.get("name"), f"{where}.function.name"):
        raise ConfigError(f"{where}.function.name: a tool has a name.")
    if function.get("parameters") is not None:
        _object(function["parameters"], f"{where}.function.parameters")
    return {**entry, "type": "function", "function": function}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: expected text, got {shown(value)}.")
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, got {shown(value)}.")
    return dict(cast("Mapping[str, Any]", value))


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thoughts of a family, between `begin` and `end`, which open an answer or may come `anywhere`.
    `closing` is the text with which such a model continues to its answer."""

    begin: str
    end: str
    closing: str
    anywhere: bool = False


THINK = Thinking("<think>", "</think>", "\n</think>\n\n")
SEED = Thinking("<seed:think>", "</seed:think>", "</seed:think>")
MISTRAL = Thinking("[THINK]", "[/THINK]", "[/THINK]")
GEMMA = Thinking("<|channel>thought", "<channel|>", "<channel|>", anywhere=True)
_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
HARMONY = Thinking("<|channel|>analysis<|message|>", "<|end|>", _FINAL, anywhere=True)
# The parts of a chat template by which each is recognised.
THINKING_SIGNS = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (SEED, (SEED.end,)),
    (GEMMA, (GEMMA.end,)),
    (MISTRAL, (MISTRAL.end,)),
    (THINK, (THINK.end,)),
)

# Tokens of a prompt before its last turn: the tag of thoughts may be special tokens itself.
_TAG_TOKENS = 32
# Most tokens of a turn that may continue.
_TURN_TOKENS = 1 << 15
# Text between the token that begins a turn and the text of the turn.
_ROLE = re.compile(r"\s*\w{0,20}\s*")

# Variables of templates that switch thoughts, and a pattern for each in a source.
_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(
        r"\bif (?:not )?thinking\b(?![.\[(])|(?<![\w.'\"])thinking *\| *default"
    ),
}


class PromptEnd(NamedTuple):
    """The end of a prompt with its special tokens. `turn` is the index at which its last turn
    begins, after the last special token, or the end of the text if there is none."""

    text: str
    turn: int

    @classmethod
    def of(cls, decoder: TokenDecoder, prompt: Sequence[int]) -> PromptEnd:
        """The end of `prompt`, with its last turn if this is no longer than a turn may be."""
        special, least = decoder.special_ids, max(0, len(prompt) - _TURN_TOKENS)
        turn = next((i for i in range(len(prompt), least, -1) if prompt[i - 1] in special), 0)
        decode = partial(decoder.decode, skip_special=False)
        if not turn:
            text = decode(prompt[-_TAG_TOKENS:])
            return cls(text, len(text))
        start = max(0, turn - _TAG_TOKENS)
        return cls(decode(prompt[start:]), len(decode(prompt[start:turn])))

    def is_open(self, begin: str, ends: Iterable[str], *, anywhere: bool) -> bool:
        """True if the prompt ends between `begin` and one of `ends`: `begin` is its last word, or
        begins its last turn, or is `anywhere` there."""
        text, turn = self
        if text.rstrip().endswith(begin):
            return True
        at = text.rfind(begin) if anywhere else text.find(begin, max(0, turn - len(begin)))
        if at < 0 or at + len(begin) < turn or not (anywhere or _ROLE.fullmatch(text[turn:at])):
            return False
        while text.startswith(begin, at):
            found = [(text.find(end, at), len(end)) for end in ends]
            closed = [start + size for start, size in found if start >= 0]
            if not closed:
                return True
            # A template may close empty thoughts before the message's own ones.
            at = min(closed)
            at += len(text[at:]) - len(text[at:].lstrip())
        return False


def switched(source: str, variables: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Variables as the template `source` names them, and notes on unsupported ones: its own switch
    replaces `enable_thinking`, which `reasoning_effort` "none" sets to false."""
    found = dict(variables)
    own = next((name for name, use in _SWITCHES.items() if use.search(source)), None)
    if own == "thinking" and "enable_thinking" in found:
        found = {own: found.pop("enable_thinking"), **found}
    if found.get("reasoning_effort") != "none":
        return found, ()
    if own is not None:
        found.setdefault(own, False)
    if "reasoning_effort" in source and re.search("""['"]none['"]""", source):
        return found, ()
    del found["reasoning_effort"]
    why = "the chat template cannot switch thoughts off; a thinking budget of 0 ends them at once"
    return found, () if own is not None else (f"reasoning_effort 'none': {why}",)


# Tools for models whose chat template does not support them: described and called in text.
#
# Instructions list the tools as JSON and request calls as JSON; earlier calls and their results are
# in the conversation in the same form. They use roles that every template has, in alternating
# turns. server/parsing reads the answers as its format `generic`.
_INSTRUCTIONS = """\
You can call these tools:

{tools}

To call one, answer with one line of JSON and nothing behind it:
{{"name": "the tool's name", "arguments": {{"its parameter": "a value"}}}}
To call several, write a line for each. What they give is in the next message. Where no tool is \
needed, answer in words."""


def has_place_for_tools(template: str) -> bool:
    return "tools" in template


def must_be_in_text(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> bool:
    """True if `template` would leave a part of tools out. If no tools are offered now, a template
    that writes earlier calls does so in its own words."""
    if has_place_for_tools(template):
        return False
    has_calls = any("tool_calls" in one or one["role"] == "tool" for one in messages)
    return bool(tools) or (has_calls and "tool" not in template)


def in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and their results as text."""
    found = list[dict[str, Any]]()
    names: dict[object, str] = {}
    has_result = False
    for message in messages:
        plain = _calls_as_lines(message, names)
        is_result = plain["role"] == "tool"
        if is_result:
            plain = _result(plain, names)
        # Results, and the user's message after them, are one turn.
        if found and plain["role"] == "user" == found[-1]["role"] and (is_result or has_result):
            found[-1]["content"] += f"\n\n{plain['content']}"
        else:
            found.append(plain)
        has_result = is_result
    if tools:
        listed = "\n".join(_json(tool["function"]) for tool in tools)
        _instruct(found, _INSTRUCTIONS.format(tools=listed))
    return found


def _calls_as_lines(message: Mapping[str, Any], names: dict[object, str]) -> dict[str, Any]:
    """A message with its calls as lines, in the requested form; `names` learns names by call id."""
    plain = dict(message)
    lines = [plain["content"]]
    for call in plain.pop("tool_calls", ()):
        function = call["function"]
        names[call.get("id")] = function["name"]
        lines.append(_json({"name": function["name"], "arguments": function["arguments"]}))
    plain["content"] = "\n".join(filter(None, lines))
    return plain


def _result(message: Mapping[str, Any], names: Mapping[object, str]) -> dict[str, Any]:
    name = message.get("name") or names.get(message.get("tool_call_id"), "the tool")
    return {"role": "user", "content": f"{name} gave:\n{message['content']}"}


def _instruct(messages: list[dict[str, Any]], text: str) -> None:
    """Put instructions in front of the first message if it gives some, else of the user's first:
    some templates refuse a system message, or have one of their own."""
    for i, message in enumerate(messages):
        if message["role"] in ("system", "developer", "user"):
            messages[i]["content"] = f"{text}\n\n{message['content']}"
            return
    messages.insert(0, {"role": "user", "content": text})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
