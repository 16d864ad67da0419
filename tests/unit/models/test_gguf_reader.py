"""GGUF headers: what is read, and that wrong files are told in words and take no memory."""

from __future__ import annotations

import errno
import mmap
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.gguf_writer import TOKENS, Gguf, Stored, small_llama, text, typed
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CapacityError, CheckpointError, OutriderError
from outrider.models.families import read_config
from outrider.models.gguf.reader import Texts, header_of, is_gguf, read_header
from outrider.models.loading import resolve
from outrider.models.weights import Weights, stored_in

# Of memory that a header may take, for a file of a few kilobytes.
FEW_BYTES = 1 << 22


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        header_of(path)
    assert caught.value.hint
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_all_types_are_read(tmp_path: Path, version: int) -> None:
    numbers = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -5, "u32": 2**32 - 1, "i32": -7, "f32": 0.5,
        "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1,
    }  # fmt: skip
    metadata: dict[str, Any] = {name: (name, number) for name, number in numbers.items()}
    metadata |= {"yes": True, "text": "grüß", "empty": "", "ints": [1, -2], "floats": [0.5]}
    metadata |= {"texts": ["a", "", "x" * 300, "é"], "nested": [["a"], ["b", "c"]]}
    found = read_header(Gguf(metadata, version=version).write(tmp_path / "a.gguf")).metadata
    assert {name: found[name] for name in numbers} == numbers
    assert found["yes"] is True
    assert (found["text"], found["empty"]) == ("grüß", "")
    assert np.array_equal(np.asarray(found["ints"]), [1, -2])
    texts, nested = found["texts"], found["nested"]
    assert isinstance(texts, Texts)
    assert texts.read() == ["a", "", "x" * 300, "é"]
    assert isinstance(nested, list)
    assert [part.read() for part in nested if isinstance(part, Texts)] == [["a"], ["b", "c"]]


def test_texts_longer_than_what_is_looked_through_at_once(tmp_path: Path) -> None:
    wanted = ["x" * (5 << 20), "y", "z" * (4 << 20), "w"]
    texts = read_header(Gguf({"texts": wanted}).write(tmp_path / "a.gguf")).metadata["texts"]
    assert isinstance(texts, Texts)
    assert texts.read() == wanted


def test_tensors_are_where_the_table_says(tmp_path: Path) -> None:
    file = Gguf({"general.alignment": 64}, alignment=64)
    file.add("first", np.arange(6.0).reshape(2, 3))
    file.add("second", np.arange(4.0), "F16")
    path = file.write(tmp_path / "a.gguf")
    entries = read_header(path).entries
    assert entries["first"].shape == (2, 3)
    for entry in entries.values():
        assert entry.offset % 64 == 0
        raw = path.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
        assert raw == file.tensors[entry.name].raw


def _changed(**changes: Any) -> Gguf:
    file = small_llama()
    for name, value in changes.items():
        setattr(file, name, value)
    return file


def _with(name: str, tensor: Stored) -> Gguf:
    file = small_llama()
    file.tensors[name] = tensor
    return file


ONE_KEY = struct.pack("<IQQ", 3, 0, 1)
_ONE = b"\0" * 128
WRONG: dict[str, tuple[Gguf | bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "other magic": (_changed(magic=b"GGML"), "no GGUF file"),
    "version 1": (_changed(version=1), "version 1"),
    "version 9": (_changed(version=9), "version 9"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
    "tensors without end": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), "claims"),
    "keys without end": (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**63), "claims"),
    "a key without end": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"a" * 99, "bytes"),
    "a text without end": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IQ", 8, 2**63) + _ONE,
        "cut off",
    ),
    "a list without end": (
        b"GGUF" + ONE_KEY + text("a") + struct.pack("<IIQ", 9, 4, 2**61) + _ONE,
        "cut off",
    ),
    "texts without end": (
        b"GGUF" + ONE_KEY + text("a") + struct.pack("<IIQ", 9, 8, 2**40) + _ONE,
        "claims",
    ),
    "a long text in a list": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text("a")
        + struct.pack("<IIQQ", 9, 8, 2, 2**63 - 9)
        + _ONE,
        "cut off",
    ),
    "lists in lists": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text("a")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 9
        + _ONE,
        "nests lists",
    ),
    "many lists in lists": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text("a")
        + struct.pack("<IIQ", 9, 9, 5000)
        + (struct.pack("<IQ", 9, 3) + struct.pack("<IQ", 4, 0) * 3) * 5000,
        "lists in a",
    ),
    "a type of values": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77) + _ONE,
        "unknown type 77",
    ),
    "no truth": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IB", 7, 2) + _ONE,
        "neither true nor false",
    ),
    "a key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + typed(1)) + _ONE,
        "'a' is there twice",
    ),
    "a tensor twice": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 2, 0)
        + 2 * (text("t") + struct.pack("<IQIQ", 1, 4, 0, 0))
        + _ONE,
        "'t' is there twice",
    ),
    "no UTF-8": (Gguf({"a": b"\xff\xfe"}), "not UTF-8"),
    "no power of two": (Gguf({"general.alignment": 24}), "no power of two"),
    "alignment of none": (Gguf({"general.alignment": 0}), "no power of two"),
    "alignment of a text": (Gguf({"general.alignment": "x"}), "no power of two"),
    "sizes that overflow": (
        _with("big", Stored((2**32, 2**32), "F32", _ONE)),
        "more than the file can hold",
    ),
    "no size": (_with("none", Stored((0, 32), "F32", _ONE)), "more than the file can hold"),
    "no dimensions": (_with("flat", Stored((), "F32", _ONE)), "0 dimensions"),
    "nine dimensions": (_with("deep", Stored((1,) * 9, "F32", _ONE)), "9 dimensions"),
    "no whole blocks": (_with("odd", Stored((2, 48), "Q4_1", _ONE)), "no whole number of Q4_1s"),
    "a known type that is not read": (_with("odd", Stored((32,), 9, _ONE)), "Q8_1"),
    "an unknown type": (_with("odd", Stored((32,), 999, _ONE)), "number 999"),
    "beyond the file": (_with("far", Stored((32,), "F32", _ONE, offset=2**40)), "cut off"),
    "nearly beyond all": (_with("far", Stored((32,), "F32", _ONE, offset=2**64 - 32)), "cut off"),
    "beside the alignment": (_with("off", Stored((32,), "F32", _ONE, offset=8)), "multiple of 32"),
    "overlapping": (_with("over", Stored((32,), "F32", _ONE, offset=0)), "overlap"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_told(tmp_path: Path, name: str) -> None:
    file, said = WRONG[name]
    raw = file if isinstance(file, bytes) else file.to_bytes()
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        assert said in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()


def test_a_text_of_a_list_that_is_not_utf_8_is_told_when_it_is_read(tmp_path: Path) -> None:
    texts = header_of(Gguf({"a": [b"ok", b"\xff"]}).write(tmp_path / "a.gguf")).metadata["a"]
    assert isinstance(texts, Texts)
    with pytest.raises(CheckpointError, match="number 1, that is not UTF-8"):
        texts.read()


WHOLE = small_llama().to_bytes()


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_told(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(WHOLE[: int(len(WHOLE) * share)])
    assert "damaged or incomplete" in refusal(path) or "no GGUF file" in refusal(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.integers(0, len(small_llama().head()) + 64), min_size=1, max_size=4),
    values=st.lists(st.sampled_from([0, 1, 7, 8, 9, 32, 127, 128, 255]), min_size=4, max_size=4),
    length=st.sampled_from([1, 2, 8]),
)
def test_changed_bytes_never_break_the_reader(
    tmp_path: Path, places: list[int], values: list[int], length: int
) -> None:
    raw = bytearray(WHOLE)
    for place, value in zip(places, values, strict=False):
        raw[place : place + length] = bytes([value]) * length
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        config = read_config(path)
        stored_in(path).check_claim(config.num_parameters)
        with Weights.at(path) as weights:
            for _, tensor in weights.each():
                assert tensor.numel() <= 4 * len(raw)
        Tokenizer.load(path)
    except OutriderError:
        pass
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert taken < FEW_BYTES


def _parts(folder: Path, count: int = 3) -> list[Path]:
    whole = small_llama()
    names = list(whole.tensors)
    paths: list[Path] = []
    for number in range(count):
        split = {"split.no": ("u16", number), "split.count": ("u16", count)}
        split |= {"split.tensors.count": ("i32", len(names))}
        part = Gguf({**(whole.metadata if number == 0 else {}), **split})
        part.tensors = {name: whole.tensors[name] for name in names[number::count]}
        paths.append(part.write(folder / f"m-{number + 1:05}-of-{count:05}.gguf"))
    return paths


def test_split_files_are_one_model(tmp_path: Path) -> None:
    one = small_llama().write(tmp_path / "one.gguf")
    (tmp_path / "split").mkdir()
    parts = _parts(tmp_path / "split")
    assert resolve(str(parts[2])) == resolve(str(tmp_path / "split")) == parts[0]
    assert read_config(parts[0]) == read_config(one)
    with Weights.at(parts[0]) as split, Weights.at(one) as whole:
        wanted = dict(whole.each())
        found = dict(split.each())
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


def test_parts_may_be_links_to_files_of_other_names(tmp_path: Path) -> None:
    """The cache of the hub has each file under its hash."""
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    links: list[Path] = []
    for number, part in enumerate(_parts(tmp_path / "blobs")):
        links.append(tmp_path / "snapshot" / part.name)
        links[-1].symlink_to(part.rename(part.with_name(f"hash-{number}")))
    assert read_config(links[0]).vocab_size == len(TOKENS)
    assert Tokenizer.load(links[0]).vocab_size == len(TOKENS)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = _parts(tmp_path)
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        assert parts[1].name in refusal(path)


def test_a_part_of_another_model_is_named(tmp_path: Path) -> None:
    parts = _parts(tmp_path)
    small_llama().write(parts[1])
    assert "not part 2" in refusal(parts[0])


def test_a_renamed_part_is_told(tmp_path: Path) -> None:
    path = _parts(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    assert "one of 3 files" in refusal(path)


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = small_llama().write(tmp_path / "sha256-0123")
    assert is_gguf(path)
    assert resolve(str(path)) == path
    (tmp_path / "thesis.txt").write_text("GGUX")
    assert not is_gguf(tmp_path / "thesis.txt")
    assert not is_gguf(tmp_path / "none")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 491400032\n"
OTHERS = {
    "a pointer": (LFS, "a pointer of Git LFS", "git lfs pull"),
    "a page": (b"\n<!DOCTYPE html>\n<html lang=en>", "a web page", "/resolve/"),
    "another page": (b"\xef\xbb\xbf<HTML><head>", "a web page", "outrider pull"),
    "an error": (b'{"error":"Repository not found"}', "a server's answer", "outrider pull"),
    "a line": (b"Invalid username or password.", "a server's answer", "outrider pull"),
    "of March 2023": (b"lmgg" + bytes(40), "before GGUF", "convert_llama_ggml"),
    "of May 2023": (b"tjgg\3\0\0\0" + bytes(40), "before GGUF", "convert_llama_ggml"),
    "safetensors": (struct.pack("<Q", 40) + b'{"__metadata__":{}}', "safetensors", "config.json"),
    "a checkpoint": (b"PK\3\4" + bytes(40), "a ZIP archive", "outrider pull"),
    "zeros": (bytes(400), "begins with zeros", "download it again"),
    "noise": (b"\x93\x12\x34\x56", "begins with", "download it again"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_file_is_instead_is_told_with_what_to_do(tmp_path: Path, name: str) -> None:
    raw, said, hint = OTHERS[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    for named in (path, tmp_path):
        with pytest.raises(CheckpointError, match=said) as caught:
            read_config(resolve(str(named)))
        assert str(path) in str(caught.value)
        assert hint in str(caught.value.hint)


def test_a_folder_of_several_models_wants_one_named(tmp_path: Path) -> None:
    small_llama().write(tmp_path / "a.gguf")
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"
    small_llama().write(tmp_path / "mmproj-a.gguf")
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"
    small_llama().write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="2 models") as caught:
        resolve(str(tmp_path))
    assert "a.gguf" in str(caught.value.hint)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = small_llama().write(tmp_path / "a.gguf")
    assert read_config(path).num_layers == 1
    small_llama({"llama.context_length": 128, "general.name": "another"}).write(path)
    assert read_config(path).max_tokens == 128


def test_memory_that_ends_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_llama({}).write(tmp_path / "a.gguf")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(CapacityError, match="memory ended while mapping"):
        read_header(path)
