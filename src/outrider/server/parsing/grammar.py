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
    has_reference,
    moved,
    resolved,
)
from outrider.core.errors import ConfigError
from outrider.server.parsing.calls import Call, ReadCalls, Schemas, call_of
from outrider.server.parsing.delimiter import Delimiter, Match, literal, pattern
from outrider.server.parsing.families import GENERIC, GLM, HERMES, LLAMA, QWEN_XML, THINK
from outrider.server.parsing.fields import Field, Kind, OutputFormat
from outrider.server.parsing.json_text import lax_json, listed, mapping, parse_json, typed

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
    given: OutputFormat,
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


def _delimited(begin: str, rules: list[str], end: str, between: str) -> _Written:
    """Return the rules of calls between `begin` and `end`; `rules` defines their `tool`."""
    if not begin:
        return _Written(rules, f"tool {_text(end)}", "", between)
    rules = [*rules, f"begun[lazy]: ANY {_text(begin)}"]
    inner = f"tool {_text(end)}"
    return _Written(rules, f"{_text(begin)} {inner}", f"begun {inner}", between)


def _hermes(tools: Sequence[OfferedTool]) -> _Written:
    rules = _json_rules(tools, "arguments", "\n")
    return _delimited("<tool_call>", rules, "</tool_call>", "\n")


def _llama(tools: Sequence[OfferedTool]) -> _Written:
    return _delimited("", _json_rules(tools, "parameters", ""), "", "; ")


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


def _generic_object(tools: Sequence[OfferedTool]) -> _Written:
    """Return the rules of `_generic` for an answer that may be other JSON instead. They only use
    JSON's own tokens: a longer token of ours would win over those of the other JSON."""
    return _delimited("", _json_rules(tools, "arguments", ""), "", "\n")


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
        if has_reference(tool.schema):
            shape["properties"] = {"name": {"const": tool.name}, arguments: {"$ref": _ROOT}}
            shape |= _document(tool)
        rules.append(f"tool_{i}: {_json(shape, strict=tool.strict)}")
    return rules


# The path of a tool's schema inside the schema of a call, so that its references can be resolved.
_ROOT = "#/$defs/arguments"


def _document(tool: OfferedTool) -> dict[str, Any]:
    return {"$defs": {"arguments": moved(tool.schema, _ROOT)}}


def _each(rule: str, tools: Sequence[OfferedTool]) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(len(tools)))


def _qwen_xml(tools: Sequence[OfferedTool]) -> _Written:
    rules = _by_pairs(
        tools,
        begin="\n<function={}>\n",
        key="<parameter={}>\n",
        value_end="\n</parameter>\n",
        end="</function>\n",
    )
    return _delimited("<tool_call>", rules, "</tool_call>", "\n")


def _glm(tools: Sequence[OfferedTool]) -> _Written:
    rules = _by_pairs(
        tools,
        begin="{}\n",
        key="<arg_key>{}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        end="",
    )
    return _delimited("<tool_call>", rules, "</tool_call>", "\n")


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
        if has_reference(whole):
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
    HERMES.name: _hermes,
    QWEN_XML.name: _qwen_xml,
    GLM.name: _glm,
    LLAMA.name: _llama,
    GENERIC.name: _generic,
}
_WITH_FORMS: Mapping[str, Callable[[Sequence[OfferedTool]], _Written]] = {
    GENERIC.name: _generic_object
}


# A checkpoint's own `response_template`, as specified by Hugging Face, read as an OutputFormat.
#
# It names the fields of the assistant's message, the delimiters of each, and the parser of its
# text. Fields of text, reasoning and calls are supported; a field that no API knows is shown as it
# was written. For a template that is not supported, ValueError is raised, and the table of families
# is used instead.
_KINDS: Mapping[str, Kind] = {
    "content": "text",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "calls",
}
_GLUE = (literal("<|start|>assistant"),)


def format_of_template(template: Mapping[str, Any]) -> OutputFormat:
    """Return the format of a template. Raises ValueError for an invalid or unsupported one."""
    given: object = template.get("fields")
    if template.get("version", 1) != 1 or not isinstance(given, Mapping) or not given:
        raise ValueError("a response template of another kind")
    fields = cast("Mapping[str, Any]", given)
    found: list[Field] = []
    drops: list[Delimiter] = []
    for name, spec in fields.items():
        opens, closes = _delimiters(spec, "open"), _delimiters(spec, "close")
        if opens:
            found.append(_field(name, spec, opens, closes))
        elif _KINDS.get(name) != "text":
            raise ValueError(f"the field {name} has no beginning")
        else:
            drops += closes
    anchors = template.get("start_anchor", ())
    return OutputFormat(
        name="response_template",
        fields=tuple(found),
        drops=(*drops, *_GLUE),
        # Its delimiters may be special tokens, so it needs text that contains all of them.
        shows_special=True,
        anchors=(anchors,) if isinstance(anchors, str) else tuple(anchors),
    )


def _delimiters(spec: Mapping[str, Any], name: str) -> tuple[Delimiter, ...]:
    if f"{name}_pattern" in spec:
        return (pattern(spec[f"{name}_pattern"]),)
    given = spec.get(name, ())
    return tuple(map(literal, (given,) if isinstance(given, str) else given))


def _field(
    name: str, spec: Mapping[str, Any], opens: tuple[Delimiter, ...], closes: tuple[Delimiter, ...]
) -> Field:
    kind = _KINDS.get(name, "other")
    content = spec.get("content", "text")
    if kind in ("text", "reasoning") and content != "text":
        kind = "other"
    arguments = cast("Mapping[str, Any]", spec.get("content_args", {}))
    read = _reader(spec, content, arguments) if kind == "calls" else None
    return Field(kind, opens, closes, strip=bool(arguments.get("strip", True)), read=read)


def _reader(spec: Mapping[str, Any], content: str, arguments: Mapping[str, Any]) -> ReadCalls:
    """Return the reader of calls that `spec` describes."""
    parse = _content(content, arguments)
    transform, each = spec.get("transform"), bool(spec.get("transform_each"))

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
        value = parse(body)
        if transform is not None:
            scopes = (
                [{**groups, **one} for one in value] if each else [{**groups, "content": value}]
            )
            value = [_filled(transform, scope) for scope in scopes]
        flat = [one for several in listed(value) for one in listed(several)]
        return [_typed_call(call_of(one), schemas) for one in flat]

    return read


def _typed_call(call: Call, schemas: Schemas) -> Call:
    types = schemas.get(call.name, {})
    return Call(
        call.name,
        {
            key: typed(value, types.get(key)) if isinstance(value, str) else value
            for key, value in call.arguments.items()
        },
    )


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return `transform` with values of `scope` for its placeholders `{name}`, `{name.key}`."""
    if isinstance(transform, Mapping):
        entries = cast("Mapping[str, Any]", transform)
        return {key: _filled(value, scope) for key, value in entries.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in cast("list[Any]", transform)]
    if not (isinstance(transform, str) and transform[:1] == "{" and transform[-1:] == "}"):
        return transform
    value: Any = scope
    for key in transform[1:-1].split("."):
        value = value[key]
    return value


def _content(name: str, arguments: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return the content parser called `name`. Raises ValueError for an unknown one."""
    if name == "json":
        strings = tuple((begin, end) for begin, end in arguments.get("string_delims", ()))
        unquoted = bool(arguments.get("unquoted_keys"))
        return lambda text: lax_json(text, unquoted=unquoted, strings=strings)
    if name == "xml-inline":
        tag = pattern(arguments["tag_pattern"])
        inner = _inner(arguments)
        return lambda text: _tags(text, tag, inner, merge=bool(arguments.get("merge_duplicates")))
    if name == "kv-lines":
        return lambda text: _lines(text, arguments)
    plain: Mapping[str, Callable[[str], Any]] = {
        "text": str.strip,
        "int": int,
        "float": float,
        "bool": lambda text: text.strip().lower() in ("true", "1"),
    }
    if name not in plain:
        raise ValueError(f"content of the kind {name!r}")
    return plain[name]


def _inner(arguments: Mapping[str, Any]) -> Callable[[str], Any]:
    inner = arguments.get("value_parser")
    if inner is None:
        return lambda text: text
    given = cast("Mapping[str, Any]", inner)
    more = cast("Mapping[str, Any]", given.get("args", {}))
    if given.get("name") == "json" and more.get("allow_non_json"):
        return _json_or_text
    return _content(given.get("name", "text"), more)


def _json_or_text(text: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return text.strip()


def _tags(text: str, tag: Delimiter, inner: Callable[[str], Any], *, merge: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = text.find(tag.first)
    while at >= 0:
        match = tag.match(text, at, final=True, most=len(text))
        end = at + 1
        if isinstance(match, Match):
            end = max(match.end, end)
            key, value = match.groups["key"], inner(match.groups.get("value", ""))
            if merge and key in found:
                value = [*listed(found[key]), value]
            found[key] = value
        at = text.find(tag.first, end)
    return found


def _lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    inner = _inner(arguments)
    found: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, sign, value = line.strip().partition(arguments.get("kv_sep", ":"))
        if sign:
            found[key.strip()] = inner(value.strip())
    return found
