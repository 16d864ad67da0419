"""The results folder: nothing is lost, nothing is mixed, a cut-off line is no harm."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.sweeps import SETTINGS, circumstances, folder_of, numbers, sample
from outrider.core.errors import ConfigError, MachineError
from outrider_lab.bench.studies.sweep_record import FILE_NAME, ResultsFolder
from outrider_lab.bench.studies.sweep_report import sections
from outrider_lab.bench.studies.sweep_summary import write_summary


@contextmanager
def room_for(path: Path, num_bytes: int) -> Generator[None]:
    """No file of this process may grow past so many bytes more than `path` has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def two(path: Path) -> ResultsFolder:
    return folder_of(path, sample(0, 0, numbers(0, 1.0)), sample(2, 0, numbers(2, 0.5)))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = two(tmp_path)
    failed = sample(2, 1, None, reason="CapacityError: full")
    written.add([failed])
    read = ResultsFolder.read(tmp_path)
    assert read.runs == written.runs
    assert [one.to_dict() for one in read.samples] == [one.to_dict() for one in written.samples]
    assert read.samples[-1].reason == "CapacityError: full"
    assert not read.samples[-1].ok


def test_a_cut_off_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    two(tmp_path)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(ResultsFolder.read(tmp_path).samples) == 1
    assert path.read_bytes() == whole[:-20]
    folder = ResultsFolder.open(tmp_path)
    # Whether the folder will be gone on with is not known yet.
    assert path.read_bytes() == whole[:-20]
    folder.add([sample(2, 0, numbers(2, 0.5))])
    assert path.read_bytes() == whole
    folder.add([sample(2, 1, numbers(2, 0.5))])
    assert path.read_bytes().startswith(whole)
    assert len(ResultsFolder.read(tmp_path).samples) == 3


def test_what_a_full_disk_left_of_a_line_is_written_over(tmp_path: Path) -> None:
    folder = two(tmp_path)
    path = tmp_path / FILE_NAME
    before = path.read_bytes()
    with room_for(path, 99), pytest.raises(MachineError, match="cannot be used"):
        folder.add([sample(2, 1, numbers(2, 0.5))])
    assert len(path.read_bytes()) == len(before) + 99
    assert len(folder.samples) == 2
    folder.add([sample(2, 2, numbers(2, 0.5))])
    assert [one.piece[-1] for one in ResultsFolder.read(tmp_path).samples] == ["0", "0", "2"]


def test_the_newest_sample_counts(tmp_path: Path) -> None:
    folder = two(tmp_path)
    folder.add([sample(2, 0, numbers(2, 0.7), visit=2)])
    found = folder.current()
    assert len(found) == 2
    newest = [one.numbers for one in found.values() if one.config.k == 2]
    assert [n.seconds for n in newest if n] == [0.7]
    assert folder.next_visit() == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": {"cpu": "loom"}}, "cpu 'abacus', not 'loom'"),
        ({"settings": SETTINGS | {"max_tokens": 9}}, "max_tokens 8, not 9"),
        ({"settings": SETTINGS | {"top_k": 4}}, "top_k unset, not 4"),
        ({"weights": {"target": "zz"}}, "weights of target 'aa', not 'zz'"),
        ({"prompt_sets": {"code": "zz"}}, "prompts of code 'cc', not 'zz'"),
    ],
)
def test_other_circumstances_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = two(tmp_path / "out")
    before = (folder.path / FILE_NAME).read_bytes()
    with pytest.raises(ConfigError, match=words) as caught:
        folder.check(circumstances(**changes))
    assert str(folder.path) in str(caught.value)
    assert "--output-dir" in str(caught.value.hint)
    assert (folder.path / FILE_NAME).read_bytes() == before


def test_what_may_differ(tmp_path: Path) -> None:
    folder = two(tmp_path)
    folder.check(circumstances())
    folder.check(circumstances(prompt_sets={"conversation": "new"}))
    folder.check(
        circumstances(pair="another", settings={"max_tokens": 99}, weights={"target": "z"})
    )
    folder.check(circumstances(weights={"target": "aa"}))


@pytest.mark.parametrize("field", ["version", "schema"])
def test_another_version_is_refused(tmp_path: Path, field: str) -> None:
    two(tmp_path)
    path = tmp_path / FILE_NAME
    first, rest = path.read_text().split("\n", 1)
    record: dict[str, Any] = json.loads(first) | {field: "0.0.0"}
    path.write_text(json.dumps(record) + "\n" + rest)
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    with pytest.raises(ConfigError, match=r"0\.0\.0") as caught:
        ResultsFolder.open(tmp_path)
    assert "--output-dir" in str(caught.value.hint)
    assert path.read_bytes() == torn


def changed(path: Path, number: int, place: Sequence[str], value: object) -> None:
    """Put `value` at `place` of line `number`; MISSING takes out what is there."""
    lines = (path / FILE_NAME).read_text().splitlines()
    record: dict[str, Any] = json.loads(lines[number - 1])
    inner = record
    for name in place[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    lines[number - 1] = json.dumps(record)
    (path / FILE_NAME).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("number", "place", "value", "said"),
    [
        (1, ["pair"], MISSING, "pair is missing"),
        (1, ["pair"], "../elsewhere", "pair is '../elsewhere'"),
        (1, ["run"], 2, "run is 2, not 1"),
        (1, ["settings"], "x", "settings is 'x'"),
        (1, ["settings", "temperature"], "hot", "temperature is 'hot'"),
        (1, ["settings", "sampler"], MISSING, "sampler is None"),
        (1, ["machine", "cpu"], 5, "cpu is 5"),
        (2, ["run"], 2, "no line before it is of run 2 of 'toy'"),
        (2, ["config", "model_pair_name"], "other", "no line before it is of run 1 of 'other'"),
        (2, ["config"], [], "config is "),
        (2, ["config", "k"], "2", "k is '2'"),
        (2, ["config", "drafter"], MISSING, "drafter is missing"),
        (2, ["config", "others"], 5, "others is 5"),
        (2, ["config", "others"], {"top_p": []}, "top_p is []"),
        (2, ["prompt_ids"], [1], "prompt_ids is "),
        (2, ["numbers"], None, "neither numbers nor a reason"),
        (3, ["numbers", "seconds"], "fast", "seconds is 'fast'"),
        (3, ["numbers", "seconds"], float("nan"), "not JSON"),
        (3, ["numbers", "seconds"], 10**30, "seconds is 1000"),
        (3, ["numbers", "seconds"], -1.0, "seconds is -1"),
        (3, ["numbers", "seconds"], 0, "seconds is 0"),
        (3, ["numbers", "num_tokens"], 0, "num_tokens is 0"),
        (3, ["numbers", "num_tokens"], True, "num_tokens is True"),
        (3, ["numbers", "token_ms"], [None], "token_ms is "),
        (3, ["numbers", "more"], 1, "more is unknown"),
    ],
)
def test_a_line_that_was_changed_is_refused_by_its_number(
    tmp_path: Path, number: int, place: Sequence[str], value: object, said: str
) -> None:
    two(tmp_path)
    changed(tmp_path, number, place, value)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        ResultsFolder.open(tmp_path)
    assert f"a line {number} that this version did not write" in str(caught.value)
    assert (tmp_path / FILE_NAME).read_bytes() == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(data=st.data(), value=JSON)
@settings(max_examples=150)
def test_whatever_a_field_becomes_it_is_refused_or_summed_up(
    data: st.DataObject, value: object
) -> None:
    with TemporaryDirectory() as name:
        path = Path(name)
        two(path)
        number = data.draw(st.integers(1, 3))
        record = json.loads((path / FILE_NAME).read_text().splitlines()[number - 1])
        place = [data.draw(st.sampled_from(sorted(record)))]
        if isinstance(record[place[0]], dict) and data.draw(st.booleans()):
            place.append(data.draw(st.sampled_from(sorted(record[place[0]]))))
        changed(path, number, place, value)
        try:
            folder = ResultsFolder.open(path)
        except ConfigError:
            return
        write_summary(folder)
        assert next(sections(folder)).rows
