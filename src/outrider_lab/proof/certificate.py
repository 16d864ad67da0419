"""The certificate: four parts one after the other, and a verdict; and checks of the reports of a
drafter of another package, over scripted models of four tokens. Tests enumerate our own drafters.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from outrider import __version__
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.plugins import AUTO, KINDS, drafter_named
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext, LoadedModels
from outrider.kernels.operators import pick_device
from outrider.kernels.reference.pointwise import argmax
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.loading import resolve
from outrider.plugins.proof.algebra import DEFECTS, algebra
from outrider.plugins.proof.check import Check, Effort, Part
from outrider.plugins.proof.reports import (
    DEPTH,
    TEXTS,
    Drawing,
    MakeDrafter,
    drawings,
    misreports,
)
from outrider_lab.models.scripted import ScriptedLM
from outrider_lab.proof.ensemble import DRAFT, TARGET, ensemble
from outrider_lab.proof.mutants import mutants
from outrider_lab.proof.parity import ParitySubject, fingerprint, task
from outrider_lab.proof.parity_part import parity

_MAX_SHOWN = 3


def own_reports(config: EngineConfig) -> tuple[Check, ...]:
    """Return the check of the drafter that `config` names, if another package provides it."""
    name = config.drafter
    if name == AUTO or name in KINDS:
        return ()
    return (report_check(name, lambda: _over_scripts(name)),)


def report_check(name: str, make: MakeDrafter) -> Check:
    """Return a check of reports. If no draft reports anything, all pass: no rule is misled. If some
    do, a draft without one may be a drawn token that was dropped by its value."""
    found: list[Drawing] = []
    problems: list[str] = []
    try:
        for text in TEXTS:
            drawn = drawings(make, text)
            draws = any(one.reported is not None for one in drawn)
            problems += misreports(text, drawn, secret=draws)
            found += drawn
    except AssertionError as error:
        problems.append(str(error))
    except (OutriderError, *DEFECTS) as error:
        fails = f"{name} fails over {TARGET.vocab_size} tokens: {type(error).__name__}: {error}"
        return _check(name, None, fails, found)
    result = "some not drawn as reported" if problems else "each drawn as it is reported"
    summary = f"{name}: {len(found)} drafts by enumeration, {result}"
    return _check(name, not problems, summary, found, tuple(problems[:_MAX_SHOWN]))


def _over_scripts(name: str) -> Drafter:
    models = LoadedModels(ScriptedLM(TARGET), ScriptedLM(DRAFT), argmax)
    resolved = models.resolve(EngineConfig(drafter=name, k=DEPTH))
    return BuildContext(resolved, models, drafter_named(name)).build()


def _check(
    name: str,
    holds: bool | None,
    summary: str,
    found: Sequence[Drawing],
    problems: tuple[str, ...] = (),
) -> Check:
    return Check(
        name="reports",
        title="drafter's report",
        holds=holds,
        summary=summary,
        facts={"drafter": name, "num_drafts": len(found), "texts": [list(t) for t in TEXTS]},
        problems=problems,
    )


PARTS = ("exact algebra", "chi-square ensemble", "same text", "planted bugs")


@dataclass(frozen=True, slots=True)
class ProofStep:
    """The current work of a part, its step `number` of `total`, 0 if that is not known before.
    `part` counts from 1 to len(PARTS)."""

    part: int
    doing: str
    number: int = 1
    total: int = 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of all parts. `about` says what was tested, where and when, in printing order."""

    about: Mapping[str, Any]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.holds is False]

    @property
    def unchecked(self) -> list[Check]:
        return [check for check in self.checks if check.holds is None]

    @property
    def holds(self) -> bool:
        """True if everything was checked, and nothing failed."""
        return not self.failed and not self.unchecked

    @property
    def verdict(self) -> str:
        """The verdict, in one sentence."""
        if self.failed:
            names = " and ".join(check.title for check in self.failed)
            return f"NOT CERTIFIED: {names} failed."
        if self.unchecked:
            names = " and ".join(check.title for check in self.unchecked)
            return f"Nothing failed, but not everything could be checked here: {names}."
        facts = next(check for check in self.checks if check.name == "parity").facts
        if facts["num_differences"]:
            return (
                "Speculation changes nothing here but rounding: every exact rule keeps the "
                f"target's distribution. {facts['num_differences']} texts differ, because these "
                f"kernels are not row-invariant; {facts['num_near_ties']} were looked into, and "
                "all differ at near-ties."
            )
        return (
            "Speculation changes nothing here: this pair wrote the same "
            f"{facts['num_tokens']:,} tokens with it and without it."
        )

    @property
    def next_command(self) -> str | None:
        """The command to try after a failure."""
        names = {check.name for check in (*self.failed, *self.unchecked)}
        models = [self.about[role] for role in ("target", "draft")]
        named = [str(model["name"]) for model in models if model]
        again = " ".join(["outrider verify", *named, *_flags(self.about["settings"])])
        sampler = self.about["settings"].get("sampler", EXACT_SAMPLERS[0])
        if "reports" in names:
            drafter = self.about["settings"].get("drafter")
            return f"mend drafter {drafter!r} in its own package, then the same command again"
        if names & {"algebra", "ensemble"} and sampler not in EXACT_SAMPLERS:
            return f"mend rule {sampler!r} in its own package, then the same command again"
        if names & {"algebra", "ensemble"}:
            return "pip install --force-reinstall outrider, then the same command again"
        if names & {"parity", "acceptance"}:
            late = any(check.facts.get("runs_left_out") for check in self.unchecked)
            more = f"{again} --no-batched-verify, and with --force-reference: what still differs"
            return "the same command with more --seconds" if late else more
        if "mutants" in names:
            return "outrider verify from an installation with its .py files, not from an archive"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "verdict": self.verdict,
            "next": self.next_command,
            "about": dict(self.about),
            "checks": [check.to_dict() for check in self.checks],
        }


def _flags(settings: Mapping[str, object]) -> list[str]:
    """Return the settings as words of a command line; the models have been named."""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif name not in ("target", "draft"):
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return words


def check_certifiable(subject: ParitySubject) -> None:
    """Check the sampler. Raises ConfigError for one that does not claim to change nothing."""
    sampler = subject.config.sampler
    if not subject.config.claims_exact:
        raise ConfigError(
            f"{sampler} is lossy; nothing to certify.",
            hint=f"choose an exact sampler: --sampler {' | '.join(EXACT_SAMPLERS)}",
        )


def about(subject: ParitySubject, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return what is under test. Opens the pair, so that bad files are found first."""
    check_certifiable(subject)
    llm = subject.open(replace(subject.config, batch_size=1, arena_tokens=0))
    kernels = sorted({choice.name for choice in llm.kernels.choices})
    spec = llm.spec
    stored = open_checkpoint(resolve(subject.target)).document(CONFIG).values
    own = stored.get("dtype") or stored.get("torch_dtype") or f"{8 * spec.bytes_per_weight} bit"
    return {
        "target": {
            "name": subject.target,
            "fingerprint": fingerprint(subject.target),
            "num_parameters": spec.num_parameters,
        },
        "draft": subject.draft
        and {"name": subject.draft, "fingerprint": fingerprint(subject.draft)},
        "drafters": list(subject.drafters),
        "dtype": own if subject.config.dtype == "auto" else subject.config.dtype,
        "kernels": {"names": kernels, "row_invariant": llm.kernels.exact},
        "device": str(pick_device(subject.config.device)),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "outrider": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "settings": dict(settings),
        "seed": subject.params.rng_seed,
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def certify(subject: ParitySubject, effort: Effort) -> Iterator[ProofStep | Check]:
    """Run the parts. Each check is yielded as soon as it is known; the check of another package's
    drafter comes first."""
    seed = subject.params.rng_seed
    # Made first: prompts that fit no window are an error before the work, not in its middle.
    job = task(subject, max_tokens=effort.greedy_tokens)
    parts: Sequence[Part] = (
        algebra(effort, seed=seed, own=subject.config.sampler),
        ensemble(effort, seed=seed, own=subject.config.sampler),
        parity(job, effort.seconds),
        mutants(seed=seed),
    )
    # Plain decoding, then each group of texts.
    totals = {PARTS.index("same text") + 1: 1 + len(list(job.groups()))}
    yield from own_reports(subject.config)
    for number, part in enumerate(parts, start=1):
        yield from _run(number, part, totals.get(number, 0))


def _run(number: int, part: Part, total: int) -> Iterator[ProofStep | Check]:
    for step in count(1):
        try:
            yield ProofStep(number, next(part), step, total)
        except StopIteration as end:
            yield from end.value
            return
