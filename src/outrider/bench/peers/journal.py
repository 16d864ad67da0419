"""The results folder of a comparison: one JSON line a run, appended and flushed as it is measured.

`runs.jsonl` is all that is written while peers take turns; tables derive from it. A line of kind
"session" says under what circumstances the lines after it were measured: machine, weights, prompts,
versions. A line of kind "trials" has seconds a token of the variants that were tried, one of kind
"run" a contestant on one prompt. The same command goes on where a run was stopped, and a line that
was cut off by the stop is dropped. What was measured under other circumstances is an error, and
nothing is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from outrider import __version__
from outrider.bench.peers.contestants import Contestant
from outrider.bench.peers.found import Entry, Found, Place, Run
from outrider.bench.store import (
    GrownFile,
    RecordError,
    add_records,
    entries,
    made,
    read_records,
    refusal,
    refuse_others,
)

SCHEMA = "outrider-bench-peers/1"
FILE_NAME = "runs.jsonl"
# What peers print; it may be there before anything is measured.
LOGS = "logs"
# Circumstances of which a later session may have more: it may ask further peers.
_GROWING = ("versions",)
# Fields of a run that are seconds in a row.
_MOMENTS = ("arrivals", "cpu")


@dataclass(slots=True)
class Journal:
    """What the folder holds, as it was found; new lines are appended to `file`."""

    folder: Path
    file: GrownFile
    found: Found = field(default_factory=Found)
    sessions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Read the folder, to go on in it. Raises ConfigError if it holds anything else, or lines
        of another version; MachineError if it cannot be read."""
        path = folder / FILE_NAME
        refuse_others(path, allowed=(LOGS,))
        journal = cls(folder, GrownFile(path))
        journal.file = read_records(path, journal._take)
        return journal

    def begin(self, circumstances: Mapping[str, object], facts: Mapping[str, object]) -> int:
        """Start a session; its number. Raises ConfigError if an earlier one had other
        `circumstances`."""
        ours = cast("dict[str, Any]", json.loads(json.dumps(circumstances)))
        for session in self.sessions:
            for name, value in ours.items():
                theirs = session["circumstances"].get(name)
                if _differs(name, theirs, value):
                    raise refusal(self.folder, f"runs with another {name}: {theirs!r:.120}")
        head = {"record": "session", "schema": SCHEMA, "version": __version__}
        session = {**head, "circumstances": ours, **facts}
        add_records(self.file, [session])
        self.sessions.append(session)
        return len(self.sessions)

    def keep_trials(self, times: Mapping[str, float], temperature: float) -> None:
        record = {"record": "trials", "temperature": temperature, "times": dict(times)}
        add_records(self.file, [record])

    def keep_run(self, entry: Entry, place: Place, run: Run) -> None:
        """A run of the session that goes on."""
        who, temperature = entry
        about = {"contestant": who.to_dict(), "temperature": temperature, "prompt": place[1]}
        told = asdict(run)
        for name in _MOMENTS:
            told[name] = [round(seconds, 6) for seconds in told[name]]
        add_records(self.file, [{"record": "run", **about, **told}])

    def _take(self, record: dict[str, Any]) -> None:
        try:
            self._note(record)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(str(error)) from None

    def _note(self, record: dict[str, Any]) -> None:
        kind = record.pop("record", None)
        if kind == "session":
            if (record.get("schema"), record.get("version")) != (SCHEMA, __version__):
                raise RecordError(f"version {record.get('version')!r:.40}")
            entries("circumstances", record.get("circumstances"))
            self.sessions.append({"record": kind, **record})
        elif not self.sessions:
            raise RecordError("no session before it")
        elif kind == "trials":
            told = entries("times", record["times"])
            times = {name: float(seconds) for name, seconds in told.items()}
            self.found.note_trials(times, float(record["temperature"]))
        elif kind == "run":
            who = made(Contestant, entries("contestant", record.pop("contestant")))
            entry = who, float(record.pop("temperature"))
            place = len(self.sessions), int(record.pop("prompt"))
            record["ids"] = tuple(map(int, record["ids"]))
            for name in _MOMENTS:
                record[name] = tuple(map(float, record[name]))
            self.found.runs.setdefault(entry, {})[place] = made(Run, record)
        else:
            raise RecordError(f"record is {kind!r:.40}")


def _differs(name: str, theirs: Any, ours: Any) -> bool:
    if name in _GROWING:
        return any(theirs[part] != ours[part] for part in theirs.keys() & ours.keys())
    return theirs != ours
