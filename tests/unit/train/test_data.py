"""Which texts are read, what is taken of JSON lines, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider_lab.train.data import (
    FileRecord,
    digest_of,
    find_files,
    python_sources,
    read_documents,
    record_of,
)


def texts(path: Path, field: str = "") -> list[str]:
    (file,) = find_files([str(path)])
    return [document.text for document in read_documents(file, field)]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "one"}, "one"),
        ({"content": "two"}, "two"),
        ({"prompt": "def f():", "completion": " pass"}, "def f(): pass"),
        ({"prompt": "alone"}, "alone"),
        (
            {"question": "3 and 4?", "answer": "It is <<3+4=7>>7.\n#### 7"},
            "Question: 3 and 4?\nAnswer: It is 7.\nThe answer is 7",
        ),
        ("a text", "a text"),
    ],
)
def test_usual_json_lines_are_understood(row: object, text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n\n", encoding="utf-8")
    assert texts(path) == [text]


def test_a_named_key_holds_the_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "no", "body": "yes"}\n', encoding="utf-8")
    assert texts(path, "body") == ["yes"]


@pytest.mark.parametrize("line", ['{"a": 1}', "{", "3", '{"text": 5}'])
def test_a_line_without_text_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        texts(path)


def test_a_folder_gives_what_looks_like_text_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.py", "sub/b.md", "picture.png"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\xff")
    found = find_files([str(tmp_path), str(tmp_path / "a.py")])
    assert [file.path.name for file in found] == ["a.py", "broken.txt", "b.md"]
    assert [len(list(read_documents(file))) for file in found] == [1, 0, 1]


def test_mistakes_say_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty").mkdir()
    for words in ([], ["nowhere"], [str(tmp_path / "empty")]):
        with pytest.raises(ConfigError) as caught:
            find_files(words)
        assert caught.value.hint
    with pytest.raises(ConfigError, match="broken"):
        texts(tmp_path / "broken.txt")


def test_a_digest_is_of_contents_not_of_places(tmp_path: Path) -> None:
    records: list[list[FileRecord]] = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        for name in ("1.txt", "2.txt") if folder == "x" else ("2.txt", "1.txt"):
            (tmp_path / folder / name).write_text(name, encoding="utf-8")
        files = find_files([str(tmp_path / folder)])
        records.append([record_of(file) for file in files])
    assert (
        digest_of(records[0], 1) == digest_of(reversed(records[1]), 1) != digest_of(records[0], 2)
    )


@pytest.mark.slow
def test_the_machines_own_source_comes_with_licences() -> None:
    found = python_sources()
    assert len(found) > 100
    assert all(source.licence for source in found)
    assert any("CPython" in source.licence for source in found)
    assert not any("tests" in source.path.parts for source in found)
