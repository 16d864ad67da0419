"""`outrider generate`: complete one prompt."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.cli.call import Call
from outrider.cli.options import GenerateOptions
from outrider.cli.output import check_writable, json_line, write_whole
from outrider.core.errors import ConfigError


def generate(call: Call[GenerateOptions]) -> int:
    from outrider.cli.compare import compare_with_off
    from outrider.cli.paint import Painter
    from outrider.cli.session import open_llm, run_record, show

    shown, resolved = call.options, call.resolved
    text = _read_stdin(call.argument) if shown.stdin else _given(call.argument)
    output = None if shown.output is None else Path(shown.output)
    if output is not None:
        check_writable(output)
    llm = open_llm(resolved)
    if shown.compare and llm.drafter == "none":
        raise ConfigError("--compare: speculation is off already.", hint="choose a --drafter")
    painter = None if shown.json else Painter(resolved.program().color, sys.stdout)
    if painter is not None and painter.colored:
        painter.write(text)
    reply = show(llm, llm.stream(text, resolved.sampling()), painter)
    if painter is not None:
        painter.close_text(() if shown.quiet else reply.seen)
    comparison = compare_with_off(llm, text, resolved) if shown.compare else None
    if painter is not None and not shown.quiet:
        verdict = [reply.result.summary(), *([comparison.summary()] if comparison else [])]
        painter.line(" · ".join(verdict))
    record = reply.result.to_dict() | {"run": run_record(llm, resolved)}
    if comparison:
        record["compare"] = comparison.to_dict()
    if shown.json:
        print(json_line(record))
    if output is not None:
        write_whole(output, json_line(record) + "\n")
    return 0


def _given(prompt: str | None) -> str:
    if prompt is None:
        raise ConfigError("no prompt.", hint='outrider generate "def f(x):", or - to read stdin')
    return prompt


def _read_stdin(prompt: str | None) -> str:
    if prompt is not None:
        raise ConfigError("two prompts: one on the command line and one on stdin.", hint="drop one")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("the prompt on stdin is not UTF-8 text.") from None
