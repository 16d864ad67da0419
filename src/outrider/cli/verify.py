"""`outrider verify`: a certificate that speculation changes nothing, for this pair and machine."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.output import Meter, answer, line_width
from outrider.cli.session import fetch_missing
from outrider.cli.verb_options import VerifyOptions
from outrider.core.settings import DEFAULT, Resolved

if TYPE_CHECKING:
    from outrider.plugins.proof.certificate import Certificate, ProofStep
    from outrider.plugins.proof.check import Check, Effort

_PIPED_WIDTH = 100
_TITLE = 21
_MARKS = {True: "ok", False: "FAILED", None: "not checked"}


def verify(call: Call[VerifyOptions]) -> int:
    from outrider.plugins.proof.certificate import Certificate, ProofStep, about, certify
    from outrider.plugins.proof.parity import subject_of

    resolved, shown = call.resolved, call.options
    program = resolved.program()
    fetch_missing(program.target, None if program.draft in ("auto", "none") else program.draft)
    subject = subject_of(
        program.target, program.draft, resolved.engine(), resolved.repeatable_sampling()
    )
    with Meter("opening the pair") as meter:
        header = about(subject, resolved.decided())
        if not shown.json:
            print(_header(header))
        checks: list[Check] = []
        for event in certify(subject, _effort(shown, resolved)):
            if isinstance(event, ProofStep):
                meter.step(0, title=_doing(event))
                continue
            checks.append(event)
            if not shown.json:
                print(_line(event), flush=True)
    certificate = Certificate(header, tuple(checks))
    answer(shown, certificate.to_dict(), _box(certificate))
    return 0 if certificate.holds else 1


def _effort(shown: VerifyOptions, resolved: Resolved) -> Effort:
    from outrider.plugins.proof.check import DEEP, Effort

    effort = DEEP if shown.deep else Effort()
    if resolved.chosen["max_tokens"].origin == DEFAULT:
        return effort
    return replace(effort, greedy_tokens=resolved.repeatable_sampling().max_tokens)


def _doing(step: ProofStep) -> str:
    from outrider.plugins.proof.certificate import PARTS

    return f"part {step.part} of {len(PARTS)}, {PARTS[step.part - 1]}: {step.doing}"


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
    width = line_width(_PIPED_WIDTH) - 4
    lines = textwrap.wrap(certificate.verdict, width)
    following = certificate.next_command
    if following is not None:
        lines += textwrap.wrap(f"next: {following}", width)
    edge = "─" * (width + 2)
    inside = [f"│ {line:<{width}} │" for line in lines]
    return "\n".join(["", f"┌{edge}┐", *inside, f"└{edge}┘"])


def _wrapped(start: str, text: str, *, indent: int) -> str:
    return textwrap.fill(
        text,
        line_width(_PIPED_WIDTH),
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
