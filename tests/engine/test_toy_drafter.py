"""Adding a drafter takes one file: the toy is added so, in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).parents[1] / "doubles" / "toy_drafter.py"
# Another folder of the package, as if the file were in the first one.
DROP = """
import sys
import outrider.drafters
outrider.drafters.__path__.append({folder!r})
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
assert not any(name.endswith(".toy") for name in sys.modules)
from outrider.core.plugins import KINDS
assert KINDS["toy"].looks_up and not KINDS["toy"].keeps_apart
assert "toy" in list(KINDS) and "torch" not in sys.modules
"""
# A module without a description of its own name.
OTHER = """
from outrider.core.plugins import KINDS
from outrider.core.errors import ContractError
try:
    KINDS["other"]
except ContractError as error:
    assert "outrider.drafters.other.KIND is no DrafterKind" in str(error), error
else:
    raise SystemExit("not refused")
"""


def run(folder: Path, script: str, name: str = "toy") -> None:
    shutil.copy(TOY, folder / f"{name}.py")
    done = subprocess.run(
        [sys.executable, "-c", DROP.format(folder=str(folder)) + script],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
@pytest.mark.weights
def test_the_toy_writes_what_plain_decoding_writes(tmp_path: Path) -> None:
    run(tmp_path, TEXTS)


def test_the_toy_is_a_choice(tmp_path: Path) -> None:
    run(tmp_path, REFUSED)


def test_a_module_describes_a_drafter_of_its_name(tmp_path: Path) -> None:
    run(tmp_path, OTHER, name="other")
