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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from outrider import __version__
from outrider.api.found import num_weight_bytes
from outrider.core.env import CALIBRATIONS
from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text
from outrider.kernels.operators import DTYPES
from outrider.models.families import read_config
from outrider.models.heads import kind_of
from outrider.models.loading import resolve
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench.calibrate.engines import TimedEngine, TimedEngines
from outrider_lab.bench.calibrate.rounds import endless
from outrider_lab.bench.calibrate.timing import Costs, Wanted
from outrider_lab.measure.machine import machine, weights_digest
from outrider_lab.measure.store import write_text
from outrider_lab.planner.calibration import Calibration, DrafterCosts

# Clocks of this machine at the moment, and the part of it that a container may use.
#
# A value that cannot be read is None. A container may have less than the machine: cgroup limits say
# so. Clock, temperature and power draw of a GPU are read through torch, which needs NVML.
_CPU_MAX = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
_CGROUP = Path("/sys/fs/cgroup")


def clocks(device: str) -> dict[str, float | None]:
    """Of the moment. `cpu_limit` is how many CPUs the container may use, in CPUs."""
    found = {
        "cpu_mhz": _cpu_mhz(),
        "cpu_mhz_most": _scaled(_word(_CPU_MAX), 1e-3),
        "cpu_limit": _cpu_limit(),
        "memory_limit_bytes": _scaled(_word(_CGROUP / "memory.max"), 1.0),
    }
    if device == "cuda":
        found |= {
            "gpu_mhz": _gauge(torch.cuda.clock_rate),
            "gpu_celsius": _gauge(torch.cuda.temperature),
            "gpu_milliwatts": _gauge(torch.cuda.power_draw),
        }
    return found


def _cpu_mhz() -> float | None:
    """The mean of all cores."""
    try:
        lines = read_text(Path("/proc/cpuinfo"), FileKind.SYSTEM).splitlines()
        mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return round(fmean(mhz), 1) if mhz else None


def _cpu_limit() -> float | None:
    quota, period = _word(_CGROUP / "cpu.max"), _word(_CGROUP / "cpu.max", 1)
    limit, over = _scaled(quota, 1.0), _scaled(period, 1.0)
    return limit / over if limit and over else None


def _word(path: Path, place: int = 0) -> str:
    """A word of a small file, empty if there is none."""
    try:
        words = read_text(path, FileKind.SYSTEM).split()
    except (OSError, UnicodeDecodeError):
        return ""
    return words[place] if place < len(words) else ""


def _scaled(word: str, by: float) -> float | None:
    """None for words that are no number, such as "max"."""
    return by * float(word) if word.isdigit() else None


def _gauge(question: Callable[[], int]) -> float | None:
    try:
        return float(question())
    except (RuntimeError, ImportError, OSError):
        return None


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
