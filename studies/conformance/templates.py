"""Chat templates of llama.cpp's tree, rendered against transformers' own rendering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.counts import Suite

from outrider.api.chat_messages import left_out, must_be_in_text
from outrider.api.chat_template import ChatTemplate, switched
from outrider.core.errors import CheckpointError

_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Messages = Sequence[Mapping[str, Any]]


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
_USER, _SYSTEM = _said("user", "Hello <b>you</b> & 'you'"), _said("system", "Be brief.\n")
_REPLY = _said("assistant", " Hi there. ")
_CALLED = _said("assistant", "", tool_calls=[_CALL])
_RESULT = _said("tool", '{"degrees": 7}', tool_call_id="call00001", name="weather")
_THOUGHT = _said("assistant", "Four.", reasoning_content="Two and two.")
# Each with its tools and the variables that are set.
_CASES: Mapping[str, tuple[Messages, Sequence[Mapping[str, Any]], Mapping[str, Any]]] = {
    "a user": ([_USER], (), {}),
    "a system message": ([_SYSTEM, _USER], (), {}),
    "turns": ([_SYSTEM, _USER, _REPLY, _said("user", "More?")], (), {}),
    "many turns": ([_USER, _REPLY] * 3 + [_USER], (), {}),
    "empty texts": ([_said("user", ""), _said("assistant", ""), _USER], (), {}),
    "blanks": ([_said("user", "\n a \t\n"), _said("assistant", "\n\nb  "), _USER], (), {}),
    "other scripts": ([_said("user", "你好 🦙 Größe \u2028 e\u0301")], (), {}),
    "tools": ([_SYSTEM, _USER], _TOOLS, {}),
    "a call": ([_USER, _CALLED, _RESULT], _TOOLS, {}),
    "a call and more": ([_USER, _CALLED, _RESULT, _REPLY, _USER], _TOOLS, {}),
    "two calls": (
        [_USER, _said("assistant", "", tool_calls=[_CALL, _CALL]), _RESULT, _RESULT],
        _TOOLS,
        {},
    ),
    "thoughts": ([_USER, _THOUGHT, _USER], (), {}),
    "no thinking": ([_USER], (), {"enable_thinking": False}),
    "thinking": ([_SYSTEM, _USER], (), {"enable_thinking": True}),
    "two users": ([_USER, _USER], (), {}),
    "a system message later": ([_USER, _REPLY, _SYSTEM, _USER], (), {}),
}


def suites(folder: Path) -> Iterator[Suite]:
    """`folder` is `models/templates` of llama.cpp."""
    from transformers.utils.chat_template_utils import render_jinja_template

    suite = Suite(f"chat templates, {len(_CASES)} conversations each")
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text("utf-8")
        template = ChatTemplate(source, _NAMES)
        for name, (messages, tools, variables) in _CASES.items():
            try:
                rendered: Any = render_jinja_template(
                    [list(map(dict, messages))],
                    tools=list(map(dict, tools)) or None,
                    chat_template=source,
                    add_generation_prompt=True,
                    **_NAMES,
                    **switched(source, variables)[0],
                )
                theirs: str | None = rendered[0][0]
            except Exception:  # noqa: BLE001 - a template may raise anything
                theirs = None
            try:
                rendered_here = template.render(messages, tools=tools, variables=variables)
                ours: str | None = rendered_here.text
            except CheckpointError:
                ours = None
            reason = None
            if must_be_in_text(source, messages, tools):
                reason = "tools: written in text, for the template leaves them out"
            elif theirs is None:
                reason = "refused by the template as it is, adapted here"
            elif left_out(theirs, messages):
                reason = "texts that the template leaves out as it is, adapted here"
            suite.count(
                path.stem, ours == theirs, f"{name}: {ours!r:.200} not {theirs!r:.200}", reason
            )
        template.close()
    yield suite
