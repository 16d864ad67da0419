"""Output of each family, and what hostile or broken text becomes, whatever the pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.plugins.tools.calls import DEEPSEEK_TOKEN
from outrider.plugins.tools.fields import OutputFormat
from outrider.plugins.tools.formats import (
    FAMILIES,
    GENERIC,
    THINK,
    format_of,
    format_of_family,
    parser_for,
)
from outrider.plugins.tools.parser import FormatParser
from outrider.server.parts import (
    Part,
    PlainParser,
    ReasoningDelta,
    TextDelta,
    ToolClose,
    ToolDelta,
    ToolOpen,
)
from outrider.server.port import EngineCard

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": ["boolean", "null"]},
                    "more": {"anyOf": [{"type": "object"}, {"type": "array"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS: Mapping[str, Any] = {
    "weather": TOOLS[0]["function"]["parameters"]["properties"],  # pyright: ignore
    "now": {},
}


def card(chat_template: str = "", **more: Any) -> EngineCard:
    given: dict[str, Any] = {
        "model": "m",
        "window": 99,
        "vocab_size": 9,
        "num_parameters": 1,
        "drafters": ("none",),
        "drafter": "none",
        "k": 0,
        "sampler": "match",
        "exact": True,
        "chat_template": chat_template,
    }
    return EngineCard(**{**given, **more})


def like(chat_template: str = "", **more: Any) -> OutputFormat | None:
    return format_of(card(chat_template, **more))


def shows_special(chat_template: str, tools: Sequence[object] = ()) -> bool:
    found = like(chat_template)
    return found is not None and found.needs_special(tools)


def joined(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """Parts with neighbours of one kind as one."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case TextDelta(text):
                new = ("text", text)
            case ReasoningDelta(text):
                new = ("reasoning", text)
            case ToolOpen(index, call_id, name):
                new = ("open", str(index), call_id, name)
            case ToolDelta(index, arguments):
                new = ("arguments", str(index), arguments)
            case ToolClose(index, whole):
                new = ("close" if whole else "broken", str(index))
        if found and new[0] in ("text", "reasoning", "arguments") and new[:-1] == found[-1][:-1]:
            new = (*new[:-1], found.pop()[-1] + new[-1])
        found.append(new)
    return found


def read(
    given: OutputFormat, pieces: Sequence[str], *, prompt: str = "", tools: bool = True
) -> list[tuple[str, ...]]:
    ids = count(1)
    parser = FormatParser(
        given,
        SCHEMAS if tools else {},
        begun=given.begun(prompt),
        new_id=lambda: f"c{next(ids)}",
    )
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return joined([*parts, *parser.finish()])


def call(index: int, name: str, **arguments: Any) -> list[tuple[str, ...]]:
    text = json.dumps(arguments, ensure_ascii=False)
    return [
        ("open", str(index), f"c{index + 1}", name),
        ("arguments", str(index), text),
        ("close", str(index)),
    ]


def family(*signs: str) -> OutputFormat:
    found = format_of_family(" ".join(signs))
    assert found is not None
    return found


SEP, BEGIN, END = (
    DEEPSEEK_TOKEN.format(name) for name in ("sep", "call\u2581begin", "call\u2581end")
)
LLAMA_CALL = """{"name": "f", "parameters": {}}"""
HERMES = family("<tool_call>", "arguments", "</think>")
QWEN_XML = family("<function=", "<parameter=", "<tool_call>")
GLM = family("<arg_key>", "<tool_call>")
DEEPSEEK = family(BEGIN)
MISTRAL = family("[TOOL_CALLS]")
LLAMA = family("<|start_header_id|>", "tools", LLAMA_CALL)
FUNCTION_GEMMA = family("<start_function_call>")
GEMMA = family("<|tool_call>", "<tool_call|>", '<|"|>')
SEED = family("<seed:tool_call>", "<function=", "<parameter=")
MINIMAX = family("<minimax:tool_call>", "<invoke name=", "</think>")
DSML = family("\uff5cDSML\uff5c", "string=", "</think>")
KIMI = family("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "</think>")
LFM = family("<|tool_list_start|>")
GRANITE = family("<|tool_call|>", "JSON list")
NEMOTRON = family("<TOOLCALL>")
HARMONY = family("<|channel|>", "<|message|>")
WEATHER = call(0, "weather", city="Zürich", days=2)
JSON = '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}'

WEATHER_AGAIN = call(1, "weather", city="Zürich", days=2)

OUTPUTS: dict[str, tuple[OutputFormat, str, list[tuple[str, ...]]]] = {
    "text": (HERMES, "just text < and <tool", [("text", "just text < and <tool")]),
    "thought": (
        HERMES,
        "<think>\nso\n\nand\n</think>\n\nAnswer.\n",
        [("reasoning", "so\n\nand"), ("text", "Answer.\n")],
    ),
    "hermes": (
        HERMES,
        f"Let me.\n\n<tool_call>\n{JSON}\n</tool_call>\n<tool_call>{JSON}</tool_call>\n",
        [("text", "Let me."), *WEATHER, *call(1, "weather", city="Zürich", days=2)],
    ),
    "hermes that ends early": (HERMES, f"<tool_call>{JSON}", WEATHER),
    "qwen xml": (
        QWEN_XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        WEATHER,
    ),
    "qwen xml of types": (
        QWEN_XML,
        "<tool_call><function=weather><parameter=exact>True</parameter>"
        '<parameter=more>{"a": [1]}</parameter><parameter=city>3</parameter>'
        "<parameter=new>4</parameter></function></tool_call>",
        call(0, "weather", exact=True, more={"a": [1]}, city="3", new="4"),
    ),
    "glm": (
        GLM,
        "<think></think>\nok\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        [("text", "ok"), *WEATHER],
    ),
    "glm without arguments": (GLM, "<tool_call>now</tool_call>", call(0, "now")),
    "deepseek": (
        DEEPSEEK,
        BEGIN.replace("call\u2581", "calls\u2581")
        + f'{BEGIN}weather{SEP}{{"city": "Zürich", "days": 2}}{END}\n{BEGIN}function{SEP}now\n'
        f"```json\n{{}}\n```{END}" + END.replace("call\u2581", "calls\u2581"),
        [*WEATHER, *call(1, "now")],
    ),
    "mistral": (
        MISTRAL,
        f"[TOOL_CALLS] [{JSON}, {JSON}]",
        [*WEATHER, *call(1, "weather", city="Zürich", days=2)],
    ),
    "mistral by name": (
        MISTRAL,
        '[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]now{}',
        [*WEATHER, *call(1, "now")],
    ),
    "mistral thought": (MISTRAL, "[THINK]so[/THINK]\nyes", [("reasoning", "so"), ("text", "yes")]),
    "llama": (
        LLAMA,
        ' {"name": "weather", "parameters": {"city": "Zürich", "days": 2}}; {"name": "now"}',
        [*WEATHER, *call(1, "now")],
    ),
    "llama by token": (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', call(0, "now")),
    "llama of another": (LLAMA, '{"name": "Bob"}', [("text", '{"name": "Bob"}')]),
    "llama amid text": (
        LLAMA,
        'So {"name": "now"} Shall I; {go on}?',
        [("text", "So"), *call(0, "now"), ("text", "Shall I; {go on}?")],
    ),
    "generic": (
        GENERIC,
        f'I look.\n{{ "name": "now" }}\n{JSON}',
        [("text", "I look."), *call(0, "now"), *call(1, "weather", city="Zürich", days=2)],
    ),
    "generic of another": (
        GENERIC,
        'A file:\n{"name": "Bob"}\n',
        [("text", 'A file:\n{"name": "Bob"}\n')],
    ),
    "generic and more": (GENERIC, f"{JSON} I hope.", [("text", f"{JSON} I hope.")]),
    "generic cut amid a call": (
        GENERIC,
        f'{{"name": "now"}}\n{JSON}\n{JSON[:30]}',
        [
            *call(0, "now"),
            *call(1, "weather", city="Zürich", days=2),
            ("text", JSON[:30]),
        ],
    ),
    "generic cut behind another": (
        GENERIC,
        f'{{"name": "Bob"}}\n{JSON[:30]}',
        [("text", f'{{"name": "Bob"}}\n{JSON[:30]}')],
    ),
    "llama cut amid a call": (
        LLAMA,
        f'{{"name": "now"}}; {JSON[:30]}',
        [*call(0, "now"), ("text", JSON[:30])],
    ),
    "function gemma": (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Zürich<escape>,days:2}<end_function_call>",
        WEATHER,
    ),
    "gemma": (
        GEMMA,
        '<|channel>thought\nso\n<channel|>Well.<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:2}'
        "<tool_call|><|channel>thought\n<channel|>",
        [("reasoning", "so"), ("text", "Well."), *WEATHER],
    ),
    "seed": (
        SEED,
        "<seed:think>so</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Zürich"
        "</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        [("reasoning", "so"), *WEATHER],
    ),
    "minimax": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        [*WEATHER, *call(1, "now")],
    ),
    "deepseek v3.2": (
        DSML,
        (
            '<@function_calls>\n<@invoke name="weather">\n<@parameter name="city" string="true">'
            'Zürich</@parameter>\n<@parameter name="days" string="false">2</@parameter>\n'
            "</@invoke>\n</@function_calls>"
        ).replace("@", "\uff5cDSML\uff5c"),
        WEATHER,
    ),
    "kimi": (
        KIMI,
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Zürich", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [("text", "Well."), *WEATHER, *call(1, "now")],
    ),
    "lfm": (
        LFM,
        "<|tool_call_start|>[weather(city='Zürich', days=2), now()]<|tool_call_end|>Done.",
        [*WEATHER, *call(1, "now"), ("text", "Done.")],
    ),
    "lfm of types": (
        LFM,
        '<|tool_call_start|>[a.b(exact=True, no=null, more={"k": [1, -2.5]}, text="a\\d\nb\\n")]'
        "<|tool_call_end|>",
        call(0, "a.b", exact=True, no=None, more={"k": [1, -2.5]}, text="a\\d\nb\n"),
    ),
    "lfm by position": (
        LFM,
        "<|tool_call_start|>weather('Zürich', 2)<|tool_call_end|>",
        WEATHER,
    ),
    "granite": (GRANITE, f"<|tool_call|>[{JSON}] So.", [*WEATHER, ("text", "So.")]),
    "nemotron": (NEMOTRON, f"<TOOLCALL>[{JSON}]</TOOLCALL>", WEATHER),
    "mistral with text": (
        MISTRAL,
        f"Well.[TOOL_CALLS][{JSON}] So.[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}} Yes",
        [("text", "Well."), *WEATHER, ("text", "So."), *call(1, "now"), ("text", "Yes")],
    ),
    "a closing tag in a string": (
        HERMES,
        f'<tool_call>{JSON[:-2]}, "x": "a </tool_call> b"}}}}</tool_call>',
        call(0, "weather", city="Zürich", days=2, x="a </tool_call> b"),
    ),
    "a string without an end": (
        HERMES,
        f'<tool_call>{{"name": "a</tool_call>\n<tool_call>{JSON}</tool_call>',
        [("text", '<tool_call>{"name": "a</tool_call>'), *WEATHER],
    ),
    "control characters in a string": (
        HERMES,
        "<tool_call>" + JSON.replace("Zürich", "Zür\n\tich") + "</tool_call>",
        call(0, "weather", city="Zür\n\tich", days=2),
    ),
    "a brace is missing": (HERMES, f"<tool_call>{JSON[:-1]}\n</tool_call>", WEATHER),
    "two braces are missing": (HERMES, f"<tool_call>{JSON[:-2]}</tool_call>", WEATHER),
    "a brace too many": (HERMES, f"<tool_call>{JSON}}}\n</tool_call>", WEATHER),
    "qwen xml without its first tag": (
        QWEN_XML,
        "Well.\n<function=now>\n</function>\n</tool_call>\n<function=weather><parameter=city>\nZürich\n"
        "</parameter><parameter=days>2</parameter></function> So.",
        [("text", "Well."), *call(0, "now"), *WEATHER_AGAIN, ("text", "So.")],
    ),
    "qwen xml with tags in a value": (
        QWEN_XML,
        "<tool_call><function=weather><parameter=city>\nA </parameter> b </function>\n</tool_call> "
        "c\n</parameter></function></tool_call>",
        call(0, "weather", city="A </parameter> b </function>\n</tool_call> c"),
    ),
    "qwen xml without the end of a value": (
        QWEN_XML,
        "<tool_call><function=weather><parameter=city>\nZürich\n<parameter=days>\n2\n</parameter>"
        "</tool_call>",
        WEATHER,
    ),
    "glm with tags in a value": (
        GLM,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>a </arg_value> b </tool_call> c"
        "</arg_value></tool_call>",
        call(0, "weather", city="a </arg_value> b </tool_call> c"),
    ),
    "thoughts that a call ends": (
        HERMES,
        f"<think>I look.\n<tool_call>{JSON}</tool_call>\n",
        [("reasoning", "I look."), *WEATHER],
    ),
    "thoughts that a call and their end close": (
        HERMES,
        f"<think>I look.\n<tool_call>{JSON}</tool_call>\n</think>\nSo.",
        [("reasoning", "I look."), *WEATHER, ("text", "So.")],
    ),
    "thoughts about a call": (
        HERMES,
        f"<think>a <tool_call>{JSON}</tool_call> b\n</think>c",
        [("reasoning", f"a <tool_call>{JSON}</tool_call> b"), ("text", "c")],
    ),
    "thoughts about a tag": (
        HERMES,
        "<think>a <tool_call> b <tool_call>{x</think>c",
        [("reasoning", "a <tool_call> b <tool_call>{x"), ("text", "c")],
    ),
    "a call instead of thoughts": (
        HERMES,
        f"<think>\n<tool_call>{JSON}</tool_call></think>So.",
        [*WEATHER, ("text", "So.")],
    ),
    "thoughts that begin twice": (
        HERMES,
        "<think>\n<think>so</think>yes",
        [("reasoning", "so"), ("text", "yes")],
    ),
    "a text about thoughts": (
        HERMES,
        "The tag `<think>` and  <think> in the </think> middle",
        [("text", "The tag `<think>` and  <think> in the </think> middle")],
    ),
    "harmony of no tool": (
        HARMONY,
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>yes",
        [("reasoning", "so"), ("text", "yes")],
    ),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Zürich", "days": 2}<|call|>',
        [("reasoning", "so"), ("text", "Looking."), *WEATHER],
    ),
    "harmony that names first": (
        HARMONY,
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary<|message|>"
        '{"city": "Zürich", "days": 2}',
        [*call(0, "now"), *call(1, "weather", city="Zürich", days=2)],
    ),
    "harmony final": (
        HARMONY,
        "<|channel|>analysis<|message|>so<|channel|>final <|constrain|>json<|message|>{}",
        [("reasoning", "so"), ("text", "{}")],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_family_is_read(name: str) -> None:
    given, text, parts = OUTPUTS[name]
    assert read(given, [text]) == parts
    assert read(given, [*text]) == parts


BROKEN = {
    "no json": (HERMES, "a\n<tool_call>{]</tool_call> b"),
    "no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "no object": (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    "no float": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    "not a number": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    "empty": (HERMES, "<tool_call></tool_call>"),
    "cut": (HERMES, '<tool_call>{"name": "now", "argum'),
    "deep": (HERMES, f"<tool_call>{'[' * 9999}</tool_call>"),
    "cut amid a value": (QWEN_XML, "<tool_call><function=weather><parameter=city>Zür"),
    "cut behind a tag in a value": (
        QWEN_XML,
        "<tool_call><function=weather><parameter=city>a </tool_call> b",
    ),
    "tags of no tool": (QWEN_XML, "see <function=foo> and </function>"),
    "an expression": (LFM, "<|tool_call_start|>[now(a=1+f())]<|tool_call_end|>"),
    "no text as key": (LFM, "<|tool_call_start|>[now(a={1: 2})]<|tool_call_end|>"),
    "deep calls": (LFM, f"<|tool_call_start|>{'(' * 999}<|tool_call_end|>"),
    "no function": (QWEN_XML, "<tool_call>weather</tool_call>"),
    "no value": (GLM, "<tool_call>now<arg_key>a</arg_key></tool_call>"),
    "no arguments": (MISTRAL, "[TOOL_CALLS]now"),
    "a text for no tool": (HARMONY, "<|channel|>commentary to=functions.f<|message|>now"),
    "another channel": (HARMONY, "<|channel|>other<|message|>text"),
    "a long header": (HARMONY, "<|channel|>" + "x" * 300 + "<|message|>text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_call_is_text_to_the_letter(name: str) -> None:
    given, text = BROKEN[name]
    assert read(given, [text]) == [("text", text)]


KIMI_CALL = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}"
TO_NOW = "<|channel|>commentary to=functions.now<|message|>"
# What comes before arguments and behind them.
AROUND = {
    "hermes": (HERMES, '<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"),
    "hermes with an id": (
        HERMES,
        '<tool_call>{"id": "a1", "type": "function", "name": "weather", "arguments": ',
        ', "index": 0}</tool_call>',
    ),
    "nemotron": (NEMOTRON, '<TOOLCALL>[{"name": "weather", "arguments": ', "}]</TOOLCALL>"),
    "granite": (GRANITE, '<|tool_call|>[{"name": "weather", "arguments": ', "}]"),
    "llama": (LLAMA, '{"name": "weather", "parameters": ', "}"),
    "llama by token": (LLAMA, '<|python_tag|>{"name": "weather", "parameters": ', "}"),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": ', "}]"),
    "mistral by name": (MISTRAL, "[TOOL_CALLS]weather[ARGS]", ""),
    "kimi": (KIMI, KIMI_CALL.format("weather", ""), "<|tool_call_end|>"),
    "deepseek v3": (DEEPSEEK, f"{BEGIN}function{SEP}weather\n```json\n", f"\n```{END}"),
    "deepseek v3.1": (DEEPSEEK, f"{BEGIN}weather{SEP}", END),
    "harmony": (HARMONY, TO_NOW.replace("now", "weather"), "<|call|>"),
    "harmony that names first": (
        HARMONY,
        " to=functions.weather<|channel|>commentary json<|message|>",
        "<|call|>",
    ),
}
# As models write them, and as they are sent: line ends in strings are escaped, nothing else.
LONG = '{"city":"a\\"}{\\u00fc\nb", "days" : 2,\n "more": {"x": ["}", "]"]}}'
SENT = '{"city":"a\\"}{\\u00fc\\nb", "days" : 2,\n "more": {"x": ["}", "]"]}}'


@pytest.mark.parametrize("name", AROUND)
def test_arguments_are_reported_while_they_are_written(name: str) -> None:
    """Each character of them as soon as it is there, and the name before the first of them."""
    given, before, behind = AROUND[name]
    parser = FormatParser(given, SCHEMAS, new_id=lambda: "c1")
    begun = [part for char in before for part in parser.feed(char)]
    assert begun == []
    opened = parser.feed(LONG[0])
    assert opened == [ToolOpen(0, "c1", "weather"), ToolDelta(0, "{")]
    sent = [part for char in LONG[1:-1] for part in parser.feed(char)]
    assert (
        "{" + "".join(part.arguments for part in sent if isinstance(part, ToolDelta)) == SENT[:-1]
    )
    assert len(sent) == len(LONG) - 2
    assert parser.feed("}") == [ToolDelta(0, "}"), ToolClose(0)]
    rest = [part for char in behind for part in parser.feed(char)]
    assert [*rest, *parser.finish()] == []


@pytest.mark.parametrize("name", AROUND)
def test_arguments_that_are_cut_off_stay_as_they_were_sent(name: str) -> None:
    given, before, _ = AROUND[name]
    for text in (LONG[:-1], LONG[:9], '{"city": tru}'):
        sent = text.replace("\nb", "\\nb")
        wanted = [("open", "0", "c1", "weather"), ("arguments", "0", sent), ("broken", "0")]
        assert read(given, [before + text]) == wanted
        assert read(given, [*(before + text)]) == wanted


MENDED = [name for name in AROUND if AROUND[name][2].endswith(">") and "```" not in AROUND[name][2]]


@pytest.mark.parametrize("name", MENDED)
def test_a_bracket_that_is_missing_is_sent_where_the_call_has_ended(name: str) -> None:
    given, before, behind = AROUND[name]
    cut, end = '{"city": "Zürich", "days": 2', behind[behind.rindex("<") :]
    assert read(given, [f"{before}{cut}{end}So."]) == [*WEATHER, ("text", "So.")]
    assert read(given, [*f"{before}{cut}{end}So."]) == [*WEATHER, ("text", "So.")]


SENT_AND_MORE: dict[str, tuple[OutputFormat, str, list[tuple[str, ...]]]] = {
    "a string without an end, and a call": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": "b</tool_call>\n'
        f"<tool_call>{JSON}</tool_call>",
        [
            ("open", "0", "c1", "now"),
            ("arguments", "0", f'{{"a": "b</tool_call>\\n<tool_call>{JSON}</tool_call>'),
            ("broken", "0"),
            *WEATHER_AGAIN,
        ],
    ),
    "a call without its end, and a call": (
        HERMES,
        f'<tool_call>{{"name": "now", "arguments": {{}}\n<tool_call>{JSON}</tool_call>',
        [*call(0, "now"), *WEATHER_AGAIN],
    ),
    "arguments before a name": (
        MISTRAL,
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, '
        '{"arguments": {"city": "Zürich", "days": 2}, "name": "weather"}]',
        [*call(0, "now"), *WEATHER_AGAIN],
    ),
    "a name that was not offered": (
        HERMES,
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}\n{JSON}</tool_call>',
        [*call(0, "f", a=1), *WEATHER_AGAIN],
    ),
    "arguments as a string": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "now", a=1),
    ),
    "text behind a call": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}} So </tool_call>',
        [*call(0, "now"), ("text", "So </tool_call>")],
    ),
    "no number": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        [("open", "0", "c1", "now"), ("arguments", "0", '{"a": NaN}'), ("broken", "0")],
    ),
    "a call without its last brace at the end": (HERMES, f"<tool_call>{JSON[:-1]}", WEATHER),
}


@pytest.mark.parametrize("name", SENT_AND_MORE)
def test_what_comes_with_arguments_that_were_sent_is_read(name: str) -> None:
    given, text, parts = SENT_AND_MORE[name]
    assert read(given, [text]) == parts
    assert read(given, [*text]) == parts


def test_a_call_amid_thoughts_waits_for_their_end() -> None:
    parser = FormatParser(HERMES, SCHEMAS, begun=THINK)
    assert parser.feed(f"<tool_call>{JSON}") == []
    assert joined([*parser.feed("</tool_call>\n"), *parser.finish()])[0][0] == "open"


def test_without_tools_nothing_is_a_call() -> None:
    text = f"<think>so</think><tool_call>{JSON}</tool_call>"
    assert read(HERMES, [text], tools=False) == [
        ("reasoning", "so"),
        ("text", f"<tool_call>{JSON}</tool_call>"),
    ]


@pytest.mark.parametrize("prompt", ["user: <think>\nassistant\n<think>\n", "<think>"])
def test_the_prompt_may_have_begun_to_think(prompt: str) -> None:
    assert read(HERMES, ["so\n</th", "ink>\nyes"], prompt=prompt) == [
        ("reasoning", "so"),
        ("text", "yes"),
    ]
    assert read(HERMES, ["so"], prompt="<think>\n\n</think>\n\n") == [("text", "so")]


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", JSON, "\n", " ", "text", "<", ">", "{",
    '"name"', "<|channel|>", "<|message|>", "analysis", "final", "commentary to=functions.now ",
    "<|start|>assistant", "<|end|>", "[TOOL_CALLS]", "now{}", "<function=now>", "</function>",
    "<parameter=city>", "</parameter>", "<function=weather>", "<arg_value>", "</arg_value>",
    "[ARGS]", "now", "[{", "}]", "}", '"', "\\", "<|tool_call_begin|>functions.now:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call_start|>", "now()",
    "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", "<channel|>", "<|channel>thought\n", ";",
    '<minimax:tool_call><invoke name="now">', "</invoke>", "</minimax:tool_call>", "<TOOLCALL>[",
    f"<tool_call>{JSON}</tool_call>", "<tool_call>{", "<|tool_call|>",
    '<tool_call>{"name": "now", "arguments": {', '"arguments": {"a": "', '[{"name": "now",', "},",
    "<arg_key>", BEGIN, SEP, END, '{"name": "now"}', " to=functions.now", "<|python_tag|>",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=14).map(
    "".join
)
FORMATS = st.sampled_from(
    [
        *(replace(one.given, fields=(*one.given.fields, THINK)) for one in FAMILIES),
        *(one.given for one in FAMILIES),
        GENERIC,
        replace(GENERIC, fields=(*GENERIC.fields, THINK)),
    ]
)


@settings(max_examples=300, deadline=None)
@given(given_format=FORMATS, text=TEXTS, data=st.data(), prompt=st.sampled_from(["", "<think>"]))
def test_pieces_make_no_difference(
    given_format: OutputFormat, text: str, data: st.DataObject, prompt: str
) -> None:
    whole = read(given_format, [text], prompt=prompt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(given_format, pieces, prompt=prompt) == whole
    assert read(given_format, [*text], prompt=prompt) == whole
    for opened, arguments, closed in zip(whole, whole[1:], whole[2:], strict=False):
        if opened[0] == "open":
            assert (arguments[0], arguments[1], closed[1]) == ("arguments", opened[1], opened[1])
            assert closed[0] == "broken" or isinstance(json.loads(arguments[2]), dict)


@settings(max_examples=150, deadline=None)
@given(given_format=FORMATS, text=st.text())
@example(HERMES, "<" * 500)
def test_text_without_delimiters_is_text(given_format: OutputFormat, text: str) -> None:
    if not any(sign in text for sign in ("<", "[", "{", "to=")):
        assert "".join(part[1] for part in read(given_format, [text])) == text


def test_templates_decide_and_plain_ones_leave_text_alone() -> None:
    assert isinstance(parser_for(like("{{ messages }} {{ tools }}")), PlainParser)
    assert isinstance(parser_for(like()), PlainParser)
    unlike = parser_for(like("<tool_call> arguments </think>"), TOOLS)
    told = f"<think>a</think><tool_call>{JSON}"
    parts = joined([*unlike.feed(told), *unlike.finish()])
    assert [part[0] for part in parts] == ["reasoning", "open", "arguments", "close"]
    own = parser_for(like("{{ messages }}", tool_template="tools <tool_call> arguments"), TOOLS)
    found = [*own.feed(f"<tool_call>{JSON}</tool_call>"), *own.finish()]
    assert isinstance(found[0], ToolOpen)
    parser = parser_for(like("<tool_call> arguments </think> tools"), TOOLS)
    assert joined([*parser.feed("<think>a</think>"), *parser.finish()]) == [("reasoning", "a")]
    assert not shows_special("<tool_call> arguments", tools=TOOLS)
    assert shows_special("<|channel|><|message|>")
    assert shows_special(f"<|start_header_id|>tools{LLAMA_CALL}", tools=TOOLS)
    assert not shows_special(f"<|start_header_id|>tools{LLAMA_CALL}")


@pytest.mark.parametrize(
    ("given", "text", "is_cut"),
    [
        (LFM, "a<|tool_call_start|>[now(a=", True),
        (LFM, "a<|tool_call_start|>[now()]<|tool_call_end|>", False),
        (LFM, "a<|tool_call_start|>[now(a=1+f())]<|tool_call_end|>b", False),
        (QWEN_XML, "<tool_call>\n<function=now>\n<parameter=a>", True),
        (HERMES, "<think>a", False),
        (HERMES, f"<tool_call>{JSON[:-1]}", False),
        (HERMES, f"<tool_call>[{JSON}, {JSON[:9]}", True),
        (HERMES, "about <tool_cal", False),
    ],
)
def test_a_call_that_a_text_ends_amid_is_known(
    given: OutputFormat, text: str, is_cut: bool
) -> None:
    for pieces in ([text], text):
        parser = FormatParser(given, SCHEMAS)
        for piece in pieces:
            parser.feed(piece)
        assert not parser.is_cut
        parser.finish()
        assert parser.is_cut is is_cut


def test_an_end_of_turn_in_letters_is_no_text() -> None:
    given = family("<arg_key>", "<tool_call>", "</think>", "<|role_end|>")
    for text, parts in (("So it is.", [("text", "So it is.")]), ("a</think>b", None)):
        wanted = parts or read(given, [text], prompt="<think>")
        for pieces in ([f"{text}<|role_end|>"], f"{text}<|role_end|>\n"):
            assert read(given, [*pieces], prompt="" if parts else "<think>") == wanted
    assert read(GLM, ["a<|role_end|>"]) == [("text", "a<|role_end|>")]


def test_a_family_that_thinks_has_thoughts() -> None:
    assert THINK in family("<tool_call>", "arguments", "</think>").fields
    assert THINK not in family("<tool_call>", "arguments").fields


@pytest.mark.parametrize(
    "template",
    [
        "tools <tool_calls>[{arguments}]</tool_calls> <tool_call>",
        "tools ']<]minimax[>[' <tool_call> <invoke name= arguments",
        "tools <|start_header_id|> >>>all name parameters",
        "tools <|start_header_id|> <function=f>{}</function> name parameters",
        "tools <function name= </think>",
        "tools <|START_ACTION|> tool_call_id parameters",
    ],
)
def test_no_family_is_taken_for_another(template: str) -> None:
    """MiniMax M1 and Apriel, MiniMax M3, Functionary (two), MiniCPM5, Command R."""
    found = format_of_family(template)
    assert found is None or not found.has_calls


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<seed:tool_call> <function= <parameter= </seed:think>", "seed"),
        ("<tool_call>\n<function= <parameter= </think>", "qwen_xml"),
        ("<minimax:tool_call> <invoke name= </think>", "minimax"),
        ("<tool_call> arguments </think>", "hermes"),
        ("<|im_start|> List of tools: [ </think>", "lfm"),
        ("<\uff5cDSML\uff5cfunction_calls> string= </think>", "dsml"),
    ],
)
def test_a_family_is_known_by_its_template(template: str, name: str) -> None:
    assert family("tools", template).name == name


def test_a_template_without_tools_has_its_own_calls_too() -> None:
    begin, end = (DEEPSEEK_TOKEN.format(f"calls\u2581{name}") for name in ("begin", "end"))
    parser = parser_for(like(f"{BEGIN} </think>"), TOOLS, new_id=lambda: "c1")
    text = f"<think>so</think>{begin}{BEGIN}now{SEP}{{}}{END}{end}"
    parts = joined([*parser.feed(text), *parser.finish()])
    assert parts == [("reasoning", "so"), *call(0, "now")]
    told = parser_for(like(f"{BEGIN} </think>"), TOOLS, new_id=lambda: "c1")
    assert joined([*told.feed('{"name": "now"}'), *told.finish()]) == call(0, "now")
    plain = parser_for(like("{{ messages }}"), TOOLS, new_id=lambda: "c1")
    trained = joined([*plain.feed('<tool_call>{"name": "now"}</tool_call>'), *plain.finish()])
    assert trained == call(0, "now")


def test_long_texts_take_as_long_as_they_are_long() -> None:
    """By counting: each character is looked at a bounded number of times."""
    text = "<tool_call>" + "x" * 20_000 + "<" * 5_000
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    assert read(HERMES, pieces) == [("text", text)]


MORE = call(1, "weather", city="Zürich", days=2)


@pytest.mark.parametrize("prompt", ["", "<think>"])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": "<think>x</think>"}', None),
        (f'{{"a": "<tool_call>{JSON}</tool_call>"}}', None),
        (f"<tool_call>{JSON}</tool_call>", WEATHER),
        (f"<tool_call>{JSON}</tool_call>\n" * 2, [*WEATHER, *MORE]),
        ("<tool_call>{}</tool_call> <tool_call>", None),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 999])
def test_text_of_a_form_is_text_from_its_first_character_on(
    text: str, wanted: list[tuple[str, ...]] | None, prompt: str, size: int
) -> None:
    thought = "so</think>\n" if prompt else "<think>so</think>\n"
    for before in (thought, "") if not prompt else (thought,):
        whole = before + text
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        found = read(HERMES.at_start(), pieces, prompt=prompt)
        expected = [("text", text)] if wanted is None else wanted
        assert found == [*([("reasoning", "so")] if before else []), *expected]


def test_a_call_that_begins_an_answer_may_come_behind_a_thought() -> None:
    given = replace(LLAMA, fields=(*LLAMA.fields, THINK))
    text = f"<think>so</think>{JSON}"
    for size in (1, 5, 999):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(given, pieces) == [("reasoning", "so"), *WEATHER]


def test_arguments_have_the_types_that_references_name() -> None:
    schema = {
        "properties": {"p": {"$ref": "#/$defs/P"}, "q": {"anyOf": [{"$ref": "#/$defs/P"}]}},
        "$defs": {"P": {"type": "object"}},
    }
    tools = [{"function": {"name": "f", "parameters": schema}}]
    text = "<tool_call><function=f><parameter=p>{}</parameter><parameter=q>{}</parameter>"
    parser = parser_for(like("tools <function= <parameter="), tools, new_id=lambda: "c1")
    parts = joined([*parser.feed(f"{text}</function></tool_call>"), *parser.finish()])
    assert parts == call(0, "f", p={}, q={})
