"""Output behind the gate: text coloured by the origin of each token, and progress bars.

Colours also differ in lightness and by underline or bold, for readers who see few colours. Without
a terminal, a model's text is written unchanged, byte for byte; on a terminal, its control
characters are replaced. So are those of text in bars, which is never parsed as markup.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console, ConsoleOptions, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from outrider.cli.gate import behind, gated, visible

if TYPE_CHECKING:
    from outrider.core.draft import Origin

STYLES: Mapping[Origin, Style] = {
    "accepted": Style.parse("green"),
    "recovered": Style.parse("bold yellow underline"),
    "bonus": Style.parse("bold cyan"),
    "plain": Style.null(),
}
LABELS: Mapping[Origin, str] = {
    "accepted": "accepted draft",
    "recovered": "recovered by the target after a refusal",
    "bonus": "bonus after a whole draft",
    "plain": "plain",
}
QUIET = Style.parse("dim")


class GatedConsole(Console):
    """A console behind the gate of `out`: only its own control sequences pass."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(file=behind(out), markup=False, emoji=False, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text), style)


class Screen(Live):
    """A full-screen display, redrawn on request."""

    def __init__(self, console: GatedConsole) -> None:
        super().__init__(console=console, screen=True, auto_refresh=False)


def styled(text: str, style: str = "") -> Text:
    """Return text with a style, for a GatedConsole."""
    return Text(text, style=style)


class Bar(Progress):
    """A progress bar on `out`, drawn if that is a terminal and the bar is not `hidden`."""

    def __init__(
        self,
        *columns: ProgressColumn | str,
        out: TextIO | None = None,
        hidden: bool = False,
        transient: bool = False,
    ) -> None:
        console = GatedConsole(sys.stderr if out is None else out)
        drawn = console.is_terminal and not hidden
        # Output to a file or a pipe must not be redirected above the bar.
        above = sys.stdout.isatty()
        super().__init__(
            *columns, console=console, disable=not drawn, transient=transient, redirect_stdout=above
        )

    def start(self) -> None:
        super().start()
        # Printed text goes above the bar through a stream that interprets control sequences.
        if isinstance(sys.stdout, FileProxy):
            sys.stdout = gated(cast("TextIO", sys.stdout))
        if isinstance(sys.stderr, FileProxy):
            sys.stderr = gated(cast("TextIO", sys.stderr))


def words(text: str = "{task.description}") -> TextColumn:
    """Return a column of text that is not parsed as markup."""
    return TextColumn(text, markup=False)


class WordWrap:
    """Breaks lines before a word that would cross the edge. Letters are shown as they come; a word
    that gets too long for its line is erased and written on the next one."""

    def __init__(self) -> None:
        self._column = 0
        self._word: list[tuple[str, Style]] = []

    def runs(self, text: str, style: Style, width: int) -> list[tuple[str, Style | None]]:
        """Return the runs to write for `text` with styles; None marks control sequences."""
        found: list[tuple[str, Style | None]] = []
        for letter in text:
            if letter == "\n":
                self._column, self._word = 0, []
            elif letter.isspace():
                self._column += 8 - self._column % 8 if letter == "\t" else 1
                self._word = []
                if self._column >= width:
                    # A blank at the edge is dropped: the next word begins the next line.
                    continue
            else:
                found += self._letter(letter, style, width)
            found.append((letter, style))
        return found

    def _letter(self, letter: str, style: Style, width: int) -> list[tuple[str, Style | None]]:
        """Add a letter to the current word; return what must be written before it."""
        wide, moved = cell_len(letter), list[tuple[str, Style | None]]()
        if self._column + wide >= width:
            taken = sum(cell_len(part) for part, _ in self._word)
            if taken < self._column:
                erase = f"\x1b[{taken}D\x1b[K" if taken else ""
                moved.append((f"{erase}\n", None))
                moved += self._word
                self._column = taken
            else:
                moved.append(("\n", None))
                self._column, self._word = 0, []
        self._column += wide
        # Scripts of wide letters have no blanks, so a line may break after any of them.
        self._word = [] if wide > 1 else [*self._word, (letter, style)]
        return moved


class Painter:
    """Writes text to `out`. `color` is auto, always or never; `wraps` breaks lines at words."""

    def __init__(self, color: str, out: TextIO, *, wraps: bool = False) -> None:
        console = GatedConsole(out)
        self._console = console
        self._wrap = WordWrap() if wraps and self._can_erase(console) else None
        self._out = behind(out)
        self._is_terminal = console.is_terminal
        self._width = console.width
        self._system: ColorSystem | None = None
        if color == "always":
            self._system = ColorSystem.STANDARD
        elif color == "auto" and not console.no_color and console.color_system:
            self._system = COLOR_SYSTEMS[console.color_system]

    @property
    def colored(self) -> bool:
        return self._system is not None

    def pieces(self, pieces: Sequence[str], origins: Sequence[Origin]) -> None:
        """Write the text of several tokens, each in the style of its origin."""
        pairs = zip(origins, pieces, strict=True)
        for origin, run in groupby(pairs, key=itemgetter(0)):
            text, style = "".join(piece for _, piece in run), STYLES[origin]
            if self._wrap is None:
                self.write(text, style)
                continue
            wrapped = self._wrap.runs(visible(text), style, self._console.width)
            for own, letters in groupby(wrapped, key=itemgetter(1)):
                joined = "".join(letter for letter, _ in letters)
                self._out.write(joined) if own is None else self.write(joined, own)
        self._out.flush()

    @staticmethod
    def _can_erase(console: GatedConsole) -> bool:
        return console.is_terminal and not console.is_dumb_terminal

    def write(self, text: str, style: Style = QUIET) -> None:
        if self._is_terminal or self.colored:
            text = visible(text)
        self._out.write(style.render(text, color_system=self._system) if self.colored else text)

    def line(self, text: str) -> None:
        """Write a line of the program itself, after the model's text."""
        self.write(visible(text))
        self._out.write("\n")
        if self._wrap is not None:
            self._wrap = WordWrap()
        self._out.flush()

    def mark(self, *, cut: bool) -> str:
        """Return the mark for the end of a text that was cut; only on a terminal."""
        return "…" if cut and self._is_terminal else ""

    def close_text(self, seen: Collection[Origin]) -> None:
        """End the text's last line; with colours, also write a legend of the styles in it."""
        self._out.write("\n")
        if self.colored and seen:
            self._out.write("\n")
            width = self._width
            shown: list[Origin] = [origin for origin in LABELS if origin in seen]
            for origin in shown:
                label = LABELS[origin]
                if width < self._width and len(label) + 3 > width:
                    self._out.write("\n")
                    width = self._width
                elif width < self._width:
                    self.write(" · ")
                    width -= 3
                self.write(label, STYLES[origin])
                width -= len(label)
            self._out.write("\n")
        self._out.flush()


T = TypeVar("T")


class Meter(Bar):
    """Progress of one piece of work. `unit` is that of `total`, such as bytes or visits; it is
    empty if progress is a share from 0 to 1."""

    def __init__(
        self,
        title: str = "",
        total: float | None = None,
        *,
        unit: str = "",
        out: TextIO | None = None,
        hidden: bool = False,
    ) -> None:
        super().__init__(*_columns(unit), out=out, hidden=hidden, transient=True)
        self._task = self.add_task(title, total=total)

    @property
    def drawn(self) -> bool:
        """True if the bar is shown."""
        return not self.disable

    def step(self, amount: float = 1, *, title: str | None = None) -> None:
        self.update(self._task, advance=amount, description=title)

    def reach(self, done: float, *, total: float | None = None, title: str | None = None) -> None:
        self.update(self._task, completed=done, total=total, description=title)


def _columns(unit: str) -> list[ProgressColumn]:
    if not unit:
        return [words(), BarColumn(), TimeElapsedColumn()]
    if unit == "bytes":
        return [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    left = words(f"{unit}, left:")
    return [words(), BarColumn(), MofNCompleteColumn(), left, TimeRemainingColumn()]


def taken(visits: Iterable[Sequence[T]], *, title: str, total: int) -> tuple[list[T], bool]:
    """Collect the items of `visits`; return them, and whether Ctrl-C did not interrupt."""
    found: list[T] = []
    with Meter(title, total, unit="visits") as meter:
        try:
            for visit in visits:
                found += visit
                meter.step()
        except KeyboardInterrupt:
            return found, False
    return found, True
