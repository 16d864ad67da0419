"""Finds or makes the native CPU library: the wheel's, or csrc/ compiled at first use.

A library is loaded from this user's own folder (core/files.py), and only if it has the SHA-256 that
was recorded when it was stored and every function of the sources; otherwise it is made again. Its
name is a SHA-256 of everything that it is made from, so a stale library is never found. A wheel
brings one for each `Level` of CPU, with the bytes that its RECORD lists (`scripts/wheel`). One
process makes a library while others wait. Folders are tried in order: the cache, a private folder
for temporary files, a folder for this process. Each failure becomes one sentence for the user, who
then gets the reference kernels.
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
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from outrider.core import env
from outrider.core.errors import MachineError, out_of_memory, progress, reason_of
from outrider.core.files import (
    FileKind,
    NotPrivateError,
    locked,
    private_folder,
    read_bytes,
    read_private,
    read_text,
    write_private,
)
from outrider.kernels.native.cpu import ENDINGS, cpu_identity, num_physical_cores

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
# Rounding is part of the contract: contraction is requested explicitly, -ffast-math never. When GCC
# tunes for a Zen, it fuses some chains of multiply-adds but not others, depending on the shape of
# the loop, so a row's bits would depend on the number of rows: the parameter forbids that.
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
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """CPUs of `machine` with the features `needs`, as in /proc/cpuinfo; `flags` of a compiler."""

    name: str
    machine: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SSE4 = _words("cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3")
_AVX2 = _SSE4 | _words("abm avx avx2 bmi1 bmi2 f16c fma movbe xsave")
_AVX512 = _AVX2 | _words("avx512bw avx512cd avx512dq avx512f avx512vl")
# The best first. AMX needs no level of its own, as its code runs only if the CPU reports tiles.
LEVELS = (
    Level(
        "avx512-bf16",
        "x86_64",
        (
            "-march=x86-64-v4",
            "-mavx512vnni",
            "-mavx512bf16",
            "-mamx-tile",
            "-mamx-int8",
            "-mamx-bf16",
        ),
        _AVX512 | {"avx512_vnni", "avx512_bf16"},
    ),
    Level("avx512-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
    Level("avx512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    Level("avx2-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    Level("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Level("x86-64", "x86_64", ("-march=x86-64",)),
    Level("arm64", "arm64"),
)


def levels_here() -> list[Level]:
    """Levels whose code this CPU can run, the best first."""
    machine, features = machine_name(platform.machine()), _features()
    return [one for one in LEVELS if one.machine == machine and one.needs <= features]


def machine_name(value: str) -> str:
    """One name for each architecture: systems call it x86_64 or AMD64, and arm64 or aarch64."""
    return {"AMD64": "x86_64", "aarch64": "arm64"}.get(value, value)


def library_name(level: Level) -> str:
    """The file name of a wheel's library for `level`; it depends on sources and flags."""
    digest = hashlib.sha256()
    for text in (*FLAGS, *level.flags):
        digest.update(text.encode() + b"\0")
    digest.update(sources_digest(SOURCES))
    return f"kernels-{level.name}-{digest.hexdigest()[:16]}.so"


def sources_digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for source in sorted(folder.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.digest()


def _features() -> frozenset[str]:
    """Features of the first core; empty if the system does not report them."""
    try:
        text = read_text(_CPUINFO, FileKind.SYSTEM)
    except (OSError, UnicodeDecodeError):
        return frozenset()
    words = {"flags", "Features"}
    lines = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return frozenset(
        found for name, _, value in lines if name.strip() in words for found in value.split()
    )


FOLDER = Path(__file__).parent / "lib"


class NoneBroughtError(Exception):
    """The package has no kernels for this machine; the message is a phrase for a sentence."""


class DamagedError(NoneBroughtError):
    """The package has kernels, but they differ from those of the wheel."""


@dataclass(frozen=True, slots=True)
class Brought:
    """A library of the wheel, with the level of CPU that it is for."""

    path: Path
    data: bytes
    level: str


def brought_library() -> Brought:
    """The wheel's library for the best level of this CPU. Raises NoneBroughtError."""
    if not FOLDER.is_dir():
        raise NoneBroughtError("this package brings no compiled kernels")
    for level in levels_here():
        path = FOLDER / library_name(level)
        if path.exists():
            return Brought(path, _checked(path), level.name)
    raise NoneBroughtError("this package brings no compiled kernels for these sources and this CPU")


def _checked(path: Path) -> bytes:
    try:
        data = read_bytes(path, FileKind.LIBRARY)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason_of(error)}") from None
    recorded = _recorded(path)
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    if recorded is None:
        raise DamagedError(f"{path} is in no RECORD of an installed wheel")
    if recorded != f"sha256={digest}":
        raise DamagedError(f"{path} is not the file that the wheel brought, by its RECORD")
    return data


def _recorded(path: Path) -> str | None:
    """The hash of `path` as the RECORD of its wheel has it; None if no RECORD lists it."""
    try:
        wheel = metadata.distribution(__name__.partition(".")[0])
    except metadata.PackageNotFoundError:
        return None
    for line in (wheel.read_text("RECORD") or "").splitlines():
        # Neither our names nor hashes have a comma.
        name, _, rest = line.partition(",")
        if name.endswith(f"/{path.name}") and _is_same(Path(str(wheel.locate_file(name))), path):
            return rest.partition(",")[0]
    return None


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and one.samefile(other)


COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_SECONDS = 300
# Limit of the wait for another process that builds; then this process builds for itself.
WAIT_SECONDS = 120.0

_MAX_LIBRARY_BYTES = 1 << 26
_LOCK, _BUILDING = ".lock", "build-"
_FUNCTION = re.compile(rb"\b(outrider_\w+)\(")


@dataclass(frozen=True, slots=True)
class Built:
    """The compiled kernels (`library`), or the reason why there are none (`refusal`). `folder` is
    this user's alone and stores results of trials and measurements; None if nothing can be stored.
    `origin` describes who compiled the kernels, and `unbrought` why they are not those of the
    package, unless a compiler was named."""

    library: ctypes.CDLL | None = None
    refusal: str | None = None
    folder: Path | None = None
    origin: str = ""
    unbrought: str = ""


class CompileError(Exception):
    """The native kernels cannot be used here, for a reason in one sentence."""


@functools.cache
def built_kernels(compiler: str | None, cache_dir: Path | None) -> Built:
    """Find or make the library. A second call returns the same result at once.

    `compiler` is a command (as in $CXX) that compiles; None takes the wheel's library, or else
    looks for a compiler on the path. Without a `cache_dir` that can be written and trusted, the
    library is stored in a folder for temporary files.
    """
    unbrought = ""
    if compiler is None:
        try:
            return _installed(brought_library(), cache_dir)
        except NoneBroughtError as reason:
            unbrought = str(reason)
            if isinstance(reason, DamagedError):
                _log.warning("The wheel's kernels are not used: %s; reinstall outrider.", reason)
    try:
        return replace(_found_or_built(compiler, cache_dir), unbrought=unbrought)
    except CompileError as error:
        refusal = str(error)
    except OSError as error:
        refusal = f"no folder can hold the compiled kernels: {error}"
    return Built(refusal="; ".join(filter(None, (refusal, unbrought))))


def needed_library(purpose: str) -> ctypes.CDLL:
    """The library for the environment's settings. Raises MachineError if there is none; the message
    begins with `purpose`, such as "memory cannot be timed"."""
    built = built_kernels(env.compiler(), env.cache_folder())
    if built.library is None:
        raise MachineError(f"{purpose}: {built.refusal}.", hint="outrider doctor")
    return built.library


def _installed(brought: Brought, cache_dir: Path | None) -> Built:
    """The wheel's library, loaded from a copy in a folder of ours. So results of trials and
    measurements on this CPU can be stored with it, and the bytes that are loaded are those that
    were checked. Raises DamagedError."""
    origin = f"the wheel's, for CPUs of level {brought.level}"
    of_cpu = hashlib.sha256(cpu_identity().encode() + brought.data).hexdigest()
    folders = trusted_folders(cache_dir)
    try:
        found = _kept_or_made(f"kernels-{of_cpu}.so", partial(_keep, brought.data), folders)
    except CompileError:  # Files of that folder must not be run.
        found = None
    try:
        library, folder = found or (ctypes.CDLL(str(brought.path)), None)
    except OSError as error:
        raise DamagedError(f"they do not load: {error}") from error
    return Built(library, folder=folder, origin=origin)


def must_compile(compiler: str | None, cache_dir: Path | None) -> bool:
    """True if `built_kernels` would run a compiler, which takes a while."""
    if compiler is None:
        with suppress(NoneBroughtError):
            brought_library()
            return False
    try:
        name = f"kernels-{_key(_compiler_command(compiler))}.so"
        return not any((folder / name).exists() for folder in trusted_folders(cache_dir))
    except (CompileError, OSError):
        return False


def _found_or_built(compiler: str | None, cache_dir: Path | None) -> Built:
    command = _compiler_command(compiler)
    origin = f"compiled here by {shlex.join(command)}"
    name, make = f"kernels-{_key(command)}.so", partial(_built, command)
    if (found := _kept_or_made(name, make, trusted_folders(cache_dir))) is not None:
        library, folder = found
        return Built(library, folder=folder, origin=origin)
    # The file stays until this process ends: trials of it run in other processes.
    alone = Path(tempfile.mkdtemp(prefix="outrider-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return Built(make(alone / name), origin=origin)


def _kept_or_made(
    name: str, make: Callable[[Path], ctypes.CDLL], folders: Sequence[Path]
) -> tuple[ctypes.CDLL, Path] | None:
    """The library `name` with its folder; None if no folder can hold it."""
    for folder in folders:
        if (library := _kept(folder / name)) is not None:
            return library, folder
    for folder in folders:
        try:
            if (library := _made_once(make, folder / name)) is not None:
                return library, folder
        except OSError as error:
            _log.warning("Kernels cannot be stored in %s: %s.", folder, reason_of(error))
    return None


def trusted_folders(cache_dir: Path | None) -> list[Path]:
    """Private folders of this user, the best first; the log says why `cache_dir` is not one."""
    found: list[Path] = []
    temporary = Path(tempfile.gettempdir()) / f"outrider-{os.geteuid()}"
    for folder in filter(None, (cache_dir, temporary)):
        try:
            found.append(private_folder(folder))
        except NotPrivateError as error:
            _log.warning("Kernels are neither loaded from %s nor stored there: %s.", folder, error)
        except OSError as error:
            _log.warning("The cache folder %s cannot be made: %s.", folder, reason_of(error))
    return found


def _compiler_command(compiler: str | None) -> list[str]:
    if compiler:
        try:
            command = shlex.split(compiler)
        except ValueError as error:
            raise CompileError(f"the C++ compiler {compiler!r} is no command: {error}") from error
        if not command or shutil.which(command[0]) is None:
            raise CompileError(f"the C++ compiler {compiler!r} was not found")
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise CompileError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _tuning() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(command: list[str]) -> str:
    digest = hashlib.sha256()
    version = _run([*command, "--version"]).stdout
    for text in (*command, version, *FLAGS, _tuning(), cpu_identity()):
        digest.update(text.encode() + b"\0")
    digest.update(sources_digest(SOURCES))
    return digest.hexdigest()


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library at `path` if there is one that passes the checks, else None."""
    if not path.exists():
        return None
    try:
        return _loaded(path)
    except (NotPrivateError, OSError) as error:
        if (ended := out_of_memory(error, "loading kernels")) is not None:
            raise ended from error
        _log.warning("Making %s again: %s.", path, error)
        return None


def _loaded(path: Path) -> ctypes.CDLL:
    """Check and load `path`, which no other user can change in between, as its folder is private.
    Raises NotPrivateError, OSError."""
    data = read_private(path, _MAX_LIBRARY_BYTES)
    if hashlib.sha256(data).hexdigest() != _expected_digest(path):
        raise NotPrivateError("it is not the file that was built, by its SHA-256")
    for function in _functions():
        # A name in a library ends in a zero.
        if function + b"\0" not in data:
            raise NotPrivateError(f"it lacks {function.decode()}")
    return ctypes.CDLL(str(path))


def _expected_digest(path: Path) -> str:
    """The SHA-256 of the library at `path`, from the record written when it was stored."""
    return read_private(_record(path), 1024).decode("ascii", "replace").split(" ")[0]


def _record(path: Path) -> Path:
    """The file with a library's SHA-256, in the format of `sha256sum --check`."""
    return path.with_name(f"{path.name}.sha256")


def _functions() -> list[bytes]:
    """The names that every library of these sources exports. Kinds of linear that need more
    features of a CPU are left out: they report themselves whether they exist."""
    optional = tuple(ending.encode() for ending in ENDINGS.values() if ending)
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.cpp"))]
    names = {name for text in texts for name in _FUNCTION.findall(text)}
    return sorted(name for name in names if not name.endswith(optional))


def _made_once(make: Callable[[Path], ctypes.CDLL], path: Path) -> ctypes.CDLL | None:
    """Make `path` unless another process does so first; None if `path` cannot be written. Raises
    OSError, or TimeoutError if the other process takes too long."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return None
    with locked(path.parent / _LOCK, WAIT_SECONDS) as held:
        if held:
            _sweep(path.parent)
        return _kept(path) or make(path)


def _sweep(folder: Path) -> None:
    """Remove files of killed builds from `folder`, whose lock is held."""
    for left in (*folder.glob(f"{_BUILDING}*"), *folder.glob(".kernels-*.part")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _built(command: list[str], path: Path) -> ctypes.CDLL:
    """Compile the sources, store the library at `path` and load it. Raises OSError."""
    progress.info(
        "Compiling the native kernels, once on each machine; it takes one to three minutes."
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=path.parent) as folder:
        output = Path(folder) / path.name
        compile_library(command, output, [_tuning()])
        data = output.read_bytes()
    progress.info("Compiled %s in %.1f s.", path, time.monotonic() - start)
    return _keep(data, path)


def _keep(data: bytes, path: Path) -> ctypes.CDLL:
    """Store a library at `path`, with its record, and load it. Raises OSError."""
    # The record comes last: a process that finds an old record for a new library makes it again.
    write_private(path, data)
    digest = hashlib.sha256(data).hexdigest()
    write_private(_record(path), f"{digest}  {path.name}\n".encode())
    try:
        return _loaded(path)
    except (NotPrivateError, OSError) as error:
        raise CompileError(f"the compiled kernels do not load: {error}") from error


def compile_library(
    command: Sequence[str], output: Path, flags: Sequence[str], link_flags: Sequence[str] = ()
) -> None:
    """Compile all sources with FLAGS and `flags`, and link them to `output`; the objects stay in
    its folder. Raises CompileError with the compiler's reason."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(output.with_name(f"{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(num_physical_cores()) as pool:
        steps = [
            pool.submit(_succeed, [*command, *FLAGS, *flags, "-c", str(source), "-o", target])
            for source, target in zip(sources, objects, strict=True)
        ]
        for step in steps:
            step.result()
    _succeed([*command, "-shared", "-pthread", *objects, *link_flags, "-o", str(output)])
    if not output.exists():
        raise CompileError(f"{command[0]} failed: it wrote no library")


def _succeed(command: list[str]) -> None:
    result = _run(command)
    if result.returncode != 0:
        raise CompileError(f"{command[0]} failed: {_first_error(result.stderr)}")


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
        raise CompileError(f"{command[0]} does not run: {error}") from error


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it gave no message"])[0]
