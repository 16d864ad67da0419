"""Everything that a plan asks of this machine: engines to open, a calibration, counts on prompts.

All engines are in memory at once, each with a target of its own, since they take turns. Where that
does not fit, the last of them are left out. A calibration is kept in the cache by its question:
machine, threads, versions, weights, precision, kernels, and which engines were measured at which
points. Its digest names the file, and the file repeats it. A file that says anything else, or is
damaged, is as good as none. A folder that cannot be written is no reason to fail.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.bench.calibrate.engines import TimedEngine, TimedEngines, open_engines
from outrider.bench.calibrate.limits import clocks
from outrider.bench.calibrate.probe import Probe, probe
from outrider.bench.calibrate.rounds import endless
from outrider.bench.calibrate.timing import BATCHES, KS, SECONDS, Costs, Timing, Wanted
from outrider.bench.machine import Neighbours, machine, provenance, weights_digest
from outrider.bench.store import write_text
from outrider.bench.studies.drafters_lineup import PLAIN, Contestant, Drafts, contestants_named
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.files import FileKind, read_text
from outrider.core.params import SamplingParams
from outrider.estimate.calibration import Calibration, DrafterCosts
from outrider.models.heads import kind_of
from outrider.models.hf_config import read_config
from outrider.models.loading import DTYPES, resolve

FOLDER = "calibrations"
_FORMAT = 4

Question = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A calibration, where it lies, and what a user should hear about that."""

    calibration: Calibration | None
    path: Path | None
    note: str | None = None


def path_of(cache: Path | None, question: Question) -> Path | None:
    if cache is None:
        return None
    digest = hashlib.sha256(_asked(question).encode()).hexdigest()[:24]
    return cache / FOLDER / f"{digest}.json"


def load(cache: Path | None, question: Question) -> Stored:
    """What was measured before, if it was."""
    path = path_of(cache, question)
    if path is None or not path.exists():
        return Stored(None, path)
    try:
        record: Any = json.loads(read_text(path, FileKind.CALIBRATION))
        if record["format"] != _FORMAT or record["question"] != json.loads(_asked(question)):
            return Stored(None, path, f"{path} is of another version; measuring anew")
        return Stored(Calibration.of_json(json.dumps(record["calibration"])), path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
        return Stored(None, path, f"{path} is damaged; measuring anew")


def keep(cache: Path | None, question: Question, calibration: Calibration) -> Stored:
    """Write it in one piece. The note says if that cannot be."""
    path = path_of(cache, question)
    if path is None:
        return Stored(
            calibration, None, "there is no cache folder, so this calibration is not kept"
        )
    record = {
        "format": _FORMAT,
        "question": json.loads(_asked(question)),
        "calibration": json.loads(calibration.to_json()),
    }
    try:
        write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        reason = error.strerror or str(error)
        return Stored(calibration, None, f"the calibration is not kept: {path}: {reason}")
    return Stored(calibration, path)


def all_of(cache: Path | None) -> list[Path]:
    """Every file that is kept."""
    return [] if cache is None else sorted((cache / FOLDER).glob("*.json"))


def _asked(question: Question) -> str:
    return json.dumps(question, sort_keys=True)


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
class Calibrated:
    """A calibration without counts, where it is kept, and whether it was there before."""

    calibration: Calibration
    path: Path | None
    is_old: bool
    notes: tuple[str, ...]


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
def opened(asked: Asked, tell: Tell) -> Generator[tuple[TimedEngines, tuple[str, ...]]]:
    """The engines, and what was left out."""
    drafts = Drafts.of(asked.target, asked.draft)
    contestants = _contestants(asked, drafts)
    tell("loading", 0.0)
    most = max(2, int(_MEMORY_SHARE * asked.memory / max(asked.target_bytes, 1)))
    left = [f"{one.name} is left out: memory ends" for one in contestants[most:]]
    base = replace(asked.engine, batch_size=max(wanted_for(asked).batches))
    engines = open_engines(contestants[:most], asked.target, drafts, base, most_k=DEEPEST)
    try:
        yield engines, (*engines.notes, *left)
    finally:
        engines.close()


def counted(
    engines: TimedEngines,
    whole: Calibrated,
    texts: Iterable[str],
    params: SamplingParams,
    *,
    notes: Sequence[str],
    tell: Tell,
) -> Found:
    """Add what is kept of drafts on `texts`. Raises ConfigError if none of them fits the window."""
    llm = engines.plain.llm
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
        engines.present,
        prompts,
        params,
        deepest=DEEPEST,
        comparable=lambda one: tied and _is_exact(one),
    ):
        probes.append(found)
        tell("counting", len(probes) / len(engines.drafting))
    known = {one.name for one in whole.calibration.drafters}
    idle = [one.name for one in engines.drafting if one.name not in known]
    notes = [*notes, *(f"{name} drafted nothing while rounds were timed" for name in idle)]
    context = round(statistics.fmean(map(len, prompts)))
    calibration = with_counts(whole.calibration, probes)
    named = {one.name: str(one.facts["draft"]) for one in engines.drafting if one.facts["draft"]}
    return Found(calibration, whole, tuple(probes), context, named, (*notes, *whole.notes))


def _is_exact(engine: TimedEngine) -> bool:
    return engine.llm.kernels.exact and engine.llm.config.sampler in EXACT_SAMPLERS


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


def measured(
    engines: TimedEngines, asked: Asked, *, cache: Path | None, fresh: bool, tell: Tell
) -> Calibrated:
    """With `fresh` it is measured anew, and takes the place of what was kept."""
    wanted = wanted_for(asked)
    question = question_of(engines, asked.target, wanted)
    found = load(cache, question)
    if found.calibration is not None and not fresh:
        return Calibrated(found.calibration, found.path, True, _notes(found))
    with Neighbours() as neighbours:
        timing = Timing.planned(engines, wanted)
        timing.run(wanted.seconds - timing.seconds, tell=tell)
    calibration = assembled(engines, asked.target, timing.costs())
    origin = {**calibration.provenance, "foreign_cpu_share": neighbours.share}
    calibration = replace(calibration, provenance=origin)
    kept = keep(cache, question, calibration)
    notes = (*(() if fresh else _notes(found)), *_notes(kept))
    return Calibrated(calibration, kept.path, False, notes)


def _notes(stored: Stored) -> tuple[str, ...]:
    return () if stored.note is None else (stored.note,)


def question_of(engines: TimedEngines, target: str, wanted: Wanted) -> dict[str, object]:
    """All that costs depend on."""
    llm = engines.plain.llm
    return {
        "version": __version__,
        "machine": machine(llm.config.device),
        "settings": asdict(llm.config),
        "threads": llm.kernels.threads.name if llm.kernels.threads else None,
        "kernels": {choice.op: f"{choice.name} {choice.kind}" for choice in llm.kernels.choices},
        "weights": weights_digest(resolve(target)),
        "drafters": {engine.name: engine.facts.get("draft_weights") for engine in engines.drafting},
        "batches": list(wanted.batches),
        "ks": list(wanted.ks),
        # What was glanced at must not pass for what was measured.
        "seconds": wanted.seconds,
        "sampling": asdict(endless(wanted.params)),
    }


def assembled(engines: TimedEngines, target: str, costs: Costs) -> Calibration:
    llm = engines.plain.llm
    here = machine(llm.config.device)
    shared = costs.shared
    return Calibration(
        machine=str(here["gpu"] or here["cpu"]),
        target_name=target,
        target=shared.target,
        drafters=tuple(
            _with_memory(engine, costs.drafts[engine.name])
            for engine in engines.drafting
            if engine.name in costs.drafts
        ),
        overhead=shared.overhead,
        host=shared.host,
        rule=shared.rule,
        token=shared.token,
        scatter=costs.scatter,
        seconds=round(costs.seconds, 3),
        memory_bytes=llm.spec.weight_bytes,
        kv_bytes_per_token=llm.spec.kv_bytes_per_token,
        provenance={
            **provenance(),
            "device": here,
            "dtype": llm.config.dtype,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "threads": llm.kernels.threads.name if llm.kernels.threads else None,
            "clocks": clocks(str(here["device"])),
        },
    )


def with_counts(calibration: Calibration, probes: Iterable[Probe]) -> Calibration:
    """The same costs with what was counted on some prompts."""
    by_name = {probe.name: probe for probe in probes}
    return replace(
        calibration,
        drafters=tuple(
            by_name[one.name].counted(one) if one.name in by_name else one
            for one in calibration.drafters
        ),
    )


def _with_memory(engine: TimedEngine, costs: DrafterCosts) -> DrafterCosts:
    """And what its draft model or heads hold in memory."""
    folder = engine.draft_folder
    if folder is None:
        return costs
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return replace(costs, memory_bytes=size, kv_bytes_per_token=_kv_bytes(folder))


def _kv_bytes(folder: Path) -> int:
    """Of a draft model a token; heads keep so little that it is left out."""
    if kind_of(folder) != "model":
        return 0
    config = read_config(folder)
    size = DTYPES.get(config.dtype, torch.float32).itemsize
    return config.spec("", bytes_per_weight=size, bytes_per_kv=size).kv_bytes_per_token
