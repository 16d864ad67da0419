"""Writes the table of limits in CONTRIBUTING.md: `python scripts/house_table.py`.

It compares tests/design/ratchets.toml with the numbers of 28 November 2026 and with the aims.

`--check` only compares, and exits with 1 if the table is out of date.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from generated import kept

ROOT = Path(__file__).parents[1]
PAGE, LIMITS = ROOT / "CONTRIBUTING.md", ROOT / "tests" / "design" / "ratchets.toml"
BEGIN, END = "<!-- table of limits: scripts/house_table.py -->\n", "<!-- end of the table -->\n"

# Label, table and name of the limit, number before, aim. Before, core, plugins and lab were one.
ROWS: tuple[tuple[str, str, str, int | None, int | None], ...] = (
    ("files of the core", "core", "files", 565, 190),
    ("lines of the core", "core", "lines", 107_732, 46_000),
    ("lines of plugins", "plugins", "lines", None, 16_000),
    ("lines of the lab", "lab", "lines", None, None),
    ("private words of the core", "core", "private_words", 2_963, 92),
    ("docstrings of the core that start without a noun", "core", "nounless_docstrings", 1_300, 120),
    ("import circles", "source", "circles", 5, 0),
    ("settings of every engine", "core", "settings", 66, 30),
    ("files that run: request in the native round", "run", "native_round", 47, 32),
    ("files that run: request by stages", "run", "stages", 58, 40),
    ("files that run: load of a GGUF file", "run", "gguf_load", 93, 55),
    ("files that run: chat completion over HTTP", "run", "http_request", 86, 55),
    ("words of docs", "docs", "words", 141_823, 70_000),
    ("bytes of tracked files", "tree", "bytes", 49_999_700, 42_000_000),
)


def table() -> str:
    limits = tomllib.loads(LIMITS.read_text("utf-8"))
    lines = ["| | before | limit now | aim |", "|---|--:|--:|--:|"]
    for label, section, name, before, aim in ROWS:
        numbers = (before, limits[section][name], aim)
        shown = " | ".join("" if number is None else f"{number:,}" for number in numbers)
        lines.append(f"| {label} | {shown} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


if __name__ == "__main__":
    sys.exit(kept({PAGE: page()}, sys.argv[1:], again="python scripts/house_table.py"))
