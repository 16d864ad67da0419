"""From paths to a report: which results there are below them, and who reads which kind.

A results file says what it is: `schema`, `benchmark` or, for a certificate, its checks. Results are
files that people look into and change, so what a reader trips over is not the end of a report: the
file is skipped, by name and with the reason. Links are not followed, so a folder cannot lead
elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from outrider.core.errors import ConfigError, OutriderError
from outrider.core.files import FileKind, read_text
from outrider_lab.bench.cost_record import SCHEMA as STUDY
from outrider_lab.bench.predictions import SCHEMA as PLAN_CELLS
from outrider_lab.bench.report.parts import Part, Record, Report, Skipped, Source, text_of
from outrider_lab.bench.report.views import benchmarks, comparisons, exact, study, sweeps
from outrider_lab.bench.studies.drafters_report import SCHEMA as DRAFTERS
from outrider_lab.bench.studies.engines_report import SCHEMA as ENGINES
from outrider_lab.bench.studies.sweep_record import K_SWEEP, SWEEP
from outrider_lab.measure.store import RecordError, parse

MAX_BYTES = 64 * 2**20
MAX_DEPTH = 4
MAX_FILES = 500
MAX_REASON = 300
_CERTIFICATE = "certificate"
_COMMON = ("results", "samples")
# Whose numbers another file of the same folder has as well; that one is read instead.
_DERIVED = {
    "summary.json": "samples.jsonl",
    "samples.jsonl": "results.json",
    "runs.jsonl": "results.json",
}
_HINT = "make some with `outrider bench k`, or name a folder of results"
# What a file that was edited, or is of another version, can make a reader do.
_TRIPS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

READERS: Mapping[str, Callable[[Source], list[Part]]] = {
    K_SWEEP.name: sweeps.sweep,
    SWEEP.name: sweeps.sweep,
    DRAFTERS: comparisons.drafters,
    "drafters": comparisons.drafters,
    ENGINES: comparisons.engines,
    "engines": comparisons.engines,
    "outrider-bench-load/1": comparisons.load,
    STUDY: study.part,
    "peers": comparisons.peers,
    "vs_peers": comparisons.peers,
    "vs_transformers": comparisons.transformers,
    "predicted": benchmarks.rounds,
    PLAN_CELLS: benchmarks.plan,
    "verify_cost": benchmarks.verify,
    "memory_cost": benchmarks.memory,
    _CERTIFICATE: exact.certificate,
    "quality": exact.quality,
    "parity": exact.parity,
    "engines_parity": exact.parity,
    "features": exact.parity,
    **dict.fromkeys(benchmarks.TITLES, benchmarks.plain),
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
        raise _nothing(given, skipped)
    return Report(_told_apart(parts), skipped)


def find(given: Sequence[Path]) -> tuple[list[Source], list[Skipped]]:
    """Every file once, in the order of `given` and by name within a folder. Raises ConfigError for
    a path that is not there."""
    sources: list[Source] = []
    skipped: list[Skipped] = []
    seen: set[Path] = set()
    for root in given:
        if not root.exists():
            raise ConfigError(f"{root} does not exist.", hint=_HINT)
        for path, place in _files(root, skipped):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                sources.append(_source(path, place))
            except RecordError as error:
                skipped.append(Skipped(place, str(error)))
    return sources, skipped


def _nothing(given: Sequence[Path], skipped: Sequence[Skipped]) -> ConfigError:
    """What to say if no part came of all this."""
    names = ", ".join(map(str, given))
    if not skipped:
        return ConfigError(f"no results in {names}.", hint=_HINT)
    first = f"{skipped[0].place}: {skipped[0].why}"
    more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
    return ConfigError(f"no results that can be shown in {names}. {first}{more}.", hint=_HINT)


def _files(root: Path, skipped: list[Skipped]) -> Iterator[tuple[Path, str]]:
    """Files that may be results, with the names that a report gives them."""
    name = root.name or root.resolve().name
    if root.is_file():
        yield root, name
        return
    found = sorted(_below(root, MAX_DEPTH))
    if len(found) > MAX_FILES:
        why = f"{len(found):,} files, of which the first {MAX_FILES} are read"
        skipped.append(Skipped(name, why))
    for path in found[:MAX_FILES]:
        derived = _DERIVED.get(path.name)
        if derived is None or not path.with_name(derived).is_file():
            yield path, f"{name}/{path.relative_to(root).as_posix()}"


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink() or path.name.startswith("."):
            continue
        if path.is_dir():
            if depth:
                yield from _below(path, depth - 1)
        elif path.suffix in (".json", ".jsonl"):
            yield path


def _source(path: Path, place: str) -> Source:
    """Raises RecordError for what is no results file."""
    text = _text(path)
    if path.suffix == ".jsonl":
        text = text.partition("\n")[0]
    if not text.strip():
        raise RecordError("it is empty")
    record = parse(text)
    return Source(path=path, place=place, kind=_kind(record), record=record)


def _kind(record: Record) -> str:
    kind = text_of(record, "schema") or text_of(record, "benchmark")
    if not kind and "checks" in record and "verdict" in record:
        return _CERTIFICATE
    if not kind:
        raise RecordError("it does not say which benchmark it is of")
    return kind


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RecordError(f"{size / 1e6:,.0f} MB are more than a results file has")
        return read_text(path, FileKind.RESULTS)
    except OSError as error:
        raise RecordError(f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecordError("it is no text") from None


def _read(source: Source) -> list[Part] | Skipped:
    reader = READERS.get(source.kind)
    if reader is None and benchmarks.fits_plain(source.record):
        reader = benchmarks.plain
    if reader is None:
        return Skipped(source.place, f"{source.kind!r:.60} is no benchmark that a report knows")
    try:
        return reader(source)
    except (OutriderError, RecordError) as error:
        return Skipped(source.place, str(error)[:MAX_REASON])
    except _TRIPS as error:
        reason = f"{type(error).__name__}: {error}"
        return Skipped(source.place, f"this version did not write it so ({reason[:MAX_REASON]})")


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
