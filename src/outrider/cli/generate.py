"""`outrider generate`: complete one prompt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.call import Call
from outrider.cli.options import GenerateOptions
from outrider.cli.output import check_writable, json_line, write_whole
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult


def generate(call: Call[GenerateOptions]) -> int:
    from outrider.cli.compare import compare_with_off
    from outrider.cli.paint import Painter
    from outrider.cli.session import open_llm, run_record, show, tell_notes

    shown, resolved = call.options, call.resolved
    text = _read_stdin(call.argument) if shown.stdin else _given(call.argument)
    output = None if shown.output is None else Path(shown.output)
    if output is not None:
        check_writable(output)
    llm = open_llm(resolved)
    if shown.compare and llm.drafter == "none":
        raise ConfigError("--compare: speculation is off already.", hint="choose a --drafter")
    params = resolved.sampling()
    if params.n > 1:
        return _several(llm, text, call, output)
    painter = None if shown.json else Painter(resolved.program().color, sys.stdout)
    if painter is not None and painter.colored:
        painter.write(text)
    reply = show(llm, llm.stream(text, params), painter)
    if painter is not None:
        painter.close_text(() if shown.quiet else reply.seen)
    tell_notes([reply.result])
    comparison = compare_with_off(llm, text, resolved) if shown.compare else None
    if painter is not None and not shown.quiet:
        verdict = [reply.result.summary(), *([comparison.summary()] if comparison else [])]
        painter.line(" · ".join(verdict))
    record = reply.result.to_dict() | {"run": run_record(llm, resolved)}
    if comparison:
        record["compare"] = comparison.to_dict()
    if resolved.engine().profile:
        record["profile"] = _profile(llm, text, reply.result, call)
    _deliver(record, output, json=shown.json)
    return 0


def _profile(
    llm: LLM, text: str, result: GenerationResult, call: Call[GenerateOptions]
) -> dict[str, object]:
    """`--profile`: the record, which is also printed in short for a person."""
    from outrider.cli.profiled import kernel_profile, profile_text, round_profile

    profile = round_profile(llm, result, call.resolved)
    profile["kernels"] = kernel_profile(llm, text, call.resolved)
    if not call.options.json and not call.options.quiet:
        print(profile_text(profile))
    return profile


def _several(llm: LLM, text: str, call: Call[GenerateOptions], output: Path | None) -> int:
    """`--n`: all completions at once, shown one after the other."""
    from outrider.cli.paint import Painter
    from outrider.cli.session import run_record, tell_notes

    shown = call.options
    if shown.compare:
        raise ConfigError("--compare shows one completion, and --n asks for more.", hint="drop one")
    results = llm.generate([text], call.resolved.sampling())
    if not shown.json:
        painter = Painter(call.resolved.program().color, sys.stdout)
        for number, result in enumerate(results, start=1):
            heading = "" if shown.quiet else f"── {number} of {len(results)} · {result.summary()}\n"
            print(heading, end="")
            painter.pieces([f"{result.text}\n\n"], ["plain"])
    tell_notes(results)
    record = {
        "completions": [
            result.to_dict() | ({"profile": result.profile()} if result.rounds else {})
            for result in results
        ],
        "run": run_record(llm, call.resolved),
    }
    _deliver(record, output, json=shown.json)
    return 0


def _deliver(record: Mapping[str, object], output: Path | None, *, json: bool) -> None:
    if json:
        print(json_line(record))
    if output is not None:
        write_whole(output, json_line(record) + "\n")


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
