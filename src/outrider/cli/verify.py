"""`outrider verify`: a certificate that speculation changes nothing, for this pair and machine;
with --against an audit of any server, which needs neither weights nor PyTorch."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.output import Meter, answer, check_writable, line_width, write_whole
from outrider.cli.session import fetch_missing
from outrider.cli.verb_options import VerifyOptions
from outrider.core.env import api_key
from outrider.core.errors import ConfigError
from outrider.core.settings import DEFAULT, Resolved

if TYPE_CHECKING:
    from outrider.plugins.proof.against import Audit, Report
    from outrider.plugins.proof.certificate import Certificate, ProofStep
    from outrider.plugins.proof.check import Check, Effort

_PIPED_WIDTH = 100
_TITLE = 21
_MARKS = {True: "ok", False: "FAILED", None: "not checked"}


def verify(call: Call[VerifyOptions]) -> int:
    only = {"plain", "html", "api_key", "texts"} & call.given
    if call.options.against:
        return _audit(call)
    if only:
        flag = min(only).replace("_", "-")
        raise ConfigError(f"--{flag} goes with --against.", hint="--against http://localhost:8000")
    return _certify(call)


def _certify(call: Call[VerifyOptions]) -> int:
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


def _audit(call: Call[VerifyOptions]) -> int:
    """Audit a server. Raises ConfigError if its speculation cannot be turned off, MachineError if
    it does not answer."""
    from outrider.api.clients import Server
    from outrider.plugins.proof.against import Amount, Audit, page_of
    from outrider.plugins.proof.served import sides_of

    shown = call.options
    if shown.html:
        check_writable(Path(shown.html), flag="--html")
    chosen: dict[str, Any] = {
        name: c.value for name, c in call.resolved.chosen.items() if c.origin != DEFAULT
    }
    key = shown.api_key or api_key() or ""
    urls = [url.rstrip("/").removesuffix("/v1") for url in (shown.plain, shown.against)]
    server, *others = (
        Server(url=url, timeout_seconds=600, retries=3, api_key=key) for url in urls[::-1] if url
    )
    model, draft = (str(chosen.get(name, "")) for name in ("target", "draft"))
    sides = sides_of(server, others[0] if others else None, model=model, draft=draft)
    amount = Amount(texts=shown.texts, seed=chosen.get("seed") or 0)
    if num := chosen.get("max_tokens"):
        fewer = min(num, amount.sampled_tokens)
        amount = replace(amount, greedy_tokens=num, sampled_tokens=fewer)
    audit = Audit(sides, replace(amount, temperature=chosen.get("temperature") or 1.0))
    checks: list[Check] = []
    with Meter("asking the server") as meter:
        for event in audit.run():
            if isinstance(event, str):
                meter.step(0, title=event)
                continue
            checks.append(event)
            if not shown.json:
                print(_line(event), flush=True)
    report = _report(audit, checks, [url or urls[1] for url in urls])
    answer(shown, report.to_dict(), _box(report))
    if shown.html:
        write_whole(Path(shown.html), page_of(report, _MARKS))
    return 0 if report.holds else 1


def _report(audit: Audit, checks: list[Check], urls: list[str]) -> Report:
    from outrider.plugins.proof.against import FAMILY_LEVEL, Report

    about: dict[str, Any] = {
        name: {"url": url, "model": side.model, "chats": side.chats, "fields": dict(side.fields)}
        for name, url, side in zip(("plain", "drafted"), urls, audit.sides, strict=True)
    }
    about |= {"amount": asdict(audit.amount), "requests": audit.num_requests}
    about |= {"level": FAMILY_LEVEL, "tolerance": audit.tolerance, "rounding": audit.rounding}
    about["utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(about, tuple(checks))


def _effort(shown: VerifyOptions, resolved: Resolved) -> Effort:
    from outrider.plugins.proof.check import DEEP, Effort

    effort = replace(DEEP if shown.deep else Effort(), seconds=shown.seconds or math.inf)
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


def _box(certificate: Certificate | Report) -> str:
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
