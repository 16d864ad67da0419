"""What an editor knows: a type checker takes every option by keyword, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

pytestmark = pytest.mark.wide

ENGINE = [item.name for item in fields(EngineConfig)]
REQUEST = [item.name for item in fields(SamplingParams)]
STRUCTURE = ["schema", "json", "regex", "choices", "grammar"]
CALLS = {
    "LLM('m', {})": ENGINE,
    "AsyncLLM('m', {})": ENGINE,
    "llm.generate('hi', {})": REQUEST + STRUCTURE,
    "llm.stream('hi', {})": REQUEST + STRUCTURE,
    "llm.submit('hi', {})": REQUEST + STRUCTURE,
    "llm.chat('hi', {})": REQUEST + STRUCTURE,
    "job = served.generate('hi', {})": REQUEST + STRUCTURE,
    "served.stream('hi', {})": REQUEST + STRUCTURE,
    "served.chat('hi', {})": REQUEST + STRUCTURE,
}
HEAD = """\
from typing import Any
from outrider import LLM, AsyncLLM
any: Any = None
llm: LLM = any
served: AsyncLLM = any
"""


def lines_with_errors(folder: Path, lines: list[str]) -> list[int]:
    """Those of `lines`, counted from 0, of which pyright complains."""
    script = folder / "script.py"
    script.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    told = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, check=False, cwd=folder
    )
    found = json.loads(told.stdout)["generalDiagnostics"]
    places = {one["range"]["start"]["line"] for one in found if one["severity"] == "error"}
    return sorted(place - HEAD.count("\n") for place in places)


def test_every_option_is_known_by_its_name_and_no_other_is(tmp_path: Path) -> None:
    known = [call.format(f"{name}=any") for call, names in CALLS.items() for name in names]
    unknown = [call.format("no_such_option=any") for call in CALLS]
    wrong = ["LLM('m', k='four')", "llm.generate('hi', max_tokens='many')"]
    found = lines_with_errors(tmp_path, [*known, *unknown, *wrong])
    assert found == list(range(len(known), len(known) + len(unknown) + len(wrong)))
