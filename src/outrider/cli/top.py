"""`outrider top`: a running server on one screen, from its history of the last hour.

Names of models, lanes and drafters come from the server, so their control characters are replaced.
Without a terminal, the screen is printed once; with --json, the server's answer is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from outrider.api.clients import Server
from outrider.cli.call import Call
from outrider.cli.output import GatedConsole, Screen, answer, styled
from outrider.cli.verb_options import TopOptions
from outrider.core.env import api_key
from outrider.core.errors import MachineError

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
