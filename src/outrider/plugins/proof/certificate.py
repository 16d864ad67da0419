"""The certificate: four parts one after the other, and a verdict; and checks of drafters' reports.

A drafter's reported distribution is the only part of it that could change a text and that no rule
can check. So a drafter of another package is run once for every outcome of its draws, over scripted
models of four tokens; tests enumerate the package's own drafters.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from outrider import __version__
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.draft import Budget, Draft
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.params import SamplingParams
from outrider.core.plugins import AUTO, KINDS, drafter_named
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import Role
from outrider.drafters.common.context import BuildContext, LoadedModels
from outrider.kernels.operators import pick_device
from outrider.kernels.reference.pointwise import argmax
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.loading import resolve
from outrider.plugins.proof.algebra import DEFECTS, algebra
from outrider.plugins.proof.check import Check, Effort, Part
from outrider.plugins.proof.distributions import EveryBranch, Tokens, runs
from outrider.plugins.proof.ensemble import DRAFT, TARGET, ensemble
from outrider.plugins.proof.mutants import mutants
from outrider.plugins.proof.parity import ParitySubject, fingerprint, task
from outrider.plugins.proof.parity_part import parity
from outrider.plugins.proof.scripted import ScriptedLM

MakeDrafter = Callable[[], Drafter]
# Temperature and filters, for drafters that shape their distribution.
SAMPLED = SamplingParams(temperature=1.3, top_k=4, seed=2)
_DEPTH = 2
# Distributions are float32.
_ROUNDING = 1e-5
_OWN_ROLES = frozenset({Role.DRAFT, Role.RACE})
# In the last text, different tokens have followed its last token.
TEXTS: tuple[Tokens, ...] = ((1, 2, 1), (0,), (0, 1, 0, 2, 0, 1, 0))
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drafted tokens, the probability of their draws, and the probability that the drafter reports;
    None if it reports nothing."""

    tokens: Tokens
    weight: float
    reported: float | None


def drawings(make: MakeDrafter, text: Tokens) -> list[Drawing]:
    """Return every draft of two tokens after `text`. Raises AssertionError for a draw with a number
    that is not a drafter's."""
    weights: dict[Tokens, float] = {}
    reports: dict[Tokens, float | None] = {}

    def drafted(rng: EveryBranch) -> Tokens:
        drafter = make()
        drafter.open(0, text)
        draft = drafter.propose([DraftRow(0, list(text), None, Budget(_DEPTH), SAMPLED, rng)])[0]
        drafter.close(0)
        foreign = rng.roles - _OWN_ROLES
        if foreign:
            raise AssertionError(
                f"after {text} it draws with numbers of Role.{min(foreign).name}, which decide "
                "for the target; a drafter's are those of row.rng.pick(probs_V, node, Role.DRAFT)"
            )
        reports[draft.tokens] = _reported(draft)
        return draft.tokens

    for tokens, weight in runs(drafted):
        weights[tokens] = weights.get(tokens, 0.0) + weight
    return [Drawing(tokens, weight, reports[tokens]) for tokens, weight in weights.items()]


def _reported(draft: Draft) -> float | None:
    if draft.probs_NV is None:
        return None
    return math.prod(float(p_V[t]) for p_V, t in zip(draft.probs_NV, draft.tokens, strict=True))


def misreports(text: Tokens, found: Sequence[Drawing], *, secret: bool) -> Iterator[str]:
    """Yield a sentence for each draft that is not drawn as reported. With `secret`, draws that are
    not reported at all count too: they bias nothing, but give a rule less than is known."""
    for one in found:
        if one.reported is None and not secret:
            continue
        reported = 1.0 if one.reported is None else one.reported
        if abs(one.weight - reported) >= _ROUNDING:
            drawn = f"after {text} it drafts {one.tokens} with {one.weight:.4f}"
            yield f"{drawn}, and reports {reported:.4f}"


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
    resolved = models.resolve(EngineConfig(drafter=name, k=_DEPTH))
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
