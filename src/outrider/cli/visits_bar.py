"""How far a benchmark is: visits done and the time left, on stderr where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from outrider.cli.paint import Bar, words

T = TypeVar("T")


def visits_bar() -> Bar:
    """To be entered; its tasks are of so many visits."""
    return Bar(
        words(),
        BarColumn(),
        MofNCompleteColumn(),
        words("visits, left:"),
        TimeRemainingColumn(),
    )


def taken(visits: Iterable[Sequence[T]], *, title: str, total: int) -> tuple[list[T], bool]:
    """What `visits` gave, and whether that is everything or an interrupt came."""
    found: list[T] = []
    with visits_bar() as bar:
        task = bar.add_task(title, total=total)
        try:
            for visit in visits:
                found += visit
                bar.advance(task)
        except KeyboardInterrupt:
            return found, False
    return found, True
