"""Output of verbs. For programs: JSON on one line, and files that are written whole or not at all.
For people: tables and sentences that fit the terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from outrider.cli.gate import in_line
from outrider.cli.options import JsonOption, OutputOption
from outrider.cli.wrap import column_widths, wrapped, wrapped_table
from outrider.core.errors import MachineError
from outrider.core.files import draft_of, replacing

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
    """Wrap the lines of a page to the terminal (wrap.py); a piped page stays as it is."""
    limit = _terminal_width() if width is None else width
    return page if limit is None else wrapped(page, limit)


def line_width(piped: int) -> int:
    """Return the width of sentences: that of the terminal, or `piped` without a terminal."""
    return min(_terminal_width() or piped, _WIDEST)


def _terminal_width(out: TextIO | None = None) -> int | None:
    """Return the terminal's width, of stdout by default; None without a terminal."""
    return shutil.get_terminal_size().columns if (out or sys.stdout).isatty() else None
