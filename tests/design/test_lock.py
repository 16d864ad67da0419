"""The locks have by hash all that pyproject.toml asks for, and so has the bill of materials.

Both are written by scripts/lock.py. scripts/setup installs the part before DEVELOPMENT for use, and
all of it for work.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "requirements.lock").read_text("utf-8")
DEVELOPMENT = "# For development\n"
EXTRAS = (ROOT / "requirements-extras.lock").read_text("utf-8")
USE, WORK = TEXT.split(DEVELOPMENT)
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ENTRY = re.compile(r"([a-z0-9-]+)==(\S+?)(?: ; (.+?))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)")
TORCH = re.findall(r"^# torch==(\S+)$", TEXT, re.MULTILINE)
# PyTorch and what its builds for GPUs bring, which come from other places than the package index.
APART = re.compile(r"torch|nvidia-.*|cuda-.*")


@cache
def entries(text: str) -> dict[str, list[tuple[str, Marker | None]]]:
    """Of each package its versions, and where each counts."""
    found: dict[str, list[tuple[str, Marker | None]]] = {}
    for name, version, marker, _ in ENTRY.findall(text):
        found.setdefault(name, []).append((version, Marker(marker) if marker else None))
    return found


def asked(requirements: list[str]) -> Iterator[Requirement]:
    for text in requirements:
        wanted = Requirement(text)
        if wanted.name == PROJECT["name"]:
            for extra in sorted(wanted.extras):
                yield from asked(PROJECT["optional-dependencies"][extra])
        elif wanted.name != "torch":
            yield wanted


@pytest.mark.parametrize("text", [TEXT, EXTRAS], ids=["work", "extras"])
def test_every_line_is_a_pinned_package_with_hashes_or_a_note(text: str) -> None:
    rest = ENTRY.sub("", text)
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []
    # Nothing of where it was made: an address, an option, a path.
    assert re.findall(r"://|--(?!hash=)|[ \n]/", text) == []


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("system", "machine"),
    [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")],
)
def test_it_has_one_fitting_version_of_all_that_is_asked_for(
    python: str, system: str, machine: str
) -> None:
    place = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": system,
        "platform_machine": machine,
    }
    wishes = [
        (asked(PROJECT["dependencies"]), entries(USE)),
        (asked(PROJECT["optional-dependencies"]["dev"]), entries(TEXT)),
        *(
            (asked(one), entries(TEXT + EXTRAS))
            for one in PROJECT["optional-dependencies"].values()
        ),
    ]
    for wanted, locked in wishes:
        for one in wanted:
            if one.marker is not None and not one.marker.evaluate(place):
                continue
            there = {
                version
                for version, marker in locked.get(canonicalize_name(one.name), [])
                if marker is None or marker.evaluate(place)
            }
            assert len(there) == 1, f"{one}: {there}; python scripts/lock.py"
            assert one.specifier.contains(there.pop()), f"{one}: python scripts/lock.py"


def test_pytorch_is_pinned_by_version_and_comes_by_itself() -> None:
    (version,) = TORCH
    (torch,) = (Requirement(d) for d in PROJECT["dependencies"] if d.startswith("torch"))
    assert torch.specifier.contains(version)
    assert [name for name in entries(TEXT) if APART.fullmatch(name)] == []


def test_extras_repeat_nothing() -> None:
    """Both locks are installed together."""
    assert entries(EXTRAS).keys() & entries(TEXT).keys() == set()
    assert {"ray", "pyarrow", "opentelemetry-exporter-otlp-proto-http"} <= entries(EXTRAS).keys()


@pytest.mark.parametrize("part", [USE, TEXT, TEXT + EXTRAS], ids=["use", "work", "extras"])
def test_it_has_what_its_packages_need_here(part: str) -> None:
    """It is installed as it is, without looking for dependencies."""
    locked = entries(part)
    for name in locked:
        try:
            needed = [Requirement(text) for text in distribution(name).requires or []]
        except PackageNotFoundError:
            continue
        for one in needed:
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                assert canonicalize_name(one.name) in locked, f"{name} needs {one}"


def test_files_of_every_platform_of_pytorch_have_their_hash() -> None:
    found: dict[str, int] = {}
    for name, _, _, hashes in ENTRY.findall(TEXT):
        found[name] = found.get(name, 0) + hashes.count("sha256")
    # The source, and wheels of Linux on two processors, of macOS and of Windows, each for three
    # Pythons or one for all.
    by_python, for_all = ("numpy", "pyyaml", "markupsafe"), ("tokenizers", "safetensors", "ruff")
    assert {name: found[name] for name in by_python if found[name] < 13} == {}
    assert {name: found[name] for name in for_all if found[name] < 5} == {}
    assert min(found.values()) >= 1


def test_the_bill_of_materials_names_each_with_its_licence() -> None:
    bill: dict[str, Any] = json.loads((ROOT / "bill-of-materials.json").read_text("utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    told = {(one["name"], one["version"]): one for one in bill["components"]}
    locked = {(name, version) for name, pins in entries(TEXT).items() for version, _ in pins}
    assert told.keys() == {*locked, ("torch", TORCH[0])}
    used = {(name, version) for name, pins in entries(USE).items() for version, _ in pins}
    assert {key for key, one in told.items() if one["scope"] == "required"} == {
        *used,
        ("torch", TORCH[0]),
    }
    for one in told.values():
        (licence,) = one["licenses"]
        assert licence.get("expression") or licence["license"]["name"]
