"""Only regular files of bounded size are read, and all of them in one place."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import tracemalloc
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType

import pytest

import outrider.pairs as pairs
from outrider.api.loading import read_corpus
from outrider.api.tokenizer import Tokenizer
from outrider.core import settings
from outrider.core.errors import CheckpointError, OutriderError
from outrider.core.files import (
    MAX_JSON_VALUES,
    FileKind,
    anonymous_file,
    open_regular,
    parse_json,
    read_bytes,
    read_private,
    read_text,
)
from outrider.models.families import read_config
from outrider.models.weights import Weights
from outrider_lab.bench.published import questions_of
from outrider_lab.bench.requests import replay
from outrider_lab.bench.workload import PromptDataset
from outrider_lab.planner.roofline import device_sheet
from outrider_lab.train.data import find_files, read_documents

TARGET = Path(pairs.__path__[0]) / "tiny" / "target"


@pytest.fixture(autouse=True)
def deadline() -> Generator[None]:
    """What waits for a pipe is interrupted, and fails."""

    def stop(_number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != __file__:
            frame = frame.f_back
        if frame is not None:
            raise TimeoutError("it waits")
        # What runs the tests is slow itself, and must not end.
        signal.alarm(1)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has a hundred characters at most
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)


STRANGE: dict[str, Callable[[Path], None]] = {
    "a pipe": make_pipe,
    "a device": make_device,
    "a socket": make_socket,
    "a directory": Path.mkdir,
}
READ: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: read_config(path.parent),
    "generation_config.json": lambda path: read_config(path.parent),
    "tokenizer.json": lambda path: Tokenizer.load(path.parent),
    "tokenizer_config.json": lambda path: Tokenizer.load(path.parent),
    "chat_template.jinja": lambda path: Tokenizer.load(path.parent),
    "model.safetensors": lambda path: Weights.at(path.parent),
    "model.safetensors.index.json": lambda path: Weights.at(path.parent),
}
NAMED: dict[str, Callable[[Path], object]] = {
    "settings.toml": settings.file,
    "settings.yaml": settings.file,
    "sheet.json": lambda path: device_sheet(str(path)),
    "questions.jsonl": questions_of,
    "prompts.json": PromptDataset.load,
    "trace.jsonl": replay,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", READ)
def test_a_file_of_a_model_is_a_regular_one(name: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / name
    path.unlink(missing_ok=True)
    STRANGE[kind](path)
    with pytest.raises(CheckpointError) as caught:
        READ[name](path)
    assert kind in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", NAMED)
def test_a_file_that_a_user_names_is_a_regular_one(name: str, kind: str, tmp_path: Path) -> None:
    STRANGE[kind](tmp_path / name)
    with pytest.raises(OutriderError) as caught:
        NAMED[name](tmp_path / name)
    assert kind in str(caught.value)


@pytest.mark.parametrize("name", [*READ, *NAMED])
def test_a_file_beyond_its_bound_is_not_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / name
    path.unlink(missing_ok=True)
    if name.endswith(".safetensors"):
        path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    else:
        make_large(path)
    with pytest.raises(OutriderError, match="more than the"):
        (READ | NAMED)[name](path)


def test_strange_files_of_a_corpus_are_left_out(tmp_path: Path) -> None:
    make_pipe(tmp_path / "pipe.txt")
    make_device(tmp_path / "device.txt")
    (tmp_path / "text.txt").write_text("one two")
    assert read_corpus(str(tmp_path), lambda text: [len(text)], num_tokens=9) == ((7,),)
    found = [one for file in find_files([str(tmp_path)]) for one in read_documents(file)]
    assert [one.text for one in found] == ["one two"]


def test_a_file_that_says_it_is_empty_is_read_whole() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("only Linux has files of the system")
    assert path.stat().st_size == 0
    assert read_bytes(path, FileKind.SYSTEM).startswith(b"Name:")


def test_a_text_is_read_as_python_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for data in (b"", b"a", b"a\r\nb\rc\n\r\n", "naïve".encode() * 100_000):
        path.write_bytes(data)
        assert read_bytes(path, FileKind.TEMPLATE) == data
        assert read_text(path, FileKind.TEMPLATE) == path.read_text("utf-8")


def test_files_are_closed(tmp_path: Path) -> None:
    for kind, make in STRANGE.items():
        make(tmp_path / kind)
        before = sum(1 for _ in Path("/dev/fd").iterdir())
        with pytest.raises(OSError, match=kind):
            open_regular(tmp_path / kind)
        assert sum(1 for _ in Path("/dev/fd").iterdir()) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "nests too deep"),
        ("[" + "0," * MAX_JSON_VALUES + "0]", "values"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        ("1" * 10_000, "integer"),
        ("{", "property name"),
    ],
)
def test_hostile_json_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_file_that_cannot_grow_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    file = anonymous_file("test", 9)
    assert os.fstat(file).st_size == 9
    os.close(file)
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "truncate", refuse)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="no space"):
        anonymous_file("test", 9)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_private_file_takes_the_memory_of_its_bytes(tmp_path: Path) -> None:
    """Not that of the most that it may have, which little address space has no room for."""
    path = tmp_path / "library"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_private(path, 1 << 26) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
