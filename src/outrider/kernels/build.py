"""Compiles csrc/ with the system's C++ compiler at first use and keeps the library in a cache.

The file name is the SHA-256 of everything the machine code depends on: sources, flags, compiler
and CPU. A library built for another CPU is therefore never found, and a changed source never needs
a cache to be cleared. The library is written beside its final name and moved into place, so
processes that build at once do not disturb each other.

Whatever goes wrong becomes a `Refusal`: one sentence for the user, who then gets the reference.
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
from pathlib import Path

from outrider.kernels.cpu import cpu_identity

COMPILERS = ("c++", "g++", "clang++")
# Rounding is part of the contract: contraction is asked for by name, -ffast-math never.
FLAGS = ("-std=gnu++20", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi",
         "-shared", "-fPIC", "-pthread")
TIMEOUT_SECONDS = 300

_SOURCES = Path(__file__).parent / "csrc"
_log = logging.getLogger(__name__)


class Refusal(Exception):  # noqa: N818 - an answer, not a failure
    """Why the native kernels cannot be used here, in one sentence."""


def default_cache_dir() -> Path | None:
    """The user's cache folder, or None if this user has no home."""
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:
        return None


@functools.cache
def load_library(compiler: str | None = None, cache_dir: Path | None = None) -> ctypes.CDLL:
    """The compiled kernels, built now unless `cache_dir` holds them. Raises Refusal.

    `compiler` is a command (as in $CXX); None looks for one on the path. A folder that cannot be
    written is replaced by a temporary one, at the price of compiling in every process.
    """
    command = _compiler_command(compiler)
    name = f"kernels-{_key(command)}.so"
    folder = _writable(cache_dir or default_cache_dir())
    if folder is not None:
        return _load_or_build(command, folder / name)
    with tempfile.TemporaryDirectory(prefix="outrider-") as temporary:
        # The mapped library outlives its file.
        return _load_or_build(command, Path(temporary) / name)


def _compiler_command(compiler: str | None) -> list[str]:
    if compiler:
        command = shlex.split(compiler)
        if shutil.which(command[0]) is None:
            raise Refusal(f"the C++ compiler {command[0]!r} was not found")
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise Refusal(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


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


def _writable(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        _log.warning("The cache folder %s cannot be written (%s).", folder, error.strerror)
        return None


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
        raise Refusal(f"the compiled kernels do not load: {error}") from error


def _build(command: list[str], library: Path) -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        output = Path(folder) / library.name
        sources = sorted(str(path) for path in _SOURCES.glob("*.cpp"))
        result = _run([*command, *FLAGS, _tuning(), *sources, "-o", str(output)])
        if result.returncode != 0:
            raise Refusal(f"{command[0]} failed: {_first_error(result.stderr)}")
        output.replace(library)
    _log.info("Compiled %s in %.1f s.", library, time.monotonic() - start)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refusal(f"{command[0]} does not run: {error}") from error


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it gave no message"])[0]
