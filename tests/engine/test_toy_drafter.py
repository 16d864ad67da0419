"""Adding a drafter takes one file and one line: the toy is added so, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# What a line of the table does, before anything else reads it.
LINE = """
from outrider.core import drafter_kinds as table
table.KINDS = {
    **table.KINDS,
    "toy": table.DrafterKind(name="toy", builder="doubles.toy_drafter:build"),
}
"""
TEXTS = """
from outrider import LLM, EngineConfig, SamplingParams
prompts = ["def add(a, b):", "aaaa aaaa aaaa", "import os\\n\\n\\n"]
params = SamplingParams(max_tokens=24, temperature=0)

def written(**settings):
    llm = LLM(config=EngineConfig(dtype="float32", threads=1, profile=True, **settings))
    assert llm.drafter == settings["drafter"]
    return llm, llm.generate(prompts, params)

_, plain = written(drafter="none")
for schedule in ("single", "pdv"):
    llm, toy = written(drafter="toy", schedule=schedule, tree_nodes=9)
    assert [one.token_ids for one in toy] == [one.token_ids for one in plain]
    assert sum(one.stats.num_drafted for one in toy) > 0
    assert "tree_nodes has no effect on drafter toy, which drafts chains" in llm.notes
"""
REFUSED = """
from outrider import EngineConfig
from outrider.core.errors import ConfigError
assert EngineConfig(drafter="toy").drafter == "toy"
try:
    EngineConfig(drafter="to")
except ConfigError as error:
    assert "toy" in str(error) + error.hint
else:
    raise SystemExit("not refused")
"""


def run(script: str) -> None:
    path = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", path + LINE + script],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
@pytest.mark.weights
def test_the_toy_writes_what_plain_decoding_writes() -> None:
    run(TEXTS)


def test_the_toy_is_a_choice() -> None:
    run(REFUSED)
