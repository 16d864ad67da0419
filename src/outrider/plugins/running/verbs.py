"""`outrider ps`, `outrider stop` and `outrider top`: running servers, on this machine or another.

Each `outrider serve` has a file in the cache folder, which it locks. The lock ends with its
process, however that ends, so a file without a lock is a leftover and is deleted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Group
from rich.table import Table

from outrider.cli.call import Call
from outrider.cli.options import JsonOption
from outrider.cli.output import GatedConsole, Screen, answer, duration, screen_table, styled
from outrider.cli.verb_options import StopOptions, TopOptions
from outrider.core import files
from outrider.core.env import api_key, cache_folder
from outrider.core.errors import ConfigError, MachineError, OutriderError
from outrider.core.fields import size
from outrider.core.files import FileKind, Lock, NotPrivateError, locked, read_text
from outrider.plugins.running.clients import Server

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


# `outrider top`: a running server on one screen, from its history of the last hour.
#
# Names of models, lanes and drafters come from the server, so their control characters are
# replaced. Without a terminal, the screen is printed once; with --json, the server's answer.

_BARS = "▁▂▃▄▅▆▇█"
_MOST_STEPS = 300
_NAME_WIDTH, _VALUE_WIDTH = 22, 24
_MOST_POSITIONS = 8


class Watched:
    """The latest columns of a server's history, joined from its answers."""

    def __init__(self) -> None:
        self.next = 0
        self.columns: dict[str, list[float | None]] = {}
        self.latest: Mapping[str, Any] = {}

    def take(self, history: Mapping[str, Any]) -> None:
        """Add an answer of the server. Raises MachineError if it is not a history."""
        try:
            if history["first"] != self.next or history["began"] != self.latest.get("began"):
                self.columns = {}
            for name, values in history["columns"].items():
                self.columns[name] = [*self.columns.get(name, ()), *values][-_MOST_STEPS:]
            self.next, self.latest = int(history["next"]), history
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MachineError("the server's answer is no history.") from None

    def last(self, name: str) -> float | None:
        """Return the latest known value of a column."""
        known = (value for value in reversed(self.columns.get(name, [])) if value is not None)
        return next(known, None)


def top(call: Call[TopOptions]) -> int:
    asked = call.options
    key = asked.api_key or api_key() or ""
    server = Server(url=asked.url, timeout_seconds=asked.timeout, api_key=key)
    watched = Watched()
    watched.take(_history(server, watched))
    if asked.json:
        answer(asked, watched.latest, None)
        return 0
    console = GatedConsole(sys.stdout)
    if not console.is_terminal:
        console.print(screen(watched, asked.url, console.width))
        return 0
    return _watch(server, watched, console, asked)


def _watch(server: Server, watched: Watched, console: GatedConsole, asked: TopOptions) -> int:
    """Update the screen until Ctrl-C."""
    problem = ""
    try:
        with Screen(console) as live:
            while True:
                width = console.width
                live.update(screen(watched, asked.url, width, problem), refresh=True)
                time.sleep(asked.interval)
                try:
                    watched.take(_history(server, watched))
                    problem = ""
                except MachineError as error:
                    problem = str(error)
    except KeyboardInterrupt:
        return 0


def _history(server: Server, watched: Watched) -> dict[str, Any]:
    return server.ask(f"/outrider/v1/history?since={watched.next}")


def screen(watched: Watched, url: str, width: int, problem: str = "") -> Group:
    """Return the whole screen, as wide as the terminal."""
    engines: Mapping[str, Any] = watched.latest.get("engines", {})
    parts: list[Any] = [styled(f"outrider top · {url} · Ctrl-C leaves", style="bold")]
    if problem:
        parts.append(styled(problem, style="bold yellow"))
    for name, one in engines.items():
        several: Sequence[Mapping[str, Any]] = one.get("engines", ())
        parts.append(styled(_engine_line(name, one, shows_lanes=not several)))
        parts += [styled(_engine_line(f"  {i}", each)) for i, each in enumerate(several)]
    totals = watched.latest.get("totals", {})
    if differing := totals.get("audits", {}).get("different"):
        words = f"{differing} audited requests had another text without speculation: see the log"
        parts.append(styled(words, style="bold red"))
    parts += [styled(""), _rates(watched, max(8, width - _NAME_WIDTH - _VALUE_WIDTH - 4))]
    drafters = totals.get("drafters", {})
    if drafters:
        parts += [styled(""), _drafters(drafters)]
    return Group(*parts)


def _engine_line(name: str, one: Mapping[str, Any], *, shows_lanes: bool = True) -> str:
    lanes = ", ".join(f"{lane} {does}" for lane, does in one.get("lanes", {}).items())
    return (
        f"{name}: {one['state']}, {one['num_running']} running, {one['num_waiting']} waiting, "
        f"KV cache {100 * one['kv_usage']:.0f} %, {one['num_preempted']} set back, "
        f"{one['num_restarts']} restarts{f', lanes: {lanes}' if lanes and shows_lanes else ''}"
    )


def _rates(watched: Watched, width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(width=_NAME_WIDTH)
    table.add_column(width=_VALUE_WIDTH, justify="right")
    table.add_column(no_wrap=True)
    for words, names, form in _ROWS:
        values = " / ".join(form(watched.last(name)) for name in names)
        column = watched.columns.get(names[0], [])
        table.add_row(words, values, styled(sparkline(column, width), style="green"))
    return table


def _drafters(drafters: Mapping[str, Any]) -> Table:
    """Return a table of drafters: their drafts since the server started, and the share of drafts
    whose token at each position was accepted."""
    longest = max(len(one.get("per_pos", ())) for one in drafters.values())
    num_positions = min(_MOST_POSITIONS, longest)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    positions = map(str, range(1, num_positions + 1))
    for name in ("drafter", "drafts", "drafted", "accepted", *positions):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for name, one in drafters.items():
        drafts, drafted = one.get("drafts", 0), one.get("draft_tokens", 0)
        accepted = [*one.get("per_pos", ())[:num_positions]]
        shares = [_percent(count / drafts if drafts else None) for count in accepted]
        whole = _percent(one.get("accepted_tokens", 0) / drafted if drafted else None)
        blanks = [""] * (num_positions - len(shares))
        table.add_row(name, str(drafts), str(drafted), whole, *shares, *blanks)
    return table


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the latest values as bars; the greatest value is the highest bar, None a blank."""
    shown = values[-width:]
    most = max((value for value in shown if value is not None), default=0)
    return "".join(" " if value is None else _bar(value, most) for value in shown)


def _bar(value: float, most: float) -> str:
    index = int(value / most * (len(_BARS) - 1) + 0.5) if most > 0 else 0
    return _BARS[min(max(index, 0), len(_BARS) - 1)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


_Row = tuple[str, tuple[str, ...], Callable[[float | None], str]]
_ROWS: Sequence[_Row] = (
    ("tokens a second", ("tokens_per_second",), _number),
    ("of prompts", ("prompt_tokens_per_second",), _number),
    ("requests a second", ("requests_per_second",), _number),
    ("refusals a second", ("refusals_per_second",), _number),
    ("first token p50 / p99", ("first_token_p50", "first_token_p99"), _seconds),
    ("between p50 / p99", ("inter_token_p50", "inter_token_p99"), _seconds),
    ("running / waiting", ("running", "waiting"), _number),
    ("KV cache", ("kv_usage",), _percent),
)
