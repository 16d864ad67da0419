"""What tools read: JSON on one line, and files that are whole or absent. What people read: tables
and sentences that fit their terminal.

Where a figure goes: its name, its folder, and whether figures can be drawn at all.
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

# Sentences are no wider than that on any terminal.
_WIDEST = 120


def json_line(value: object) -> str:
    """Printable ASCII only, so that it survives any terminal and any pipe."""
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def answer(options: JsonOption, record: object, text: str | None) -> None:
    """Print the record for programs, or else `text` for people, if it was not printed as it came.
    The record also goes to the file of --output, where a verb has one."""
    if options.json or text is not None:
        print(json_line(record) if options.json or text is None else fitted(text))
    if isinstance(options, OutputOption) and options.output is not None:
        write_whole(Path(options.output), json_line(record) + "\n")


def say(text: str) -> None:
    """What is beside the answer goes to stderr."""
    width = _terminal_width(sys.stderr)
    print(text if width is None else fitted(text, width), file=sys.stderr)


def check_writable(path: Path, *, flag: str = "--output") -> None:
    """Raise MachineError now rather than after the work, if `path`, which `flag` names, cannot be
    written."""
    draft = draft_of(path)
    try:
        if path.is_dir():
            raise MachineError(f"{path} is a folder.", hint=f"name a file with {flag}")
        draft.touch(exist_ok=False)
        draft.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part. Pieces
    of a text are written as they come."""
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
    """Columns as wide as their content, never cut: readable, and easy to search."""
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
    """`table`, for people. Where it is wider than the terminal, columns of sentences wrap at words,
    and what is too wide still becomes several tables, one below the other, each of which begins
    with the columns that tell rows apart. `indent` blanks will stand before each line. What is
    piped stays whole."""
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
    room = limit - sum(widths[:num_keys]) - 2 * num_keys
    parts: list[list[int]] = [[]]
    for column in range(num_keys, len(widths)):
        taken = sum(widths[one] + 2 for one in parts[-1])
        if parts[-1] and taken + widths[column] > room:
            parts.append([])
        parts[-1].append(column)
    keys = range(num_keys)
    tables = [[[row[column] for column in (*keys, *part)] for row in cells] for part in parts]
    return "\n\n".join(wrapped_table(one, limit) or fitted(table(one), limit) for one in tables)


def _num_keys(cells: Sequence[Sequence[str]], widths: Sequence[int], limit: int) -> int:
    """Leading columns that tell rows apart, at least one, and no more than have room."""
    num = 1
    while num < len(widths) - 1 and sum(widths[: num + 1]) + 2 * num <= limit:
        if len({tuple(row[:num]) for row in cells}) == len(cells):
            break
        num += 1
    return num


def prose(text: str, *, width: int | None = None) -> str:
    """Wrapped at spaces where that is a terminal; a number stays with its %."""
    limit = _terminal_width() if width is None else width
    if limit is None:
        return text
    kept = text.replace(" %", "\u00a0%")
    return fitted(kept, min(limit, _WIDEST)).replace("\u00a0", " ")


def fitted(page: str, width: int | None = None) -> str:
    """A page whose lines fit the terminal (wrap.py); what is piped stays as it is."""
    limit = _terminal_width() if width is None else width
    return page if limit is None else wrapped(page, limit)


def line_width(piped: int) -> int:
    """Of sentences: the terminal's, or else `piped`."""
    return min(_terminal_width() or piped, _WIDEST)


def _terminal_width(out: TextIO | None = None) -> int | None:
    """Of stdout, if it is no other stream; None where nobody looks on."""
    return shutil.get_terminal_size().columns if (out or sys.stdout).isatty() else None
