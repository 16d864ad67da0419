"""Chooses between kernels that all fit by timing them: once a machine, then from a file.

Which loop is faster depends on the caches, the memory and what a hypervisor hides, so it is not
guessed. Candidates do the same works in turn, in an order that rotates, and the median of each
counts. A candidate's gain is the geometric mean, over the works, of the first one's time over its
own; the first candidate is the plain one, and another must beat it by MARGIN.

The answer is a small file in the cache folder. Its name and its content say what was asked: the
compiled library (hence sources, compiler and CPU), the precision and the hardware threads this
process may use. A file that says anything else, or is damaged, is as good as none. So is a folder
that cannot be written: the answer then holds for this process only, and another process may answer
otherwise. `forget` removes the files; `outrider doctor --measure` calls it.

Only candidates that have the same bits are timed, so an answer changes no text: which it is may
depend on what else the machine did in that second.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any

from outrider.core.files import NotPrivateError, read_private, write_private

FORMAT = 1
MARGIN = 1.05
BUDGET_SECONDS = 0.8
MIN_TURNS, MAX_TURNS = 3, 15
# A turn takes between a nanosecond and minutes; an answer has a few kilobytes.
_MICROSECONDS = (1e-3, 1e9)
_MAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of a candidate's turns at one work, such as "9 rows, large"."""

    candidate: str
    work: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The candidate to use, and every candidate's timings, the plain one's first."""

    chosen: str
    timings: tuple[Timing, ...] = ()

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
Contest = Mapping[str, Mapping[str, Callable[[], object]]]
# What a process knows already, by folder and question.
Known = dict[tuple[Path | None, str], Answer]
_KNOWN: Known = {}
_LOCK = RLock()


def decide(
    question: Mapping[str, str],
    contest: Callable[[], Contest],
    *,
    folder: Path | None,
    clock: Callable[[], float] = perf_counter,
    known: Known = _KNOWN,
) -> Answer:
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
    contest: Callable[[], Contest],
    folder: Path | None,
    clock: Callable[[], float],
) -> Answer:
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
    contest: Contest, *, started: float, clock: Callable[[], float] = perf_counter
) -> tuple[Timing, ...]:
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
        Timing(name, work, round(1e6 * statistics.median(found), 3))
        for (name, work), found in seconds.items()
    )


def _judged(timings: tuple[Timing, ...]) -> Answer:
    """The fastest by MARGIN over the plain one; of those, the earlier where they are equal."""
    plain = Answer(timings[0].candidate, timings)
    gains = {timing.candidate: plain.gain(timing.candidate) for timing in timings}
    fastest = max(gains, key=lambda name: gains[name])
    return Answer(fastest, timings) if gains[fastest] >= MARGIN else plain


def _file_name(question: Mapping[str, str]) -> str:
    asked = json.dumps([FORMAT, sorted(question.items())])
    return f"measured-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"


def _read(path: Path, question: Mapping[str, str]) -> Answer | None:
    """The answer in a file, or None if it is none of ours or not to this question."""
    try:
        record: Any = json.loads(read_private(path, _MAX_BYTES))
        if record["format"] != FORMAT or record["question"] != dict(question):
            return None
        answer = Answer(str(record["chosen"]), tuple(_timing(raw) for raw in record["timings"]))
    except (OSError, NotPrivateError, RecursionError):
        return None
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None
    return answer if _is_whole(answer, question["candidates"].split(",")) else None


def _timing(raw: Any) -> Timing:
    return Timing(str(raw["candidate"]), str(raw["work"]), float(raw["microseconds"]))


def _is_whole(answer: Answer, candidates: Sequence[str]) -> bool:
    """Each of these and nobody else has a possible time for every work, and one is chosen."""
    works: dict[str, set[str]] = {}
    for timing in answer.timings:
        if not _MICROSECONDS[0] <= timing.microseconds <= _MICROSECONDS[1]:
            return False
        works.setdefault(timing.candidate, set()).add(timing.work)
    if answer.chosen not in works or works.keys() != set(candidates):
        return False
    return len(set(map(frozenset, works.values()))) == 1


def _write(path: Path, question: Mapping[str, str], answer: Answer) -> Answer:
    """Keep `answer`, written beside its name and moved into place."""
    record = {"format": FORMAT, "question": dict(question), **asdict(answer)}
    text = json.dumps(record, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, text.encode())
    except OSError as error:
        _log.warning("%s cannot be kept: %s", path, error.strerror)
    return answer
