"""`outrider explain`: a formula, the numbers put in, the result, and where to read more.

What `outrider explain` can explain, in the order in which one would read it.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import fields, replace

from rich.style import Style

from outrider.cli.call import Call
from outrider.cli.explain_ahead import ahead, fan_out, published
from outrider.cli.explain_machine import batch, energy, roofline
from outrider.cli.explain_page import Explanation, Numbers, Topic, given
from outrider.cli.explain_rounds import acceptance, longest, one_round, speed_up
from outrider.cli.output import json_line, screen_table, table
from outrider.cli.paint import QUIET, Painter
from outrider.cli.plan_options import ExplainOptions
from outrider.core.errors import ConfigError

_DEVICE = ("parameters", "bandwidth", "tflops")

TOPICS = (
    Topic(
        name="round",
        text="One round by hand: accept, refuse, recover.",
        explain=one_round,
    ),
    Topic(
        name="acceptance",
        text="How much of a draft is kept.",
        explain=acceptance,
        takes=("alpha", "k"),
    ),
    Topic(
        name="speed-up",
        text="What a round brings over plain decoding.",
        explain=speed_up,
        takes=("alpha", "k", "c", "verify"),
    ),
    Topic(
        name="best-k",
        text="How long to draft, and when not to.",
        explain=longest,
        takes=("alpha", "c", "verify"),
    ),
    Topic(
        name="roofline",
        text="What a pass waits for: memory or arithmetic.",
        explain=roofline,
        takes=_DEVICE,
    ),
    Topic(
        name="batch",
        text="Speculation for many sequences at once, and with long contexts.",
        explain=batch,
        takes=("alpha", "k", "c", "batch", "context", *_DEVICE),
    ),
    Topic(
        name="ssd",
        text="Drafting ahead of the verdict.",
        explain=ahead,
        takes=("alpha", "k", "c", "p_hit", "batch"),
    ),
    Topic(
        name="fan-out",
        text="Which verdicts to draft for.",
        explain=fan_out,
        takes=("alpha", "k", "branches"),
    ),
    Topic(
        name="energy",
        text="Joules a token: saved too, but not as much as time.",
        explain=energy,
        takes=("alpha", "k", "c", "watts", *_DEVICE),
    ),
    Topic(
        name="published",
        text="A published prediction that does not follow from its inputs.",
        explain=published,
    ),
)


_WIDTH = 80
_BOLD, _FORMULA = Style.parse("bold"), Style.parse("cyan")


def explain(call: Call[ExplainOptions]) -> int:
    if call.argument is None:
        _numbers(None, call.options)
        return _list(as_json=call.options.json)
    topic = next(topic for topic in TOPICS if topic.name == call.argument)
    numbers = _numbers(topic, call.options)
    found = topic.explain(numbers)
    if call.options.json:
        used = {name: getattr(numbers, name) for name in topic.takes}
        print(json_line({"topic": topic.name, "given": used, **found.to_dict()}))
    else:
        _show(topic, numbers, found)
    return 0


def _list(*, as_json: bool) -> int:
    if as_json:
        print(json_line([{"topic": t.name, "text": t.text, "takes": t.takes} for t in TOPICS]))
        return 0
    rows = [(topic.name, topic.text, " ".join(map(_flag, topic.takes))) for topic in TOPICS]
    print(screen_table(rows, header=("topic", "explains", "takes")))
    print("\nOne of them: outrider explain speed-up --alpha 0.8 --k 4 --c 0.1")
    return 0


def _numbers(topic: Topic | None, options: ExplainOptions) -> Numbers:
    """Those given, and the rest as they are. Raises ConfigError for one that has no place."""
    asked = {item.name: getattr(options, item.name) for item in fields(Numbers)}
    asked = {name: value for name, value in asked.items() if value is not None}
    if topic is None:
        if asked:
            raise ConfigError(f"{_flag(next(iter(asked)))}, but no topic.", hint="outrider explain")
        return Numbers()
    strange = [name for name in asked if name not in topic.takes]
    if strange:
        takes = " ".join(map(_flag, topic.takes)) or "no numbers"
        raise ConfigError(
            f"{topic.name} has no {_flag(strange[0])} in its formula.",
            hint=f"outrider explain {topic.name} takes {takes}",
        )
    return replace(Numbers(), **asked)


def _show(topic: Topic, numbers: Numbers, found: Explanation) -> None:
    painter = Painter("auto", sys.stdout)
    painter.write(f"{found.title}\n\n", _BOLD)
    _paragraph(painter, found.idea)
    for line in found.formula:
        painter.write(f"  {line}\n", _FORMULA)
    _block(painter, table(given(numbers, topic.takes)))
    for step in found.steps:
        value = f"{step.value:.3f} {step.unit}".rstrip()
        painter.write(f"\n  {step.name} = {step.worked} = ", Style.null())
        painter.write(value, _BOLD)
    painter.write("\n", Style.null())
    _block(painter, table(found.rows, header=found.header) if found.rows else "")
    painter.write("\n", Style.null())
    _paragraph(painter, found.result)
    painter.line("\n".join(["Read more:", *(f"  {place}" for place in found.more)]))


def _paragraph(painter: Painter, text: str) -> None:
    wrapped = textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    painter.write(f"{wrapped}\n\n", Style.null())


def _block(painter: Painter, text: str) -> None:
    if text:
        painter.write("\n" + textwrap.indent(text, "  ") + "\n", QUIET)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
