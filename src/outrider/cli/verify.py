"""`outrider verify`: a certificate that speculation changes nothing, for this pair and machine."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.gate import overwrite
from outrider.cli.options import VerifyOptions
from outrider.cli.output import check_writable, json_line, write_whole
from outrider.core.errors import ConfigError
from outrider.core.settings import DEFAULT, ProgramConfig, Resolved

if TYPE_CHECKING:
    from outrider.proof.certificate import Certificate, Step
    from outrider.proof.check import Check, Effort

WIDTH = 100
_TITLE = 21
_MARKS = {True: "ok", False: "FAILED", None: "not checked"}


def verify(call: Call[VerifyOptions]) -> int:
    from outrider.proof.certificate import Certificate, Step, about, certify
    from outrider.proof.parity import subject_of

    resolved, shown = call.resolved, call.options
    output = None if shown.output is None else Path(shown.output)
    if output is not None:
        check_writable(output)
    program = _named(resolved.program(), resolved, call.arguments)
    subject = subject_of(program.target, program.draft, resolved.engine(), resolved.sampling())
    with _Progress() as progress:
        progress.show("opening the pair")
        header = about(subject, resolved.decided())
        progress.clear()
        if not shown.json:
            print(_header(header))
        checks: list[Check] = []
        for event in certify(subject, _effort(shown, resolved)):
            if isinstance(event, Step):
                progress.step(event)
                continue
            checks.append(event)
            progress.clear()
            if not shown.json:
                print(_line(event), flush=True)
    certificate = Certificate(header, tuple(checks))
    print(json_line(certificate.to_dict()) if shown.json else _box(certificate))
    if output is not None:
        write_whole(output, json_line(certificate.to_dict()) + "\n")
    return 0 if certificate.holds else 1


def _named(program: ProgramConfig, resolved: Resolved, arguments: tuple[str, ...]) -> ProgramConfig:
    """`program` with the models that the words name. Raises ConfigError for a model named twice."""
    for name, word in zip(("target", "draft"), arguments, strict=False):
        if resolved.chosen[name].origin == f"--{name}":
            raise ConfigError(
                f"two models: {word!r} and --{name} {getattr(program, name)!r}.", hint="drop one"
            )
        program = replace(program, **{name: word})
    return program


def _effort(shown: VerifyOptions, resolved: Resolved) -> Effort:
    from outrider.proof.check import DEEP, Effort

    effort = DEEP if shown.deep else Effort()
    if resolved.chosen["max_tokens"].origin == DEFAULT:
        return effort
    return replace(effort, greedy_tokens=resolved.sampling().max_tokens)


class _Progress:
    """One line on stderr that overwrites itself; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._started = perf_counter()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def step(self, step: Step) -> None:
        from outrider.proof.certificate import PARTS

        title = PARTS[step.part - 1]
        self.show(f"part {step.part} of {len(PARTS)}, {title}: {step.doing}")

    def show(self, text: str) -> None:
        if self._on:
            line = f"{perf_counter() - self._started:4.0f} s  {text}"
            room = shutil.get_terminal_size().columns - 1
            overwrite(f"{line[:room]:<{room}}", sys.stderr)

    def clear(self) -> None:
        if self._on:
            room = shutil.get_terminal_size().columns - 1
            overwrite(" " * room, sys.stderr)
            overwrite("", sys.stderr)


def _header(about: Mapping[str, Any]) -> str:
    versions, kernels = about["versions"], about["kernels"]
    invariant = "row-invariant" if kernels["row_invariant"] else "NOT row-invariant"
    draft = about["draft"]
    rows = [
        ("target", _model(about["target"])),
        ("draft", _model(draft) if draft else "none"),
        ("drafters", ", ".join(about["drafters"])),
        ("runs on", f"{about['device']}, {about['dtype']}; {about['machine']}"),
        ("kernels", f"{', '.join(kernels['names'])}, {invariant}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("settings", _settings(about["settings"])),
        ("seed, date", f"{about['seed']}, {about['utc']}"),
    ]
    lines = [_wrapped(f"  {name:<11}", text, indent=13) for name, text in rows]
    return "\n".join(["Certificate of exactness", *lines, ""])


def _model(about: Mapping[str, Any]) -> str:
    return f"{about['name']} (config and tensor headers {about['fingerprint']})"


def _settings(decided: Mapping[str, object]) -> str:
    named = {name: value for name, value in decided.items() if name not in ("target", "draft")}
    return ", ".join(f"{name}={value}" for name, value in named.items()) or "all defaults"


def _line(check: Check) -> str:
    mark = _MARKS[check.holds]
    start = f"  {mark:<6}  {check.title:<{_TITLE}}"
    lines = [_wrapped(start, check.summary, indent=len(f"  {'':<6}  {'':<{_TITLE}}"))]
    for kind, notes in (("problem", check.problems), ("warning", check.warnings)):
        lines += [_wrapped(f"          {kind}: ", note, indent=19) for note in notes]
    return "\n".join(lines)


def _box(certificate: Certificate) -> str:
    lines = textwrap.wrap(certificate.verdict, WIDTH - 4)
    following = certificate.next_command
    if following is not None:
        lines += textwrap.wrap(f"next: {following}", WIDTH - 4)
    edge = "─" * (WIDTH - 2)
    inside = [f"│ {line:<{WIDTH - 4}} │" for line in lines]
    return "\n".join(["", f"┌{edge}┐", *inside, f"└{edge}┘"])


def _wrapped(start: str, text: str, *, indent: int) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
