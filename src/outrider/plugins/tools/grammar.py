"""Grammars of answers: required calls, strict arguments, and text of a given form after thoughts or
instead of calls.

A grammar consists of a format's own delimiters and each tool's JSON schema, in llguidance's dialect
of Lark. Formats whose delimiters are special tokens have no grammar, because a grammar describes
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from outrider.api.structure import (
    WHITE_SPACE,
    StructureOptions,
    choices_rule,
    followed,
    moved,
    resolved,
)
from outrider.core.errors import ConfigError
from outrider.plugins.tools.fields import OutputFormat
from outrider.plugins.tools.formats import GENERIC, GLM, HERMES, LLAMA, QWEN_XML, THINK
from outrider.plugins.tools.json_text import listed, mapping

Choice: TypeAlias = Literal["auto", "required"]
Tool: TypeAlias = Mapping[str, Any]

_ANY = "ANY: /(.|\\n)*/"
# Not \s, which would include blanks of Unicode that JSON does not allow.
_ANY_BLANKS = r"[\x20\t\r\n]*"
_JSON_BLANKS = r"[\x20\t\r\n]{0,9}"
# Without a bound, a weak model may write blanks for ever.
_BLANKS = r"( |\n{1,2}[\x20\t]{0,20})?"


class OfferedTool(NamedTuple):
    """A tool whose `schema` can be enforced. Errors and notes about it begin with `called`."""

    name: str
    schema: Mapping[str, Any]
    strict: bool
    called: str
    notes: tuple[str, ...] = ()


def offered_tool(tool: Tool, path: str) -> OfferedTool:
    """Return a tool with the schema of the parameter `path`, closed so that the tool gets no
    unknown arguments. Raises ConfigError for a schema that cannot be enforced."""
    function = cast("Mapping[str, Any]", tool.get("function", tool))
    name, strict = str(function["name"]), function.get("strict") is True
    called = f"{path}: the tool {name[:64]!r}"
    given: object = function.get("parameters") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{called}: its parameters are no JSON schema.")
    found = followed(cast("Mapping[str, object]", given), strict=strict, called=called)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        **found.schema,
    }
    return OfferedTool(name, schema, strict, called, found.notes)


class Form(NamedTuple):
    """The required form of a text: the right side of a grammar rule, the schemas in it (`parts` of
    StructureOptions), and `notes` about parts of the schemas that the rule does not enforce."""

    rule: str
    parts: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()


def form_of(structure: StructureOptions) -> Form | None:
    """Return the form of a structure; None if it cannot be a rule of another grammar, as it is a
    whole grammar or a schema in text. Raises ConfigError for a schema that cannot be enforced."""
    schema, strict = structure.get("schema"), structure.get("strict", True)
    if isinstance(schema, Mapping):
        parts = structure.get("parts", {})
        called = next(iter(parts), "schema")
        found = followed(schema, strict=strict, called=called)
        return Form(_json(found.schema, strict=strict, blanks=WHITE_SPACE), parts, found.notes)
    if structure.get("json"):
        return Form(_json({"type": "object"}, strict=True, blanks=WHITE_SPACE))
    if (choices := structure.get("choices")) is not None:
        return Form(choices_rule(choices))
    if (regex := structure.get("regex")) is not None:
        return Form(f"/{_NOT_IN_LARK.sub(lambda found: _IN_LARK.get(found[0], found[0]), regex)}/")
    return None


# A slash or a line end would end an expression; characters after a backslash stay as they are.
_NOT_IN_LARK = re.compile(r"\\.|/|\n", re.DOTALL)
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


class AnswerGrammar(NamedTuple):
    """A grammar, its schemas (`parts` of StructureOptions), and `notes` on what is not enforced."""

    text: str
    parts: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def structure(self) -> StructureOptions:
        return {"grammar": self.text, "parts": self.parts}


def answer_grammar(
    given: OutputFormat | None,
    tools: Sequence[OfferedTool],
    *,
    choice: Choice,
    parallel: bool = True,
    begun: bool = False,
    form: Form | None = None,
) -> AnswerGrammar | None:
    """Return the grammar of an answer. If calls are required, it has at least one call of `tools`.
    Otherwise, with a `form`, it is calls or a text of that form; else text in which every call is
    valid. The first two may begin with thoughts; `begun` means that the prompt has opened them.
    None for a format without a grammar, and for a form alone if the format has no thoughts."""
    if given is None:
        return None
    write, thinks = _WRITERS.get(given.name), THINK in given.fields
    if form is not None:
        write = _WITH_FORMS.get(given.name, write)
    if write is None if tools else form is None or not thinks:
        return None
    written = write(tools) if write is not None and tools else None
    if choice == "auto" and form is None:
        lines = [] if written is None else _free(written, parallel=parallel)
    else:
        lines = _due(written, form, parallel=parallel, begun=begun, thinks=thinks)
    if not lines:
        return None
    parts = {tool.called: tool.schema for tool in tools}
    notes = tuple(note for tool in tools for note in tool.notes)
    if form is not None:
        parts, notes = {**parts, **form.parts}, (*notes, *form.notes)
    return AnswerGrammar("\n".join(["%llguidance {}", _ANY, *lines]), parts, notes)


def _free(written: _Written, *, parallel: bool) -> list[str]:
    """Return the rules of text with only valid calls; empty if no grammar expresses it."""
    if not written.called:
        return []
    lines = [*written.rules, f"call: {written.call}", f"called: {written.called}"]
    if written.is_last:
        return [*lines, f"start: ANY | called{_more(written, parallel=parallel)}"]
    return [*lines, "start: called* ANY" if parallel else "start: called | ANY"]


def _due(
    written: _Written | None, form: Form | None, *, parallel: bool, begun: bool, thinks: bool
) -> list[str]:
    """Return the rules of calls or of a text of the form, after thoughts."""
    lines: list[str] = []
    wanted: list[str] = []
    if written is not None:
        lines += [*written.rules, f"call: {written.call}"]
        wanted.append(f"call{_more(written, parallel=parallel)}")
    if form is not None:
        lines.append(f"form: {form.rule}")
        wanted.append("form")
    before = ""
    if thinks:
        before = "thought " if begun else f"({_text('<think>')} thought)? "
        lines += [f"thought: thinks {_text('')} /\\n{{0,2}}/", 'thinks[lazy]: ANY "</think>"']
    return [*lines, f"start: {before}({' | '.join(wanted)})"]


def _more(written: _Written, *, parallel: bool) -> str:
    return f" ({_text(written.between)} call)*" if parallel else ""


class _Written(NamedTuple):
    """Rules for the calls of a format. `call` is a required call; `called` is text followed by a
    call, empty if no grammar can express it. With `is_last`, only calls may follow a call."""

    rules: list[str]
    call: str
    called: str
    between: str
    is_last: bool = False


def _tagged(rules: list[str]) -> _Written:
    """Return the rules of calls between tags; `rules` defines their `tool`."""
    begin, inner = _text("<tool_call>"), f"tool {_text('</tool_call>')}"
    rules = [*rules, f"begun[lazy]: ANY {begin}"]
    return _Written(rules, f"{begin} {inner}", f"begun {inner}", "\n")


def _bare(rules: list[str], between: str) -> _Written:
    """Return the rules of calls without tags."""
    return _Written(rules, "tool", "", between)


def _generic(tools: Sequence[OfferedTool]) -> _Written:
    """Return the rules of calls without delimiters: an object is a call if it has the name of a
    tool. Text may contain other objects, such as {"name": "Bob"}."""
    rules = [
        rf'MIDDLE: /{_JSON_BLANKS},{_JSON_BLANKS}"arguments"{_JSON_BLANKS}:{_JSON_BLANKS}/',
        rf"END: /{_JSON_BLANKS}\}}/",
    ]
    for i, tool in enumerate(tools):
        written = json.dumps(tool.name, ensure_ascii=False)
        rules.append(f"rest_{i}: MIDDLE {_json(tool.schema, strict=tool.strict)} END")
        begin = '{"name": ' + written
        rules.append(f"call_{i}: {_text(begin)}")
        begun = rf'/\{{{_ANY_BLANKS}"name"{_ANY_BLANKS}:{_ANY_BLANKS}/'
        rules.append(f"begun_{i}[lazy]: ANY {begun} {_text(written)}")
    each = range(len(tools))
    call = " | ".join(f"call_{i} rest_{i}" for i in each)
    called = " | ".join(f"begun_{i} rest_{i}" for i in each)
    return _Written(rules, call, called, "\n", is_last=True)


def _json_rules(tools: Sequence[OfferedTool], arguments: str, edge: str) -> list[str]:
    """Return the rules of an object with the name of a tool and its arguments."""
    rules = [f"tool: {_text(edge)} ({_each('tool', tools)}) {_text(edge)}"]
    for i, tool in enumerate(tools):
        shape = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments: tool.schema},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        if _has_reference(tool.schema):
            shape["properties"] = {"name": {"const": tool.name}, arguments: {"$ref": _ROOT}}
            shape |= _document(tool)
        rules.append(f"tool_{i}: {_json(shape, strict=tool.strict)}")
    return rules


# The path of a tool's schema inside the schema of a call, so that its references can be resolved.
_ROOT = "#/$defs/arguments"


def _document(tool: OfferedTool) -> dict[str, Any]:
    return {"$defs": {"arguments": moved(tool.schema, _ROOT)}}


def _has_reference(schema: object) -> bool:
    """True if the schema contains a `$ref`."""
    if isinstance(schema, Mapping):
        entries = cast("Mapping[str, object]", schema)
        return "$ref" in entries or any(map(_has_reference, entries.values()))
    return isinstance(schema, list) and any(map(_has_reference, cast("list[object]", schema)))


def _each(rule: str, tools: Sequence[OfferedTool]) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(len(tools)))


def _by_pairs(
    tools: Sequence[OfferedTool], *, begin: str, key: str, value_end: str, end: str
) -> list[str]:
    """Return the rules of formats with one entry per argument: strings raw, others as JSON."""
    rules = [f"tool: {_each('tool', tools)}"]
    for i, tool in enumerate(tools):
        properties = mapping(tool.schema.get("properties"))
        required = [str(one) for one in listed(tool.schema.get("required") or [])]
        parts = [_text(begin.format(tool.name))]
        order = sorted(properties, key=lambda one: one not in required)
        for j, one in enumerate(order):
            parts.append(f"arg_{i}_{j}" + ("" if one in required else "?"))
            value = _value(tool, properties[one], f"text_{i}_{j}", value_end, rules)
            rules.append(f"arg_{i}_{j}: {_text(key.format(one))} {value}")
        rules.append(f"tool_{i}: {' '.join(parts)} {_text(end)}")
    return rules


def _value(tool: OfferedTool, schema: Any, rule: str, end: str, rules: list[str]) -> str:
    entry = mapping(resolved(tool.schema, schema))
    if entry.get("type", "string") != "string" or entry.keys() & {"anyOf", "oneOf", "allOf"}:
        whole = dict(mapping(schema))
        if _has_reference(whole):
            whole = {**mapping(moved(whole, _ROOT)), **_document(tool)}
        return f"{_json(whole, strict=tool.strict)} {_text(end)}"
    if "enum" in entry or "const" in entry:
        values = listed(entry["enum"]) if "enum" in entry else [entry["const"]]
        texts = " | ".join(_text(_as_text(one)) for one in values)
        return f"({texts}) {_text(end)}"
    rules.append(f"{rule}[lazy]: ANY {_text(end)}")
    return rule


def _as_text(value: object) -> str:
    """Return a string as it is, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(schema: Mapping[str, Any], *, strict: bool, blanks: str = _BLANKS) -> str:
    rules = {"whitespace_pattern": blanks, "coerce_one_of": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': rules})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


_WRITERS: Mapping[str, Callable[[Sequence[OfferedTool]], _Written]] = {
    HERMES.name: lambda tools: _tagged(_json_rules(tools, "arguments", "\n")),
    QWEN_XML.name: lambda tools: _tagged(
        _by_pairs(
            tools,
            begin="\n<function={}>\n",
            key="<parameter={}>\n",
            value_end="\n</parameter>\n",
            end="</function>\n",
        )
    ),
    GLM.name: lambda tools: _tagged(
        _by_pairs(
            tools,
            begin="{}\n",
            key="<arg_key>{}</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
            end="",
        )
    ),
    LLAMA.name: lambda tools: _bare(_json_rules(tools, "parameters", ""), "; "),
    GENERIC.name: _generic,
}
# For an answer that may be other JSON instead. The rules only use JSON's own tokens: a longer token
# of ours would win over those of the other JSON.
_WITH_FORMS: Mapping[str, Callable[[Sequence[OfferedTool]], _Written]] = {
    GENERIC.name: lambda tools: _bare(_json_rules(tools, "arguments", ""), "\n")
}
