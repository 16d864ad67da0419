"""Messages and tools of a conversation: checked, and in the form that chat templates expect.

Callers write them as OpenAI's API does: content is text or a list of text parts, arguments of a
call are JSON text. Published templates want one text and objects, and have several names for the
model's thoughts. Clients send an assistant's turns and results of tools again with every request,
so odd ones are read as far as possible, with a note; a mistake elsewhere raises ConfigError.

A template may accept no system message, or one at the beginning only, no `developer`, only
alternating turns, one call per turn, ids of nine characters, or tools with descriptions. `forms`
yields a conversation as it is and then in other forms, the nearest first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from typing import Any, TypeAlias, TypedDict, cast

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
    # The model's thoughts, from the first name with a value.
    name = next((name for name in REASONING if message.get(name) is not None), None)
    thought = (_text(message[name], f"{where}.{name}") if name else "") or thought
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


# Tools for models whose chat template does not support them: described and called in text.
#
# Instructions list the tools as JSON and request calls as JSON; earlier calls and their results are
# in the conversation in the same form. They use roles that every template has, in alternating
# turns. plugins/tools reads the answers as its format `generic`.
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


Message: TypeAlias = dict[str, Any]
_ALIASES = {"developer": "system", "function": "tool", "model": "assistant", "human": "user"}
_ROLES = ("system", "user", "assistant", "tool")
_CALLS = "tool_calls"
_ID_CHARS = 9
_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its name in notes."""

    name: str
    message: Message

    @property
    def role(self) -> str:
        return self.message["role"]

    def of_role(self, role: str) -> Turn:
        return replace(self, message={**self.message, "role": role})

    def joined(self, other: Message) -> Turn:
        """The message with the text, thoughts and calls of `other` after its own."""
        found = dict(self.message)
        for key in ("content", "reasoning_content"):
            texts = [one[key] for one in (found, other) if one.get(key)]
            if texts or key in found:
                found[key] = "\n\n".join(texts)
        calls = [*found.get(_CALLS, ()), *other.get(_CALLS, ())]
        return replace(self, message=found | ({_CALLS: calls} if calls else {}))


@dataclass(frozen=True, slots=True)
class Form:
    """A conversation in one form. `notes` list the changes from the sent one."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    notes: tuple[str, ...] = ()

    @property
    def messages(self) -> list[Message]:
        return [turn.message for turn in self.turns]

    def with_turns(self, turns: Sequence[Turn], *notes: str) -> Form:
        return replace(self, turns=tuple(turns), notes=(*self.notes, *notes))


def forms(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], developer: str
) -> Iterator[Form]:
    """Forms of a conversation, the nearest first. `developer` is the role of such messages."""
    turns = [Turn(_name(i, one), dict(one)) for i, one in enumerate(messages)]
    renamed = [turn.of_role(developer) if turn.role == "developer" else turn for turn in turns]
    given = Form(tuple(renamed), tuple(tools) or None)
    tried: list[Form] = []
    for steps in _STEPS:
        found = given
        for step in steps:
            found = step(found)
        if not any(found.turns == one.turns and found.tools == one.tools for one in tried):
            tried.append(found)
            yield found


def left_out(prompt: str, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note for each message whose text, or one of whose calls, is not in the prompt. Blanks are
    ignored, JSON may have escaped the text, and thoughts within it may be left out."""
    texts = [str(one["content"]).rpartition("</think>")[2].strip() for one in messages]
    missing = {i for i, text in enumerate(texts) if text and not _any_in(prompt, text)}
    if len(missing) < len(texts):
        # The text of a message may be part of another one, or equal to it.
        missing |= _sharing(prompt, {i: t for i, t in enumerate(texts) if t and i not in missing})
    for i, message in enumerate(messages):
        calls = message.get(_CALLS, ())
        # If a template writes ids instead, the name is part of the id.
        if not all(
            one["function"]["name"] in prompt or one.get("id", prompt) in prompt for one in calls
        ):
            missing.add(i)
    return [
        f"{_name(i, messages[i])}: the chat template leaves it out of the prompt: {shown(texts[i])}"
        for i in sorted(missing)
    ]


def _name(index: int, message: Mapping[str, Any]) -> str:
    return f"messages[{index}] ({message['role'][:_MOST_SHOWN]})"


def _any_in(prompt: str, text: str) -> bool:
    if any(one in prompt for one in _spellings(text)):
        return True
    return "".join(text.split()) in "".join(prompt.split())


def _spellings(text: str) -> Iterator[str]:
    yield text
    for ascii_only in (False, True):
        yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def _sharing(prompt: str, texts: Mapping[int, str]) -> set[int]:
    """Messages without a part of the prompt of their own. Longer ones are searched first."""
    left = bytearray(prompt.encode("utf-8", "surrogatepass"))
    missing: set[int] = set()
    for i in sorted(texts, key=lambda i: -len(texts[i])):
        for text in _spellings(texts[i]):
            data = text.encode("utf-8", "surrogatepass")
            at = left.find(data)
            if at >= 0:
                left[at : at + len(data)] = bytes(len(data))
                break
        else:
            # Blanks within it were changed: it is there, at an unknown position.
            if any(text in prompt for text in _spellings(texts[i])):
                missing.add(i)
    return missing


def _plain(form: Form) -> Form:
    """Give all messages roles that every template has, tools all fields, ids nine characters."""
    found: list[Turn] = []
    notes: list[str] = []
    for turn in form.turns:
        role = turn.role.strip().lower()
        role = _ALIASES.get(role, role)
        role = role if role in _ROLES else "user"
        if role != turn.role and turn.role != "developer":
            notes.append(f"{turn.name}: the chat template lacks this role; {role} was given")
        found.append(Turn(turn.name, _short_ids({**turn.message, "role": role})))
    whole = replace(form, tools=tuple(map(_whole, form.tools or ())))
    return whole.with_turns(found, *notes)


def _short_ids(message: Message) -> Message:
    if message.get("tool_call_id"):
        message["tool_call_id"] = _short(message["tool_call_id"])
    if _CALLS in message:
        calls = message[_CALLS]
        message[_CALLS] = [{**call, "id": _short(call.get("id") or "")} for call in calls]
    return message


def _short(call_id: object) -> str:
    text = str(call_id)
    if len(text) == _ID_CHARS and text.isalnum():
        return text
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_CHARS]


def _whole(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters: dict[str, Any] = function.get("parameters") or {}
    given: dict[str, Any] = parameters.get("properties") or {}
    properties: dict[str, Any] = {
        key: {"description": "", **value} if isinstance(value, dict) else value
        for key, value in given.items()
    }
    parameters = {"type": "object", **parameters, "properties": properties}
    named = {"name": function["name"], "description": function.get("description") or ""}
    return {**tool, "function": {**named, **function, **named, "parameters": parameters}}


def _late(form: Form) -> Form:
    """Keep one system message at the beginning; later instructions become the user's."""
    system = list(takewhile(lambda turn: turn.role == "system", form.turns))
    others = form.turns[len(system) :]
    first, notes = system[:1], list[str]()
    for turn in system[1:]:
        first = [first[0].joined(turn.message)]
        notes.append(f"{turn.name}: joined with the system message before it")
    late = [turn.name for turn in others if turn.role == "system"]
    notes += [f"{name}: the chat template takes none here; it was given as user" for name in late]
    plain = [turn.of_role("user") if turn.role == "system" else turn for turn in others]
    return form.with_turns([*first, *plain], *notes)


def _no_system(form: Form) -> Form:
    """Put the system message in front of the user's first message."""
    form = _late(form)
    if not (form.turns and form.turns[0].role == "system"):
        return form
    system, *others = form.turns
    note = f"{system.name}: the chat template takes none; it begins the user's first message"
    first = system.of_role("user")
    if others and others[0].role == "user":
        first, others = replace(first.joined(others[0].message), name=others[0].name), others[1:]
    return form.with_turns([first, *others], note)


def _alternating(form: Form) -> Form:
    """Begin with the user, join messages of one role, and drop the assistant's empty turns."""
    found: list[Turn] = []
    notes: list[str] = []
    for turn in form.turns:
        last = found[-1] if found else None
        # The last one may be continued.
        is_empty = not turn.message["content"] and _CALLS not in turn.message
        if turn.role == "assistant" and is_empty and turn is not form.turns[-1]:
            notes.append(f"{turn.name}: an empty turn was left out")
            continue
        if turn.role in ("user", "assistant") and last is not None and last.role == turn.role:
            found[-1] = last.joined(turn.message)
            if turn.name:
                notes.append(f"{turn.name}: joined with the message before it, of the same role")
        else:
            found.append(turn)
    at = 1 if found and found[0].role == "system" else 0
    if len(found) == at or found[at].role != "user":
        found.insert(at, Turn("", {"role": "user", "content": ""}))
        notes.append("an empty message of the user's was put first: the chat template needs one")
    return form.with_turns(found, *notes)


def _single_calls(form: Form) -> Form:
    """Split a turn into its text and each of its calls, a call followed by its result."""
    found: list[Turn] = []
    notes: list[str] = []
    waiting: dict[object, Turn] = {}
    for turn in form.turns:
        calls = turn.message.get(_CALLS, ())
        if turn.role == "tool":
            call = waiting.pop(turn.message.get("tool_call_id"), None)
            found += [turn] if call is None else [call, turn]
            continue
        found += waiting.values()
        waiting = {}
        if len(calls) + bool(turn.message["content"]) < 2 or not calls:
            found.append(turn)
            continue
        notes.append(f"{turn.name}: its text and each of its calls are turns of their own")
        said = {key: value for key, value in turn.message.items() if key != _CALLS}
        if said["content"]:
            found.append(replace(turn, message=said))
            said = {"role": "assistant", "content": ""}
        for i, call in enumerate(calls):
            call_id = call.get("id")
            alone = Turn(turn.name, {**said, _CALLS: [call]})
            waiting[i if call_id in (None, *waiting) else call_id] = alone
            said = {"role": "assistant", "content": ""}
    return form.with_turns([*found, *waiting.values()], *notes)


def _answered(form: Form) -> Form:
    """Insert an empty answer between the result of a tool and the user's next message."""
    found: list[Turn] = []
    for turn in form.turns:
        if found and found[-1].role == "tool" and turn.role == "user":
            found.append(Turn("", {"role": "assistant", "content": ""}))
        found.append(turn)
    if len(found) == len(form.turns):
        return form
    return form.with_turns(
        found, "empty answers stand between results of tools and the user's messages"
    )


def _in_text(form: Form) -> Form:
    """Write earlier calls and results as text of the assistant and the user."""
    form = _late(form)
    if not any(_CALLS in turn.message or turn.role == "tool" for turn in form.turns):
        return form
    turns = [Turn("", message) for message in in_text(form.messages, ())]
    return form.with_turns(turns, "calls of tools and their results were written as text")


_STEPS: tuple[tuple[Callable[[Form], Form], ...], ...] = (
    (),
    (_plain,),
    (_plain, _late),
    (_plain, _alternating),
    (_plain, _late, _alternating),
    (_plain, _single_calls),
    (_plain, _late, _alternating, _single_calls),
    (_plain, _late, _alternating, _answered),
    (_plain, _late, _alternating, _answered, _single_calls),
    (_plain, _no_system),
    (_plain, _no_system, _alternating),
    (_plain, _no_system, _alternating, _single_calls),
    (_plain, _in_text, _alternating),
    (_plain, _no_system, _in_text, _alternating),
)
