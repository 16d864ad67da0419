"""Levels of CPU that kernels are compiled for, and the compiled kernels of an installed wheel, one
library for each level.

A library's name has a hash of its sources, so edited sources find no library. Its bytes must be
those that the wheel's RECORD lists; `scripts/wheel` makes such wheels.
"""

from __future__ import annotations

import hashlib
import platform
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from outrider.core.files import FileKind, read_bytes, read_text

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
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
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
