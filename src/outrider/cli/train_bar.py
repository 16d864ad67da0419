"""What is shown of a training run: lines before it begins, and then a bar.

On a terminal the bar moves, elsewhere every measurement is a line.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.progress import BarColumn, TaskProgressColumn, TimeElapsedColumn

from outrider.cli.paint import Bar, words
from outrider.core.clock import HOST_CLOCK, Clock

if TYPE_CHECKING:
    from outrider.train.loop import Progress as Standing


# Between lines about one thing that takes long.
_EVERY_SECONDS = 5.0


class Preparation:
    """Hears what is done before the first step: says each thing once, and then how far it is."""

    def __init__(self, out: TextIO, *, clock: Clock = HOST_CLOCK) -> None:
        self._out, self._clock = out, clock
        self._doing, self._told = "", 0.0

    def __call__(self, doing: str, share: float) -> None:
        now = self._clock()
        if doing != self._doing:
            print(doing, file=self._out, flush=True)
        elif now - self._told >= _EVERY_SECONDS:
            print(f"{doing}: {100 * share:.0f} %", file=self._out, flush=True)
        else:
            return
        self._doing, self._told = doing, now


class TrainBar:
    """Use it in a `with` block."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown: dict[str, float] = {}
        self._bar = Bar(
            BarColumn(),
            TaskProgressColumn(),
            words("{task.fields[words]}"),
            TimeElapsedColumn(),
            out=out,
            transient=True,
        )
        self._is_terminal = self._bar.console.is_terminal
        self._task = self._bar.add_task("training", total=1.0, words="")

    def __enter__(self) -> TrainBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, progress: Standing) -> None:
        words = described(progress)
        self._bar.update(self._task, completed=progress.share, words=words)
        if not self._is_terminal and progress.figures != self._shown:
            self._shown = dict(progress.figures)
            print(f"{100 * progress.share:3.0f} %  {words}", file=self._out, flush=True)


def described(progress: Standing) -> str:
    """step 120 · loss 5.213 · 4,100 tokens/s · tokens per round 1.214"""
    parts = [
        f"step {progress.step}",
        f"loss {progress.loss:.3f}",
        f"{progress.tokens_per_second:,.0f} tokens/s",
        *(f"{name.replace('_', ' ')} {value:.3f}" for name, value in progress.figures.items()),
    ]
    return " · ".join(parts)
