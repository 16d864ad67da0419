"""The prompt store of one model: reads pages when a text is opened, writes them in the background.

A thread writes what was offered, in order: at full speed once requests pause, and while they run
for SHARE of the time of one core. What was overwritten in memory before its turn is not stored, nor
are pages that could not be found, since the page before them is not stored. Held in memory are at
most _MOST_WAITING names of files, copies of _MOST_COPIED bytes, and the file that is being written.
After an error of the disk nothing is written any more, with one warning; requests go on.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from weakref import WeakSet

from outrider.cache.pages import PageName, Part
from outrider.core.errors import reason_of
from outrider.plugins.prompt_store.files import DamagedError, StoreFolder, check_file

_log = logging.getLogger(__name__)

# Files that wait to be written, and bytes of copies that they hold.
_MOST_WAITING, _MOST_COPIED = 16_384, 256_000_000
# The share of one core's time that the stores of an engine write for while requests run. Requests
# pause once none has run for PAUSE_SECONDS.
SHARE = 1 / 400
PAUSE_SECONDS = 0.2
# A thread without jobs looks so often, and ends after a while: to start one takes a while, too.
_LOOK_SECONDS, _LINGER_SECONDS = 1.0, 30.0
# The end of a process waits so long for its writes.
FLUSH_SECONDS = 10.0
_STARTED: WeakSet[PromptStore] = WeakSet()


@lru_cache(256)
def _origin(model: str, salt: str) -> str:
    """The digest before the first page of the texts of a salt."""
    return hashlib.sha256(f"{model}\n{salt}".encode("utf-8", "surrogatepass")).hexdigest()


@atexit.register
def _flush_all() -> None:
    for store in list(_STARTED):
        store.flush()


@dataclass(slots=True)
class Counts:
    """Counts of files so far."""

    read: int = 0
    written: int = 0
    damaged: int = 0
    missed: int = 0


@dataclass(slots=True)
class Pace:
    """The pace of all stores of an engine. `is_idle` is True while no request runs; the last one
    ended at the time `ended`. Until the time `due` files are written in pauses only. Writing took
    `busy_seconds` of a core while requests ran."""

    is_idle: Callable[[], bool]
    ended: float = 0.0
    due: float = 0.0
    busy_seconds: float = 0.0

    def is_pause(self) -> bool:
        return time.monotonic() - self.ended >= PAUSE_SECONDS and self.is_idle()

    def allows(self) -> bool:
        """True if a file may be written now."""
        return time.monotonic() >= self.due or self.is_pause()

    def spend(self, seconds: float) -> None:
        """Note that writing took so many seconds of a core while requests ran."""
        self.busy_seconds += seconds
        self.due = max(self.due, time.monotonic()) + seconds / SHARE


# A file to be written or touched, and the bytes of the copy that it holds.
_Job = tuple[Callable[[], None], int]


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptStore:
    """A PageStore over the files of `model` in a folder, whose name is the digest of what it is
    `about`.

    The thread ends when it has nothing to do for a while, so that it does not hold the model."""

    folder: StoreFolder
    model: str
    pace: Pace
    about: Mapping[str, object] = field(default_factory=dict[str, object])
    counts: Counts = field(default_factory=Counts)
    problem: str = ""
    _jobs: deque[_Job] = field(default_factory=deque[_Job])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _process: int = 0
    # Bytes of copies so far: counted by the threads that offer them, and by the one that writes.
    _num_offered: int = 0
    _num_taken: int = 0
    _is_busy: bool = False
    _hurries: bool = False

    def name(self, before: PageName | None, tokens: Sequence[int], salt: str) -> PageName:
        if before is None:
            return PageName(_origin(self.model, salt), 0, tuple(tokens))
        return PageName(before, before.index + 1, tuple(tokens))

    def has(self, kind: str, name: PageName) -> bool:
        return self.folder.has(kind, self.model, name.digest, name.index)

    def read(self, kind: str, name: PageName, parts: Sequence[Part]) -> bool:
        try:
            self.folder.read(kind, self.model, name, parts)
        except FileNotFoundError:
            return False
        except (DamagedError, OSError) as error:
            self._drop_damaged(self.folder.path(kind, self.model, name), error)
            return False
        self.counts.read += 1
        return True

    def _drop_damaged(self, path: Path, error: Exception) -> None:
        """Delete a damaged file; one that cannot be read now may be whole."""
        if not self.counts.damaged:
            reason = reason_of(error)
            _log.warning("A file of the prompt store is not used: %s: %s.", path, reason)
        self.counts.damaged += 1
        if isinstance(error, DamagedError):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                _log.debug("%s cannot be deleted.", path, exc_info=True)

    def offer(
        self,
        kind: str,
        name: PageName,
        copied: Callable[[], Sequence[Part] | None],
        *,
        at_once: bool = False,
    ) -> None:
        if len(self._jobs) >= _MOST_WAITING:
            self.counts.missed += 1
            return
        held = 0
        if at_once:
            if self._num_offered - self._num_taken >= _MOST_COPIED or (parts := copied()) is None:
                self.counts.missed += 1
                return
            copied, held = partial(list[Part], parts), sum(part.nbytes for part in parts)
            self._num_offered += held
        self._add(partial(self._write, kind, name, copied, time.time_ns()), held)

    def used(self, names: Sequence[PageName]) -> None:
        self.pace.ended = time.monotonic()
        if names and len(self._jobs) < _MOST_WAITING:
            self._add(partial(self._touch, tuple(names), time.time_ns()))

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all is written, at most so many seconds; return whether it is."""
        if self._process != os.getpid():
            return True
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._jobs and not self._is_busy, seconds)
            self._hurries = False
        return done

    def _add(self, job: Callable[[], None], held: int = 0) -> None:
        if self.problem:
            return
        # No wake-up: the thread looks by itself, and a wake-up takes longer than all else here.
        self._jobs.append((job, held))
        if self._thread is None or self._process != os.getpid():
            with self._changed:
                if self._thread is None or self._process != os.getpid():
                    self._start()

    def _start(self) -> None:
        """Start the thread, in this process: a fork has no threads of its parent."""
        _STARTED.add(self)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="prompt-store", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            is_free, began = self._hurries or self.pace.is_pause(), time.thread_time()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a request must never suffer from a write
                self._give_up(error)
            if not is_free:
                self.pace.spend(time.thread_time() - began)

    def _next(self) -> Callable[[], None] | None:
        """The next job, once it may be done; None ends the thread: there was none for a while."""
        end = time.monotonic() + _LINGER_SECONDS
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            while not self._jobs:
                if time.monotonic() < end:
                    self._changed.wait(_LOOK_SECONDS)
                    continue
                # In this order: what is added from now on starts a thread, or is seen here.
                thread, self._thread = self._thread, None
                if not self._jobs:
                    return None
                self._thread = thread
            while not (self._hurries or self.pace.allows()):
                self._changed.wait(PAUSE_SECONDS)
            self._is_busy = True
            job, held = self._jobs.popleft()
            self._num_taken += held
            return job

    def _give_up(self, error: Exception) -> None:
        self.problem = reason_of(error) or type(error).__name__
        self._jobs.clear()
        _log.warning(
            "The prompt store %s gets nothing more from this process: %s.",
            self.folder.folder,
            self.problem,
            exc_info=None if isinstance(error, OSError) else error,
        )

    def _write(
        self, kind: str, name: PageName, copied: Callable[[], Sequence[Part] | None], used: int
    ) -> None:
        path = self.folder.path(kind, self.model, name)
        if path.exists() and self._is_good(path):
            self.folder.touch(path, used)
            return
        parts = copied() if self._can_be_found(kind, name) else None
        if parts is None:
            self.counts.missed += 1
            return
        self.folder.write(kind, self.model, name, parts, used, self.about)
        self.counts.written += 1

    def _can_be_found(self, kind: str, name: PageName) -> bool:
        """True if the store has what is read before: the page before, or the page of a state."""
        if kind == "state":
            return self.has("page", name)
        before = name.index - 1
        return before < 0 or self.folder.has("page", self.model, name.before, before)

    def _is_good(self, path: Path) -> bool:
        """True for a file that need not be written again. Once one was damaged, all are checked."""
        try:
            if self.counts.damaged:
                check_file(path)
        except (DamagedError, OSError):
            return False
        return True

    def _touch(self, names: tuple[PageName, ...], used: int) -> None:
        for name in names:
            for kind in ("page", "state"):
                self.folder.touch(self.folder.path(kind, self.model, name), used)
