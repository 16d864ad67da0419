"""Calibrations that were measured before, in the cache folder: a file for each question.

The question is everything that costs depend on: machine, threads, versions, weights, precision,
kernels, and which engines were measured at which points. Its digest names the file, and the file
repeats it. A file that says anything else, or is damaged, is as good as none, and is measured anew.
A folder that cannot be written is no reason to fail: the calibration then holds for one run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.store import write_text
from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text
from outrider.estimate.calibration import Calibration

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
