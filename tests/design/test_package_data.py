"""Every file that is not Python is named as package data, so a wheel has what a checkout has."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outrider"


def test_every_data_file_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["outrider"]
    named = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    data = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data == named
