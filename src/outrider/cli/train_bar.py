"""The bar of a training run: on a terminal it moves, elsewhere every measurement is a line."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from outrider.train.loop import Progress as Standing


class TrainBar:
    """Use it in a `with` block."""

    def __init__(self, out: TextIO) -> None:
        console = Console(file=out)
        self._out = out
        self._is_terminal = console.is_terminal
        self._shown: dict[str, float] = {}
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._is_terminal,
        )
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
