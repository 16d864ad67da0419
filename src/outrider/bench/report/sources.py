"""Which results there are below the files and folders that a user named.

A results file says what it is: `schema`, `benchmark` or, for a certificate, its checks. What says
nothing, is damaged, too large or of no use is skipped with a reason, never guessed at. Links are
not followed, so a folder cannot lead elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.report.reading import Record, text_of
from outrider.bench.report.values import Skipped
from outrider.bench.store import RecordError, parse
from outrider.core.errors import ConfigError
from outrider.core.files import Kind, read_text

CERTIFICATE = "certificate"
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 4
MAX_FILES = 500
# Whose numbers another file of the same folder has as well; that one is read instead.
_DERIVED = {
    "summary.json": "samples.jsonl",
    "samples.jsonl": "results.json",
    "runs.jsonl": "results.json",
}
_HINT = "make some with `outrider bench k`, or name a folder of results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that says it is of `kind`. `record` is the object of a JSON file and the first line of
    a JSON-lines file; `place` is how a report names it."""

    path: Path
    place: str
    kind: str
    record: Record


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


def nothing(given: Sequence[Path], skipped: Sequence[Skipped]) -> ConfigError:
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
        return CERTIFICATE
    if not kind:
        raise RecordError("it does not say which benchmark it is of")
    return kind


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RecordError(f"{size / 1e6:,.0f} MB are more than a results file has")
        return read_text(path, Kind.RESULTS)
    except OSError as error:
        raise RecordError(f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecordError("it is no text") from None
