"""Extent of a measurement (batches, depths, texts) and the seconds and memory that it may take.

A pass of a small target takes a millisecond, so every usual point is tried. That of a large one
takes fifty, and keys and values of its texts count: fewer texts at once, fewer depths. Work that
would not end in time, or would not fit, is not begun: its seconds and bytes are estimated before.
Memory is the weights of every model once, and a fixed amount for the rest of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.api.output import ProcessGauge
from outrider.core.clock import Clock
from outrider.core.errors import CapacityError
from outrider.core.fields import size
from outrider.core.spec import ModelSpec
from outrider_lab.bench.calibrate.timing import BATCHES, KS

# Weights from which on a target is a large one, in bytes.
_LARGE = 100_000_000
# K up to which drafts are counted and planned; what they cost beyond goes on along their line.
DEEPEST, DEEPEST_OF_LARGE = 16, 8
_LEAST_KS = (3, 7)
# K of one text alone: up to whole tiles of 8 and 12 rows, and one row more than 16.
_KS_ALONE = (1, 2, 3, 5, 7, 11, 16)
# Texts at once on which drafts of a large target are counted.
_AT_ONCE = 1
# Tokens of a prompt that a large target reads even if there is little time: a row takes it
# milliseconds, for every drafter, and each engine keeps them.
_PROMPT_OF_LARGE = 40
# Keys and values that one engine holds: tokens at the least and bytes at the most.
_LEAST_ROOM, _MOST_ROOM_BYTES = 512, 96_000_000
# Of the memory that is left once the target is loaded, what keys and values may take.
_ROOM_SHARE = 0.5
_PAGE = 64
_CHUNK, _CHUNK_OF_LARGE = 256, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """`room` is how many tokens an engine holds, `chunk` how many of a prompt it reads at once, and
    `longest` how many of a prompt it reads in short time, None for no limit. Rounds are timed with
    `batches` of texts, and up to `batch_size` texts are written at once. With `is_large` rounds are
    timed while what is kept of them is counted, since there is no time for both. With `alone` only
    rounds of one text are timed, of about the length that texts will have."""

    batches: Sequence[int]
    ks: Sequence[int]
    deepest: int
    least_ks: tuple[int, ...]
    room: int
    chunk: int
    batch_size: int
    is_large: bool = False
    alone: bool = False
    longest: int | None = None

    def engine_bytes(self, spec: ModelSpec) -> int:
        """Of another engine beside one with the same weights: keys and values, buffers, logits and
        the distributions made of them."""
        rows = self.batch_size * (self.deepest + 1)
        wide = 6 * spec.hidden_size + 3 * spec.ffn_size
        buffers = 4 * (self.chunk + rows) * wide
        return self.room * spec.kv_bytes_per_token + buffers + 8 * rows * spec.vocab_size


def extent_of(
    spec: ModelSpec, *, batch: int, num_engines: int, left_bytes: int | None, alone: bool = False
) -> Extent:
    """Of engines that will write `batch` texts at once; `left_bytes` is the memory for all of them
    beside the weights, None for no limit."""
    large = spec.weight_bytes >= _LARGE
    others = (_AT_ONCE,) if large else BATCHES
    batches = list(dict.fromkeys((batch, *others)))
    batch_size = max(batches)
    most = _MOST_ROOM_BYTES
    if left_bytes is not None:
        most = min(most, int(_ROOM_SHARE * max(left_bytes, 0)) // max(num_engines, 1))
    room = max(most // spec.kv_bytes_per_token, _LEAST_ROOM, batch * _LEAST_ROOM // 2)
    return Extent(
        batches=(1,) if alone else batches,
        ks=_KS_ALONE if alone else KS,
        deepest=DEEPEST_OF_LARGE if large else DEEPEST,
        least_ks=_LEAST_KS,
        room=-(-room // _PAGE) * _PAGE,
        chunk=_CHUNK_OF_LARGE if large else _CHUNK,
        batch_size=batch_size,
        is_large=large,
        alone=alone,
        longest=_PROMPT_OF_LARGE if large else None,
    )


# Besides weights: the program, memory of texts, buffers of all engines.
BESIDE_WEIGHTS = 1_000_000_000
# What is kept to reckon the answer, to print it and to end: so many seconds or this share of them,
# and more where the program took long to start, for then it takes long to end; never more than the
# last share.
_ENDING, _ENDING_SHARE = 2.0, 0.1
_ENDING_OF_START, _MOST_ENDING_SHARE = 0.5, 0.3
# Bytes of weights that are read and packed in a second at the least, and seconds of any loading.
LOAD_RATE, LOAD_SECONDS = 120e6, 0.4
# Seconds after which partial answers are given, and between them.
FIRST_ANSWER, NEXT_ANSWER = 10.0, 10.0


@dataclass(slots=True)
class Bounds:
    """`seconds` from `began` on; `most_bytes` of resident memory, None for no limit. `held` tells
    what the process holds, now and at most so far."""

    seconds: float = math.inf
    most_bytes: int | None = None
    clock: Clock = perf_counter
    began: float = math.nan
    held: Callable[[], tuple[int, int]] = field(default_factory=lambda: held_bytes)
    _ending: float = 0.0
    _load_rate: float = LOAD_RATE
    _load_seconds: float = LOAD_SECONDS
    _next_answer: float = FIRST_ANSWER

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            self.began = self.clock()
        if math.isfinite(self.seconds):
            usual = min(_ENDING, _ENDING_SHARE * self.seconds)
            slow = min(_ENDING_OF_START * self.spent, _MOST_ENDING_SHARE * self.seconds)
            self._ending = max(usual, slow)

    @property
    def spent(self) -> float:
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds for measuring; below 0 once the answer is due."""
        return self.seconds - self._ending - self.spent

    def part(self, share: float) -> float:
        """The moment at which this share of what is left will have gone."""
        return self.clock() + max(share * self.left, 0.0)

    def answer_is_due(self) -> bool:
        """Whether a partial answer should be given now; then the next one is due later. None is
        where the whole answer is next."""
        if self.spent < self._next_answer or self.left <= 0:
            return False
        self._next_answer = self.spent + NEXT_ANSWER
        return True

    def must_fit(self, what: str, *, num_bytes: int) -> None:
        """Raises CapacityError for what would take more memory than is left."""
        most, (now, _) = self.most_bytes, self.held()
        if most is not None and now + num_bytes > most:
            raise CapacityError(
                f"{what} would take {size(num_bytes)} more, and {size(max(most - now, 0))} of "
                f"{size(most)} are left.",
                hint="name fewer drafters with --drafters",
            )

    def loading_seconds(self, num_bytes: int) -> float:
        """Of weights of so many bytes, by the rate at which others were loaded."""
        return self._load_seconds + num_bytes / self._load_rate

    def note_loading(self, num_bytes: int, seconds: float) -> None:
        """A model of so many bytes was loaded in so long, or an engine without one was made."""
        if not num_bytes:
            self._load_seconds = max(seconds, LOAD_SECONDS)
        elif num_bytes > LOAD_RATE / 10 and seconds > 0:
            self._load_rate = num_bytes / seconds

    def add_time(self, seconds: float) -> None:
        """For what had to be done first and does not count."""
        self.began += seconds

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process held so far."""
        return self.held()[1]


def held_bytes() -> tuple[int, int]:
    """Resident memory of this process, now and at most so far."""
    gauge = ProcessGauge()
    return gauge.now(), gauge.peak()
