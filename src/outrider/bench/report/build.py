"""From paths to a report: who reads which kind of results.

Results are files that people look into and change, so what a reader trips over is not the end of a
report: the file is skipped, by name and with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from outrider.bench.gemm.record import SCHEMA as STUDY
from outrider.bench.predictions import SCHEMA as PLAN_CELLS
from outrider.bench.report import (
    costs_part,
    drafters_part,
    engines_part,
    exact_part,
    load_part,
    peers_part,
    plain_part,
    prediction_part,
    study_part,
    sweep_part,
)
from outrider.bench.report.sources import CERTIFICATE, Source, find, nothing
from outrider.bench.report.values import Part, Report, Skipped
from outrider.bench.store import RecordError
from outrider.bench.studies.drafters_report import SCHEMA as DRAFTERS
from outrider.bench.studies.engines_record import SCHEMA as ENGINES
from outrider.bench.studies.sweep_record import K_SWEEP, SWEEP
from outrider.core.errors import OutriderError

MAX_REASON = 300
_COMMON = ("results", "samples")
Reader = Callable[[Source], list[Part]]
# What a file that was edited, or is of another version, can make a reader do.
_TRIPS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

READERS: Mapping[str, Reader] = {
    K_SWEEP.name: sweep_part.by_k,
    SWEEP.name: sweep_part.grid,
    DRAFTERS: drafters_part.parts,
    "drafters": drafters_part.parts,
    ENGINES: engines_part.parts,
    "engines": engines_part.parts,
    "outrider-bench-load/1": load_part.part,
    STUDY: study_part.part,
    "peers": peers_part.part,
    "vs_peers": peers_part.part,
    "vs_transformers": peers_part.transformers,
    "predicted": prediction_part.rounds,
    PLAN_CELLS: prediction_part.plan,
    "verify_cost": costs_part.verify,
    "memory_cost": costs_part.memory,
    CERTIFICATE: exact_part.certificate,
    "quality": exact_part.quality,
    "parity": exact_part.parity,
    "engines_parity": exact_part.parity,
    "features": exact_part.parity,
    **dict.fromkeys(plain_part.TITLES, plain_part.part),
}


def build(given: Sequence[Path]) -> Report:
    """Raises ConfigError if a path is missing, or if none of them has results."""
    sources, skipped = find(given)
    parts: list[Part] = []
    for source in sources:
        found = _read(source)
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            parts += found
    if not parts:
        raise nothing(given, skipped)
    return Report(_told_apart(parts), skipped)


def _told_apart(parts: Sequence[Part]) -> list[Part]:
    """Parts of one title are named by their files as well."""
    counts = Counter(part.title for part in parts)
    return [
        replace(part, title=f"{part.title} ({_file(part.place)})")
        if counts[part.title] > 1
        else part
        for part in parts
    ]


def _file(place: str) -> str:
    """The file's name, or of one that all runs call alike that of its folder."""
    path = PurePosixPath(place)
    return path.parent.name if path.stem in _COMMON else path.stem


def _read(source: Source) -> list[Part] | Skipped:
    reader = READERS.get(source.kind)
    if reader is None and plain_part.fits(source.record):
        reader = plain_part.part
    if reader is None:
        return Skipped(source.place, f"{source.kind!r:.60} is no benchmark that a report knows")
    try:
        return reader(source)
    except (OutriderError, RecordError) as error:
        return Skipped(source.place, str(error)[:MAX_REASON])
    except _TRIPS as error:
        reason = f"{type(error).__name__}: {error}"
        return Skipped(source.place, f"this version did not write it so ({reason[:MAX_REASON]})")
