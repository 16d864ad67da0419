"""What peers were measured at is on disk at once, and a stopped run goes on from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import ConfigError
from outrider_lab.bench.peers.contestants import Contestant
from outrider_lab.bench.peers.match import FILE_NAME, Journal, Run

TERMS = {"machine": {"cpu": "one"}, "versions": {"outrider": "1", "llama.cpp": "b1"}}
PLAIN = Contestant("outrider", "none", "f32"), 0.0
THEIRS = Contestant("llama.cpp", "none", "f32", 0, {"gguf": "f32"}), 0.8
SERVED = Contestant("vllm", "model", "f32", 0, {}, "http://there"), 0.0


def some_run(turn: int) -> Run:
    return Run(
        ids=(1, turn),
        seconds=0.5,
        drafted=2,
        arrivals=(0.25, 0.5),
        usage=turn or None,
        cpu=(0.5, 0.0, 0.125, 1.0),
    )


def some_runs(folder: Path) -> Journal:
    journal = Journal.open(folder)
    journal.begin(TERMS, {"plan": {}})
    journal.keep_trials({"a": 0.5, "b": 0.25}, 0.0)
    for turn in range(2):
        for entry in (PLAIN, THEIRS, SERVED):
            journal.keep_run(entry, (1, turn), some_run(turn))
    return journal


def test_everything_comes_back(tmp_path: Path) -> None:
    some_runs(tmp_path / "out")
    found = Journal.open(tmp_path / "out").found
    assert found.trials == {"a": {"0.0": 0.5}, "b": {"0.0": 0.25}}
    assert list(found.runs) == [PLAIN, THEIRS, SERVED]
    assert found.runs[SERVED] == {(1, turn): some_run(turn) for turn in range(2)}


@cache
def whole_file() -> bytes:
    with TemporaryDirectory() as name:
        some_runs(Path(name) / "out")
        return (Path(name) / "out" / FILE_NAME).read_bytes()


@settings(max_examples=40)
@given(cut=st.integers(min_value=0, max_value=3000))
def test_a_file_that_was_cut_off_anywhere_is_a_run_that_goes_on(cut: int) -> None:
    data = whole_file()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / FILE_NAME).write_bytes(data[:cut])
        journal = Journal.open(folder)
        journal.begin(TERMS, {"plan": {}})
        again = Journal.open(folder)
    whole = data[:cut].count(b"\n")
    assert len(again.sessions) == 1 + (whole > 0)
    # The session, the trials, and then a line a run.
    assert sum(map(len, again.found.runs.values())) == max(whole - 2, 0)
    assert bool(again.found.trials) == (whole > 1)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({**TERMS, "machine": {"cpu": "two"}}, "results with machine"),
        ({**TERMS, "versions": {"llama.cpp": "b2"}}, "llama.cpp of version 'b1', not 'b2'"),
    ],
)
def test_other_circumstances_are_not_mixed(
    tmp_path: Path, terms: dict[str, object], said: str
) -> None:
    some_runs(tmp_path / "out")
    before = (tmp_path / "out" / FILE_NAME).read_bytes()
    with pytest.raises(ConfigError, match=said) as caught:
        Journal.open(tmp_path / "out").begin(terms, {})
    assert "--output-dir" in str(caught.value.hint)
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == before


def test_a_later_session_may_ask_further_peers(tmp_path: Path) -> None:
    some_runs(tmp_path / "out")
    journal = Journal.open(tmp_path / "out")
    journal.begin({**TERMS, "versions": {"outrider": "1", "openvino": "3"}}, {})
    assert len(Journal.open(tmp_path / "out").sessions) == 2
