"""Writes the two locks and bill-of-materials.json: `.venv/bin/python scripts/lock.py`.

Needs uv on the path (`pip install uv`) and the package index. Run it when pyproject.toml asks for
something else, or with `--upgrade` for newer versions; then run scripts/setup and it again, for the
licences of packages that were not installed.

The lock has one version of each package a Python and platform, and the SHA-256 of its source and of
its wheels for platforms that PyTorch has wheels for: what `scripts/setup` installs. PyTorch comes
from the index that fits the machine, which has files of its own for one version, so it is pinned by
version alone; the CUDA libraries that some of its builds ask for come with it.

requirements-extras.lock has the same of what the extras ask for that development does not need:
`pip install --require-hashes -r requirements.lock -r requirements-extras.lock` has all of them.

The bill of materials is CycloneDX 1.6, with the licence that each package declares.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
EXTRAS_LOCK = ROOT / "requirements-extras.lock"
EXTRAS = ("data", "otel", "cluster")
BILL = ROOT / "bill-of-materials.json"
DEVELOPMENT = "# For development"
HEADER = """\
# What scripts/setup installs, with the SHA-256 of its source and of its wheels for Python 3.11 to
# 3.13 where PyTorch has wheels too. Written by scripts/lock.py; do not edit.
# PyTorch comes from the index that fits the machine, so it is pinned by version alone:
# torch=={}
"""
EXTRAS_HEADER = """\
# What the extras data, otel and cluster need besides requirements.lock, in the same form.
# Written by scripts/lock.py; do not edit.
"""
# With PyTorch; the packages of development have a Triton, to interpret its kernels without a GPU.
APART = re.compile(r"torch|nvidia-.*|cuda-.*")
APART_IN_USE = re.compile(rf"{APART.pattern}|triton")
# Of packages that are installed on other platforms only.
ELSEWHERE = {"colorama": "BSD-3-Clause"}
PLATFORMS = r"any|(many)?linux\w*_(x86_64|aarch64)|macosx_\d+_\d+_(arm64|universal2)|win_amd64"
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; (.*?))? \\$")
HASH = re.compile(r"^    --hash=sha256:([0-9a-f]{64})")
# What a classifier calls them, and short names of the same.
LICENCES = {
    "MIT License": "MIT",
    "MIT": "MIT",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache-2.0 license": "Apache-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "PSF": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One pinned package; `marker` says on which Pythons and platforms."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    def text(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        lines = [f"{self.name}=={self.version}{marker}", *self.hashes]
        return " \\\n    --hash=sha256:".join(lines) + "\n"


def parse(text: str) -> list[Entry]:
    found: list[Entry] = []
    for line in text.splitlines():
        if match := ENTRY.match(line):
            found.append(Entry(match[1], match[2], match[3] or "", ()))
        elif match := HASH.match(line):
            last = found.pop()
            found.append(Entry(last.name, last.version, last.marker, (*last.hashes, match[1])))
    return found


def fits(tag: Tag) -> bool:
    """True for a wheel's tag of Python 3.11 to 3.13 on a platform that PyTorch has wheels for."""
    python = re.fullmatch(r"(?:cp|py)3(\d*)", tag.interpreter)
    minor = int(python[1] or 0) if python else 99
    # A wheel with a stable interface, or with none, is for later Pythons as well.
    oldest = 11 if tag.abi == tag.interpreter else 0 if tag.abi in ("abi3", "none") else 99
    return oldest <= minor <= 13 and re.fullmatch(PLATFORMS, tag.platform) is not None


def entry_of(package: Mapping[str, Any]) -> Entry:
    """A package of pylock.toml with the hashes of its source and of the wheels that fit."""
    names = [(wheel, wheel["url"].rpartition("/")[2]) for wheel in package.get("wheels", ())]
    files = [w for w, name in names if any(map(fits, parse_wheel_filename(unquote(name))[3]))]
    files += [package["sdist"]] if "sdist" in package else []
    hashes = sorted(file["hashes"]["sha256"] for file in files)
    marker = re.sub(r"python_full_version >= '3\.11'( and )?", "", package.get("marker", ""))
    return Entry(package["name"], package["version"], marker, tuple(hashes))


def compiled(uv: str, *words: str) -> list[Entry]:
    """What uv resolves pyproject.toml to, for every Python and platform."""
    command = [uv, "pip", "compile", "pyproject.toml", "--universal", "--format", "pylock.toml"]
    options = ["--no-config", "--no-annotate", "--no-header", "--quiet", "--python-version", "3.11"]
    # PyTorch's own index has other files of the same version.
    options.append("--no-sources")
    result = subprocess.run(
        [*command, *options, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(result.stderr)
    entries = map(entry_of, tomllib.loads(result.stdout)["packages"])
    # Not the packages of browsers.
    return [entry for entry in entries if "== 'emscripten'" not in entry.marker]


def resolved(uv: str, *, upgrade: bool) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """What use needs, the server included, what development needs, and what all extras need."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        kept = [] if upgrade else [e for lock in LOCKS for e in parse(lock.read_text())]
        pins.write_text("".join(f"{e.name}=={e.version} ; {e.marker or _ALWAYS}\n" for e in kept))
        all_of_it = compiled(uv, "--extra", "dev", "--constraint", str(pins))
        pins.write_text("".join(entry.text() for entry in all_of_it))
        base = compiled(uv, "--extra", "server", "--constraint", str(pins))
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        more = compiled(uv, "--extra", "dev", *extras, "--constraint", str(pins))
    names = {entry.name for entry in all_of_it}
    return base, all_of_it, [entry for entry in more if entry.name not in names]


LOCKS = [lock for lock in (LOCK, EXTRAS_LOCK) if lock.exists()]
_ALWAYS = "python_version >= '3.11'"


def licence_of(name: str) -> str:
    """As the package that is installed here says it."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    try:
        own = metadata(name)
    except PackageNotFoundError:
        sys.exit(f"{name} is not installed, so its licence is not known: run scripts/setup dev")
    if expression := own.get("License-Expression"):
        return expression
    named = [c.rsplit(" :: ", 1)[1] for c in own.get_all("Classifier") or [] if "License" in c]
    named = [one for one in named if one != "OSI Approved"]
    first_line = (own.get("License") or "").strip().splitlines()[:1]
    for one in (*named, *first_line):
        return LICENCES.get(one, one)
    sys.exit(f"{name} says nothing of its licence")


def component(entry: Entry, scope: str) -> dict[str, object]:
    """As CycloneDX has it. A licence is an expression if it is made of SPDX names alone."""
    licence = licence_of(entry.name)
    is_expression = re.fullmatch(r"[\w.+()-]+( (AND|OR|WITH) [\w.+()-]+)*", licence)
    told = {"expression": licence} if is_expression else {"license": {"name": licence}}
    reference = f"pkg:pypi/{entry.name}@{entry.version}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": entry.name,
        "version": entry.version,
        "scope": scope,
        "licenses": [told],
        "purl": reference,
    }


def bill(base: Iterable[Entry], development: Iterable[Entry]) -> Mapping[str, object]:
    scoped = [(e, "required") for e in base] + [(e, "optional") for e in development]
    # One component a version, whatever the platforms.
    found = {(e.name, e.version): (e, scope) for e, scope in reversed(scoped)}
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": project["name"],
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": [component(*found[key]) for key in sorted(found)],
    }


def main() -> None:
    uv = shutil.which("uv") or sys.exit("uv is not on the path: pip install uv")
    base, every, extras = resolved(uv, upgrade="--upgrade" in sys.argv[1:])
    (torch,) = (entry for entry in base if entry.name == "torch")
    base = [entry for entry in base if not APART_IN_USE.fullmatch(entry.name)]
    development = [e for e in every if e not in base and not APART.fullmatch(e.name)]
    parts = [HEADER.format(torch.version), *(entry.text() for entry in base)]
    parts += [DEVELOPMENT + "\n", *(entry.text() for entry in development)]
    LOCK.write_text("".join(parts))
    extras = [entry for entry in extras if not APART.fullmatch(entry.name)]
    EXTRAS_LOCK.write_text("".join([EXTRAS_HEADER, *(entry.text() for entry in extras)]))
    listed = json.dumps(bill([*base, torch], development), separators=(",", ":"))
    # A line for each component.
    BILL.write_text(listed.replace('{"type":"library"', '\n{"type":"library"') + "\n")


if __name__ == "__main__":
    main()
