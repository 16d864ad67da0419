"""Files of random blocks are models, whose drafts are kept at the rate that was asked for."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import LLM
from outrider.core.config import RULES
from outrider.core.plugins import RuleKind

STUDIES = Path(__file__).parents[3] / "studies"


@pytest.mark.slow
def test_random_files_are_models_whose_drafts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(STUDIES), *sys.path])
    study = import_module("synthetic")
    kind = RuleKind(name="synthetic", build=study.Chance, exact=False)
    monkeypatch.setitem(RULES._added, "synthetic", kind)  # pyright: ignore[reportPrivateUsage]
    options = SimpleNamespace(folder=tmp_path, programs="", tokens=13, turns=1, threads=1)
    drafts = study.Drafts(2, 1.0, "all are kept")
    [cell] = study.measured(study.Case("tiny-mtp", "", [drafts]), options)
    assert cell["ours_round"] == pytest.approx(3.0)
    with LLM(tmp_path / "tiny-mtp-q4_k_m.gguf", drafter="none", threads=1) as llm:
        result = llm.generate([[300, 301]], max_tokens=4, temperature=0.0, logprobs=True)[0]
    assert all(math.isfinite(one.logprob) for one in result.logprobs)
