"""Grammars of calls: what a model may write where a request demands calls, or strict arguments.

A grammar is made of a format's own delimiters and of each tool's JSON schema, in llguidance's
dialect of Lark. Formats whose delimiters are special tokens have none: a grammar speaks of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from outrider.api.structure import strict_schema
from outrider.server.parsing.calls import listed, mapping
from outrider.server.parsing.families import GENERIC, GLM, HERMES, LLAMA, QWEN_XML, THINK
from outrider.server.parsing.fields import OutputFormat

Choice: TypeAlias = Literal["auto", "required"]
Tool: TypeAlias = Mapping[str, Any]

_ANY = "ANY: /(.|\\n)*/"
# \s would take blanks of Unicode, which JSON does not.
_ANY_BLANKS = r"[\x20\t\r\n]*"
_JSON_BLANKS = r"[\x20\t\r\n]{0,9}"
# Without a bound a weak model writes nothing but blanks.
_BLANKS = {"whitespace_pattern": r"( |\n{1,2}[\x20\t]{0,20})?"}


def tool_grammar(
    given: OutputFormat,
    tools: Sequence[Tool],
    *,
    choice: Choice,
    parallel: bool = True,
    begun: bool = False,
) -> str | None:
    """The grammar of answers that call `tools`: at least once where calls are required, else text
    in which each call is one. None for a format that grammars do not speak of. `begun` says that
    the prompt has begun to think."""
    write = _WRITERS.get(given.name)
    if write is None or not tools:
        return None
    written = write(tools)
    lines = ["%llguidance {}", _ANY, *written.rules, f"call: {written.call}"]
    more = f" ({_text(written.between)} call)*" if parallel else ""
    if choice == "auto":
        if not written.called:
            return None
        lines.append(f"called: {written.called}")
        if written.is_last:
            return "\n".join([*lines, f"start: ANY | called{more}"])
        return "\n".join([*lines, "start: called* ANY" if parallel else "start: called | ANY"])
    before = ""
    if THINK in given.fields:
        before = "thought " if begun else f"({_text('<think>')} thought)? "
        lines += [f"thought: thinks {_text('')} /\\n{{0,2}}/", 'thinks[lazy]: ANY "</think>"']
    return "\n".join([*lines, f"start: {before}call{more}"])


class _Written(NamedTuple):
    """`call` is a call where one is due, `called` a text that goes on with one, empty where that is
    no grammar. `is_last` says that nothing but calls may come behind a call."""

    rules: list[str]
    call: str
    called: str
    between: str
    is_last: bool = False


def _delimited(begin: str, rules: list[str], end: str, between: str) -> _Written:
    """Of formats whose calls stand between two texts; `rules` has `tool`, what stands there."""
    if not begin:
        return _Written(rules, f"tool {_text(end)}", "", between)
    rules = [*rules, f"begun[lazy]: ANY {_text(begin)}"]
    inner = f"tool {_text(end)}"
    return _Written(rules, f"{_text(begin)} {inner}", f"begun {inner}", between)


def _hermes(tools: Sequence[Tool]) -> _Written:
    rules = [_json_rule(tools, "arguments", "\n")]
    return _delimited("<tool_call>", rules, "</tool_call>", "\n")


def _llama(tools: Sequence[Tool]) -> _Written:
    return _delimited("", [_json_rule(tools, "parameters", "")], "", "; ")


def _generic(tools: Sequence[Tool]) -> _Written:
    """An object is a call from the name of a tool on: text may have others, as {"name": "Bob"}."""
    rules = [
        rf'MIDDLE: /{_JSON_BLANKS},{_JSON_BLANKS}"arguments"{_JSON_BLANKS}:{_JSON_BLANKS}/',
        rf"END: /{_JSON_BLANKS}\}}/",
    ]
    for i, (name, schema) in enumerate(map(_name_and_schema, tools)):
        written = json.dumps(name, ensure_ascii=False)
        rules.append(f"rest_{i}: MIDDLE {_json(schema)} END")
        begin = '{"name": ' + written
        rules.append(f"call_{i}: {_text(begin)}")
        begun = rf'/\{{{_ANY_BLANKS}"name"{_ANY_BLANKS}:{_ANY_BLANKS}/'
        rules.append(f"begun_{i}[lazy]: ANY {begun} {_text(written)}")
    each = range(len(tools))
    call = " | ".join(f"call_{i} rest_{i}" for i in each)
    called = " | ".join(f"begun_{i} rest_{i}" for i in each)
    return _Written(rules, call, called, "\n", is_last=True)


def _json_rule(tools: Sequence[Tool], arguments: str, edge: str) -> str:
    """A rule of an object with the name of a tool and its arguments."""
    shapes = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for name, schema in map(_name_and_schema, tools)
    ]
    return f"tool: {_text(edge)} {_json({'anyOf': shapes})} {_text(edge)}"


def _qwen_xml(tools: Sequence[Tool]) -> _Written:
    rules = _by_pairs(
        tools,
        begin="\n<function={}>\n",
        key="<parameter={}>\n",
        value_end="\n</parameter>\n",
        end="</function>\n",
    )
    return _delimited("<tool_call>", rules, "</tool_call>", "\n")


def _glm(tools: Sequence[Tool]) -> _Written:
    rules = _by_pairs(
        tools,
        begin="{}\n",
        key="<arg_key>{}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        end="",
    )
    return _delimited("<tool_call>", rules, "</tool_call>", "\n")


def _by_pairs(
    tools: Sequence[Tool], *, begin: str, key: str, value_end: str, end: str
) -> list[str]:
    """Rules of formats that write each argument by itself: text as it is, other values as JSON."""
    rules = ["tool: " + " | ".join(f"tool_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(map(_name_and_schema, tools)):
        properties = mapping(schema.get("properties"))
        required = [str(one) for one in listed(schema.get("required") or [])]
        parts = [_text(begin.format(name))]
        order = sorted(properties, key=lambda one: one not in required)
        for j, one in enumerate(order):
            parts.append(f"arg_{i}_{j}" + ("" if one in required else "?"))
            value = _value(properties[one], f"text_{i}_{j}", value_end, rules)
            rules.append(f"arg_{i}_{j}: {_text(key.format(one))} {value}")
        rules.append(f"tool_{i}: {' '.join(parts)} {_text(end)}")
    return rules


def _value(schema: Any, rule: str, end: str, rules: list[str]) -> str:
    entry = mapping(schema)
    if entry.get("type", "string") != "string" or "anyOf" in entry or "oneOf" in entry:
        return f"{_json(dict(entry))} {_text(end)}"
    if "enum" in entry:
        texts = " | ".join(_text(str(one)) for one in listed(entry["enum"]))
        return f"({texts}) {_text(end)}"
    rules.append(f"{rule}[lazy]: ANY {_text(end)}")
    return rule


def _name_and_schema(tool: Tool) -> tuple[str, dict[str, Any]]:
    """A schema without more keys than it names: what a tool does not know it cannot be given."""
    function = cast("Mapping[str, Any]", tool.get("function", tool))
    schema = dict(cast("Mapping[str, Any]", function.get("parameters") or {}))
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    schema.setdefault("additionalProperties", False)
    return str(function["name"]), schema


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**strict_schema(schema), 'x-guidance': _BLANKS})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


_WRITERS: Mapping[str, Callable[[Sequence[Tool]], _Written]] = {
    HERMES.name: _hermes,
    QWEN_XML.name: _qwen_xml,
    GLM.name: _glm,
    LLAMA.name: _llama,
    GENERIC.name: _generic,
}
