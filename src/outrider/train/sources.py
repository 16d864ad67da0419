"""Python source that is on this machine anyway: the standard library, and installed packages whose
own metadata say that their licence is permissive. No test files: they repeat themselves.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

# The word that means all of this where texts are named.
PYTHON = "python"
_PSF = "PSF-2.0 (CPython standard library)"
_PERMISSIVE = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC")
_SKIPPED = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages"}
# Generated tables rather than source.
_MAX_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    licence: str


def python_sources() -> list[Source]:
    """All of it, sorted by path."""
    found = dict([*_standard_library(), *_packages()])
    return [Source(Path(path), found[path]) for path in sorted(found)]


def _standard_library() -> Iterator[tuple[str, str]]:
    """Paths with their licence."""
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = [name for name in inside if name not in _SKIPPED]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 - thousands of them
            if name.endswith(".py") and _fits(path):
                yield path, _PSF


def _packages() -> Iterator[tuple[str, str]]:
    """The same, from the list of files that every installed package keeps."""
    for package in distributions():
        licence = permissive_licence(package)
        if licence is None:
            continue
        # Either of these reads the package's metadata anew.
        told, root = f"{licence} ({package.name})", str(package.locate_file(""))
        for line in (package.read_text("RECORD") or "").splitlines():
            name = line.split(",")[0]
            if name.endswith(".py") and not _SKIPPED & set(name.split("/")):
                path = os.path.join(root, name)  # noqa: PTH118 - thousands of them
                if _fits(path):
                    yield path, told


def permissive_licence(package: Distribution) -> str | None:
    """The licence that a package's metadata state, if it is one of the permissive ones."""
    fields: list[str] = []
    for key in ("License-Expression", "License"):
        fields += package.metadata.get_all(key) or []
    classifiers: list[str] = package.metadata.get_all("Classifier") or []
    fields += [line.split("::")[-1].strip() for line in classifiers if "License ::" in line]
    # A whole licence text says too many words to tell by one of them.
    short = [text for text in fields if 0 < len(text) < 100]
    if any("GPL" in text for text in short):
        return None
    return next((text for text in short if any(word in text for word in _PERMISSIVE)), None)


def _fits(path: str) -> bool:
    try:
        return os.stat(path).st_size <= _MAX_BYTES  # noqa: PTH116 - thousands of them
    except OSError:
        return False
