"""A corpus on disk becomes texts of tokens, within its bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.api.loading import read_corpus
from outrider.core.errors import ConfigError


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_a_file_is_one_text_and_a_folder_one_text_a_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two", encoding="utf-8")
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("three", encoding="utf-8")
    one = read_corpus(str(tmp_path / "a.txt"), encode, num_tokens=99)
    assert one == (tuple(encode("one")),)
    all_three = read_corpus(str(tmp_path), encode, num_tokens=99)
    assert all_three == tuple(tuple(encode(text)) for text in ("one", "two", "three"))


def test_no_more_is_read_than_there_is_room_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcdef", encoding="utf-8")
    (tmp_path / "b").write_text("ghijkl", encoding="utf-8")
    texts = read_corpus(str(tmp_path), encode, num_tokens=8)
    assert [len(text) for text in texts] == [6, 2]


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x00\x01")
    (tmp_path / "b").write_bytes(b"\xff\xfe broken")
    (tmp_path / "c").write_text("", encoding="utf-8")
    (tmp_path / "d").write_text("text", encoding="utf-8")
    assert read_corpus(str(tmp_path), encode, num_tokens=99) == (tuple(encode("text")),)


def test_a_character_cut_in_two_by_the_bound_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a" * 15 + "ä" * 10, encoding="utf-8")
    assert read_corpus(str(tmp_path), lambda text: [len(text)], num_tokens=1) == ((15,),)


def test_no_path_is_no_corpus_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert read_corpus("", encode, num_tokens=9) == ()
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="suffix_corpus") as caught:
            read_corpus(str(path), encode, num_tokens=9)
        assert caught.value.hint
