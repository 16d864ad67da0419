"""Output formats of families whose checkpoints have no `response_template`.

A family is recognised by its chat template, never by the name of a model: a checkpoint that is
renamed or trained further keeps its template. The first entry that fits is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.api import chat_template as known
from outrider.server.parsing import calls
from outrider.server.parsing import delimiter as tagged
from outrider.server.parsing.calls import DEEPSEEK_TOKEN
from outrider.server.parsing.delimiter import Delimiter, Literal, Mark, Run, literal, pattern
from outrider.server.parsing.fields import Field, OutputFormat
from outrider.server.parsing.json_text import in_string, mended_json


def _between(read: calls.ReadCalls, begin: Delimiter | str, end: str, **more: Any) -> Field:
    begin = literal(begin) if isinstance(begin, str) else begin
    return Field("calls", (begin,), (literal(end),), read=read, **more)


def _json(begin: str, end: str, read: calls.ReadCalls = calls.json_calls) -> Field:
    """Calls as JSON, which must follow the delimiter: a text about calls is no call."""
    opens = literal(begin, ahead=("{", "["))
    return _between(read, opens, end, head=calls.json_head, mend=mended_json, goes_on=in_string)


def _tags(tags: tagged.Tags, begin: str, end: str, ahead: str) -> Field:
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
    read=tagged.QWEN_TAGS.offered_calls,
    mend=tagged.QWEN_TAGS.mend,
    goes_on=tagged.QWEN_TAGS.goes_on,
)
QWEN_XML = OutputFormat(
    "qwen_xml", (_tags(tagged.QWEN_TAGS, "<tool_call>", "</tool_call>", "<function="), _BARE)
)
_SEED_TAGS = replace(tagged.QWEN_TAGS, edge="")
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
    (_tags(tagged.INVOKE_TAGS, "<minimax:tool_call>", "</minimax:tool_call>", "<invoke"), THINK),
    shows_special=True,
)
GLM = OutputFormat(
    "glm",
    (_between(tagged.glm_calls, "<tool_call>", "</tool_call>", goes_on=tagged.glm_goes_on), THINK),
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
            tagged.DSML_TAGS,
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
        Field(
            "calls",
            (replace(pattern(rf"<\|tool_call_begin\|>(?P<name>.*?){_ARGUMENTS}"), ahead=("{",)),),
            (literal("<|tool_call_end|>"),),
            balanced=True,
            mend=mended_json,
            goes_on=in_string,
            read=calls.named_calls,
            head=calls.named_head,
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
    (_between(tagged.python_calls, "<|tool_call_start|>", "<|tool_call_end|>"),),
    shows_special=True,
)
GRANITE = OutputFormat(
    "granite",
    (
        Field(
            "calls",
            (literal("<|tool_call|>", ahead=("[", "{")),),
            balanced=True,
            read=calls.json_calls,
            head=calls.json_head,
        ),
    ),
    shows_special=True,
)
NEMOTRON = OutputFormat("nemotron", (_json("<TOOLCALL>", "</TOOLCALL>"),))
_IN_NAME = Run(lambda char: char not in "[{", 1)
_NAMED = Delimiter(
    (
        Literal("[TOOL_CALLS]"),
        Mark("name"),
        _IN_NAME,
        Mark("name"),
        Literal("[CALL_ID]", optional=True),
        replace(_IN_NAME, least=0),
        Literal("[ARGS]", optional=True),
    ),
    ahead=("{",),
)
MISTRAL = OutputFormat(
    "mistral",
    (
        Field(
            "calls",
            (literal("[TOOL_CALLS]", ahead=("[", "{")),),
            balanced=True,
            read=calls.json_calls,
            head=calls.json_head,
        ),
        Field("calls", (_NAMED,), balanced=True, read=calls.named_calls, head=calls.named_head),
        _thought(known.MISTRAL),
    ),
    shows_special=True,
)
_OBJECTS = (pattern(r'\{\s*"name"'), pattern(r'\{\s*"type"'))
LLAMA = OutputFormat(
    "llama",
    (
        Field(
            "calls",
            (literal("<|python_tag|>", ahead=("{",)),),
            balanced=True,
            read=calls.json_calls,
            head=calls.json_head,
        ),
        Field(
            "calls",
            _OBJECTS,
            keeps=True,
            balanced=True,
            read=calls.offered_json_calls,
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
        Field("calls", (pattern(r'\{\s*"name"'),), keeps=True, read=calls.offered_json_calls),
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
