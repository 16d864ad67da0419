"""Everything that a plan asks of this machine: engines to open, a calibration, counts on prompts.

All engines are in memory at once, each with a target of its own, since they take turns. Where that
does not fit, the last of them are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.bench.calibrate.phases import BATCHES, KS, SECONDS, Wanted
from outrider.bench.calibrate.probe import Probe, probe
from outrider.bench.calibrate.stands import Stand, Stands, open_stands
from outrider.bench.calibrate.whole import Calibrated, calibrated, with_counts
from outrider.bench.studies.drafters_lineup import (
    PLAIN,
    Contestant,
    Drafts,
    contestants_named,
)
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.params import SamplingParams
from outrider.estimate.calibration import Calibration

AUTO = "auto"
_USUAL = ("model", "mtp", "eagle", "medusa", "block", "ngram", "suffix")
# K up to which drafts are counted and planned; what they cost beyond KS goes on along their line.
DEEPEST = 16
# Tokens of each prompt's text on which acceptance is counted at most.
COUNTED_TOKENS = 96
# Of free memory, what targets may take together.
_MEMORY_SHARE = 0.6

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`drafters` are words of a user, or AUTO. `memory` is what targets may take, in bytes of
    `target_bytes` each; `seconds` is how long rounds may be timed, with tokens drawn by
    `params`."""

    target: str
    draft: str | None
    drafters: str
    engine: EngineConfig
    batch: int
    target_bytes: int
    memory: int
    seconds: float = SECONDS
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Found:
    """A calibration with the counts of some prompts. `same` says for each drafter whether it wrote
    what plain decoding writes; `context` is the mean length of the prompts, and `drafts` names what
    each drafter drafts from, if anything."""

    calibration: Calibration
    calibrated: Calibrated
    probes: tuple[Probe, ...]
    context: int
    drafts: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def same(self) -> dict[str, bool | None]:
        return {one.name: one.same for one in self.probes}


def wanted_for(asked: Asked) -> Wanted:
    """The usual points, and those of the batch that will run."""
    return Wanted(
        batches=sorted({*BATCHES, asked.batch}),
        ks=KS,
        seconds=asked.seconds,
        params=asked.params,
    )


@contextmanager
def opened(asked: Asked, tell: Tell) -> Generator[tuple[Stands, tuple[str, ...]]]:
    """The engines, and what was left out."""
    drafts = Drafts.of(asked.target, asked.draft)
    contestants = _contestants(asked, drafts)
    tell("loading", 0.0)
    most = max(2, int(_MEMORY_SHARE * asked.memory / max(asked.target_bytes, 1)))
    left = [f"{one.name} is left out: memory ends" for one in contestants[most:]]
    base = replace(asked.engine, batch_size=max(wanted_for(asked).batches))
    stands = open_stands(contestants[:most], asked.target, drafts, base, most_k=DEEPEST)
    try:
        yield stands, (*stands.notes, *left)
    finally:
        stands.close()


def counted(
    stands: Stands,
    whole: Calibrated,
    texts: Iterable[str],
    params: SamplingParams,
    *,
    notes: Sequence[str],
    tell: Tell,
) -> Found:
    """Add what is kept of drafts on `texts`. Raises ConfigError if none of them fits the window."""
    llm = stands.plain.llm
    room = llm.spec.max_tokens - DEEPEST - params.max_tokens - 2
    ids = [llm.tokenizer.encode(text) for text in texts]
    prompts = [one for one in ids if 0 < len(one) <= room]
    if not prompts:
        raise ConfigError(
            f"none of {len(ids)} prompts fits a window of {llm.spec.max_tokens} tokens.",
            hint="give shorter prompts, or lower --max-tokens",
        )
    if len(prompts) < len(ids):
        notes = [*notes, f"{len(ids) - len(prompts)} prompts are too long for the window"]
    probes: list[Probe] = []
    tell("counting", 0.0)
    tied = params.greedy or llm.config.sampler in ("match", "coupled")
    for found in probe(
        stands.present,
        prompts,
        params,
        deepest=DEEPEST,
        comparable=lambda one: tied and _is_exact(one),
    ):
        probes.append(found)
        tell("counting", len(probes) / len(stands.drafting))
    known = {one.name for one in whole.calibration.drafters}
    idle = [one.name for one in stands.drafting if one.name not in known]
    notes = [*notes, *(f"{name} drafted nothing while rounds were timed" for name in idle)]
    context = round(statistics.fmean(map(len, prompts)))
    calibration = with_counts(whole.calibration, probes)
    named = {one.name: str(one.facts["draft"]) for one in stands.drafting if one.facts["draft"]}
    return Found(calibration, whole, tuple(probes), context, named, (*notes, *whole.notes))


def measured(
    stands: Stands, asked: Asked, *, cache: Path | None, fresh: bool, tell: Tell
) -> Calibrated:
    wanted = wanted_for(asked)
    return calibrated(stands, asked.target, wanted, cache=cache, fresh=fresh, tell=tell)


def _is_exact(stand: Stand) -> bool:
    return stand.llm.kernels.exact and stand.llm.config.sampler in EXACT_SAMPLERS


def _contestants(asked: Asked, drafts: Drafts) -> list[Contestant]:
    """Plain decoding first."""
    if asked.drafters != AUTO:
        return contestants_named(asked.drafters)
    found = [PLAIN]
    for name in _USUAL:
        try:
            drafts.of_drafter(name)
        except OutriderError:
            continue
        found.append(Contestant(name=name, drafter=name))
    return found
