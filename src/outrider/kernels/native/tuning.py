"""Chooses between kernels of equal bits by timing them: once a machine, then from a file.

Candidates do the same work in turn, in a rotating order, and the median of each counts. A
candidate's gain is the geometric mean, over the works, of the first one's time over its own; the
first candidate is the plain one, and another must beat it by MARGIN. The answer is a file in the
cache folder whose name and content say what was asked; a damaged or other file counts as none.
`forget` removes the files (`outrider doctor --measure`).

Shapes:  N = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import env
from outrider.core.errors import ConfigError, ContractError, given
from outrider.core.files import NotPrivateError, read_private, write_private
from outrider.kernels.native import huge_pages
from outrider.kernels.native.cpu import (
    ENDINGS,
    VECTORS,
    hardware_threads,
    kind_by_rule,
    last_cache_bytes,
    num_fast_cores,
    num_physical_cores,
    refused_kinds,
)
from outrider.kernels.native.ops import NativeOps
from outrider.kernels.native.quantised import NativeInt8
from outrider.kernels.plan import PackedLinear

FORMAT = 1
MARGIN = 1.05
BUDGET_SECONDS = 0.8
MIN_TURNS, MAX_TURNS = 3, 15
# A turn takes between a nanosecond and minutes; an answer has a few kilobytes.
_MICROSECONDS = (1e-3, 1e9)
_MAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """The median of a candidate's turns at one work, such as "9 rows, large"."""

    candidate: str
    work: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """The candidate to use, and every candidate's timings, the plain one's first."""

    chosen: str
    timings: tuple[KernelTiming, ...] = ()

    def gain(self, candidate: str) -> float:
        """How many times as fast as the plain candidate `candidate` is."""
        plain, own = self._of(self.timings[0].candidate), self._of(candidate)
        logs = [math.log(plain[work] / own[work]) for work in plain]
        return math.exp(statistics.fmean(logs))

    @property
    def why(self) -> str:
        """One sentence, without an end."""
        names = list(dict.fromkeys(timing.candidate for timing in self.timings))
        if not names:
            return ""
        plain, *others = names
        if self.chosen != plain:
            return f"{self.gain(self.chosen):.2f}x as fast as {plain} on this machine"
        told = ", ".join(f"{name} {self.gain(name):.2f}x as fast" for name in others)
        return f"{told} on this machine; below {MARGIN:.2f}x the plainer wins"

    def _of(self, candidate: str) -> dict[str, float]:
        return {t.work: t.microseconds for t in self.timings if t.candidate == candidate}


# Candidates by name, the plain one first; of each, a turn at every work by name.
ModeTrial = Mapping[str, Mapping[str, Callable[[], object]]]
# What a process knows already, by folder and question.
Known = dict[tuple[Path | None, str], TunedKernel]
_KNOWN: Known = {}
_LOCK = RLock()


def decide(
    question: Mapping[str, str],
    contest: Callable[[], ModeTrial],
    *,
    folder: Path | None,
    clock: Callable[[], float] = perf_counter,
    known: Known = _KNOWN,
) -> TunedKernel:
    """The answer to `question`, from this process, from `folder`, or by a contest of at most about
    a second. `question` must name all that the answer depends on, the `candidates` of the contest,
    separated by commas, among it; `contest` is made only if need be, and its candidates do the same
    works."""
    name = _file_name(question)
    with _LOCK:
        if (folder, name) not in known:
            known[folder, name] = _found_or_made(question, contest, folder, clock)
        return known[folder, name]


def forget(folder: Path | None) -> int:
    """Remove every answer, also of other machines that share the folder; how many files went."""
    removed = 0
    with _LOCK:
        _KNOWN.clear()
        for path in folder.glob("measured-*.json") if folder else ():
            with suppress(OSError):
                path.unlink()
                removed += 1
    return removed


def _found_or_made(
    question: Mapping[str, str],
    contest: Callable[[], ModeTrial],
    folder: Path | None,
    clock: Callable[[], float],
) -> TunedKernel:
    path = folder / _file_name(question) if folder else None
    found = _read(path, question) if path else None
    if found is not None:
        return found
    started = clock()
    answer = _judged(time_in_turns(contest(), started=started, clock=clock))
    _log.info("Measured in %.1f s: %s is %s.", clock() - started, answer.chosen, answer.why)
    if path is None:
        return answer
    # Another process may have answered meanwhile; the first answer is everybody's.
    return _read(path, question) or _write(path, question, answer)


def time_in_turns(
    contest: ModeTrial, *, started: float, clock: Callable[[], float] = perf_counter
) -> tuple[KernelTiming, ...]:
    """Medians over rotating turns, until the budget that began at `started` is spent; the first
    turn of each warms it up."""
    turns = [(name, work, call) for name, works in contest.items() for work, call in works.items()]
    seconds: dict[tuple[str, str], list[float]] = {(name, work): [] for name, work, _ in turns}
    for turn in range(MAX_TURNS + 1):
        for place in range(len(turns)):
            name, work, call = turns[(turn + place) % len(turns)]
            before = clock()
            call()
            if turn:
                seconds[name, work].append(clock() - before)
        if turn >= MIN_TURNS and clock() - started > BUDGET_SECONDS:
            break
    return tuple(
        KernelTiming(name, work, round(1e6 * statistics.median(found), 3))
        for (name, work), found in seconds.items()
    )


def _judged(timings: tuple[KernelTiming, ...]) -> TunedKernel:
    """The fastest by MARGIN over the plain one; of those, the earlier where they are equal."""
    plain = TunedKernel(timings[0].candidate, timings)
    gains = {timing.candidate: plain.gain(timing.candidate) for timing in timings}
    fastest = max(gains, key=lambda name: gains[name])
    return TunedKernel(fastest, timings) if gains[fastest] >= MARGIN else plain


def _file_name(question: Mapping[str, str]) -> str:
    asked = json.dumps([FORMAT, sorted(question.items())])
    return f"measured-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"


def _read(path: Path, question: Mapping[str, str]) -> TunedKernel | None:
    """The answer in a file, or None if it is none of ours or not to this question."""
    try:
        record: Any = json.loads(read_private(path, _MAX_BYTES))
        if record["format"] != FORMAT or record["question"] != dict(question):
            return None
        answer = TunedKernel(
            str(record["chosen"]), tuple(_timing(raw) for raw in record["timings"])
        )
    except (OSError, NotPrivateError, RecursionError):
        return None
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None
    return answer if _is_whole(answer, question["candidates"].split(",")) else None


def _timing(raw: Any) -> KernelTiming:
    return KernelTiming(str(raw["candidate"]), str(raw["work"]), float(raw["microseconds"]))


def _is_whole(answer: TunedKernel, candidates: Sequence[str]) -> bool:
    """Each of these and nobody else has a possible time for every work, and one is chosen."""
    works: dict[str, set[str]] = {}
    for timing in answer.timings:
        if not _MICROSECONDS[0] <= timing.microseconds <= _MICROSECONDS[1]:
            return False
        works.setdefault(timing.candidate, set()).add(timing.work)
    if answer.chosen not in works or works.keys() != set(candidates):
        return False
    return len(set(map(frozenset, works.values()))) == 1


def _write(path: Path, question: Mapping[str, str], answer: TunedKernel) -> TunedKernel:
    """Keep `answer`, written beside its name and moved into place."""
    record = {"format": FORMAT, "question": dict(question), **asdict(answer)}
    text = json.dumps(record, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, text.encode())
    except OSError as error:
        _log.warning("%s cannot be kept: %s", path, error.strerror)
    return answer


ROWS = (1, 9)
LARGE_OI, SMALL_OI = (4096, 1024), (1024, 256)
# Enough to be no cache's, and little enough to be allocated in passing.
MAX_LARGE_BYTES = 128 << 20
SMALL_CALLS = 32


class Packs(Protocol):
    """One kind of linear: `NativeOps` or `NativeInt8`."""

    def pack(self, weight_OI: Tensor) -> PackedLinear: ...
    def linear(self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor) -> None: ...


def library_key(library: ctypes.CDLL) -> str:
    """What build.py named the library after: sources, compiler, flags and CPU."""
    return Path(library._name).stem  # pyright: ignore[reportPrivateUsage] - documented as public


def about_machine(library: ctypes.CDLL) -> dict[str, str]:
    """What every measured answer depends on."""
    cpus = ",".join(map(str, hardware_threads()))
    return {"library": library_key(library), "hardware_threads": cpus}


def thread_answer(library: ctypes.CDLL, folder: Path | None) -> TunedKernel:
    """The number of threads as a candidate's name: the physical cores, all hardware threads, or the
    fast cores of a CPU that has slow ones.

    A process keeps one team of threads for all its models, so their number is decided once, on
    bfloat16 weights, for every precision.
    """
    numbers = (num_physical_cores(), len(hardware_threads()), num_fast_cores())
    candidates = {str(n): n for n in numbers}
    if len(candidates) == 1:
        return TunedKernel(str(num_physical_cores()))
    question = about_machine(library) | {"choice": "threads", "candidates": ",".join(candidates)}

    def contest() -> dict[str, Mapping[str, Callable[[], object]]]:
        kinds = {name: NativeOps(library, torch.bfloat16, n) for name, n in candidates.items()}
        return {name: linear_works(ops) for name, ops in kinds.items()}

    return decide(question, contest, folder=folder)


def kind_answer(
    library: ctypes.CDLL, dtype: torch.dtype, scheme: str, folder: Path | None
) -> TunedKernel:
    """The kind of linears of `dtype`, by a rule, or of int8, by measuring; the one that the
    environment names goes first. Those that `refused_kinds` names are never taken.

    Raises ConfigError where the environment names no kind.

    Kinds of linear are tried where they have the same bits, on integers, and with the physical
    cores, whatever number of threads a user wants.
    """
    refused = refused_kinds(library, dtype, scheme)
    candidates = [kind for kind in ENDINGS if kind not in refused]
    if (wanted := env.linears()) is not None:
        if wanted not in ENDINGS:
            raise ConfigError(
                f"OUTRIDER_LINEARS: {wanted!r} is no kind of linear.",
                hint=f"unset it, or set it to one of: {', '.join(ENDINGS)}",
            )
        return TunedKernel(wanted if wanted in candidates else VECTORS)
    if scheme == "none":
        return TunedKernel(kind_by_rule(library, refused))
    if candidates == [VECTORS]:
        return TunedKernel(VECTORS)
    question = about_machine(library) | {
        "choice": "linear",
        "scheme": scheme,
        "candidates": ",".join(candidates),
    }
    threads = num_physical_cores()

    def contest() -> dict[str, Mapping[str, Callable[[], object]]]:
        kinds = {one: NativeInt8(library, threads, kind=one) for one in candidates}
        return {one: linear_works(linear) for one, linear in kinds.items()}

    return decide(question, contest, folder=folder)


def linear_works(kind: Packs) -> dict[str, Callable[[], object]]:
    """A turn at each work, by name; weights are made of bfloat16.

    Large weights are many copies of one matrix, together larger than the last cache; small ones are
    one matrix that stays in a cache, where the start of a team of threads counts. Both have the
    rows of plain decoding and of a draft's verification. Values do not matter for time.
    """
    rng = torch.Generator().manual_seed(0)
    large = kind.pack(torch.randn(LARGE_OI, generator=rng).bfloat16())
    room = min(2 * last_cache_bytes(), MAX_LARGE_BYTES)
    copies = cycle([large, *(copied(large) for _ in range(room // large.nbytes))])
    small = kind.pack(torch.randn(SMALL_OI, generator=rng).bfloat16())
    works: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        told = f"{rows} row{'s' if rows > 1 else ''}"
        works[f"{told}, large"] = _turn(kind, copies, rows, 1)
        works[f"{told}, small"] = _turn(kind, cycle([small]), rows, SMALL_CALLS)
    return works


def copied(packed: PackedLinear) -> PackedLinear:
    """The same weights in memory of their own, of the kind that weights are in."""
    data = huge_pages.empty(*packed.data.shape, dtype=packed.data.dtype).copy_(packed.data)
    own = given(packed.descriptor, "descriptor")
    descriptor: Any = type(own).from_buffer_copy(own)
    if descriptor.packed != packed.data.data_ptr():
        raise ContractError("the packed weight was moved")
    descriptor.packed = data.data_ptr()
    return replace(packed, data=data, pointer=ctypes.addressof(descriptor), descriptor=descriptor)


def _turn(
    kind: Packs, weights: Iterator[PackedLinear], rows: int, num_calls: int
) -> Callable[[], None]:
    num_out, num_in = LARGE_OI if num_calls == 1 else SMALL_OI
    x_NI, out_NO = torch.ones(rows, num_in), torch.empty(rows, num_out)

    def turn() -> None:
        for _ in range(num_calls):
            kind.linear(x_NI, next(weights), out_NO)

    return turn
