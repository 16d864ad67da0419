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


def test_drafts_of_both_programs_are_compared_at_the_same_acceptance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours writes 12 tokens in three rounds and six seconds, llama.cpp in six rounds and nine."""
    monkeypatch.setattr(sys, "path", [str(STUDIES), *sys.path])
    study = import_module("synthetic")
    drafts = study.Drafts(4, 0.8, "a test")
    ids = range(13)
    texts = {
        (study.OURS, study.PLAIN): [study.Text(ids, 12.0, 12)],
        (study.OURS, drafts.name): [study.Text(ids, 6.0, 3)],
        (study.THEIRS, study.PLAIN): [study.Text(ids, 24.0, 12)],
        (study.THEIRS, drafts.name): [study.Text(ids, 9.0, 6)],
    }
    cell = study.told(study.Case("tiny", "", [drafts]), drafts, texts)
    assert cell["drafts_over_llama_cpp"] == 1.5
    # A round takes 2 seconds here and 1.5 there.
    assert cell["drafts_at_rate_over_llama_cpp"] == 0.75
