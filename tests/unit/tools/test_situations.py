"""Situations in which other servers' parsers are tested, in every family that has calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from outrider.plugins.tools.calls import DEEPSEEK_TOKEN
from outrider.plugins.tools.fields import OutputFormat
from outrider.plugins.tools.formats import FAMILIES
from outrider.plugins.tools.parser import FormatParser
from outrider.server.parts import TextDelta, ToolDelta, ToolOpen

FORMATS: Mapping[str, OutputFormat] = {one.given.name: one.given for one in FAMILIES}
SEP, BEGIN, END, ALL, DONE = (
    DEEPSEEK_TOKEN.format(name.replace(" ", "\u2581"))
    for name in ("sep", "call begin", "call end", "calls begin", "calls end")
)
DSML = "\uff5cDSML\uff5c"
MAYBE = [{"type": "null"}]
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "tide": {
        "harbour": {"type": "string"},
        "hours": {"type": "integer"},
        "height": {"type": "number"},
        "metric": {"type": "boolean"},
        "buoy": {"type": ["null", "integer"]},
        "gauges": {"anyOf": [{"type": "array"}, *MAYBE]},
        "limits": {"oneOf": [{"type": "object"}, *MAYBE]},
    },
    "port.list": {"first": {"anyOf": [{"type": "integer"}, *MAYBE]}},
    "moon": {},
}
Arguments = Mapping[str, Any]
Writer = Callable[[str, Arguments], str]


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    return value if isinstance(value, str) else as_json(value)


def pairs(arguments: Arguments, pair: str, value: Callable[[object], str] = plain) -> str:
    return "".join(
        pair.replace("KEY", key).replace("VALUE", value(one)) for key, one in arguments.items()
    )


def by_json(before: str, behind: str, key: str = "arguments") -> Writer:
    return lambda name, given: f"{before}{as_json({'name': name, key: given})}{behind}"


def gemma(quote: str, begin: str, end: str) -> Writer:
    def value(one: object) -> str:
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in one.items()) + "}"  # pyright: ignore
        if isinstance(one, list):
            return "[" + ",".join(map(value, one)) + "]"  # pyright: ignore
        return f"{quote}{one}{quote}" if isinstance(one, str) else as_json(one)

    return lambda name, given: f"{begin}call:{name}{value(dict(given))}{end}"


def dsml(name: str, given: Arguments) -> str:
    keys = "".join(
        f'<{DSML}parameter name="{key}" string="{str(isinstance(one, str)).lower()}">{plain(one)}'
        f"</{DSML}parameter>\n"
        for key, one in given.items()
    )
    return (
        f'<{DSML}function_calls>\n<{DSML}invoke name="{name}">\n{keys}</{DSML}invoke>\n'
        f"</{DSML}function_calls>"
    )


WRITERS: Mapping[str, Writer] = {
    "hermes": by_json("<tool_call>\n", "\n</tool_call>"),
    "nemotron": by_json("<TOOLCALL>[", "]</TOOLCALL>"),
    "granite": by_json("<|tool_call|>[", "]"),
    "llama": by_json("", "", "parameters"),
    "mistral": lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}",
    "kimi": lambda name, given: (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{as_json(given)}"
        "<|tool_call_end|>"
    ),
    "deepseek": lambda name, given: f"{BEGIN}{name}{SEP}{as_json(given)}{END}",
    "harmony": lambda name, given: (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{as_json(given)}<|call|>"
    ),
    "qwen_xml": lambda name, given: (
        f"<tool_call>\n<function={name}>\n"
        + pairs(given, "<parameter=KEY>\nVALUE\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "seed": lambda name, given: (
        f"<seed:tool_call>\n<function={name}>\n"
        + pairs(given, "<parameter=KEY>VALUE</parameter>\n")
        + "</function>\n</seed:tool_call>"
    ),
    "minimax": lambda name, given: (
        f'<minimax:tool_call>\n<invoke name="{name}">\n'
        + pairs(given, '<parameter name="KEY">VALUE</parameter>\n')
        + "</invoke>\n</minimax:tool_call>"
    ),
    "glm": lambda name, given: (
        f"<tool_call>{name}\n"
        + pairs(given, "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
        + "</tool_call>"
    ),
    "dsml": dsml,
    "lfm": lambda name, given: (
        f"<|tool_call_start|>[{name}("
        + ", ".join(f"{key}={one!r}" for key, one in given.items())
        + ")]<|tool_call_end|>"
    ),
    "gemma": gemma('<|"|>', "<|tool_call>", "<tool_call|>"),
    "function_gemma": gemma("<escape>", "<start_function_call>", "<end_function_call>"),
}
VALUES: Arguments = {
    "harbour": "Cuxhaven",
    "hours": 12,
    "height": 2.75,
    "metric": False,
    "buoy": None,
    "gauges": [3, "x", {"y": []}],
    "limits": {"low": -1.5, "in": {"deep": True}},
}
SIGNS = "C:\\tmp \"q\" 'r' <b>&amp;</b> {x} [y] ü 🌊 \\n"


class Situation(NamedTuple):
    """What a model of `family` writes, and the text and calls in it."""

    family: str
    text: str
    content: str
    calls: Sequence[tuple[str, Arguments]]


def of_every_family() -> Iterator[tuple[str, Situation]]:
    for family, call in WRITERS.items():
        tide, first = call("tide", VALUES), call("port.list", {"first": 5})
        moon, between = call("moon", {}), "; " if family == "llama" else "\n"
        wanted: tuple[str, Arguments] = ("tide", VALUES)
        say = "<|channel|>final<|message|>{}<|end|>" if family == "harmony" else "{}"
        yield f"{family}: values of all types", Situation(family, tide, "", [wanted])
        yield f"{family}: no arguments", Situation(family, moon, "", [("moon", {})])
        yield (
            f"{family}: a dotted name",
            Situation(family, first, "", [("port.list", {"first": 5})]),
        )
        yield (
            f"{family}: three calls",
            Situation(
                family,
                between.join([moon, tide, first]),
                "",
                [("moon", {}), wanted, ("port.list", {"first": 5})],
            ),
        )
        yield (
            f"{family}: text before a call",
            Situation(
                family, f"{say.format('At what time? {So}')}{tide}", "At what time? {So}", [wanted]
            ),
        )
        yield (
            f"{family}: signs in a text",
            Situation(family, call("tide", {"harbour": SIGNS}), "", [("tide", {"harbour": SIGNS})]),
        )
        yield (
            f"{family}: no call",
            Situation(family, say.format("Ebb < flow, 1 > 0."), "Ebb < flow, 1 > 0.", []),
        )


def dsml_values(*values: tuple[str, str, str]) -> str:
    return dsml("tide", {}).replace(
        f"</{DSML}invoke>",
        "".join(
            f'<{DSML}parameter name="{key}" string="{says}">{text}</{DSML}parameter>'
            for key, says, text in values
        )
        + f"</{DSML}invoke>",
    )


def python(text: str) -> str:
    return f"<|tool_call_start|>{text}<|tool_call_end|>"


def kimi(name: str, body: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{body}<|tool_call_end|>"


EMDEN = ("tide", {"harbour": "Emden"})
EMDEN_JSON = '{"harbour": "Emden"}'
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
LOST = (
    "<function=tide>\n<parameter=harbour>\nEmden\n<parameter=hours>\n3\n</parameter>\n</function>"
)
EMDEN_3 = ("tide", {"harbour": "Emden", "hours": 3})
SHELL = "sed -n '3,9p' a.py | grep \"x\", y"
SITUATIONS: dict[str, Situation] = {
    **dict(of_every_family()),
    "hermes: no line ends": Situation(
        "hermes", f'<tool_call>{{"name":"tide","arguments":{EMDEN_JSON}}}</tool_call>', "", [EMDEN]
    ),
    "hermes: no closing tag": Situation(
        "hermes", f'<tool_call>\n{{"name": "tide", "arguments": {EMDEN_JSON}}}', "", [EMDEN]
    ),
    "hermes: arguments as a string": Situation(
        "hermes",
        f'<tool_call>{{"name": "tide", "arguments": {json.dumps(EMDEN_JSON)}}}</tool_call>',
        "",
        [EMDEN],
    ),
    "hermes: indented over several lines": Situation(
        "hermes",
        "<tool_call>\n"
        + json.dumps({"name": "tide", "arguments": EMDEN[1]}, indent=2)
        + "\n</tool_call>",
        "",
        [EMDEN],
    ),
    "llama: text around calls": Situation(
        "llama",
        f'Look: {{"name": "tide", "parameters": {EMDEN_JSON}}}; '
        '{"name": "moon", "parameters": {}} '
        "More {of} this?",
        "Look: More {of} this?",
        [EMDEN, ("moon", {})],
    ),
    "llama: the other key": Situation(
        "llama", f'{{"name": "tide", "arguments": {EMDEN_JSON}}}', "", [EMDEN]
    ),
    "llama: no separator": Situation(
        "llama",
        '{"name": "moon", "parameters": {}}{"name": "moon", "parameters": {}}',
        "",
        [("moon", {})] * 2,
    ),
    "llama: a line end as separator": Situation(
        "llama",
        '{"name": "moon", "parameters": {}}\n{"name": "moon", "parameters": {}}',
        "",
        [("moon", {})] * 2,
    ),
    "llama: no name": Situation("llama", '{"parameters": {}}', '{"parameters": {}}', []),
    "llama: an object behind a call": Situation(
        "llama",
        f'{{"name": "tide", "parameters": {EMDEN_JSON}}} I sent {EMDEN_JSON}',
        f"I sent {EMDEN_JSON}",
        [EMDEN],
    ),
    "mistral: a list": Situation(
        "mistral",
        'Wait.[TOOL_CALLS]  [ {"name":"moon" , "arguments" : {} },{"name": "tide", "arguments": '
        f"{EMDEN_JSON}}}]\nmore",
        "Wait.more",
        [("moon", {}), EMDEN],
    ),
    "mistral: arguments before the name": Situation(
        "mistral", f'[TOOL_CALLS] [{{"arguments": {EMDEN_JSON}, "name": "tide"}}]', "", [EMDEN]
    ),
    "mistral: a name among the arguments": Situation(
        "mistral",
        '[TOOL_CALLS] [{"arguments": {"harbour": "a", "name": "b"}, "name": "tide"}]',
        "",
        [("tide", {"harbour": "a", "name": "b"})],
    ),
    "mistral: braces before and in a value": Situation(
        "mistral",
        'a{b[TOOL_CALLS]tide{"harbour": "f(\\"x\\")\\n{}"}',
        "a{b",
        [("tide", {"harbour": 'f("x")\n{}'})],
    ),
    "kimi: a section": Situation(
        "kimi",
        f"Both. {SECTION[0]}{kimi('functions.moon:0 ', '{}')}"
        f"{kimi('tide:1', EMDEN_JSON)}{SECTION[1]}",
        "Both.",
        [("moon", {}), EMDEN],
    ),
    "kimi: an empty section": Situation("kimi", f"None. {SECTION[0]}{SECTION[1]}", "None.", []),
    "kimi: a brace is missing": Situation(
        "kimi",
        kimi("functions.tide:0", EMDEN_JSON[:-1]) + kimi("functions.moon:1", "{}"),
        "",
        [EMDEN, ("moon", {})],
    ),
    "kimi: several lines": Situation(
        "kimi", kimi("functions.tide:0", '{\n "harbour": "Emden"\n} '), "", [EMDEN]
    ),
    "kimi: a number for the name": Situation("kimi", kimi("0", EMDEN_JSON), "", [EMDEN]),
    "kimi: a number that fits several tools": Situation(
        "kimi", kimi("0", "{}"), kimi("0", "{}").removesuffix("<|tool_call_end|>"), []
    ),
    "deepseek: a block": Situation(
        "deepseek",
        f"So{ALL}{BEGIN}tide{SEP}{EMDEN_JSON}{END}{BEGIN}moon{SEP}{{}}{END}{DONE}",
        "So",
        [EMDEN, ("moon", {})],
    ),
    "deepseek: the older form": Situation(
        "deepseek",
        f"{ALL}{BEGIN}function{SEP}tide\n```json\n{EMDEN_JSON}\n```{END}{DONE}",
        "",
        [EMDEN],
    ),
    "dsml: text for a number": Situation(
        "dsml", dsml_values(("hours", "true", "9")), "", [("tide", {"hours": 9})]
    ),
    "dsml: text for an object": Situation(
        "dsml", dsml_values(("limits", "true", '{"a": 1}')), "", [("tide", {"limits": {"a": 1}})]
    ),
    "dsml: null for a text": Situation(
        "dsml", dsml_values(("harbour", "false", "null")), "", [("tide", {"harbour": "null"})]
    ),
    "dsml: null": Situation(
        "dsml", dsml_values(("buoy", "false", "null")), "", [("tide", {"buoy": None})]
    ),
    "dsml: no number": Situation(
        "dsml", dsml_values(("hours", "false", "soon")), "", [("tide", {"hours": "soon"})]
    ),
    "dsml: no schema": Situation(
        "dsml",
        dsml_values(("x", "false", "7"), ("y", "true", "7")),
        "",
        [("tide", {"x": 7, "y": "7"})],
    ),
    "dsml: arguments in an object": Situation(
        "dsml", dsml_values(("arguments", "false", EMDEN_JSON)), "", [EMDEN]
    ),
    "dsml: arguments in a text": Situation(
        "dsml", dsml_values(("input", "true", EMDEN_JSON)), "", [EMDEN]
    ),
    "dsml: two calls in a block": Situation(
        "dsml",
        dsml("moon", {}).replace(
            f"</{DSML}invoke>", f'</{DSML}invoke>\n<{DSML}invoke name="moon">\n</{DSML}invoke>'
        ),
        "",
        [("moon", {})] * 2,
    ),
    "qwen_xml: no first tag": Situation("qwen_xml", f"Well. {LOST}", "Well.", [EMDEN_3]),
    "qwen_xml: the end of a value is missing": Situation(
        "qwen_xml", f"<tool_call>\n{LOST}\n</tool_call>", "", [EMDEN_3]
    ),
    "qwen_xml: a value of several lines": Situation(
        "qwen_xml",
        '<tool_call>\n<function=tide>\n<parameter=limits>\n{"a":\n 1}\n</parameter>\n</function>\n'
        "</tool_call>",
        "",
        [("tide", {"limits": {"a": 1}})],
    ),
    "qwen_xml: text of a number": Situation(
        "qwen_xml",
        "<tool_call>\n<function=tide>\n<parameter=harbour>\n7\n</parameter>\n</function>\n</tool_call>",
        "",
        [("tide", {"harbour": "7"})],
    ),
    "seed: thoughts with a budget": Situation(
        "seed",
        "<seed:think>I have <seed:cot_budget_reflect>9 left</seed:cot_budget_reflect>"
        "</seed:think>\n" + WRITERS["seed"]("moon", {}),
        "",
        [("moon", {})],
    ),
    "seed: thoughts about a call": Situation(
        "seed",
        f"<seed:think>Say {WRITERS['seed']('tide', EMDEN[1])}. So.</seed:think>"
        + WRITERS["seed"]("moon", {}),
        "",
        [("moon", {})],
    ),
    "minimax: two calls in a block": Situation(
        "minimax",
        '<minimax:tool_call><invoke name="moon"></invoke><invoke name="tide">'
        '<parameter name="harbour">Emden</parameter></invoke></minimax:tool_call>',
        "",
        [("moon", {}), EMDEN],
    ),
    "glm: all in one line": Situation(
        "glm",
        "<tool_call>tide<arg_key>harbour</arg_key><arg_value>Emden</arg_value></tool_call>",
        "",
        [EMDEN],
    ),
    "glm: arguments in a text": Situation(
        "glm",
        f"<tool_call>tide<arg_key>input</arg_key><arg_value>{EMDEN_JSON}</arg_value></tool_call>",
        "",
        [EMDEN],
    ),
    "glm: a name and a line end": Situation(
        "glm", "  \n<tool_call>moon\n</tool_call>", "", [("moon", {})]
    ),
    "gemma: a quoted key": Situation(
        "gemma",
        '<|tool_call>call:tide{limits:{<|"|>3<|"|>:<|"|>x<|"|>}}<tool_call|>',
        "",
        [("tide", {"limits": {"3": "x"}})],
    ),
    "gemma: a hyphen in the name": Situation(
        "gemma", "<|tool_call>call:sea-state{}<tool_call|>", "", [("sea-state", {})]
    ),
    "gemma: cut off": Situation(
        "gemma",
        '<|tool_call>call:tide{harbour:<|"|>Em',
        '<|tool_call>call:tide{harbour:<|"|>Em',
        [],
    ),
    "harmony: several lines": Situation(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.tide<|message|>{\n"harbour": "Emden"\n}<|call|>',
        "",
        [EMDEN],
    ),
    "harmony: no body": Situation(
        "harmony",
        "<|channel|>commentary to=functions.moon <|constrain|>json<|message|><|call|>",
        "",
        [("moon", {})],
    ),
    "harmony: an answer behind a call": Situation(
        "harmony",
        WRITERS["harmony"]("moon", {})
        + "<|start|>assistant<|channel|>final<|message|>Full.<|end|>",
        "Full.",
        [("moon", {})],
    ),
    "lfm: two calls in a list": Situation(
        "lfm", python("[moon(), tide(harbour='Emden')]") + "\nDone.", "Done.", [("moon", {}), EMDEN]
    ),
    "lfm: blanks before the list": Situation("lfm", python(" [moon()]"), "", [("moon", {})]),
    "lfm: nothing in the list": Situation("lfm", python("[]"), python("[]"), []),
    "lfm: a set": Situation(
        "lfm", python("[tide(gauges={'a'})]"), "", [("tide", {"gauges": ["a"]})]
    ),
    "lfm: zeros before a number": Situation(
        "lfm", python("[tide(hours=07, height=0.5)]"), "", [("tide", {"hours": 7, "height": 0.5})]
    ),
    "lfm: a bracket in a text": Situation(
        "lfm", python("""[tide(harbour='grep "]" a')]"""), "", [("tide", {"harbour": 'grep "]" a'})]
    ),
    "lfm: lines in a text": Situation(
        "lfm", python("[tide(harbour='a <<E\nb\nE')]"), "", [("tide", {"harbour": "a <<E\nb\nE"})]
    ),
    "lfm: a backslash before a line end": Situation(
        "lfm", python("[tide(harbour='a \\\n b')]"), "", [("tide", {"harbour": "a \\\n b"})]
    ),
    "lfm: a zero byte": Situation(
        "lfm", python("[tide(harbour='a\0b')]"), "", [("tide", {"harbour": "a\0b"})]
    ),
    "lfm: quotes in a text": Situation(
        "lfm",
        python(f"[tide(harbour='{SHELL}', hours=3), moon()]"),
        "",
        [("tide", {"harbour": SHELL, "hours": 3}), ("moon", {})],
    ),
    "lfm: code in a text": Situation(
        "lfm",
        python("[tide(harbour='py -c \"f(1,\ng='\\,'))\"')]"),
        "",
        [("tide", {"harbour": "py -c \"f(1,\ng='\\,'))\""})],
    ),
}
# Read in another way than other servers do, each for a reason.
DIFFERENT: dict[str, Situation] = {
    # Arguments are an object in all three APIs.
    "hermes: a text for arguments": Situation(
        "hermes",
        '<tool_call>{"name": "tide", "arguments": "Emden"}</tool_call>',
        '<tool_call>{"name": "tide", "arguments": "Emden"}</tool_call>',
        [],
    ),
    # An object with the name of an offered tool alone is a call of it; others have it as text.
    "llama: no arguments at all": Situation("llama", '{"name": "moon"}', "", [("moon", {})]),
    # No text is left out: others drop the call that cannot be read.
    "lfm: a value that JSON has not": Situation(
        "lfm", python("[moon(), tide(harbour=b'x')]"), python("[moon(), tide(harbour=b'x')]"), []
    ),
    # No text is left out: others drop the echo, and all text in and behind a section.
    "lfm: a call once more": Situation(
        "lfm", python("[moon()]") + "[moon()]", "[moon()]", [("moon", {})]
    ),
    "kimi: text in a section": Situation(
        "kimi",
        f"{SECTION[0]} hm {kimi('functions.moon:0', '{}')}{SECTION[1]} So",
        "hm So",
        [("moon", {})],
    ),
    # A name without a number is a name; others leave the call out.
    "kimi: no number": Situation("kimi", kimi("functions.moon", "{}"), "", [("moon", {})]),
    # Control tokens are left out of a text; others show them.
    "deepseek: no calls in a block": Situation("deepseek", f"So{ALL}tide", "Sotide", []),
}


def read(one: Situation, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The text, blanks apart, and the calls."""
    parser = FormatParser(FORMATS[one.family], SCHEMAS)
    content, calls = "", list[list[str]]()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    for part in [*parts, *parser.finish()]:
        match part:
            case TextDelta(text):
                content += text
            case ToolOpen(name=name):
                calls.append([name, ""])
            case ToolDelta(arguments=arguments):
                calls[-1][1] += arguments
            case _:
                pass
    return "".join(content.split()), [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("name", [*SITUATIONS, *DIFFERENT])
def test_a_situation_is_read(name: str) -> None:
    one = {**SITUATIONS, **DIFFERENT}[name]
    wanted = ("".join(one.content.split()), [(name, dict(given)) for name, given in one.calls])
    assert read(one, [one.text]) == wanted
    assert read(one, [*one.text]) == wanted
    chance = random.Random(name)
    cuts = sorted(chance.randrange(len(one.text) + 1) for _ in range(4))
    pieces = [one.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(one.text)], strict=True)]
    assert read(one, pieces) == wanted


def test_every_family_with_calls_is_here_and_few_situations_differ() -> None:
    assert WRITERS.keys() == {one.name for one in FORMATS.values() if one.has_calls}
    assert len(DIFFERENT) <= 0.05 * len(SITUATIONS)
