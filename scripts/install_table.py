"""Writes the table of docs/install.md: `.venv/bin/python scripts/install_table.py --write`.

Each row is a clean install: a new environment, an empty cache of the installer, and then a first
text of the embedded pair in a process that has an empty cache of kernels. Its wheels are those of
`scripts/wheel`, in dist/. Without --write the table is printed.

    --find-links FOLDER   where PyTorch's build for CPUs lies, if its index is out of reach
    --only WORDS          rows whose name has these words
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from release_check import CPU_INDEX, ENVIRONMENT, PIP, ReleaseError, first_token, ran, timed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "install.md"
MARKS = "<!--installs-->\n", "<!--/installs-->\n"
HEAD = """\
| | packages | download, MB | on disk, MB | install, s | first text, s | again, s |
| --- | --: | --: | --: | --: | --: | --: |
"""
PROMPT = ("generate", "Once upon a time", "--max-tokens", "16", "--quiet")


@dataclass(frozen=True, slots=True)
class Row:
    """A way to install: with or without a compiler on the path, by pip or uv."""

    name: str
    what: str
    installer: str = "pip"
    compiles: bool = False


def rows() -> list[Row]:
    wheels = sorted((ROOT / "dist").glob("outrider-*.whl"))
    pure = [str(path) for path in wheels if path.name.endswith("-any.whl")]
    own = [str(path) for path in wheels if not path.name.endswith("-any.whl")]
    if not pure or not own:
        raise ReleaseError("dist/ lacks a wheel of this platform or the pure one: scripts/wheel")
    return [
        Row("checkout, pip", ".", compiles=True),
        Row("checkout with `[server]`, pip", ".[server]", compiles=True),
        Row("checkout with `[server]`, uv", ".[server]", "uv", compiles=True),
        Row("wheel with kernels, pip, no compiler", own[0]),
        Row("wheel with kernels, uv, no compiler", own[0], "uv"),
        Row("pure wheel, pip, no compiler", pure[0]),
    ]


def measured(row: Row, links: str) -> str:
    with tempfile.TemporaryDirectory(prefix="outrider-install-") as scratch:
        folder, home = Path(scratch) / "env", Path(scratch) / "home"
        home.mkdir()
        venv.create(folder, with_pip=row.installer == "pip", symlinks=True)
        before = _size(folder)
        environment = {
            **ENVIRONMENT,
            "PIP_CACHE_DIR": f"{scratch}/pip",
            "UV_CACHE_DIR": f"{scratch}/uv",
        }
        seconds = timed(lambda: ran(list(_install(row, folder, links)), environment))
        packages = list(folder.glob("lib/python*/site-packages/*.dist-info"))
        number = len(packages) - (row.installer == "pip")
        held = _size(folder) - before
        fetched = "the same"
        if row.installer == "pip":
            # Once more, into a folder: what pip does with its cache differs by machine.
            files = Path(scratch) / "files"
            ran(list(_install(row, folder, links, "download", "--dest", str(files))), environment)
            fetched = f"{_size(files) / 1e6:.0f}"
        path = ":".join([str(folder / "bin"), *([ENVIRONMENT["PATH"]] if row.compiles else [])])
        alone = {"PATH": path, "HOME": str(home), "XDG_CACHE_HOME": str(home)}
        program = str(folder / "bin" / "outrider")
        first, again = (first_token([program, *PROMPT], alone) for _ in range(2))
    return (
        f"| {row.name} | {number} | {fetched} | {held / 1e6:,.0f} | {seconds:.0f} | {first:.1f} "
        f"| {again:.1f} |\n"
    )


def _install(row: Row, folder: Path, links: str, *verb: str) -> Iterator[str]:
    python = str(folder / "bin" / "python")
    if row.installer == "uv":
        uv = shutil.which("uv")
        if uv is None:
            raise ReleaseError("uv is not on the path: pip install uv")
        # Its own source of PyTorch, in pyproject.toml, is the index for CPUs.
        here = ["--no-sources", "--find-links", links] if links else ["--torch-backend", "cpu"]
        yield from (uv, "pip", "install", "--quiet", "--python", python, *here)
    else:
        index = ["--find-links", links] if links else ["--extra-index-url", CPU_INDEX]
        yield from (python, *PIP, *(verb or ("install",)), *index)
    yield row.what


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/install_table.py")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--find-links", default="")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.chdir(ROOT)
    table = HEAD
    for row in rows():
        if options.only in row.name:
            table += measured(row, options.find_links)
            print(table.splitlines()[-1], file=sys.stderr, flush=True)
    if options.write:
        text = PAGE.read_text("utf-8")
        start, end = (text.index(mark) for mark in MARKS)
        PAGE.write_text(text[: start + len(MARKS[0])] + table + text[end:], "utf-8")
    else:
        print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
