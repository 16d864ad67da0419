"""`outrider explain`: a formula, the numbers put in, the result, and where to read more.

explain.yaml has the words of every topic; explain_topics.py computes what they name.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Any

import yaml
from rich.style import Style

from outrider.cli.call import Call
from outrider.cli.explain_topics import WORKED
from outrider.cli.output import json_line, line_width, screen_table
from outrider.cli.paint import QUIET, Painter
from outrider.cli.run_options import ExplainOptions
from outrider.core.errors import ConfigError

_PIPED_WIDTH = 80
_BOLD, _FORMULA = Style.parse("bold"), Style.parse("cyan")
# How formulas write the numbers.
_SIGNS = {
    "k": "K",
    "verify": "v",
    "batch": "b",
    "context": "n",
    "p_hit": "p",
    "branches": "B",
    "parameters": "N",
    "bandwidth": "BW",
    "tflops": "F",
    "watts": "P",
}


@cache
def topics() -> Mapping[str, Any]:
    """The words of every topic, by its name."""
    return yaml.safe_load(files("outrider.cli").joinpath("explain.yaml").read_text("utf-8"))


def explain(call: Call[ExplainOptions]) -> int:
    _check_given(call)
    name, numbers = call.argument, call.options
    if name is None:
        _list(as_json=numbers.json)
        return 0
    takes = topics()[name].get("takes", [])
    found = explained(name, numbers)
    if numbers.json:
        used = {name: getattr(numbers, name) for name in takes}
        print(json_line({"topic": name, "given": used, **found}))
    else:
        _show(found, numbers, takes)
    return 0


def _list(*, as_json: bool) -> None:
    listed = [(name, words["text"], words.get("takes", [])) for name, words in topics().items()]
    if as_json:
        print(json_line([{"topic": n, "text": text, "takes": takes} for n, text, takes in listed]))
        return
    rows = [(name, text, " ".join(map(_flag, takes))) for name, text, takes in listed]
    print(screen_table(rows, header=("topic", "explains", "takes")))
    print("\nOne of them:\n  outrider explain speed-up --alpha 0.8 --k 4 --c 0.1")


def _check_given(call: Call[ExplainOptions]) -> None:
    """Raises ConfigError for a number that the topic has no use for."""
    asked = [item.name for item in fields(call.options) if item.name in call.given - {"json"}]
    if call.argument is None:
        if asked:
            raise ConfigError(f"{_flag(asked[0])}, but no topic.", hint="outrider explain")
        return
    takes = topics()[call.argument].get("takes", [])
    strange = [name for name in asked if name not in takes]
    if strange:
        wanted = " ".join(map(_flag, takes)) or "no numbers"
        raise ConfigError(
            f"{call.argument} has no {_flag(strange[0])} in its formula.",
            hint=f"outrider explain {call.argument} takes {wanted}",
        )


def explained(name: str, numbers: ExplainOptions) -> dict[str, Any]:
    """The words of a topic with the numbers put in, its steps and its table."""
    words = topics()[name]
    worked, found = WORKED[name](numbers)
    given = {item.name: getattr(numbers, item.name) for item in fields(numbers)}
    values: dict[str, Any] = given | worked

    def filled(text: str) -> str:
        return text.format(**values)

    def value_of(key: str) -> float:
        return Formatter().get_field(key, (), values)[0]

    steps = [
        {"name": filled(name), "worked": filled(how), "value": value_of(key), "unit": unit}
        for name, how, key, unit in words["steps"]
    ]
    columns: Mapping[str, str] = words.get("columns", {})
    shapes = columns.values()
    return {
        "title": words["title"],
        "idea": filled(words["idea"]),
        "formula": [filled(line) for line in words["formula"]],
        "steps": steps,
        "header": list(columns),
        "rows": [[f.format(v) for f, v in zip(shapes, row, strict=True)] for row in found],
        "result": filled(words["result"]),
        "more": words["more"],
    }


def _show(found: Mapping[str, Any], numbers: ExplainOptions, takes: list[str]) -> None:
    painter = Painter("auto", sys.stdout)
    painter.write(f"{found['title']}\n\n", _BOLD)
    _paragraph(painter, found["idea"])
    for line in found["formula"]:
        painter.write(f"  {line}\n", _FORMULA)
    helps = {item.name: item.meta.help for item in ExplainOptions.verb.own_options()}
    given = [
        (_SIGNS.get(name, name), f"{getattr(numbers, name):g}", _flag(name), helps[name])
        for name in takes
    ]
    _block(painter, _indented_table(given))
    for step in found["steps"]:
        painter.write(f"\n  {step['name']} = {step['worked']} = ", Style.null())
        painter.write(f"{step['value']:.3f} {step['unit']}".rstrip(), _BOLD)
    painter.write("\n", Style.null())
    _block(painter, _indented_table(found["rows"], found["header"]) if found["rows"] else "")
    painter.write("\n", Style.null())
    _paragraph(painter, found["result"])
    painter.line("\n".join(["Read more:", *(f"  {place}" for place in found["more"])]))


def _paragraph(painter: Painter, text: str) -> None:
    wrapped = textwrap.fill(
        text, line_width(_PIPED_WIDTH), break_long_words=False, break_on_hyphens=False
    )
    painter.write(f"{wrapped}\n\n", Style.null())


def _block(painter: Painter, text: str) -> None:
    if text:
        painter.write("\n" + textwrap.indent(text, "  ") + "\n", QUIET)


def _indented_table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    return screen_table(rows, header=header, indent=2)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
