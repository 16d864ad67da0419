"""How far a download is: a bar on a terminal, elsewhere a line for every tenth."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from outrider.cli.output import size
from outrider.cli.paint import Bar


class PullBar:
    """Hears how many bytes come of `total`."""

    def __init__(self, out: TextIO, bar: Progress, total: int) -> None:
        self._out, self._bar, self._total = out, bar, total
        self._done, self._tenths = 0, 0
        self._task = bar.add_task("fetching", total=total)

    def advance(self, num_bytes: int) -> None:
        """So many more came; fewer than none if some must come again."""
        self._done += num_bytes
        self._bar.update(self._task, completed=self._done)
        tenths = 10 * self._done // self._total if self._total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            if not self._bar.console.is_terminal:
                line = f"{10 * tenths} %  {size(self._done)} of {size(self._total)}"
                print(line, file=self._out, flush=True)


@contextmanager
def pull_bar(out: TextIO, total: int) -> Generator[PullBar]:
    """Drawn on `out`, as long as it is a terminal and there is something to fetch."""
    with Bar(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        out=out,
        transient=True,
        hidden=not total,
    ) as bar:
        yield PullBar(out, bar, total)
