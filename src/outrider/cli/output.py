"""Output behind the gate: text coloured by its tokens' origin, Markdown, tables, progress bars.

Colours also differ in lightness and by underline or bold, for readers who see few colours. Without
a terminal, a model's text is written unchanged, byte for byte; on a terminal, its control
characters are replaced. So are those of text in bars, which is never parsed as markup.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TextIO, TypeAlias, TypeVar, cast

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

from outrider.cli.gate import behind, gated, in_line, visible
from outrider.cli.options import JsonOption, OutputOption
from outrider.cli.page import column_widths, wrapped, wrapped_table
from outrider.core.errors import MachineError
from outrider.core.files import draft_of, replacing

if TYPE_CHECKING:
    from outrider.core.draft import Origin

# Markdown, while it is written: styles of runs, for texts that arrive in pieces.
#
# Headings and `**strong**` words are bold, list marks become bullets, a fence becomes a thin line
# with the language, and code between backticks is in italics. A mark is held until the letters that
# decide what it is; all else is passed on at once. Within fences nothing is changed. Tables, links
# and single asterisks are left as they are, since a text may mean them.

_BOLD, _TITLE, _CODE = Style(bold=True), Style(bold=True, underline=True), Style(italic=True)
_QUIET = Style(dim=True)
_RULE = "───"
# Beginnings of lines that may still become a mark, and the marks.
_OPEN = re.compile(r" *(#{1,6}|[-*+]|`{1,2}|```[^\n]*)?")
_CLOSING = re.compile(r" *(`{1,2}|```[^\n]*)?")
_HEADING, _BULLET = re.compile(r" {0,3}#{1,6} "), re.compile(r"( *)[-*+] ")
_FENCE = re.compile(r" *```([^`\n]*)\n")

Run: TypeAlias = tuple[str, Style]


class Markdown:
    """The styles of one text."""

    def __init__(self) -> None:
        self._held: list[Run] = []
        self._begins_line, self._in_fence = True, False
        self._is_title = self._is_bold = self._is_code = False
        self._before = "\n"

    def runs(self, text: str, style: Style) -> Iterator[Run]:
        """Runs to write for the next piece of the text, whose letters have this `style`."""
        for letter in text:
            self._held.append((letter, style))
            yield from self._begun() if self._begins_line else self._inline()

    def end(self) -> Iterator[Run]:
        """Runs of the letters that were held at the end of the text."""
        held, self._held = self._held, []
        yield from held

    def _begun(self) -> Iterator[Run]:
        """Read the beginning of a line, once it shows what the line is."""
        start = "".join(letter for letter, _ in self._held)
        style = self._held[-1][1]
        if fence := _FENCE.fullmatch(start):
            self._held, self._in_fence = [], not self._in_fence
            yield f"{_RULE} {fence[1].strip()}".rstrip() + "\n", _QUIET
        elif self._in_fence:
            # Code is passed on but for what may become the closing fence.
            if not _CLOSING.fullmatch(start):
                self._begins_line = start.endswith("\n")
                yield from self.end()
        elif _HEADING.fullmatch(start):
            self._held, self._begins_line, self._is_title = [], False, True
        elif bullet := _BULLET.fullmatch(start):
            self._held, self._begins_line = [], False
            yield f"{bullet[1]}• ", style
        elif not _OPEN.fullmatch(start):
            held, self._held, self._begins_line = self._held, [], False
            for one in held:
                self._held.append(one)
                yield from self._inline()

    def _inline(self) -> Iterator[Run]:
        """Read one more letter within a line. Two asterisks are held until the next letter."""
        letters = "".join(letter for letter, _ in self._held)
        letter, style = self._held[-1]
        if letter == "\n":
            yield from self._styled(self.end())
            self._is_title = self._is_bold = self._is_code = False
            self._begins_line, self._before = True, "\n"
        elif self._in_fence:
            yield from self.end()
        elif self._is_code or not letters.startswith("*"):
            yield from self._styled(self.end())
            self._is_code ^= letter == "`"
            self._before = letter
        elif self._is_bold and letters == "**" and not self._before.isspace():
            self._held, self._is_bold = [], False
        elif letters not in ("*", "**"):
            opens = letters[:2] == "**" and not letter.isspace() and not self._before.isalnum()
            if opens and letter != "*":
                self._held, self._is_bold = [(letter, style)], True
                yield from self._inline()
            else:
                yield from self._styled(self.end())
                self._before = letter

    def _styled(self, runs: Iterator[Run]) -> Iterator[Run]:
        found = {_TITLE: self._is_title, _BOLD: self._is_bold, _CODE: self._is_code}
        extra = sum((style for style, applies in found.items() if applies), Style.null())
        return ((letter, style + extra) for letter, style in runs)


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
    """Writes text to `out`. `color` is auto, always or never. On a terminal, texts of a chat break
    at words, and with colours their Markdown is shown as styles."""

    def __init__(self, color: str, out: TextIO, *, chats: bool = False) -> None:
        console = GatedConsole(out)
        self._console = console
        self._wrap = WordWrap() if chats and self._can_erase(console) else None
        self._out = behind(out)
        self._is_terminal = console.is_terminal
        self._width = console.width
        self._system: ColorSystem | None = None
        if color == "always":
            self._system = ColorSystem.STANDARD
        elif color == "auto" and not console.no_color and console.color_system:
            self._system = COLOR_SYSTEMS[console.color_system]
        self._markdown = Markdown() if self._wrap is not None and self.colored else None

    @property
    def colored(self) -> bool:
        return self._system is not None

    def pieces(self, pieces: Sequence[str], origins: Sequence[Origin]) -> None:
        """Write the text of several tokens, each in the style of its origin."""
        pairs = zip(origins, pieces, strict=True)
        for origin, run in groupby(pairs, key=itemgetter(0)):
            text, style = "".join(piece for _, piece in run), STYLES[origin]
            read = self._markdown and self._markdown.runs(visible(text), style)
            self._write_runs(read or [(text, style)])
        self._out.flush()

    def _write_runs(self, runs: Iterable[tuple[str, Style]]) -> None:
        wrap = self._wrap
        if wrap is None:
            for text, style in runs:
                self.write(text, style)
            return
        width = self._console.width
        wrapped = [part for text, own in runs for part in wrap.runs(visible(text), own, width)]
        for style, letters in groupby(wrapped, key=itemgetter(1)):
            joined = "".join(letter for letter, _ in letters)
            self._out.write(joined) if style is None else self.write(joined, style)

    def _end_runs(self) -> None:
        """End a text: write letters that were held, and begin anew."""
        if self._markdown is not None:
            self._write_runs(self._markdown.end())
            self._markdown = Markdown()

    @staticmethod
    def _can_erase(console: GatedConsole) -> bool:
        return console.is_terminal and not console.is_dumb_terminal

    def write(self, text: str, style: Style = QUIET) -> None:
        if self._is_terminal or self.colored:
            text = visible(text)
        self._out.write(style.render(text, color_system=self._system) if self.colored else text)

    def line(self, text: str) -> None:
        """Write a line of the program itself, after the model's text."""
        self._end_runs()
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
    if unit == "steps":
        return [TimeElapsedColumn(), words()]
    if unit == "bytes":
        return [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    left = words(f"{unit}, left:")
    return [words(), BarColumn(), MofNCompleteColumn(), left, TimeRemainingColumn()]


class Steps(Meter):
    """Progress of named steps that take long: a line on a terminal; elsewhere the title, a line of
    its own for a step that is `new`, and for others one in _PAUSE seconds."""

    def __init__(self, title: str, *, hidden: bool = False) -> None:
        super().__init__(title, unit="steps", hidden=hidden)
        self._title = "" if hidden else title
        self.began = self._shown = perf_counter()

    def begin(self) -> None:
        """Say the title where no line is drawn. A line disappears, but what was said stays, so
        inputs are checked before: an error is then alone."""
        if not self.drawn and self._title:
            say(self._title)

    def show(self, title: str, *, new: bool = True) -> None:
        now = perf_counter()
        if self.drawn:
            self.step(0, title=title)
        elif new or now >= self._shown + _PAUSE:
            self._shown = now
            say(f"{duration(now - self.began):>5}  {title}")


_PAUSE = 10.0


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


def duration(seconds: float) -> str:
    """Format a duration for people: 8 s, 3 min 20 s, 5 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# Maximum width of sentences, even on a wider terminal.
_WIDEST = 120


def json_line(value: object) -> str:
    """Encode as printable ASCII, which survives any terminal and any pipe."""
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def answer(options: JsonOption, record: object, text: str | None) -> None:
    """Print the record for programs, or `text` for people; None if that was printed already. The
    record is also written to the file of --output, if the verb has one."""
    if options.json or text is not None:
        print(json_line(record) if options.json or text is None else fitted(text))
    if isinstance(options, OutputOption) and options.output is not None:
        write_whole(Path(options.output), json_line(record) + "\n")


def say(text: str) -> None:
    """Print a message to stderr: stdout is only for the answer."""
    width = _terminal_width(sys.stderr)
    print(text if width is None else fitted(text, width), file=sys.stderr)


def check_writable(path: Path, *, flag: str = "--output") -> None:
    """Check now that `path`, the value of `flag`, can be written. Raises MachineError."""
    draft = draft_of(path)
    try:
        if path.is_dir():
            raise MachineError(f"{path} is a folder.", hint=f"name a file with {flag}")
        draft.touch(exist_ok=False)
        draft.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Replace `path` in one step: readers never see a part. Raises MachineError."""
    try:
        with replacing(path) as draft, draft.open("w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path} cannot be written: {error.strerror or error}.",
        hint="name a file in a folder that exists and that you may write",
    )


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Return a table whose columns are as wide as their content, so that it is easy to search."""
    cells = [[in_line(str(cell)) for cell in row] for row in ([header, *rows] if header else rows)]
    if not cells:
        return ""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    return "\n".join(lines)


def screen_table(
    rows: Sequence[Sequence[object]],
    *,
    header: Sequence[str] = (),
    width: int | None = None,
    indent: int = 0,
) -> str:
    """Return a table that fits the terminal; if piped, the same as `table`.

    Columns of sentences wrap at words. A table that is still too wide is split into several tables,
    one below another, each of which begins with the columns that identify the rows. `indent` is the
    number of blanks that will be before each line.
    """
    limit = _terminal_width() if width is None else width
    limit = None if limit is None else limit - indent
    whole = table(rows, header=header)
    if limit is None or all(len(line) <= limit for line in whole.splitlines()):
        return whole
    cells = [[in_line(str(cell)) for cell in row] for row in ([header, *rows] if header else rows)]
    narrower = wrapped_table(cells, limit)
    if narrower is not None:
        return narrower
    widths = column_widths(cells)
    num_keys = _num_keys(cells, widths, limit // 2)
    available = limit - sum(widths[:num_keys]) - 2 * num_keys
    parts: list[list[int]] = [[]]
    for column in range(num_keys, len(widths)):
        taken = sum(widths[one] + 2 for one in parts[-1])
        if parts[-1] and taken + widths[column] > available:
            parts.append([])
        parts[-1].append(column)
    keys = range(num_keys)
    tables = [[[row[column] for column in (*keys, *part)] for row in cells] for part in parts]
    return "\n\n".join(wrapped_table(one, limit) or fitted(table(one), limit) for one in tables)


def _num_keys(cells: Sequence[Sequence[str]], widths: Sequence[int], limit: int) -> int:
    """Return how many leading columns identify the rows: one or more, within `limit`."""
    num = 1
    while num < len(widths) - 1 and sum(widths[: num + 1]) + 2 * num <= limit:
        if len({tuple(row[:num]) for row in cells}) == len(cells):
            break
        num += 1
    return num


def prose(text: str, *, width: int | None = None) -> str:
    """Wrap a text at spaces for a terminal; a number stays with its %."""
    limit = _terminal_width() if width is None else width
    if limit is None:
        return text
    joined = text.replace(" %", "\u00a0%")
    return fitted(joined, min(limit, _WIDEST)).replace("\u00a0", " ")


def fitted(page: str, width: int | None = None) -> str:
    """Wrap the lines of a page to the terminal (page.py); a piped page stays as it is."""
    limit = _terminal_width() if width is None else width
    return page if limit is None else wrapped(page, limit)


def line_width(piped: int) -> int:
    """Return the width of sentences: that of the terminal, or `piped` without a terminal."""
    return min(_terminal_width() or piped, _WIDEST)


def _terminal_width(out: TextIO | None = None) -> int | None:
    """Return the terminal's width, of stdout by default; None without a terminal."""
    return shutil.get_terminal_size().columns if (out or sys.stdout).isatty() else None
