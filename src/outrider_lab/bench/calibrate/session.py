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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.api.plan import num_weight_bytes
from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text
from outrider.estimate.calibration import CALIBRATIONS, Calibration, DrafterCosts
from outrider.kernels.kinds import DTYPES
from outrider.measure.machine import machine, provenance, weights_digest
from outrider.measure.store import write_text
from outrider.models.heads import kind_of
from outrider.models.hf_config import read_config
from outrider.models.loading import resolve
from outrider_lab.bench.calibrate.clocks import clocks
from outrider_lab.bench.calibrate.engines import TimedEngine, TimedEngines
from outrider_lab.bench.calibrate.rounds import endless
from outrider_lab.bench.calibrate.timing import Costs, Wanted

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
    return cache / CALIBRATIONS / f"{digest}.json"


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


def _asked(question: Question) -> str:
    return json.dumps(question, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration without counts, where it is kept, and whether it was there before."""

    calibration: Calibration
    path: Path | None
    is_old: bool


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
        "context": wanted.context,
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


def _with_memory(engine: TimedEngine, costs: DrafterCosts) -> DrafterCosts:
    """And what its draft model or heads hold in memory."""
    folder = engine.draft_folder
    if folder is None:
        return costs
    kept = _kv_bytes(folder)
    return replace(costs, memory_bytes=num_weight_bytes(folder), kv_bytes_per_token=kept)


def _kv_bytes(folder: Path) -> int:
    """Of a draft model a token; heads keep so little that it is left out."""
    if kind_of(folder) != "model":
        return 0
    config = read_config(folder)
    size = DTYPES.get(config.dtype, torch.float32).itemsize
    return config.spec("", bytes_per_weight=size, bytes_per_kv=size).kv_bytes_per_token
