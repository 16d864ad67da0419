"""Forms of a conversation for chat templates that refuse it, or leave a part out of the prompt.

A template may accept no system message, or one at the beginning only, no `developer`, only
alternating turns, one call per turn, ids of nine characters, or tools with descriptions. A
conversation that a client sends again with every request must not fail there. `forms` yields the
conversation as it is and then in other forms, the nearest first; `left_out` lists the messages that
a prompt lacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from typing import Any, TypeAlias

from outrider.api.chat_messages import in_text
from outrider.core.fields import shown

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
