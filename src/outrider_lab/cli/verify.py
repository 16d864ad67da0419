"""`outrider verify`: a certificate that speculation changes nothing, for this pair and machine;
with --against an audit of any server, which needs neither weights nor PyTorch."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.output import Steps, answer, check_writable, duration, line_width, write_whole
from outrider.cli.session import check_models, fetch_missing
from outrider.core.env import api_key
from outrider.core.errors import ConfigError
from outrider.core.settings import DEFAULT, Resolved
from outrider_lab.cli.bench_options import VerifyOptions

if TYPE_CHECKING:
    from outrider.plugins.proof.check import Check, Effort
    from outrider_lab.proof.against import Audit, Report
    from outrider_lab.proof.certificate import Certificate, ProofStep

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
    program = call.resolved.program()
    check_models(program.target, program.draft)
    # On a terminal shown first: imports and models take seconds.
    with Steps(f"verify {program.target}: 4 checks, one to several minutes") as steps:
        from outrider_lab.proof.certificate import (
            Certificate,
            ProofStep,
            about,
            certify,
            check_certifiable,
        )
        from outrider_lab.proof.parity import subject_of

        resolved, shown = call.resolved, call.options
        fetch_missing(program.target, None if program.draft in ("auto", "none") else program.draft)
        subject = subject_of(
            program.target, program.draft, resolved.engine(), resolved.repeatable_sampling()
        )
        check_certifiable(subject)
        steps.begin()
        header = about(subject, resolved.decided())
        checks: list[Check] = []
        forecast = Forecast(shown.seconds or math.inf)
        for event in certify(subject, _effort(shown, resolved)):
            if isinstance(event, ProofStep):
                left = forecast.left(event, perf_counter())
                steps.show(_doing(event, checks, left), new=event.number == 1)
            else:
                checks.append(event)
    certificate = Certificate(header, tuple(checks))
    answer(shown, certificate.to_dict(), f"{_found(certificate)}\n\n{_header(header)}")
    return 0 if certificate.holds else 1


def _audit(call: Call[VerifyOptions]) -> int:
    """Audit a server. Raises ConfigError if its speculation cannot be turned off, MachineError if
    it does not answer."""
    from outrider.plugins.proof.check import Check
    from outrider.plugins.running.clients import Server
    from outrider_lab.proof.against import NUM_STEPS, Amount, Audit, page_of
    from outrider_lab.proof.served import sides_of

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
    with Steps(f"verify {urls[1]}: {NUM_STEPS} checks of its answers, a minute or more") as steps:
        steps.begin()
        number = 0
        for event in audit.run():
            if isinstance(event, Check):
                checks.append(event)
                continue
            number += 1
            doing = f"check {number} of {NUM_STEPS}, {event}"
            if number > 1:
                # Each asks for about as many tokens.
                each = (perf_counter() - steps.began) / (number - 1)
                doing += f", about {duration(each * (NUM_STEPS + 1 - number))} left"
            steps.show(doing + _failed(checks))
    report = _report(audit, checks, [url or urls[1] for url in urls])
    answer(shown, report.to_dict(), _found(report))
    if shown.html:
        write_whole(Path(shown.html), page_of(report, _MARKS))
    return 0 if report.holds else 1


def _report(audit: Audit, checks: list[Check], urls: list[str]) -> Report:
    from outrider_lab.proof.against import FAMILY_LEVEL, Report

    about: dict[str, Any] = {
        name: {"url": url, "model": side.model, "chats": side.chats, "fields": dict(side.fields)}
        for name, url, side in zip(("plain", "drafted"), urls, audit.sides, strict=True)
    }
    about |= {"amount": asdict(audit.amount), "requests": audit.num_requests}
    about |= {"level": FAMILY_LEVEL, "tolerance": audit.tolerance, "rounding": audit.rounding}
    about["step"] = audit.step
    about["utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(about, tuple(checks))


def _effort(shown: VerifyOptions, resolved: Resolved) -> Effort:
    from outrider.plugins.proof.check import DEEP, Effort

    effort = replace(DEEP if shown.deep else Effort(), seconds=shown.seconds or math.inf)
    if resolved.chosen["max_tokens"].origin == DEFAULT:
        return effort
    return replace(effort, greedy_tokens=resolved.repeatable_sampling().max_tokens)


# Seconds of a part on two quiet cores of 2.1 GHz; those of the third depend on the model.
SECONDS_OF_PARTS: Mapping[int, float] = {1: 8, 2: 42, 4: 6}
_TEXTS = 3


@dataclass(slots=True)
class Forecast:
    """The time left of a certificate, from the times of its parts until now; the model's texts
    take `most` seconds."""

    most: float
    _part: int = 0
    _since: float = 0.0
    _speed: float = 1.0

    def left(self, step: ProofStep, now: float) -> str:
        """Return the time left at the begin of a step, in words."""
        if step.part != self._part:
            if self._part in SECONDS_OF_PARTS:
                self._speed = (now - self._since) / SECONDS_OF_PARTS[self._part]
            self._part, self._since = step.part, now
        spent = now - self._since
        later = self._speed * sum(one for part, one in SECONDS_OF_PARTS.items() if part > step.part)
        if step.part in SECONDS_OF_PARTS:
            own = max(SECONDS_OF_PARTS[step.part] * self._speed - spent, 1)
        elif step.number > 1:
            own = spent / (step.number - 1) * max(step.total + 1 - step.number, 1)
            own = max(min(own, self.most - spent), 1)
        else:
            own = 0
        texts = " and the model's texts" if step.part < _TEXTS or not own else ""
        return f"about {duration(own + later)} left{texts}"


def _doing(step: ProofStep, checks: Sequence[Check], left: str) -> str:
    from outrider_lab.proof.certificate import PARTS

    part = f"check {step.part} of {len(PARTS)}, {PARTS[step.part - 1]}"
    if step.total:
        part += f", run {min(step.number, step.total)} of {step.total}"
    return f"{part}, {left}{_failed(checks)}: {step.doing}"


def _failed(checks: Sequence[Check]) -> str:
    failed = [check.title for check in checks if check.holds is False]
    return f"; FAILED: {', '.join(failed)}" if failed else ""


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
    return "\n".join(["What was checked", *lines])


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


def _found(report: Certificate | Report) -> str:
    """Return the verdict, what to try next, and a line for each check."""
    lines = [_wrapped("", report.verdict, indent=0)]
    if report.next_command is not None:
        lines.append(_wrapped("next: ", report.next_command, indent=6))
    return "\n".join([*lines, *map(_line, report.checks)])


def _wrapped(start: str, text: str, *, indent: int) -> str:
    return textwrap.fill(
        text,
        line_width(_PIPED_WIDTH),
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
