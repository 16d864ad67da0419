"""The results folder of a sweep: one JSON line a sample, appended and flushed as it is measured.

`samples.jsonl` is all that a run writes while it measures; tables and figures derive from it and
can be made again. A line of kind "run" says under what circumstances the samples after it were
measured; a line of kind "sample" is one cell, one piece of work, one repetition. A run that was
stopped goes on where it ended, and a line that was cut off by the stop is dropped. Measured again,
a sample counts instead of the earlier one.

Results that could mean different things never share a folder: another version, machine, settings,
weights or prompts is an error, and nothing is overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.bench.store import (
    GrownFile,
    Plain,
    RecordError,
    add_records,
    made,
    read_records,
    refusal,
    refuse_others,
)
from outrider.bench.sweep_samples import Key, Sample


@dataclass(frozen=True, slots=True)
class Schema:
    """A kind of results. With `one_setting` all runs of a pair have the same settings, and say
    which; else samples of any settings may meet, and each one's configuration says its own."""

    name: str
    one_setting: bool


K_SWEEP = Schema("outrider-bench-k/1", one_setting=True)
SWEEP = Schema("outrider-bench-sweep/1", one_setting=False)
FILE_NAME = "samples.jsonl"

# A pair's figures are kept in a folder of its name.
_PAIR_NAME = re.compile(r"\w[\w.+-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What must agree among the runs of one folder: the machine always, `settings` and `weights`
    (fingerprints) among runs of one pair, and `prompt_sets` for a domain that both have."""

    pair: str
    machine: Mapping[str, Plain]
    settings: Mapping[str, Plain]
    weights: Mapping[str, str]
    prompt_sets: Mapping[str, str]

    @classmethod
    def of_run(cls, run: Mapping[str, Any], schema: Schema = K_SWEEP) -> Circumstances:
        """Those that a line of kind "run" states. Raises RecordError."""
        names = [item.name for item in fields(cls)]
        found = made(cls, {name: run[name] for name in names if name in run})
        if not _PAIR_NAME.fullmatch(found.pair):
            raise RecordError(f"pair is {found.pair!r:.40}")
        if schema.one_setting:
            made(
                _Settings, {item.name: found.settings.get(item.name) for item in fields(_Settings)}
            )
        made(_Machine, {item.name: found.machine.get(item.name) for item in fields(_Machine)})
        return found

    def difference(self, run: Mapping[str, Any]) -> str | None:
        """What `run` has otherwise, in words, or None. What one side lacks is no difference, since
        plain decoding has no draft and no drafter; but another setting is then at its default."""
        parts = [
            (self.machine, "machine", "{}"),
            (self.prompt_sets, "prompt_sets", "prompts of {}"),
        ]
        if run["pair"] == self.pair:
            parts += [(self.settings, "settings", "{}"), (self.weights, "weights", "weights of {}")]
        for ours, group, words in parts:
            theirs: Mapping[str, Any] = run[group]
            both = ours.keys() & theirs.keys()
            if group == "settings":
                both = (ours.keys() | theirs.keys()) - ({"drafter"} - both)
            for name in sorted(both):
                if name not in ours or name not in theirs or ours[name] != theirs[name]:
                    values = [
                        repr(side[name]) if name in side else "the default"
                        for side in (theirs, ours)
                    ]
                    return f"results with {words.format(name)} {values[0]}, not {values[1]}"
        return None


@dataclass(frozen=True, slots=True)
class _Settings:
    """What tables say of a run's settings."""

    temperature: float
    max_tokens: int
    batch_size: int
    sampler: str


@dataclass(frozen=True, slots=True)
class _Machine:
    """What figures say of its machine."""

    cpu: str
    gpu: str | None


@dataclass(slots=True)
class ResultsFolder:
    """Runs and samples read so far, and the file that new ones are appended to."""

    path: Path
    schema: Schema = K_SWEEP
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    samples: list[Sample] = field(default_factory=list[Sample])
    file: GrownFile = field(init=False)

    def __post_init__(self) -> None:
        self.file = GrownFile(self.path / FILE_NAME)

    @classmethod
    def open(cls, path: Path, schema: Schema = K_SWEEP) -> ResultsFolder:
        """Read the folder, to go on in it; it is made with the first record. Raises ConfigError if
        it holds anything else, or is of another version."""
        refuse_others(path / FILE_NAME)
        return cls.read(path, schema)

    @classmethod
    def read(cls, path: Path, schema: Schema = K_SWEEP) -> ResultsFolder:
        """What the folder holds; nothing is made or changed. Raises ConfigError, with the number of
        the line, for one that this version did not write."""
        folder = cls(path, schema)
        folder.file = read_records(folder.file.path, folder._take)
        return folder

    def _take(self, record: Mapping[str, Any]) -> None:
        """One line that was read."""
        kind = record.get("record")
        if kind == "run":
            _check_version(record, self.path, self.schema)
            Circumstances.of_run(record, self.schema)
            if record.get("run") != len(self.runs) + 1:
                raise RecordError(f"run is {record.get('run')!r:.40}, not {len(self.runs) + 1}")
            self.runs.append(dict(record))
        elif kind == "sample":
            sample = Sample.from_dict(record)
            pair = sample.config.model_pair_name
            if pair not in [run["pair"] for run in self.runs if run["run"] == sample.run]:
                raise RecordError(f"no line before it is of run {sample.run} of {pair!r:.40}")
            self.samples.append(sample)
        else:
            raise RecordError(f"record is {kind!r:.40}")

    def check(self, ours: Circumstances) -> None:
        """Raises ConfigError if any run here was measured under other circumstances."""
        for run in self.runs:
            found = ours.difference(run)
            if found is not None:
                raise refusal(self.path, found)

    def current(self) -> dict[Key, Sample]:
        """The newest sample of each cell, piece and repetition. A prompt counts in one piece of a
        cell: one that was cut otherwise, before prompts were added to its batch, gives way."""
        keys = [sample.key for sample in self.samples]
        newest: dict[tuple[str, str], str] = {}
        for (cell, piece, _), sample in zip(keys, self.samples, strict=True):
            newest.update(((cell, prompt), piece) for prompt in sample.prompt_ids)
        return {
            key: sample
            for key, sample in zip(keys, self.samples, strict=True)
            if all(newest[key[0], prompt] == sample.piece for prompt in sample.prompt_ids)
        }

    def add_run(self, ours: Circumstances, facts: Mapping[str, object]) -> int:
        """Append what is said of a run; its number."""
        number = len(self.runs) + 1
        head = {"record": "run", "schema": self.schema.name, "version": __version__, "run": number}
        full: dict[str, Any] = {**head, **asdict(ours), **facts}
        add_records(self.file, [full])
        self.runs.append(full)
        return number

    def prepare(self) -> None:
        """Make the folder now, and see that it can be written, rather than after the first visit.
        Raises MachineError."""
        add_records(self.file, [])

    def next_visit(self) -> int:
        return max((sample.visit for sample in self.samples), default=0) + 1

    def add(self, samples: Iterable[Sample]) -> None:
        """Append the samples of one visit, all or none."""
        new = list(samples)
        add_records(self.file, [sample.to_dict() for sample in new])
        self.samples += new


def _check_version(run: Mapping[str, Any], folder: Path, schema: Schema) -> None:
    if run.get("schema") != schema.name or run.get("version") != __version__:
        raise refusal(
            folder,
            f"results of outrider {run.get('version')} ({run.get('schema')}); "
            f"this is {__version__} ({schema.name})",
        )
