"""Timings of this machine: which of several kernels of equal bits is the fastest.

Candidates do the same works in turn, in a rotating order, and the median time of each counts. A
candidate's gain is the geometric mean, over the works, of the first candidate's time over its own.
The first candidate is the plain one, and another must beat it by MARGIN. The answer is stored in a
file of the cache folder with the question in its name and content; a damaged file, or one with
another question, is ignored. `forget` removes the files (`outrider doctor --measure`).

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
from outrider.core.errors import ConfigError, ContractError, given, reason_of
from outrider.core.files import NotPrivateError, read_private, write_private
from outrider.kernels.native import huge_pages
from outrider.kernels.native.cpu import (
    DOTS,
    ENDINGS,
    TILES,
    VECTORS,
    hardware_threads,
    last_cache_bytes,
    num_fast_cores,
    num_physical_cores,
    tiles_refusal,
)
from outrider.kernels.native.ops import NativeInt8, NativeOps
from outrider.kernels.plan import PackedLinear

_log = logging.getLogger(__name__)

FORMAT = 1
MARGIN = 1.05
BUDGET_SECONDS = 0.8
MIN_TURNS, MAX_TURNS = 3, 15
# A turn takes between a nanosecond and minutes; an answer has a few kilobytes.
_MICROSECONDS = (1e-3, 1e9)
_MAX_BYTES = 1 << 20


# As in csrc/pairs.cpp.
_NO_DOTS = (
    None,
    "AVX512-BF16: this CPU has no dot products of bfloat16",
    "AVX512-BF16: the compiler does not know it",
)


def refused_kinds(library: ctypes.CDLL, dtype: torch.dtype, scheme: str) -> dict[str, str]:
    """Kinds that linears of `dtype` (or of `scheme`, unless that is "none") cannot use, each with
    the reason in one sentence. All other kinds can be used."""
    # Called for every precision: permission must come before the first team of threads.
    no_tiles = tiles_refusal(library)
    missing: int = library.outrider_dots_missing()
    no_dots: str | None = _NO_DOTS[missing]
    if scheme != "none" or dtype != torch.bfloat16:
        no_dots = "they multiply bfloat16 only"
    if scheme == "none" and dtype != torch.bfloat16:
        no_tiles = "they multiply bfloat16 and integers only"
    return {kind: why for kind, why in ((DOTS, no_dots), (TILES, no_tiles)) if why}


def kind_by_rule(library: ctypes.CDLL, refused: Mapping[str, str]) -> str:
    """The kind that RULE names if `refused` kinds cannot be used."""
    if TILES not in refused:
        return TILES
    return DOTS if DOTS not in refused and library.outrider_dots_faster() else VECTORS


def attention_kind(library: ctypes.CDLL, dtype: torch.dtype) -> str:
    """The kind of attention over an arena of `dtype`: by rule too, since kinds differ in bits."""
    wished = dtype == torch.bfloat16 and env.linears() in (None, TILES)
    return TILES if wished and TILES not in refused_kinds(library, dtype, "none") else VECTORS


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
        """The speed of `candidate` over that of the plain candidate."""
        plain, own = self._of(self.timings[0].candidate), self._of(candidate)
        logs = [math.log(plain[work] / own[work]) for work in plain]
        return math.exp(statistics.fmean(logs))

    @property
    def why(self) -> str:
        """The reason for the choice in one sentence, without a full stop."""
        names = list(dict.fromkeys(timing.candidate for timing in self.timings))
        if not names:
            return ""
        plain, *others = names
        if self.chosen != plain:
            return f"{self.gain(self.chosen):.2f}x as fast as {plain} on this machine"
        gains = ", ".join(f"{name} {self.gain(name):.2f}x as fast" for name in others)
        return f"{gains} on this machine; below {MARGIN:.2f}x the plainer wins"

    def _of(self, candidate: str) -> dict[str, float]:
        return {t.work: t.microseconds for t in self.timings if t.candidate == candidate}


# Candidates by name, the plain one first; of each, a turn at every work by name.
ModeTrial = Mapping[str, Mapping[str, Callable[[], object]]]
# Answers that this process already has, by folder and question.
Known = dict[tuple[Path | None, str], TunedKernel]
_KNOWN: Known = {}
_LOCK = RLock()


def decide(
    question: Mapping[str, str],
    trial: Callable[[], ModeTrial],
    *,
    folder: Path | None,
    clock: Callable[[], float] = perf_counter,
    known: Known = _KNOWN,
) -> TunedKernel:
    """The answer to `question`: known to this process, stored in `folder`, or found by a trial of
    at most about a second. `question` must have everything that the answer depends on, with the
    `candidates` of the trial separated by commas. `trial` is called only if need be, and all its
    candidates do the same works."""
    name = _file_name(question)
    with _LOCK:
        if (folder, name) not in known:
            known[folder, name] = _found_or_made(question, trial, folder, clock)
        return known[folder, name]


def forget(folder: Path | None) -> int:
    """Remove all answers, also of other machines that share the folder; return their number."""
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
    trial: Callable[[], ModeTrial],
    folder: Path | None,
    clock: Callable[[], float],
) -> TunedKernel:
    path = folder / _file_name(question) if folder else None
    found = _read(path, question) if path else None
    if found is not None:
        return found
    started = clock()
    answer = _judged(time_in_turns(trial(), started=started, clock=clock))
    _log.info("Measured in %.1f s: %s is %s.", clock() - started, answer.chosen, answer.why)
    if path is None:
        return answer
    # Another process may have answered in the meantime; the first answer counts for all.
    return _read(path, question) or _write(path, question, answer)


def time_in_turns(
    trial: ModeTrial, *, started: float, clock: Callable[[], float] = perf_counter
) -> tuple[KernelTiming, ...]:
    """Median times over rotating turns until the budget is spent, without each first turn."""
    turns = [(name, work, call) for name, works in trial.items() for work, call in works.items()]
    seconds: dict[tuple[str, str], list[float]] = {(name, work): [] for name, work, _ in turns}
    for turn in range(MAX_TURNS + 1):
        for offset in range(len(turns)):
            name, work, call = turns[(turn + offset) % len(turns)]
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
    """The fastest candidate, the first if equal, if it beats the plain one by MARGIN."""
    plain = TunedKernel(timings[0].candidate, timings)
    gains = {timing.candidate: plain.gain(timing.candidate) for timing in timings}
    fastest = max(gains, key=lambda name: gains[name])
    return TunedKernel(fastest, timings) if gains[fastest] >= MARGIN else plain


def _file_name(question: Mapping[str, str]) -> str:
    asked = json.dumps([FORMAT, sorted(question.items())])
    return f"measured-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"


def _read(path: Path, question: Mapping[str, str]) -> TunedKernel | None:
    """The answer in a file; None if the file is not ours or has another question."""
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
    """True if exactly these candidates have a plausible time for every work, and one is chosen."""
    works: dict[str, set[str]] = {}
    for timing in answer.timings:
        if not _MICROSECONDS[0] <= timing.microseconds <= _MICROSECONDS[1]:
            return False
        works.setdefault(timing.candidate, set()).add(timing.work)
    if answer.chosen not in works or works.keys() != set(candidates):
        return False
    return len(set(map(frozenset, works.values()))) == 1


def _write(path: Path, question: Mapping[str, str], answer: TunedKernel) -> TunedKernel:
    """Store `answer` in a new file, which then gets its name in one step."""
    record = {"format": FORMAT, "question": dict(question), **asdict(answer)}
    text = json.dumps(record, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, text.encode())
    except OSError as error:
        _log.warning("%s cannot be stored: %s", path, reason_of(error))
    return answer


ROWS = (1, 9, 32)
LARGE_OI, SMALL_OI = (4096, 1024), (1024, 256)
# More than any cache holds, but little enough to be allocated quickly.
MAX_LARGE_BYTES = 128 << 20
SMALL_CALLS = 32


class Packs(Protocol):
    """One kind of linear: `NativeOps` or `NativeInt8`."""

    def pack(self, weight_OI: Tensor) -> PackedLinear: ...
    def linear(self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor) -> None: ...


def library_key(library: ctypes.CDLL) -> str:
    """The library's name, in which build.py hashes sources, compiler, flags and CPU."""
    return Path(library._name).stem  # pyright: ignore[reportPrivateUsage] - documented as public


def about_machine(library: ctypes.CDLL) -> dict[str, str]:
    """The part of a question that every measured answer depends on."""
    cpus = ",".join(map(str, hardware_threads()))
    return {"library": library_key(library), "hardware_threads": cpus}


def thread_answer(library: ctypes.CDLL, folder: Path | None) -> TunedKernel:
    """The number of threads, as the name of a candidate: the physical cores, all hardware threads,
    or the fast cores of a CPU that also has slow ones.

    A process has one team of threads for all its models, so their number is decided once, on
    bfloat16 weights, for every precision.
    """
    numbers = (num_physical_cores(), len(hardware_threads()), num_fast_cores())
    candidates = {str(n): n for n in numbers}
    if len(candidates) == 1:
        return TunedKernel(str(num_physical_cores()))
    question = about_machine(library) | {"choice": "threads", "candidates": ",".join(candidates)}

    def trial() -> dict[str, Mapping[str, Callable[[], object]]]:
        kinds = {name: NativeOps(library, torch.bfloat16, n) for name, n in candidates.items()}
        return {name: linear_works(ops) for name, ops in kinds.items()}

    return decide(question, trial, folder=folder)


def kind_answer(
    library: ctypes.CDLL, dtype: torch.dtype, scheme: str, folder: Path | None
) -> TunedKernel:
    """The kind of linears: the one that the environment names, or else by a rule for `dtype` and by
    measuring for int8; never one that is refused. Raises ConfigError for an unknown kind.

    Only kinds with the same bits are timed, so only on integers; always with the physical cores.
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

    def trial() -> dict[str, Mapping[str, Callable[[], object]]]:
        kinds = {one: NativeInt8(library, threads, kind=one) for one in candidates}
        return {one: linear_works(linear) for one, linear in kinds.items()}

    return decide(question, trial, folder=folder)


def linear_works(kind: Packs) -> dict[str, Callable[[], object]]:
    """A function for each work that runs one turn of it; weights are packed from bfloat16.

    Large weights are many copies of one matrix, together larger than the last cache; small ones are
    one matrix that stays in a cache, where the start of a team of threads counts. Both have the
    rows of plain decoding, of a draft's verification and of prompts. Values do not matter for time.
    """
    rng = torch.Generator().manual_seed(0)
    large = kind.pack(torch.randn(LARGE_OI, generator=rng).bfloat16())
    most_bytes = min(2 * last_cache_bytes(), MAX_LARGE_BYTES)
    copies = cycle([large, *(copied(large) for _ in range(most_bytes // large.nbytes))])
    small = kind.pack(torch.randn(SMALL_OI, generator=rng).bfloat16())
    works: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        label = f"{rows} row{'s' if rows > 1 else ''}"
        works[f"{label}, large"] = _turn(kind, copies, rows, 1)
        works[f"{label}, small"] = _turn(kind, cycle([small]), rows, SMALL_CALLS)
    return works


def copied(packed: PackedLinear) -> PackedLinear:
    """A copy of packed weights, in huge pages like other weights."""
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
