"""Makes an sdist, a pure wheel, and a wheel with compiled kernels; scripts/wheel says how.

All are built from a copy of the checkout's own files, so that nothing that lies about gets in. The
wheel of a platform is the pure wheel with one library for each level of CPU. Its tag is what the
libraries ask for: on Linux the newest version of glibc among their symbols. libstdc++ is linked
into them, since a machine without a compiler may have an older one; libgcc_s.so.1 is asked for, as
PyTorch asks for it.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from outrider import __version__
from outrider.kernels.native.build import (
    LEVELS,
    CompileError,
    Level,
    compile_library,
    library_name,
    machine_name,
)

ROOT = Path(__file__).parents[1]
LIBRARIES = "outrider/kernels/native/lib"
# What every Linux with glibc has, and libgcc_s, of which PyTorch makes the same demand.
SYSTEM = re.compile(r"(libc|libm|libgcc_s|libpthread|ld-linux-[\w-]+)\.so\.\d+")
MAC_VERSION = "11.0"
# A wheel of the same sources and compiler has the same bytes.
EPOCH = (1980, 1, 1, 0, 0, 0)
EXPORTED = "{ global: outrider_*; local: *; };\n"
BACKEND = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def main() -> int:
    options = _options()
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="outrider-wheel-") as scratch:
        tree = _copy(Path(scratch) / "tree")
        if options.address:
            addressed(tree, options.address.rstrip("/"))
        sdist = _backend("build_sdist", tree, folder)
        made = [sdist]
        # From the sdist, which must be enough to build from.
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        pure = _backend("build_wheel", Path(scratch) / sdist.name.removesuffix(".tar.gz"), folder)
        made.append(pure)
        if not options.pure:
            levels = _wanted(options.machine, options.levels)
            libraries = _compiled(levels, Path(scratch))
            tag = _platform_tag(options.machine, libraries)
            made.append(_with_libraries(pure, tag, libraries))
    for path in made:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")
    return 0


def _options() -> argparse.Namespace:
    machine = machine_name(platform.machine())
    parser = argparse.ArgumentParser(prog="scripts/wheel")
    parser.add_argument("folder", nargs="?", default=ROOT / "dist")
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--levels", default="")
    parser.add_argument("--address", default="")
    parser.add_argument("--machine", default=machine, choices=("x86_64", "arm64"))
    return parser.parse_args()


def _wanted(machine: str, names: str) -> list[Level]:
    levels = [level for level in LEVELS if level.machine == machine]
    if not names:
        return levels
    known = {level.name: level for level in levels}
    if unknown := set(names.split(",")) - known.keys():
        raise SystemExit(
            f"error: no level {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    return [known[name] for name in names.split(",")]


def _copy(tree: Path) -> Path:
    """The checkout's files, new ones too; those of an unpacked sdist where there is no checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    for name in names:
        to = tree / name
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes((ROOT / name).read_bytes())
        to.chmod((ROOT / name).stat().st_mode)
    return tree


def addressed(tree: Path, address: str) -> None:
    """Make README's relative links absolute, to the tag of this version in the repository at
    `address`, and give the package links: an index shows both far from the files."""
    readme, project = tree / "README.md", tree / "pyproject.toml"
    kinds = {"!": "raw", "": "blob"}
    links = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
    readme.write_text(
        links.sub(
            lambda m: f"{m[1]}[{m[2]}]({address}/{kinds[m[1]]}/v{__version__}/{m[3]})",
            readme.read_text("utf-8"),
        ),
        "utf-8",
    )
    names = {
        "Repository": "",
        "Issues": "/issues",
        "Changelog": f"/blob/v{__version__}/CHANGELOG.md",
    }
    lines = [f'{name} = "{address}{path}"' for name, path in names.items()]
    text = project.read_text("utf-8") + "\n[project.urls]\n" + "\n".join(lines) + "\n"
    project.write_text(text, "utf-8")


def _backend(step: str, tree: Path, folder: Path) -> Path:
    """What the build backend of pyproject.toml makes of `tree`."""
    command = [sys.executable, "-c", BACKEND, step, str(folder)]
    done = subprocess.run(command, cwd=tree, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {step} failed:\n{done.stderr}")
    return folder / done.stdout.splitlines()[-1]


def _compiled(levels: Sequence[Level], scratch: Path) -> dict[str, Path]:
    environment = os.environ  # noqa: TID251 - no part of the program
    # Compiler and linker of macOS read it.
    environment.setdefault("MACOSX_DEPLOYMENT_TARGET", MAC_VERSION)
    command = shlex.split(environment.get("CXX", "c++"))
    found: dict[str, Path] = {}
    for level in levels:
        folder = scratch / level.name
        folder.mkdir()
        output = folder / library_name(level)
        print(f"compiling for {level.name}", file=sys.stderr)
        try:
            compile_library(command, output, level.flags, _link_flags(folder))
        except CompileError as error:
            raise SystemExit(f"error: {error}") from None
        found[output.name] = output
    return found


def _link_flags(folder: Path) -> list[str]:
    if sys.platform == "darwin":
        return ["-Wl,-exported_symbol,_outrider_*"]
    (folder / "exported.map").write_text(EXPORTED)
    options = ["-s", "--gc-sections", f"--version-script={folder / 'exported.map'}"]
    return ["-static-libstdc++", *(f"-Wl,{option}" for option in options)]


def _platform_tag(machine: str, libraries: Mapping[str, Path]) -> str:
    if sys.platform == "darwin":
        return f"macosx_{MAC_VERSION.replace('.', '_')}_{machine}"
    told = [_elf(path) for path in libraries.values()]
    needed = {name for text in told for name in re.findall(r"\(NEEDED\).*\[(.+)\]", text)}
    if foreign := {name for name in needed if not SYSTEM.fullmatch(name)}:
        raise SystemExit(f"error: the libraries need {', '.join(sorted(foreign))}")
    versions = {(int(m), int(n)) for t in told for m, n in re.findall(r"GLIBC_(\d+)\.(\d+)", t)}
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_{'aarch64' if machine == 'arm64' else machine}"


def _elf(path: Path) -> str:
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _with_libraries(pure: Path, tag: str, libraries: Mapping[str, Path]) -> Path:
    """The pure wheel with `libraries`, tagged for their platform."""
    path = pure.with_name(pure.name.replace("-py3-none-any", f"-py3-none-{tag}"))
    with zipfile.ZipFile(pure) as wheel:
        content = {name: wheel.read(name) for name in wheel.namelist() if name[-1] != "/"}
    content |= {f"{LIBRARIES}/{name}": one.read_bytes() for name, one in libraries.items()}
    (info,) = {name.partition("/")[0] for name in content if ".dist-info/" in name}
    about = content[f"{info}/WHEEL"].decode()
    about = about.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    content[f"{info}/WHEEL"] = about.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}").encode()
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    # What a reader of the archive looks for first comes last, as the specification advises.
    names = sorted(content, key=lambda name: (name.startswith(info), name))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name in names:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content[name])
    return path


def _record(content: Mapping[str, bytes], itself: str) -> bytes:
    text = io.StringIO()
    rows: Iterable[tuple[str, str, object]] = (
        (name, f"sha256={_digest(data)}", len(data))
        for name, data in content.items()
        if name != itself
    )
    csv.writer(text, lineterminator="\n").writerows([*rows, (itself, "", "")])
    return text.getvalue().encode()


def _digest(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


if __name__ == "__main__":
    sys.exit(main())
