"""environment.yml says what pyproject.toml says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "environment.yml").read_text(encoding="utf-8")


def test_the_conda_environment_has_the_versions_of_the_package() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: list[Any] = yaml.safe_load(TEXT)["dependencies"]
    python = next(item for item in wanted if str(item).startswith("python="))
    lowest = project["requires-python"].split(",")[0].removeprefix(">=")
    assert python == f"python={lowest}"
    from_pip: list[str] = wanted[-1]["pip"]
    torch = next(item for item in project["dependencies"] if item.startswith("torch"))
    assert from_pip == [torch, "-e .[dev]"]


def test_it_says_how_to_check_the_gpu_and_how_to_log_in() -> None:
    assert "torch.cuda.is_available()" in TEXT
    assert "hf auth login" in TEXT
