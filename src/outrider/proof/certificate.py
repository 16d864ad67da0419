"""The certificate: what was tested, four parts one after the other, and a verdict."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider import __version__
from outrider.core.config import EXACT_SAMPLERS
from outrider.core.errors import ConfigError
from outrider.models.documents import read_document
from outrider.models.loading import pick_device, resolve
from outrider.proof.algebra import algebra
from outrider.proof.check import Check, Effort, Part
from outrider.proof.ensemble import ensemble
from outrider.proof.mutants import mutants
from outrider.proof.parity import ParitySubject, fingerprint, task
from outrider.proof.parity_part import parity
from outrider.proof.reports import own_reports

PARTS = ("exact algebra", "chi-square ensemble", "same text", "planted bugs")


@dataclass(frozen=True, slots=True)
class ProofStep:
    """What a part is doing now; `part` counts from 1 to len(PARTS)."""

    part: int
    doing: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """`about` says what was tested, where and when, in the order to print it in."""

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
        """Everything was checked, and nothing failed."""
        return not self.failed and not self.unchecked

    @property
    def verdict(self) -> str:
        """One sentence for people."""
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
            "Speculation changes nothing here: every exact rule keeps the target's distribution, "
            f"and this pair wrote the same {facts['num_tokens']:,} tokens with it and without it."
        )

    @property
    def next_command(self) -> str | None:
        """What to try after a failure."""
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
            return f"{again} --no-batched-verify, and with --force-reference: what still differs"
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
    """As words of a command line; the models have been named."""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif name not in ("target", "draft"):
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return words


def check_certifiable(subject: ParitySubject) -> None:
    """Raise ConfigError for a sampler that does not claim to change nothing."""
    sampler = subject.config.sampler
    if not subject.config.claims_exact:
        raise ConfigError(
            f"{sampler} is lossy; nothing to certify.",
            hint=f"choose an exact sampler: --sampler {' | '.join(EXACT_SAMPLERS)}",
        )


def about(subject: ParitySubject, settings: Mapping[str, object]) -> dict[str, Any]:
    """What is under test. Opens the pair, so that bad files are found before the work begins."""
    check_certifiable(subject)
    llm = subject.open(replace(subject.config, batch_size=1, arena_tokens=0))
    kernels = sorted({choice.name for choice in llm.kernels.choices})
    spec = llm.spec
    stored = read_document(resolve(subject.target) / "config.json").values
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
    """Run the parts; each check comes as soon as it is known, that of a drafter which another
    package brings before them."""
    seed = subject.params.rng_seed
    # Made first: prompts that fit no window are an error before the work, not after half of it.
    job = task(subject, max_tokens=effort.greedy_tokens)
    parts: Sequence[Part] = (
        algebra(effort, seed=seed, own=subject.config.sampler),
        ensemble(effort, seed=seed, own=subject.config.sampler),
        parity(job),
        mutants(seed=seed),
    )
    yield from own_reports(subject.config)
    for number, part in enumerate(parts, start=1):
        yield from _run(number, part)


def _run(number: int, part: Part) -> Iterator[ProofStep | Check]:
    while True:
        try:
            yield ProofStep(number, next(part))
        except StopIteration as end:
            yield from end.value
            return
