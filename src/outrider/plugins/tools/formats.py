"""Output formats of checkpoints: that of their own `response_template`, or else of their family.

A family is recognised by its chat template, never by the name of a model: a checkpoint that is
renamed or trained further keeps its template. The first entry that fits is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from outrider.api import chat_template as known
from outrider.api.chat_messages import has_place_for_tools
from outrider.api.structure import resolved
from outrider.plugins.tools import calls
from outrider.plugins.tools.calls import DEEPSEEK_TOKEN, Call, ReadCalls, Schemas, call_of
from outrider.plugins.tools.fields import (
    Delimiter,
    Field,
    Kind,
    Match,
    OutputFormat,
    literal,
    pattern,
)
from outrider.plugins.tools.json_text import (
    in_string,
    lax_json,
    listed,
    mapping,
    mended_json,
    parse_json,
    typed,
)
from outrider.plugins.tools.parser import FormatParser, new_call_id
from outrider.server.parts import OutputParser, PlainParser
from outrider.server.port import EngineCard

_log = logging.getLogger(__name__)


def _between(read: calls.ReadCalls, begin: Delimiter | str, end: str, **more: Any) -> Field:
    begin = literal(begin) if isinstance(begin, str) else begin
    return Field("calls", (begin,), (literal(end),), read=read, **more)


def _json(begin: str, end: str, read: calls.ReadCalls = calls.json_calls) -> Field:
    """Calls as JSON, which must follow the delimiter: a text about calls is no call."""
    opens = literal(begin, ahead=("{", "["))
    return _between(read, opens, end, head=calls.json_head, mend=mended_json, goes_on=in_string)


def _balanced(
    begin: Delimiter,
    read: calls.ReadCalls = calls.json_calls,
    head: calls.ReadHead = calls.json_head,
    **more: Any,
) -> Field:
    """Calls that end with the JSON value behind `begin`."""
    return Field("calls", (begin,), balanced=True, read=read, head=head, **more)


def _tags(tags: calls.Tags, begin: str, end: str, ahead: str) -> Field:
    opens = literal(begin, ahead=(ahead,))
    return _between(tags.calls, opens, end, mend=tags.mend, goes_on=tags.goes_on)


def _thought(given: known.Thinking) -> Field:
    """Thoughts at the start of an answer. Later in it, the same tag may be part of the text."""
    opens = literal(given.begin, at_start=not given.anywhere)
    return Field("reasoning", (opens,), (literal(given.end),))


def _deepseek(name: str) -> str:
    return DEEPSEEK_TOKEN.format(name.replace(" ", "\u2581"))


THINK = _thought(known.THINK)
HERMES_CALL = _json("<tool_call>", "</tool_call>")
HERMES = OutputFormat("hermes", (HERMES_CALL,))
# Sometimes the model omits the first tag.
_BARE = Field(
    "calls",
    (literal("<function="),),
    (pattern(r"</function>\s*(?:</tool_call>)?"),),
    keeps=True,
    read=calls.QWEN_TAGS.calls,
    mend=calls.QWEN_TAGS.mend,
    goes_on=calls.QWEN_TAGS.goes_on,
)
QWEN_XML = OutputFormat(
    "qwen_xml", (_tags(calls.QWEN_TAGS, "<tool_call>", "</tool_call>", "<function="), _BARE)
)
_SEED_TAGS = replace(calls.QWEN_TAGS, edge="")
SEED = OutputFormat(
    "seed",
    (
        _tags(_SEED_TAGS, "<seed:tool_call>", "</seed:tool_call>", "<function="),
        _thought(known.SEED),
    ),
    shows_special=True,
)
MINIMAX = OutputFormat(
    "minimax",
    (_tags(calls.INVOKE_TAGS, "<minimax:tool_call>", "</minimax:tool_call>", "<invoke"), THINK),
    shows_special=True,
)
GLM = OutputFormat(
    "glm",
    (
        _between(
            calls.GLM_TAGS.calls, "<tool_call>", "</tool_call>", goes_on=calls.GLM_TAGS.goes_on
        ),
        THINK,
    ),
)
FUNCTION_GEMMA = OutputFormat(
    "function_gemma",
    (_between(calls.gemma_calls("<escape>"), "<start_function_call>", "<end_function_call>"),),
    shows_special=True,
)
GEMMA = OutputFormat(
    "gemma",
    (_between(calls.gemma_calls('<|"|>'), "<|tool_call>", "<tool_call|>"), _thought(known.GEMMA)),
    drops=(literal("<|channel>"), literal("<channel|>")),
    shows_special=True,
)
DEEPSEEK = OutputFormat(
    "deepseek",
    (
        _between(
            calls.deepseek_calls,
            _deepseek("call begin"),
            _deepseek("call end"),
            head=calls.deepseek_head,
            mend=mended_json,
            goes_on=in_string,
        ),
        THINK,
    ),
    drops=(literal(_deepseek("calls begin")), literal(_deepseek("calls end"))),
    shows_special=True,
)
_DSML = ("<\uff5cDSML\uff5c{}>", "</\uff5cDSML\uff5c{}>")
DSML = OutputFormat(
    "dsml",
    tuple(
        _tags(
            calls.DSML_TAGS,
            _DSML[0].format(name),
            _DSML[1].format(name),
            "<\uff5cDSML\uff5cinvoke",
        )
        for name in ("function_calls", "tool_calls")
    ),
    shows_special=True,
)
_ARGUMENTS = r"<\|tool_call_argument_begin\|>"
KIMI = OutputFormat(
    "kimi",
    (
        _balanced(
            replace(pattern(rf"<\|tool_call_begin\|>(?P<name>.*?){_ARGUMENTS}"), ahead=("{",)),
            calls.named_calls,
            calls.named_head,
            closes=(literal("<|tool_call_end|>"),),
            mend=mended_json,
            goes_on=in_string,
        ),
    ),
    drops=tuple(
        literal(f"<|tool_{name}|>")
        for name in ("calls_section_begin", "calls_section_end", "call_end")
    ),
    shows_special=True,
)
LFM = OutputFormat(
    "lfm",
    (_between(calls.python_calls, "<|tool_call_start|>", "<|tool_call_end|>"),),
    shows_special=True,
)
GRANITE = OutputFormat(
    "granite",
    (_balanced(literal("<|tool_call|>", ahead=("[", "{"))),),
    shows_special=True,
)
NEMOTRON = OutputFormat("nemotron", (_json("<TOOLCALL>", "</TOOLCALL>"),))
_NAMED = pattern(r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[CALL_ID\])?[^\[{]*(?:\[ARGS\])?")
MISTRAL = OutputFormat(
    "mistral",
    (
        _balanced(literal("[TOOL_CALLS]", ahead=("[", "{"))),
        _balanced(replace(_NAMED, ahead=("{",)), calls.named_calls, calls.named_head),
        _thought(known.MISTRAL),
    ),
    shows_special=True,
)
_OBJECTS = (pattern(r'\{\s*"name"'), pattern(r'\{\s*"type"'))
LLAMA = OutputFormat(
    "llama",
    (
        _balanced(literal("<|python_tag|>", ahead=("{",))),
        Field(
            "calls",
            _OBJECTS,
            keeps=True,
            balanced=True,
            read=calls.json_calls,
            head=calls.json_head,
        ),
    ),
    drops=(literal(";", behind_call=True, ahead=("{",)),),
    shows_special=True,
)
THINKING = OutputFormat("thinking", (THINK,))
# The format that api/chat_messages.py requests: an object that is a call, up to the end of the
# answer. Or Hermes' format, in which many models are trained even if their template has no tools.
GENERIC = OutputFormat(
    "generic",
    (
        Field("calls", (pattern(r'\{\s*"name"'),), keeps=True, read=calls.json_calls),
        HERMES_CALL,
    ),
)


def _is_for(channel: str) -> Callable[[Mapping[str, str]], bool]:
    """Return a test of harmony headers: a message of `channel` for the user."""
    return lambda groups: not calls.recipient(groups["header"]) and _channel(groups) == channel


def _is_call(groups: Mapping[str, str]) -> bool:
    return bool(calls.recipient(groups["header"]))


def _channel(groups: Mapping[str, str]) -> str:
    """Return the first word after `<|channel|>`, or the first word of a header without it."""
    words = groups["header"].rpartition("<|channel|>")[2].split("<")[0].split()
    return words[0] if words else ""


_HEADERS = (
    pattern(r"<\|channel\|>(?P<header>.*?)<\|message\|>"),
    pattern(r"<\|start\|>assistant(?P<header>.*?)<\|message\|>"),
    replace(pattern(r"to=(?P<to>.*?)<\|message\|>"), at_start=True),
)
_ENDS = tuple(map(literal, ("<|end|>", "<|call|>", "<|return|>")))
_HARMONY_CALLS: Mapping[str, Any] = {
    "gives_way": True,
    "read": calls.harmony_calls,
    "head": calls.harmony_head,
    "mend": mended_json,
}
HARMONY = OutputFormat(
    "harmony",
    (
        Field("calls", _HEADERS[:2], _ENDS, _is_call, **_HARMONY_CALLS),
        Field("calls", _HEADERS[2:], _ENDS, **_HARMONY_CALLS),
        Field("reasoning", _HEADERS[:2], _ENDS, _is_for("analysis"), gives_way=True),
        # Calls if no tool was offered: the model believes that some tools are built in.
        Field("hidden", _HEADERS[:2], _ENDS, _is_call, gives_way=True),
        Field("text", _HEADERS[:2], _ENDS, _is_for("final"), gives_way=True),
        Field("text", _HEADERS[:2], _ENDS, _is_for("commentary"), gives_way=True),
    ),
    drops=_ENDS,
    shows_special=True,
)


@dataclass(frozen=True, slots=True)
class Family:
    """A family: its chat templates contain all of `signs`, and none of `unlike`."""

    signs: tuple[str, ...]
    given: OutputFormat
    unlike: tuple[str, ...] = ()


# Ling and Ring sometimes write this in several tokens, which do not end the answer.
_TURN_END = "<|role_end|>"
_OTHERS = ("<tool_calls>", "<invoke", "<seed:", "minimax")
FAMILIES = (
    Family(("<|channel|>", "<|message|>"), HARMONY),
    Family(("<seed:tool_call>", "<function="), SEED),
    Family(("<function=", "<parameter="), QWEN_XML),
    Family(("<arg_key>", "<tool_call>"), GLM),
    Family((_deepseek("call begin"),), DEEPSEEK),
    Family(("\uff5cDSML\uff5c", "string="), DSML),
    Family(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), KIMI),
    Family(("[TOOL_CALLS]",), MISTRAL),
    Family(("<start_function_call>",), FUNCTION_GEMMA),
    Family(("<|tool_call>", "<tool_call|>", '<|"|>'), GEMMA),
    Family(("<minimax:tool_call>", "<invoke name="), MINIMAX),
    Family(("<|tool_call_start|>",), LFM),
    Family(("<|tool_list_start|>",), LFM),
    Family(("<|im_start|>", "List of tools: ["), LFM),
    Family(("<|tool_call|>", "JSON list"), GRANITE),
    Family(("<TOOLCALL>",), NEMOTRON),
    Family(("<tool_call>", "arguments"), HERMES, _OTHERS),
    Family(("<|start_header_id|>", "tools", '{"name": ', '"parameters": '), LLAMA),
    Family(("</think>",), THINKING),
)


def format_of_family(chat_template: str) -> OutputFormat | None:
    """Return the format of a chat template; None if all output is text."""
    for family in FAMILIES:
        is_like = all(sign in chat_template for sign in family.signs)
        if is_like and not any(sign in chat_template for sign in family.unlike):
            given = family.given
            if "</think>" in chat_template and THINK not in given.fields:
                given = replace(given, fields=(*given.fields, THINK))
            if _TURN_END in chat_template:
                given = replace(given, drops=(*given.drops, literal(_TURN_END)))
            return given
    return None


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
        return lambda text: _by_tag(text, tag, inner, merge=bool(arguments.get("merge_duplicates")))
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


def _by_tag(
    text: str, tag: Delimiter, inner: Callable[[str], Any], *, merge: bool
) -> dict[str, Any]:
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


def format_of(card: EngineCard) -> OutputFormat | None:
    """Return the format of the model's output; None if all of it is text. If the chat template does
    not support tools, the prompt describes them in text; calls then have the format that this text
    requests, or the one that the model was trained to write."""
    source = card.tool_template or card.chat_template
    given = _own_format(card, source)
    if not source or has_place_for_tools(source):
        return given
    if given is None:
        return GENERIC
    fields = (*GENERIC.fields, *given.fields)
    return replace(given, name=GENERIC.name, fields=fields)


def _own_format(card: EngineCard, source: str) -> OutputFormat | None:
    template = card.response_template
    if template is not None:
        try:
            return format_of_template(template)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            _warn_once(str(problem))
    return format_of_family(source)


def parser_for(
    given: OutputFormat | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: known.PromptEnd | str = "",
    has_form: bool = False,
    new_id: Callable[[], str] = new_call_id,
) -> OutputParser:
    """Return the parser of one answer in the format `given`. The end of `prompt` shows whether the
    chat template, or a continued message, has opened a field such as `<think>`. Calls are
    recognised only if `tools` were offered; with `has_form`, thoughts and calls only before the
    text."""
    if given is None:
        return PlainParser()
    if has_form:
        given = given.at_start()
    return FormatParser(given, schemas_of(tools), begun=given.begun(prompt), new_id=new_id)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return by each tool's name the schemas of its arguments."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = mapping(tool.get("function", tool))
        schema = mapping(function.get("parameters"))
        properties = mapping(schema.get("properties"))
        known = {name: _with_types(schema, value) for name, value in properties.items()}
        found[str(function.get("name"))] = known
    return found


def _with_types(root: Mapping[str, Any], schema: object) -> object:
    """Return the schema with its own and its alternatives' references resolved, for types."""
    given = mapping(resolved(root, schema))
    choices = {
        name: given[name] for name in ("anyOf", "oneOf") if isinstance(given.get(name), list)
    }
    return {**given, **{name: [resolved(root, one) for one in choices[name]] for name in choices}}


@lru_cache(maxsize=8)
def _warn_once(problem: str) -> None:
    _log.warning("The checkpoint's response_template is not followed: %s.", problem)
