"""Compiled kernels that the installed wheel brings, one library for each level of CPU.

A library's name says for which sources it was compiled, so that edited sources find none. Its bytes
must be those that the wheel's RECORD lists; `scripts/wheel` makes such wheels.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from outrider.core.files import FileKind, read_bytes
from outrider.kernels.native.levels import levels_here, library_name

FOLDER = Path(__file__).parent / "lib"


class NoneBroughtError(Exception):
    """Why the package has no kernels for this machine; a phrase for a sentence."""


class DamagedError(NoneBroughtError):
    """It has them, but they are not what the wheel brought."""


@dataclass(frozen=True, slots=True)
class Brought:
    """A library as the wheel brought it, and the level of CPU that it is for."""

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
    """The hash of `path` in the RECORD of the wheel that brought it, in RECORD's words."""
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
