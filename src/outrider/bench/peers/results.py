"""What a match comes to, run by run, and the results folder that keeps it.

`runs.jsonl` is all that is written while peers take turns, a line as soon as it is known; tables
derive from it. A line of kind "session" says under what circumstances the lines after it were
measured: machine, weights, prompts, versions. A line of kind "trials" has seconds a token of the
variants that were tried, a line of kind "run" a contestant on one prompt. The same command goes on
where a run was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from outrider.bench.peers.contestants import Contestant
from outrider.bench.store import RecordError, Store, difference, entries, made
from outrider.metrics.summary import inter_token_latencies

SCHEMA = "outrider-bench-peers/1"
FILE_NAME = "runs.jsonl"
# What peers print; it may be there before anything is measured.
LOGS = "logs"
# Fields of a run that are seconds in a row.
_MOMENTS = ("arrivals", "cpu")

# A contestant at a temperature.
Entry = tuple[Contestant, float]
# A session and the number of a prompt. Runs are compared within a session: a moment apart.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contestant on one prompt. `arrivals` are seconds since the request, one a token, or none
    where a peer does not tell; `usage` is how many tokens a server counted itself. `cpu` are CPU
    seconds meanwhile (process.py), or none where they are not known."""

    ids: tuple[int, ...]
    seconds: float
    drafted: int = 0
    accepted: int = 0
    arrivals: tuple[float, ...] = ()
    usage: int | None = None
    cpu: tuple[float, ...] = ()

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(len(self.ids), 1)

    @property
    def first_seconds(self) -> float | None:
        """To the first token."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def later_seconds(self) -> tuple[float, ...]:
        """Each later token's share of the time since the arrival before its own."""
        return inter_token_latencies(self.arrivals) if self.arrivals else ()


@dataclass(slots=True)
class Found:
    """`trials` are seconds a token of the variants that were tried to the end, `behind` names those
    that were too slow to go on with; `refused` says who could not, and why; `notes` are the peers'
    own; `runs` go by session and prompt."""

    trials: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    behind: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    runs: dict[Entry, dict[Place, Run]] = field(default_factory=dict[Entry, dict[Place, Run]])

    def note_trials(self, times: dict[str, float], temperature: float) -> None:
        """Seconds a token of variants that were tried at `temperature`."""
        for name, seconds in times.items():
            self.trials.setdefault(name, {})[str(temperature)] = seconds

    def is_done(self, entries: Iterable[Entry], turn: int) -> bool:
        """Whether all `entries` have run this prompt in one and the same session."""
        sessions = [
            {session for session, prompt in self.runs.get(entry, {}) if prompt == turn}
            for entry in entries
        ]
        return bool(sessions) and bool(set[int].intersection(*sessions))


@dataclass(slots=True)
class Journal:
    """What the folder holds, as it was found; new lines are appended to its `store`."""

    folder: Path
    found: Found = field(default_factory=Found)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        path = self.folder / FILE_NAME
        self.store = Store(path, SCHEMA, "session", self._take, allowed=(LOGS,))

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Read the folder, to go on in it. Raises ConfigError if it holds anything else, or lines
        of another version; MachineError if it cannot be read."""
        journal = cls(folder)
        journal.store.open()
        return journal

    @property
    def sessions(self) -> list[dict[str, Any]]:
        return self.store.heads

    def begin(self, circumstances: Mapping[str, object], facts: Mapping[str, object]) -> int:
        """Start a session; its number. Raises ConfigError if an earlier one had other
        `circumstances`."""
        ours = cast("dict[str, Any]", json.loads(json.dumps(circumstances)))
        self.store.check(lambda session: _difference(session["circumstances"], ours))
        return self.store.begin({"circumstances": ours, **facts})

    def keep_trials(self, times: Mapping[str, float], temperature: float) -> None:
        self.store.add("trials", [{"temperature": temperature, "times": dict(times)}])

    def keep_run(self, entry: Entry, place: Place, run: Run) -> None:
        """A run of the session that goes on."""
        who, temperature = entry
        about = {"contestant": who.to_dict(), "temperature": temperature, "prompt": place[1]}
        told = asdict(run)
        for name in _MOMENTS:
            told[name] = [round(seconds, 6) for seconds in told[name]]
        self.store.add("run", [about | told])

    def _take(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "session":
            entries("circumstances", record.get("circumstances"))
        elif kind == "trials":
            told = entries("times", record["times"])
            times = {name: float(seconds) for name, seconds in told.items()}
            self.found.note_trials(times, float(record["temperature"]))
        elif kind == "run":
            del record["record"]
            who = made(Contestant, entries("contestant", record.pop("contestant")))
            entry = who, float(record.pop("temperature"))
            place = len(self.sessions), int(record.pop("prompt"))
            record["ids"] = tuple(map(int, record["ids"]))
            for name in _MOMENTS:
                record[name] = tuple(map(float, record[name]))
            self.found.runs.setdefault(entry, {})[place] = made(Run, record)
        else:
            raise RecordError(f"record is {kind!r:.40}")


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """A later session may ask further peers, whose versions are then new."""
    fixed = ({name: side[name] for name in side if name != "versions"} for side in (theirs, ours))
    versions = (side.get("versions", {}) for side in (theirs, ours))
    return difference(*fixed) or difference(*versions, words="{} of version", of_both_only=True)
