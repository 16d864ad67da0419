"""Compiles csrc/ with the system's C++ compiler at first use and keeps the library in a cache.

The file name is the SHA-256 of everything the machine code depends on: sources, flags, compiler
and CPU. A library built for another CPU is therefore never found, and a changed source never needs
a cache to be cleared. The library is written beside its final name and moved into place, so
processes that build at once do not disturb each other.

Whatever goes wrong becomes one sentence for the user, who then gets the reference.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outrider.kernels.cpu import cpu_identity, num_physical_cores

COMPILERS = ("c++", "g++", "clang++")
# Rounding is part of the contract: contraction is asked for by name, -ffast-math never. Tuned for
# a Zen, GCC fuses some chains of multiply-adds and leaves others, by the shape of the loop, so that
# a row's bits would depend on how many rows are computed with it: the parameter forbids that.
FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "--param=avoid-fma-max-bits=0",
    "-Wno-psabi",
    "-fPIC",
    "-pthread",
)
TIMEOUT_SECONDS = 300

_SOURCES = Path(__file__).parent / "csrc"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """The compiled kernels, or why there are none: exactly one is given."""

    library: ctypes.CDLL | None = None
    refusal: str | None = None


class _Refusal(Exception):  # noqa: N818 - an answer, not a failure
    """Why the native kernels cannot be used here, in one sentence."""


@functools.cache
def built_kernels(compiler: str | None, cache_dir: Path | None) -> Built:
    """Finds or makes the library; asked again, gives the same answer at once.

    `compiler` is a command (as in $CXX); None looks for one on the path. Without a `cache_dir` that
    can be written, every process compiles for itself.
    """
    try:
        return Built(library=_library(compiler, cache_dir))
    except _Refusal as refusal:
        return Built(refusal=str(refusal))


def _library(compiler: str | None, cache_dir: Path | None) -> ctypes.CDLL:
    command = _compiler_command(compiler)
    name = f"kernels-{_key(command)}.so"
    if cache_dir is not None and _is_writable(cache_dir):
        return _load_or_build(command, cache_dir / name)
    with tempfile.TemporaryDirectory(prefix="outrider-") as temporary:
        # A library stays mapped when its file is gone.
        return _load_or_build(command, Path(temporary) / name)


def _compiler_command(compiler: str | None) -> list[str]:
    if compiler:
        try:
            command = shlex.split(compiler)
        except ValueError as error:
            raise _Refusal(f"the C++ compiler {compiler!r} is no command: {error}") from error
        if not command or shutil.which(command[0]) is None:
            raise _Refusal(f"the C++ compiler {compiler!r} was not found")
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise _Refusal(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _tuning() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(command: list[str]) -> str:
    digest = hashlib.sha256()
    version = _run([*command, "--version"]).stdout
    for text in (*command, version, *FLAGS, _tuning(), cpu_identity()):
        digest.update(text.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        _log.warning("The cache folder %s cannot be written: %s", folder, error.strerror)
        return False


def _load_or_build(command: list[str], library: Path) -> ctypes.CDLL:
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            _log.warning("Building %s again: %s", library, error)
    _build(command, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise _Refusal(f"the compiled kernels do not load: {error}") from error


def _build(command: list[str], library: Path) -> None:
    start = time.monotonic()
    sources = sorted(_SOURCES.glob("*.cpp"))
    with (
        tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder,
        ThreadPoolExecutor(num_physical_cores()) as pool,
    ):
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        compile_flags = [*command, *FLAGS, _tuning(), "-c"]
        steps = [
            pool.submit(_succeed, [*compile_flags, str(source), "-o", output])
            for source, output in zip(sources, objects, strict=True)
        ]
        for step in steps:
            step.result()
        output = Path(folder) / library.name
        _succeed([*command, "-shared", "-pthread", *objects, "-o", str(output)])
        output.replace(library)
    _log.info("Compiled %s in %.1f s.", library, time.monotonic() - start)


def _succeed(command: list[str]) -> None:
    result = _run(command)
    if result.returncode != 0:
        raise _Refusal(f"{command[0]} failed: {_first_error(result.stderr)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Refusal(f"{command[0]} does not run: {error}") from error


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it gave no message"])[0]
