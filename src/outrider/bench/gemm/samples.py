"""The samples of a cost study: one JSON line each, appended and flushed as it is measured.

A line of kind "study" says under what circumstances the lines after it were measured; they must be
those of the run that goes on. A line of kind "sample" is one measurement: its `part`, its `name`
within that, its repetition, and the `values` found or the `reason` why there are none. A study that
was stopped goes on where it ended; half a line is dropped, and a sample that failed is taken again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from outrider import __version__
from outrider.bench.gemm.record import SAMPLES, SCHEMA
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

Part = Literal["passes", "ceilings", "products", "engines"]
Key = tuple[str, str, int]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`foreign_cpu_share` is of the whole machine while it was taken, None if unknown."""

    part: str
    name: str
    repeat: int
    values: dict[str, Any] | None
    reason: str | None = None
    foreign_cpu_share: float | None = None

    @property
    def key(self) -> Key:
        return self.part, self.name, self.repeat


@dataclass(slots=True)
class SamplesFile:
    """The samples of one folder, newest per key, and the file that new ones are appended to."""

    folder: Path
    _file: GrownFile
    samples: dict[Key, Sample] = field(default_factory=dict[Key, Sample])
    _is_begun: bool = False

    @classmethod
    def open(cls, folder: Path, circumstances: Mapping[str, object]) -> SamplesFile:
        """Read what is there, to go on. Raises ConfigError if it was measured under other
        circumstances, or is not ours, and MachineError if it cannot be read; nothing is changed."""
        path, ours = folder / SAMPLES, json.loads(json.dumps(circumstances))
        refuse_others(path)
        samples = cls(folder, GrownFile(path))
        samples._file = read_records(path, lambda record: samples._take(record, ours))
        return samples

    def done(self, key: Key) -> bool:
        sample = self.samples.get(key)
        return sample is not None and sample.reason is None

    def values(self, part: Part) -> dict[str, list[Values]]:
        """Of every name, its repetitions in order, those that failed left out."""
        return {name: list(found.values()) for name, found in self.by_repeat(part).items()}

    def by_repeat(self, part: Part) -> dict[str, dict[int, Values]]:
        """The same by number: what was measured in turns has the same one."""
        found: dict[str, dict[int, Values]] = {}
        for sample in sorted(self.samples.values(), key=lambda one: one.repeat):
            if sample.part == part and sample.values is not None:
                found.setdefault(sample.name, {})[sample.repeat] = sample.values
        return found

    def num_failures(self, part: Part, name: str) -> int:
        own = (s for s in self.samples.values() if (s.part, s.name) == (part, name))
        return sum(one.reason is not None for one in own)

    def add(self, samples: Iterable[Sample], circumstances: Mapping[str, object]) -> None:
        """Append samples that were measured in turns, all or none."""
        new = list(samples)
        lines: list[Mapping[str, object]] = [{"record": "sample", **asdict(one)} for one in new]
        if not self._is_begun:
            head = {"record": "study", "schema": SCHEMA, "version": __version__}
            lines.insert(0, {**head, "circumstances": circumstances})
        add_records(self._file, lines)
        self._is_begun = True
        self.samples |= {one.key: one for one in new}

    def _take(self, record: dict[str, Any], circumstances: Mapping[str, object]) -> None:
        kind = record.pop("record", None)
        if kind == "study":
            self._check(record, circumstances)
            self._is_begun = True
        elif kind == "sample" and self._is_begun:
            sample = made(Sample, record)
            if (sample.values is None) == (sample.reason is None):
                raise RecordError("neither values nor a reason, or both")
            self.samples[sample.key] = sample
        else:
            raise RecordError(f"record is {kind!r:.40}")

    def _check(self, record: Mapping[str, Any], ours: Mapping[str, object]) -> None:
        written = record.get("schema"), record.get("version")
        if written != (SCHEMA, __version__):
            found = f"results of outrider {written[1]} ({written[0]}); this is {__version__}"
            raise refusal(self.folder, found)
        theirs = entries("circumstances", record.get("circumstances"))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                found = f"results with {name} {theirs.get(name)!r:.80}, not {ours.get(name)!r:.80}"
                raise refusal(self.folder, found)
