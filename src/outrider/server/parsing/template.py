"""A checkpoint's own `response_template`, as specified by Hugging Face, read as an OutputFormat.

It names the fields of the assistant's message, the delimiters of each, and the parser of its text.
Fields of text, reasoning and calls are supported; a field that no API knows is shown as it was
written. For a template that is not supported, ValueError is raised, and the table of families is
used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from outrider.server.parsing.calls import Call, ReadCalls, Schemas, call_of
from outrider.server.parsing.delimiter import Delimiter, Match, literal, pattern
from outrider.server.parsing.fields import Field, Kind, OutputFormat
from outrider.server.parsing.json_text import lax_json, listed, parse_json, typed

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
