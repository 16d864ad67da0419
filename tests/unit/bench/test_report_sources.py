"""What a report finds in folders, and what becomes of files that are cut, edited or of no use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles import report_results
from doubles.sweeps import folder_of, small_sweep
from outrider.core.errors import ConfigError
from outrider_lab.bench.report import build as build_module
from outrider_lab.bench.report.build import build, find
from outrider_lab.bench.report.page import summary


def why(path: Path) -> dict[str, str]:
    return {item.place.rpartition("/")[2]: item.why for item in find([path])[1]}


def test_what_cannot_be_read_is_skipped_by_name_and_reason(tmp_path: Path) -> None:
    small_sweep(tmp_path / "good")
    files = {
        "empty.json": "",
        "cut.json": '{"benchmark": "limits", "cel',
        "list.json": "[1]",
        "nameless.json": "{}",
        "nan.json": '{"benchmark": "limits", "bar": NaN}',
        "other.json": '{"benchmark": "<script>"}',
        "hollow.json": '{"benchmark": "limits"}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "link.json").symlink_to(tmp_path / "empty.json")
    found = build([tmp_path])
    assert [part.kind for part in found.parts] == ["K sweep"]
    reasons = {item.place.rpartition("/")[2]: item.why for item in found.skipped}
    assert reasons.keys() == {*files, "binary.json"}
    assert reasons["empty.json"] == "it is empty"
    assert reasons["cut.json"] == "not JSON"
    assert "does not say which benchmark" in reasons["nameless.json"]
    assert "no benchmark that a report knows" in reasons["other.json"]
    assert reasons["hollow.json"] == "it has no cells"


def test_a_folder_without_results_says_which_command_makes_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results in") as refusal:
        build([tmp_path])
    assert "outrider bench k" in str(refusal.value.hint)
    with pytest.raises(ConfigError, match="does not exist"):
        build([tmp_path / "nowhere"])
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a\.json: not JSON"):
        build([tmp_path])


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "MAX_BYTES", 10)
    (tmp_path / "big.json").write_text('{"benchmark": "limits"}')
    assert "are more than a results file has" in why(tmp_path)["big.json"]


def test_files_made_from_others_and_files_named_twice_count_once(tmp_path: Path) -> None:
    small_sweep(tmp_path)
    (tmp_path / "summary.json").write_text('{"schema": "outrider-bench-k/1"}')
    found, skipped = find([tmp_path, tmp_path / "samples.jsonl", tmp_path])
    assert [source.path.name for source in found] == ["samples.jsonl"]
    assert skipped == []


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_went(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path / "cut")
    with (folder.path / "samples.jsonl").open("a") as file:
        file.write('{"record": "sam')
    folder_of(tmp_path / "begun")
    found = build([tmp_path])
    (part,) = found.parts
    assert any("half a line" in warning for warning in part.warnings)
    (skipped,) = found.skipped
    assert "no sample was written yet" in skipped.why
    interrupted = {**report_results.drafters(), "complete": False}
    report_results.write(tmp_path, "drafters", interrupted)
    parts = [part for part in build([tmp_path]).parts if part.kind == "drafters"]
    assert any("interrupted" in warning for warning in parts[0].warnings)


JUNK: Sequence[Any] = (
    *(None, True, -1, 0, 1e308, "x", "<script>"),
    *([], {}, [None], {"a": 1}, [{}]),
)


def keys_of(value: Any) -> Sequence[Any]:
    """What leads further into a JSON value."""
    if isinstance(value, dict):
        return sorted(cast("dict[str, Any]", value))
    return range(len(cast("list[Any]", value))) if isinstance(value, list) else ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(name=st.sampled_from(sorted(report_results.EVERY)), data=st.data())
def test_whatever_was_edited_a_file_is_shown_or_skipped(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    record = json.loads(report_results.stored(name))
    place: Any = record
    key: Any = data.draw(st.sampled_from(sorted(record)))
    while keys_of(place[key]) and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(keys_of(place)))
    place[key] = data.draw(st.sampled_from(JUNK))
    report_results.write(tmp_path, "edited", record)
    report_results.write(tmp_path, "whole", report_results.limits())
    found = build([tmp_path])
    assert len(found.parts) + len(found.skipped) >= 2
    summary(found)
