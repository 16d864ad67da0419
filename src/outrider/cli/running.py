"""`outrider ps` and `outrider stop`: this user's servers on this machine.

Each `outrider serve` has a file in the cache folder, which it locks. The lock ends with its
process, however that ends, so a file without a lock is a leftover and is deleted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from outrider.api.clients import Server
from outrider.cli.call import Call
from outrider.cli.options import JsonOption
from outrider.cli.output import answer, duration, screen_table
from outrider.cli.verb_options import StopOptions
from outrider.core import files
from outrider.core.env import cache_folder
from outrider.core.errors import ConfigError, MachineError, OutriderError
from outrider.core.fields import size
from outrider.core.files import FileKind, Lock, NotPrivateError, locked, read_text

_NAME = "servers"
_ANSWER_SECONDS = _LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server: its process, its address, the names of its models, and when it began, in seconds of
    the system's clock."""

    pid: int
    url: str
    models: tuple[str, ...]
    began: float

    @property
    def state(self) -> str:
        """Ready or not; unknown of HTTPS, whose certificate may be for another name."""
        if self.url.startswith("https"):
            return "unknown"
        try:
            Server(url=self.url, timeout_seconds=_ANSWER_SECONDS).ask("/ready")
        except OutriderError:
            return "not ready"
        return "ready"

    @property
    def names(self) -> set[str]:
        """Words that mean this server."""
        return {str(self.pid), self.url, self.url.rpartition(":")[2], *self.models}


@contextmanager
def announced(url: str, models: Sequence[str]) -> Generator[None]:
    """Announce a server of this process to `ps` and `stop` for as long as the block runs. Without a
    folder that only this user may write, it is not announced."""
    folder, lock, path = cache_folder(), None, Path()
    with suppress(OSError, NotPrivateError, TimeoutError):
        if folder is not None:
            path = files.private_folder(folder / _NAME) / f"{os.getpid()}.json"
            lock = Lock(path, _LOCK_SECONDS, mode=0o600)
            one = Running(pid=os.getpid(), url=url, models=tuple(models), began=time.time())
            path.write_text(json.dumps(asdict(one)), encoding="utf-8")
    try:
        yield
    finally:
        if lock is not None:
            files.remove(path)
            lock.close()


def running() -> dict[Path, Running]:
    """Return the servers by their files, the oldest first. Leftovers are deleted."""
    folder = cache_folder()
    if folder is None or not (folder / _NAME).is_dir():
        return {}
    found: dict[Path, Running] = {}
    with suppress(OSError, NotPrivateError):
        for path in files.private_folder(folder / _NAME).glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                if one := _running(path):
                    found[path] = one
    return dict(sorted(found.items(), key=lambda item: item[1].began))


def _running(path: Path) -> Running | None:
    try:
        with locked(path, 0.0) as held:
            if held:
                files.remove(path)
                return None
    except TimeoutError:
        pass
    read = cast("dict[str, Any]", files.read_json(path, FileKind.SYSTEM))
    read["models"] = tuple(read["models"])
    return Running(**read)


def ps(call: Call[JsonOption]) -> int:
    rows, records = list[tuple[object, ...]](), list[dict[str, object]]()
    for one in running().values():
        state, memory = one.state, _resident(one.pid)
        records.append({**asdict(one), "state": state, "memory_bytes": memory})
        since = duration(time.time() - one.began)
        shown = size(memory) if memory else "-"
        rows.append((", ".join(one.models), state, shown, one.url, one.pid, since))
    header = ("models", "state", "memory", "address", "process", "since")
    none = "no server runs here; `outrider serve MODEL` starts one"
    answer(call.options, records, screen_table(rows, header=header) if rows else none)
    return 0


def stop(call: Call[StopOptions]) -> int:
    path, one = _meant(call.argument)
    with suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGTERM)
    try:
        with locked(path, call.options.timeout):
            files.remove(path)
    except TimeoutError:
        raise MachineError(
            f"{one.url} has not ended after {call.options.timeout:g} seconds.",
            hint=f"the same again ends it at once: outrider stop {one.pid}",
        ) from None
    answer(call.options, asdict(one), f"stopped {', '.join(one.models)} at {one.url}")
    return 0


def _meant(word: str | None) -> tuple[Path, Running]:
    """Return the server that `word` means, or the only one. Raises ConfigError."""
    servers = running()
    found = [item for item in servers.items() if word is None or word in item[1].names]
    if len(found) == 1:
        return found[0]
    known = [f"outrider stop {one.pid} ({', '.join(one.models)})" for one in servers.values()]
    if not known:
        raise ConfigError("no server runs here.", hint="`outrider ps` lists servers of this user")
    what = f"no server is called {word!r}" if not found else f"{len(found)} servers are meant"
    raise ConfigError(f"{what}.", hint="; ".join(known))


def _resident(pid: int) -> int | None:
    """Return resident bytes of a process and of its children; None without /proc."""
    with suppress(OSError, ValueError, IndexError):
        statm, children = (
            read_text(Path("/proc") / str(pid) / name, FileKind.SYSTEM).split()
            for name in ("statm", f"task/{pid}/children")
        )
        own = int(statm[1]) * os.sysconf("SC_PAGE_SIZE")
        return own + sum(_resident(int(child)) or 0 for child in children)
    return None
