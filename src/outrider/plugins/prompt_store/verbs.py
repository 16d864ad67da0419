"""`outrider cache`: lists, checks and empties a prompt store."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from outrider.cli.call import Call, needed
from outrider.cli.options import JsonOption
from outrider.cli.output import answer, screen_table
from outrider.core.fields import size
from outrider.core.files import FileKind, read_json
from outrider.plugins.prompt_store.files import ABOUT, StoredFile, StoreFolder


def list_store(call: Call[JsonOption]) -> int:
    store = _store(call)
    models: dict[str, list[StoredFile]] = {model: [] for model in store.models()}
    for one in store.files():
        models.setdefault(one.model, []).append(one)
    records = [_record(store, model, found) for model, found in models.items()]
    rows = [
        (one["name"], one["pages"], one["states"], size(one["bytes"]), one["used"] or "never")
        for one in records
    ]
    header = ("model", "pages", "states", "size", "last used")
    text = screen_table(rows, header=header) if rows else f"{store.folder} has no prompts."
    answer(call.options, {"folder": str(store.folder), "models": records}, text)
    return 0


def _record(store: StoreFolder, model: str, found: list[StoredFile]) -> dict[str, Any]:
    name: object = "?"
    with suppress(OSError, ValueError, KeyError, TypeError):
        about: Any = read_json(store.folder / model / ABOUT, FileKind.SETTINGS)
        name = about["name"]
    used = max((one.used for one in found), default=0)
    time = ""
    with suppress(ValueError, OverflowError):  # a time that no clock showed
        time = datetime.fromtimestamp(used / 1e9, UTC).isoformat(timespec="seconds") if used else ""
    return {
        "model": model,
        "name": name,
        "pages": sum(one.kind == "page" for one in found),
        "states": sum(one.kind == "state" for one in found),
        "bytes": sum(one.num_bytes for one in found),
        "used": time,
    }


def clear_store(call: Call[JsonOption]) -> int:
    store = _store(call)
    num_files, num_bytes = store.clear()
    record = {"folder": str(store.folder), "files": num_files, "bytes": num_bytes}
    answer(call.options, record, f"{num_files} files with {size(num_bytes)} were deleted.")
    return 0


def verify_store(call: Call[JsonOption]) -> int:
    """`outrider cache verify`. Returns 1 if a file was damaged."""
    store = _store(call)
    num_files, damaged = 0, list[tuple[str, str]]()
    for one, problem in store.verify():
        num_files += 1
        if problem:
            damaged.append((str(one.path.relative_to(store.folder)), problem))
    lines = [f"{path}: {problem}" for path, problem in damaged]
    lines.append(f"{num_files} files, {len(damaged)} damaged.")
    record = {"folder": str(store.folder), "files": num_files, "damaged": dict(damaged)}
    answer(call.options, record, "\n".join(lines))
    return 1 if damaged else 0


def _store(call: Call[JsonOption]) -> StoreFolder:
    return StoreFolder.opened(needed(call, "FOLDER"), create=False)
