"""Builds the native CPU library: compiles csrc/ with the system's C++ compiler at first use.

The file name is the SHA-256 of sources, flags, compiler and CPU, so no stale library is ever found.
A library is loaded only from this user's own folder (core/files.py), with the SHA-256 that was
recorded when it was built and every function of the sources; any other library is built again. One
process builds while others wait. Folders are tried in order: the cache, a private folder among
temporary files, one for this process. Each failure becomes one sentence for the user, who then gets
the reference kernels.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outrider.core.files import NotPrivateError, locked, private_folder, read_private, write_private
from outrider.kernels.native.cpu import ENDINGS, cpu_identity, num_physical_cores

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
# How long to wait for another process that builds; then this one builds for itself.
WAIT_SECONDS = 120.0

_MAX_LIBRARY_BYTES = 1 << 26
_LOCK, _BUILDING = ".lock", "build-"
_FUNCTION = re.compile(rb"\b(outrider_\w+)\(")
_SOURCES = Path(__file__).parent / "csrc"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """The compiled kernels, or why there are none: exactly one is given. `folder` is ours alone and
    keeps what else is known of them; None where nothing can be kept."""

    library: ctypes.CDLL | None = None
    refusal: str | None = None
    folder: Path | None = None


class _Refusal(Exception):  # noqa: N818 - an answer, not a failure
    """Why the native kernels cannot be used here, in one sentence."""


@functools.cache
def built_kernels(compiler: str | None, cache_dir: Path | None) -> Built:
    """Finds or makes the library; asked again, gives the same answer at once.

    `compiler` is a command (as in $CXX); None looks for one on the path. Without a `cache_dir` that
    can be written and trusted, the library is kept among temporary files.
    """
    try:
        return _found_or_built(compiler, cache_dir)
    except _Refusal as refusal:
        return Built(refusal=str(refusal))
    except OSError as error:
        return Built(refusal=f"no folder can hold the compiled kernels: {error}")


def _found_or_built(compiler: str | None, cache_dir: Path | None) -> Built:
    command = _compiler_command(compiler)
    name = f"kernels-{_key(command)}.so"
    folders = trusted_folders(cache_dir)
    for folder in folders:
        if (library := _kept(folder / name)) is not None:
            return Built(library, folder=folder)
    for folder in folders:
        try:
            if (library := _built_once(command, folder / name)) is not None:
                return Built(library, folder=folder)
        except OSError as error:
            _log.warning("No kernels are built in %s: %s.", folder, error.strerror or error)
    # The file stays as long as the process: trials of it run in others.
    alone = Path(tempfile.mkdtemp(prefix="outrider-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return Built(_built(command, alone / name))


def trusted_folders(cache_dir: Path | None) -> list[Path]:
    """Folders of this user alone, made if need be, the best first; a line on the log says why
    `cache_dir` is none of them."""
    found: list[Path] = []
    temporary = Path(tempfile.gettempdir()) / f"outrider-{os.geteuid()}"
    for folder in filter(None, (cache_dir, temporary)):
        try:
            found.append(private_folder(folder))
        except NotPrivateError as error:
            _log.warning("Compiled kernels are neither taken from %s nor kept: %s.", folder, error)
        except OSError as error:
            _log.warning("The cache folder %s cannot be made: %s.", folder, error.strerror)
    return found


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


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library at `path` if there is one and it is ours, else None."""
    if not path.exists():
        return None
    try:
        return _loaded(path)
    except (NotPrivateError, OSError) as error:
        _log.warning("Building %s again: %s.", path, error)
        return None


def _loaded(path: Path) -> ctypes.CDLL:
    """Load `path`, after the checks. Raises NotPrivateError, OSError.

    Nobody else can change the file between the checks and the loading: `path` lies in a folder of
    this user alone.
    """
    data = read_private(path, _MAX_LIBRARY_BYTES)
    if hashlib.sha256(data).hexdigest() != _expected_digest(path):
        raise NotPrivateError("it is not the file that was built, by its SHA-256")
    for function in _functions():
        # A name in a library ends in a zero.
        if function + b"\0" not in data:
            raise NotPrivateError(f"it lacks {function.decode()}")
    return ctypes.CDLL(str(path))


def _expected_digest(path: Path) -> str:
    """What the library at `path` must hash to: its record, written when it was built.

    This is the place where a library that a wheel brings is checked against the wheel's RECORD.
    """
    return read_private(_record(path), 1024).decode("ascii", "replace").split(" ")[0]


def _record(path: Path) -> Path:
    """The file beside a library that `sha256sum --check` reads."""
    return path.with_name(f"{path.name}.sha256")


def _functions() -> list[bytes]:
    """The names that every library of these sources exports; kinds of linear that need more of a
    CPU say themselves whether they are there."""
    optional = tuple(ending.encode() for ending in ENDINGS.values() if ending)
    texts = [path.read_bytes() for path in sorted(_SOURCES.glob("*.cpp"))]
    names = {name for text in texts for name in _FUNCTION.findall(text)}
    return sorted(name for name in names if not name.endswith(optional))


def _built_once(command: list[str], path: Path) -> ctypes.CDLL | None:
    """Build `path` unless another process does so first; None where `path` cannot be written.
    Raises OSError, or TimeoutError if the other one takes too long."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return None
    with locked(path.parent / _LOCK, WAIT_SECONDS) as held:
        if held:
            _sweep(path.parent)
        return _kept(path) or _built(command, path)


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed left in `folder`, whose lock is held."""
    for left in (*folder.glob(f"{_BUILDING}*"), *folder.glob(".kernels-*.part")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _built(command: list[str], path: Path) -> ctypes.CDLL:
    """Compile the sources, keep the library at `path` and load it. Raises OSError."""
    _log.info("Compiling the native kernels; the first use on a machine takes some 15 s.")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=path.parent) as folder:
        output = Path(folder) / path.name
        _compile(command, output)
        try:
            data = output.read_bytes()
        except FileNotFoundError:
            raise _Refusal(f"{command[0]} failed: it wrote no library") from None
    # The record comes last: whoever finds an old one beside a new library builds again.
    write_private(path, data)
    digest = hashlib.sha256(data).hexdigest()
    write_private(_record(path), f"{digest}  {path.name}\n".encode())
    _log.info("Compiled %s in %.1f s.", path, time.monotonic() - start)
    try:
        return _loaded(path)
    except (NotPrivateError, OSError) as error:
        raise _Refusal(f"the compiled kernels do not load: {error}") from error


def _compile(command: list[str], output: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [str(output.with_name(f"{source.stem}.o")) for source in sources]
    compile_flags = [*command, *FLAGS, _tuning(), "-c"]
    with ThreadPoolExecutor(num_physical_cores()) as pool:
        steps = [
            pool.submit(_succeed, [*compile_flags, str(source), "-o", target])
            for source, target in zip(sources, objects, strict=True)
        ]
        for step in steps:
            step.result()
    _succeed([*command, "-shared", "-pthread", *objects, "-o", str(output)])


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
