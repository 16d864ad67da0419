from __future__ import annotations

from pathlib import Path

import pytest

from outrider.core.errors import CheckpointError
from outrider.core.files import FileKind
from outrider.models.json_object import JsonObject


def read(folder: Path, text: str) -> JsonObject:
    path = folder / "config.json"
    path.write_text(text)
    return JsonObject.read(path)


def test_values_come_back_typed(tmp_path: Path) -> None:
    raw = read(tmp_path, '{"i": 3, "n": 2, "f": true, "t": "x", "c": {"k": 1}, "l": [1, 2]}')
    assert raw.integer("i") == 3
    assert raw.number("n") == 2.0
    assert raw.flag("f", default=False)
    assert raw.text("t") == "x"
    assert raw.integers("l") == (1, 2)
    assert raw.integers("i") == (3,)
    assert raw.numbers("l") == (1.0, 2.0)
    assert raw.texts("none") == ()
    child = raw.child("c")
    assert child is not None
    assert child.integer("k") == 1


def test_a_count_may_be_allowed_to_be_nothing(tmp_path: Path) -> None:
    raw = read(tmp_path, '{"zero": 0, "less": -1}')
    assert raw.integer("zero", least=0) == 0
    with pytest.raises(CheckpointError, match="less must be from 0"):
        raw.integer("less", least=0)


def test_lists_of_strings_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, '{"kinds": ["a", "b"]}').texts("kinds") == ("a", "b")


def test_null_counts_as_absent(tmp_path: Path) -> None:
    raw = read(tmp_path, '{"i": null, "c": null}')
    assert raw.integer("i", 5) == 5
    assert raw.child("c") is None
    assert raw.integers("i") == ()
    assert not raw.has("i")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object, not a list"),
        ("null", "not None"),
        ("\x80", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' * 100_000, "not valid JSON"),
    ],
)
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        JsonObject.read(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.json: No such file"):
        JsonObject.read(tmp_path / "none.json")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(FileKind.CONFIG.max_bytes + 1)
    with pytest.raises(CheckpointError, match="more than the 4 MiB that a model's configuration"):
        JsonObject.read(path)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("text", "must be an integer, got 'x'"),
        ("flag", "must be an integer, got True"),
        ("real", "must be an integer, got 1.5"),
        ("zero", "must be from 1 to 2147483647, got 0"),
        ("huge", "must be from 1 to 2147483647, got 2147483648"),
        ("none", "the key none is missing"),
    ],
)
def test_a_bad_integer_is_named(tmp_path: Path, key: str, said: str) -> None:
    raw = read(tmp_path, '{"text": "x", "flag": true, "real": 1.5, "zero": 0, "huge": 2147483648}')
    with pytest.raises(CheckpointError) as caught:
        raw.integer(key)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-1.0", "0", '"x"', "false", "1e999", "9" * 400]
)
def test_a_number_is_finite_and_positive(tmp_path: Path, value: str) -> None:
    raw = read(tmp_path, f'{{"n": {value}}}')
    with pytest.raises(CheckpointError, match=": n must be"):
        raw.number("n")


def test_other_types_are_checked(tmp_path: Path) -> None:
    raw = read(tmp_path, '{"n": 1, "s": "x", "l": [1, "a"], "b": [true]}')
    for call in (
        lambda: raw.child("n"),
        lambda: raw.flag("n", default=True),
        lambda: raw.text("n"),
        lambda: raw.integers("s"),
        lambda: raw.integers("l"),
        lambda: raw.integers("b"),
        lambda: raw.numbers("l"),
        lambda: raw.numbers("n"),
        lambda: raw.texts("l"),
        lambda: raw.texts("s"),
    ):
        with pytest.raises(CheckpointError, match="must be"):
            call()
