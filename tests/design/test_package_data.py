"""Every file that is not Python is named as package data, so a wheel has what a checkout has; and
all of them together stay small enough to install without thinking of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGES = ("outrider", "outrider_lab")
_MOST_BYTES = 45_000_000


def _data() -> set[Path]:
    return {
        path
        for name in PACKAGES
        for path in (SOURCE / name).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }


def test_every_data_file_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]
    named = {
        path
        for name in PACKAGES
        for pattern in patterns[name]
        for path in (SOURCE / name).glob(pattern)
        if path.is_file()
    }
    assert _data() == named


def test_data_stay_below_45_megabytes() -> None:
    assert sum(path.stat().st_size for path in _data()) < _MOST_BYTES
