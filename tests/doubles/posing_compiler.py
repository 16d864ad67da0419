"""Commands that pose as a C++ compiler, so that a build of the native kernels takes no time.

Their library has every name and computes nothing; each run of a linker is a line in `runs`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outrider.kernels.native import build
from outrider.kernels.native.build import Built, built_kernels

SOURCES = Path(build.__file__).parent / "csrc"


def script(folder: Path, *lines: str) -> str:
    """A command that poses as a compiler; `$out` is the file it should write."""
    path = folder / "posing c++"
    find_output = 'for word; do out="$last"; last="$word"; done; out="$last"'
    version = '[ "$1" = --version ] && echo 1.0 && exit 0'
    path.write_text("\n".join(["#!/bin/sh", version, find_output, *lines, ""]))
    path.chmod(0o755)
    return f"'{path}'"


def names() -> set[str]:
    """Every function that the sources export."""
    texts = [path.read_text() for path in SOURCES.glob("*.cpp")]
    return {name for text in texts for name in re.findall(r"\b(outrider_\w+)\(", text)}


def linker(folder: Path, source: str, name: str = "empty.c") -> str:
    """A shell command that makes `$out` of C `source`."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to make an empty library with")
    (folder / name).write_text(source)
    return f'{compiler} -shared -fPIC -x c "{folder / name}" -o "$out"'


def empty_library(folder: Path, *also: str, lacks: str = "") -> str:
    """A posing compiler whose library has all names but that which it `lacks`, and computes
    nothing; it does what `also` says before it links."""
    functions = "".join(f"void {name}(void) {{}}\n" for name in sorted(names() - {lacks}))
    link = f'{linker(folder, functions)} && echo >> "{folder}/runs"'
    return script(folder, 'case "$out" in *.so)', *also, link, ";; esac")


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def num_builds(folder: Path) -> int:
    runs = folder / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def attempt(compiler: str | None, cache_dir: Path | None) -> Built:
    """As in a new process."""
    built_kernels.cache_clear()
    return built_kernels(compiler, cache_dir)


def later_process(compiler: str, *cache_dirs: Path) -> str:
    """What a process finds in each, and finds again: "loaded", or why not."""
    program = (
        "import sys, pathlib, tempfile; tempfile.tempdir = sys.argv[2];"
        "from outrider.kernels.native import build; build.SOURCES = pathlib.Path(sys.argv[3]);"
        "dirs = [pathlib.Path(one) for one in sys.argv[4:] for _ in '12'];"
        "built = [build.built_kernels.__wrapped__(sys.argv[1], one) for one in dirs];"
        "print(*{'loaded' if one.library else one.refusal for one in built}, sep='; ')"
    )
    command = [
        sys.executable,
        "-c",
        program,
        compiler,
        tempfile.gettempdir(),
        str(build.SOURCES),
        *map(str, cache_dirs),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout.strip()
