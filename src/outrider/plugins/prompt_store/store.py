"""The prompt store of one model: reads pages when a text is opened, writes them in the background.

A thread writes what was offered, in order. While requests run it rests between files for so long
that it takes less than a hundredth of the time; once none runs it goes on at full speed. What is
overwritten in memory before its turn is not stored. After an error of the disk nothing is written
any more, with one warning; requests go on.
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
from functools import partial
from pathlib import Path
from weakref import WeakSet

from outrider.cache.pages import PageName, Part
from outrider.plugins.prompt_store.files import DamagedError, StoreFolder, check_file, digest_after

_log = logging.getLogger(__name__)

# Files that wait to be written, and those of them that hold copies of their pages.
_MOST_WAITING, _MOST_COPIES = 16_384, 256
# Pause after a file while requests run, as a multiple of the time that it took.
REST = 150
_POLL_SECONDS = 0.02
_LINGER_SECONDS = 2.0
# The end of a process waits so long for its writes.
FLUSH_SECONDS = 10.0
_STARTED: WeakSet[PromptStore] = WeakSet()


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


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptStore:
    """A PageStore over the files of `model` in a folder, whose name is the digest of what it is
    `about`. `is_idle` is True while no request runs. There are `num_writers` stores in the process.

    The thread ends when it has nothing to do for a while, so that it does not hold the model."""

    folder: StoreFolder
    model: str
    is_idle: Callable[[], bool]
    about: Mapping[str, object] = field(default_factory=dict[str, object])
    counts: Counts = field(default_factory=Counts)
    num_writers: int = 1
    problem: str = ""
    _jobs: deque[tuple[Callable[[], None], bool]] = field(
        default_factory=deque[tuple[Callable[[], None], bool]]
    )
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _process: int = 0
    _num_copies: int = 0
    _is_busy: bool = False
    _hurries: bool = False

    def name(self, before: PageName | None, tokens: Sequence[int], salt: str) -> PageName:
        if before is None:
            origin = f"{self.model}\n{salt}".encode("utf-8", "surrogatepass")
            digest, index = hashlib.sha256(origin).hexdigest(), 0
        else:
            digest, index = before.digest, before.index + 1
        return PageName(digest_after(digest, tokens), digest, index, tuple(tokens))

    def has(self, kind: str, name: PageName) -> bool:
        return os.path.exists(self.folder.path(kind, self.model, name))  # noqa: PTH110 - faster

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
            reason = getattr(error, "strerror", None) or error
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
        is_copied: bool = False,
    ) -> None:
        if len(self._jobs) >= _MOST_WAITING or (is_copied and self._num_copies >= _MOST_COPIES):
            self.counts.missed += 1
            return
        self._add(partial(self._write, kind, name, copied, time.time_ns()), is_copied)

    def used(self, names: Sequence[PageName]) -> None:
        if names and len(self._jobs) < _MOST_WAITING:
            self._add(partial(self._touch, tuple(names), time.time_ns()), False)

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

    def _add(self, job: Callable[[], None], is_copied: bool) -> None:
        if self.problem:
            return
        self._jobs.append((job, is_copied))
        if self._is_busy and not is_copied and self._process == os.getpid():
            return  # a wake-up for each page would take longer than all else here
        with self._changed:
            self._num_copies += is_copied
            self._changed.notify_all()
            if self._thread is None or self._process != os.getpid():
                self._start()

    def _start(self) -> None:
        """Start the thread, in this process: a fork has no threads of its parent."""
        _STARTED.add(self)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="prompt-store", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                # In this order: what is added from now on wakes the thread, or was there before.
                self._is_busy = False
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: bool(self._jobs), _LINGER_SECONDS):
                    self._thread = None
                    return
                job, is_copied = self._jobs.popleft()
                self._num_copies -= is_copied
                self._is_busy = True
            began = time.perf_counter()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a request must never suffer from a write
                self._give_up(error)
            self._rest(REST * self.num_writers * (time.perf_counter() - began))

    def _rest(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        with self._changed:
            while not (self._hurries or self.is_idle()):
                left = end - time.perf_counter()
                if left <= 0:
                    return
                self._changed.wait(min(left, _POLL_SECONDS))

    def _give_up(self, error: Exception) -> None:
        self.problem = str(getattr(error, "strerror", None) or error) or type(error).__name__
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
        parts = copied()
        if parts is None:
            self.counts.missed += 1
            return
        try:
            self._write_parts(kind, name, parts, used)
        except FileNotFoundError:
            # Another process has emptied the store meanwhile.
            self._write_parts(kind, name, parts, used)
        self.counts.written += 1

    def _write_parts(self, kind: str, name: PageName, parts: Sequence[Part], used: int) -> None:
        self.folder.describe(self.model, self.about)
        self.folder.write(kind, self.model, name, parts, used)

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
