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

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.bench.config import BenchmarkConfig, Plain
from outrider.core.errors import ConfigError, MachineError

SCHEMA = "outrider-bench-k/1"
FILE_NAME = "samples.jsonl"

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What one sample measured, over all prompts of its piece.

    `seconds` is the wall clock of the whole call. Of a batch, the seconds of stages are those of
    the passes that its last sequence to end took part in. `verify_ms` is the mean pass that read no
    prompt, None if there was none. `accepted_histogram[n]` counts rounds that kept n drafts.
    `token_ms` has every token's share of its round, without the first round's. `identical` says
    whether the ids are those of plain decoding, None where that need not be so; `digest` is theirs.
    """

    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    first_token_seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    verify_ms: float | None
    num_rounds: int
    num_drafted: int
    num_accepted: int
    accepted_histogram: Sequence[int]
    token_ms: Sequence[float]
    identical: bool | None
    digest: str

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """None when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def other_seconds(self) -> float:
        """Outside drafting, target passes and acceptance: text, bookkeeping, waiting."""
        named = self.prefill_seconds + self.draft_seconds + self.verify_seconds
        return max(self.seconds - named - self.accept_seconds, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One cell, piece and repetition. `reason` says why it failed, None if it did not; a failed
    sample may have numbers all the same. Samples of one `visit` were measured in turns."""

    run: int
    visit: int
    config: BenchmarkConfig
    piece: str
    prompt_ids: Sequence[str]
    iteration: int
    reason: str | None
    numbers: Numbers | None
    foreign_cpu_share: float | None

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def key(self) -> Key:
        return self.config.config_hash(), self.piece, self.iteration

    def to_dict(self) -> dict[str, object]:
        return {
            "record": "sample",
            **asdict(self),
            "config": self.config.to_dict(),
            "config_hash": self.config.config_hash(),
            "label": self.config.label,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Sample:
        """Raises TypeError or KeyError for a record of another form."""
        derived = ("record", "config_hash", "label", "config", "numbers")
        given = {name: value for name, value in record.items() if name not in derived}
        numbers = record["numbers"]
        return cls(
            **given,
            config=BenchmarkConfig.from_dict(record["config"]),
            numbers=None if numbers is None else Numbers(**numbers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What must agree among the runs of one folder: the machine always, `settings` and `weights`
    (fingerprints) among runs of one pair, and `prompt_sets` for a domain that both have."""

    pair: str
    machine: Mapping[str, Plain]
    settings: Mapping[str, Plain]
    weights: Mapping[str, str]
    prompt_sets: Mapping[str, str]

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


@dataclass(slots=True)
class ResultsFolder:
    """Runs and samples read so far, and the file that new ones are appended to."""

    path: Path
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    samples: list[Sample] = field(default_factory=list[Sample])

    @classmethod
    def open(cls, path: Path) -> ResultsFolder:
        """Read the folder, to go on in it; a last line that was cut off is dropped from the file.

        It is made with the first record. Raises ConfigError if it is of another version.
        """
        if (path / FILE_NAME).exists():
            try:
                _drop_cut_line(path / FILE_NAME)
            except OSError as error:
                raise _unusable(path, error) from None
        elif path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise _refusal(path, f"other files and no {FILE_NAME}")
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> ResultsFolder:
        """What the folder holds; nothing is made or changed."""
        folder = cls(path)
        for number, line in enumerate(_lines(path / FILE_NAME), start=1):
            try:
                record: Any = json.loads(line)
                if record["record"] == "run":
                    _check_version(record, path)
                    folder.runs.append(record)
                else:
                    folder.samples.append(Sample.from_dict(record))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise _refusal(path, f"a line {number} that this version did not write") from None
        return folder

    def check(self, ours: Circumstances) -> None:
        """Raises ConfigError if any run here was measured under other circumstances."""
        for run in self.runs:
            found = ours.difference(run)
            if found is not None:
                raise _refusal(self.path, found)

    def current(self) -> dict[Key, Sample]:
        """The newest sample of each cell, piece and repetition."""
        return {sample.key: sample for sample in self.samples}

    def add_run(self, ours: Circumstances, facts: Mapping[str, object]) -> int:
        """Append what is said of a run; its number."""
        number = len(self.runs) + 1
        head = {"record": "run", "schema": SCHEMA, "version": __version__, "run": number}
        full: dict[str, Any] = {**head, **asdict(ours), **facts}
        self._append([full])
        self.runs.append(full)
        return number

    def next_visit(self) -> int:
        return max((sample.visit for sample in self.samples), default=0) + 1

    def add(self, samples: Iterable[Sample]) -> None:
        """Append the samples of one visit, all or none."""
        new = list(samples)
        self._append([sample.to_dict() for sample in new])
        self.samples += new

    def _append(self, records: Iterable[Mapping[str, object]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / FILE_NAME).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unusable(self.path, error) from None


def _lines(path: Path) -> list[str]:
    """Whole lines only: the end of a file that was cut off is not one."""
    if not path.exists():
        return []
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise _unusable(path.parent, error) from None
    except UnicodeDecodeError:
        raise _refusal(path.parent, "a file that is not text") from None
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def _drop_cut_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def _check_version(run: Mapping[str, Any], folder: Path) -> None:
    if run.get("schema") != SCHEMA or run.get("version") != __version__:
        raise _refusal(
            folder,
            f"results of outrider {run.get('version')} ({run.get('schema')}); "
            f"this is {__version__} ({SCHEMA})",
        )


def _refusal(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{folder} holds {found}. They are not mixed, and nothing was changed.",
        hint=f"choose another folder, such as --output-dir {folder}-2",
    )


def _unusable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"the results folder {folder} cannot be used: {error.strerror or error}.",
        hint="name a folder that you may write with --output-dir",
    )
