"""One sample of a sweep: what was measured, of what, and how a line of the results says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.config import BenchmarkConfig
from outrider.bench.store import Plain, RecordError, entries, made

Key = tuple[str, str, int]
# Fields that lines of before do not have.
_LATER: Mapping[str, object] = {"request_ms": [], "first_ms": [], "cumulative_p95_ms": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
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
        """Inverse of `to_dict`. Raises RecordError."""
        derived = ("record", "config_hash", "label")
        given = {name: value for name, value in record.items() if name not in derived}
        given["config"] = _config(given.get("config"))
        if given.get("numbers") is not None:
            given["numbers"] = _numbers(given["numbers"])
        sample = made(cls, given)
        if sample.ok and sample.numbers is None:
            raise RecordError("neither numbers nor a reason")
        return sample


def _config(record: object) -> BenchmarkConfig:
    given = entries("config", record)
    others = entries("others", given.get("others"))
    for name, value in others.items():
        if not isinstance(value, Plain):
            raise RecordError(f"{name} is {value!r:.40}")
    return made(BenchmarkConfig, {**given, "others": tuple(sorted(others.items()))})


def _numbers(record: object) -> Numbers:
    given = {**_LATER, **entries("numbers", record)}
    numbers = made(Numbers, given)
    for name in ("num_tokens", "num_rounds", "seconds", "verify_ms"):
        # These are divided by.
        if getattr(numbers, name) == 0:
            raise RecordError(f"{name} is 0")
    return numbers
