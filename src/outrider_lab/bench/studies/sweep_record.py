"""What a sweep leaves behind: one JSON line a sample, appended as soon as it is measured.

A line of kind "run" says under what circumstances the samples after it were measured; a line of
kind "sample" is one cell, one piece of work, one repeat. Tables and figures derive from them and
can be made again. Measured again, a sample counts instead of the earlier one. Two samples may be
put side by side only if everything but what is swept is equal, so each has its whole configuration,
whose hash says what need not be measured again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider_lab.measure.frame import Sample
from outrider_lab.measure.store import Plain, RecordError, Store, difference, entries, made

Key = tuple[str, str, int]
# Fields that lines of before do not have.
_LATER: Mapping[str, object] = {"request_ms": [], "first_ms": [], "cumulative_p95_ms": None}


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
class BenchmarkConfig:
    """One cell: a pair, a domain of prompts, a K, and how tokens are drawn.

    `prompt_set` is the fingerprint of the domain's prompts. `others` are the settings that
    somebody decided besides those that have a field here, as (name, value) in order of names.
    """

    model_pair_name: str
    prompt_domain: str
    k: int
    temperature: float
    max_tokens: int
    seed: int
    drafter: str = "none"
    sampler: str = "block"
    dtype: str = "auto"
    device: str = "auto"
    batch_size: int = 1
    prompt_set: str = ""
    others: tuple[tuple[str, Plain], ...] = ()

    @property
    def label(self) -> str:
        """AR for plain decoding, SD-K4 for drafts of four tokens."""
        return f"SD-K{self.k}" if self.is_speculative else "AR"

    @property
    def is_speculative(self) -> bool:
        return self.k > 0

    def plain(self) -> dict[str, Plain]:
        """The fields but `others`, which are settings too."""
        return {name: value for name, value in asdict(self).items() if name != "others"}

    def to_dict(self) -> dict[str, object]:
        return {**self.plain(), "others": dict(self.others)}

    def config_hash(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of the sorted JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def from_dict(cls, record: object) -> BenchmarkConfig:
        """Inverse of `to_dict`. Raises RecordError."""
        given = entries("config", record)
        others = entries("others", given.get("others"))
        for name, value in others.items():
            if not isinstance(value, Plain):
                raise RecordError(f"{name} is {value!r:.40}")
        return made(cls, {**given, "others": tuple(sorted(others.items()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepNumbers:
    """What one sample measured, over all prompts of its piece.

    `seconds` is the wall clock of the whole call. Of a batch, the seconds of stages are those of
    the passes that its last sequence to end took part in. `verify_ms` is the mean pass that read no
    prompt, None if there was none. `accepted_histogram[n]` counts rounds that kept n drafts.
    `token_ms` has every token's share of its round, without the first round's; `request_ms` and
    `first_ms` how long each prompt took in all and to its first token, and `cumulative_p95_ms` is
    the percentile 95 of every token's time since its prompt was handed in, all three empty in
    results of before they were told. Of a closed loop no stages are told: they are 0. `identical`
    says whether the ids are those of plain decoding, None where that need not be so; `digest` is
    theirs.
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
    request_ms: Sequence[float] = ()
    first_ms: Sequence[float] = ()
    cumulative_p95_ms: float | None = None

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
class SweepSample(Sample[SweepNumbers]):
    """One cell, piece and repeat. Samples of one `visit` were measured in turns."""

    run: int
    visit: int
    config: BenchmarkConfig
    piece: str
    prompt_ids: Sequence[str]
    numbers: SweepNumbers | None = None

    @property
    def key(self) -> Key:
        return self.config.config_hash(), self.piece, self.repeat

    def to_dict(self) -> dict[str, object]:
        record = asdict(self)
        return {
            "iteration": record.pop("repeat"),
            **record,
            "config": self.config.to_dict(),
            "config_hash": self.config.config_hash(),
            "label": self.config.label,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SweepSample:
        """Inverse of `to_dict`. Raises RecordError."""
        derived = ("record", "config_hash", "label")
        given = {name: value for name, value in record.items() if name not in derived}
        if "iteration" in given:
            given["repeat"] = given.pop("iteration")
        given["config"] = BenchmarkConfig.from_dict(given.get("config"))
        if given.get("numbers") is not None:
            given["numbers"] = _numbers(given["numbers"])
        sample = made(cls, given)
        if sample.ok and sample.numbers is None:
            raise RecordError("neither numbers nor a reason")
        return sample


def _numbers(record: object) -> SweepNumbers:
    given = {**_LATER, **entries("numbers", record)}
    numbers = made(SweepNumbers, given)
    for name in ("num_tokens", "num_rounds", "seconds", "verify_ms"):
        # These are divided by.
        if getattr(numbers, name) == 0:
            raise RecordError(f"{name} is 0")
    return numbers


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
    def of_run(cls, run: Mapping[str, Any], schema: Schema) -> Circumstances:
        """Those that a line of kind "run" states. Raises RecordError."""
        names = [item.name for item in fields(cls)]
        found = made(cls, {name: run[name] for name in names if name in run})
        if not _PAIR_NAME.fullmatch(found.pair):
            raise RecordError(f"pair is {found.pair!r:.40}")
        if schema.one_setting:
            made(_Settings, {f.name: found.settings.get(f.name) for f in fields(_Settings)})
        made(_Machine, {f.name: found.machine.get(f.name) for f in fields(_Machine)})
        return found

    def difference(self, run: Mapping[str, Any]) -> str | None:
        """What `run` has otherwise, in words, or None. What one side lacks is no difference, since
        plain decoding has no draft and no drafter; but another setting is then at its default."""
        found = difference(run["machine"], self.machine, of_both_only=True) or difference(
            run["prompt_sets"], self.prompt_sets, words="prompts of {}", of_both_only=True
        )
        if found is not None or run["pair"] != self.pair:
            return found
        theirs, ours = dict(run["settings"]), dict(self.settings)
        if "drafter" not in theirs.keys() & ours.keys():
            theirs.pop("drafter", None)
            ours.pop("drafter", None)
        return difference(theirs, ours) or difference(
            run["weights"], self.weights, words="weights of {}", of_both_only=True
        )


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
    """Runs and samples read so far, and the store that new ones are appended to."""

    path: Path
    schema: Schema = K_SWEEP
    samples: list[SweepSample] = field(default_factory=list[SweepSample])
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(self.path / FILE_NAME, self.schema.name, "run", self._take)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return self.store.heads

    @classmethod
    def open(cls, path: Path, schema: Schema = K_SWEEP) -> ResultsFolder:
        """Read the folder, to go on in it; it is made with the first record. Raises ConfigError if
        it holds anything else, or is of another version."""
        folder = cls(path, schema)
        folder.store.open()
        return folder

    @classmethod
    def read(cls, path: Path, schema: Schema = K_SWEEP) -> ResultsFolder:
        """What the folder holds; nothing is made or changed. Raises ConfigError, with the number of
        the line, for one that this version did not write."""
        folder = cls(path, schema)
        folder.store.read()
        return folder

    def _take(self, kind: str, record: Mapping[str, Any]) -> None:
        """One line that was read."""
        if kind == "run":
            Circumstances.of_run(record, self.schema)
            if record.get("run") != len(self.runs) + 1:
                raise RecordError(f"run is {record.get('run')!r:.40}, not {len(self.runs) + 1}")
        elif kind == "sample":
            sample = SweepSample.from_dict(record)
            pair = sample.config.model_pair_name
            if pair not in [run["pair"] for run in self.runs if run["run"] == sample.run]:
                raise RecordError(f"no line before it is of run {sample.run} of {pair!r:.40}")
            self.samples.append(sample)
        else:
            raise RecordError(f"record is {kind!r:.40}")

    def check(self, ours: Circumstances) -> None:
        """Raises ConfigError if any run here was measured under other circumstances."""
        self.store.check(ours.difference)

    def current(self) -> dict[Key, SweepSample]:
        """The newest sample of each cell, piece and repeat. A prompt counts in one piece of a cell:
        one that was cut otherwise, before prompts were added to its batch, gives way."""
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
        return self.store.begin({"run": len(self.runs) + 1, **asdict(ours), **facts})

    def prepare(self) -> None:
        """Make the folder now, and see that it can be written, rather than after the first visit.
        Raises MachineError."""
        self.store.add("sample", [])

    def next_visit(self) -> int:
        return max((sample.visit for sample in self.samples), default=0) + 1

    def add(self, samples: Iterable[SweepSample]) -> None:
        """Append the samples of one visit, all or none."""
        new = list(samples)
        self.store.add("sample", [sample.to_dict() for sample in new])
        self.samples += new
