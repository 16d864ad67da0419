"""Only regular files of bounded size are read, and all of them in one place."""

from __future__ import annotations

import ast
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

import outrider
import outrider.pairs as pairs
from outrider.api.loading import read_corpus
from outrider.api.tokenizer import Tokenizer
from outrider.bench.published import questions_of
from outrider.bench.requests import replay
from outrider.bench.workload import PromptDataset
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
from outrider.models.hf_config import read_config
from outrider.models.weights import Weights
from outrider.planner.devices import device_sheet
from outrider.train.data import find_files, read_documents

SOURCE = Path(outrider.__file__).parent
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
    "model.safetensors": lambda path: Weights(path.parent),
    "model.safetensors.index.json": lambda path: Weights(path.parent),
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


# Who reads without `core/files.py`, and why.
EXCEPTIONS = {
    ("api/rounds.py", "read_text"): "a script and a style of this package",
    ("bench/reference.py", "read_text"): "figures of this package",
    ("bench/studies/sweep_recipes.py", "read_text"): "figures of this package",
    ("bench/workload.py", "read_text"): "prompts of this package",
    ("cli/simulate_setup.py", "read_text"): "sizes of this package",
    ("kernels/native/build.py", "read_bytes"): "what it compiled",
    ("kernels/native/levels.py", "read_bytes"): "sources of this package",
    ("kernels/native/levels.py", "read_text"): "the RECORD of this package",
    ("models/parallel/meeting.py", "open"): "memory that it made",
    ("models/weight_files.py", "safe_open"): "behind check_header",
    ("pairs/catalog.py", "read_text"): "names of this package",
    ("planner/devices.py", "read_text"): "sheets of this package",
    ("server/numerics.py", "open"): "4 MiB at most of files that loading has read",
    ("server/web.py", "read_bytes"): "pages of this package",
    ("train/checkpoint.py", "safe_open"): "behind check_header",
    ("train/losses.py", "memmap"): "made by this run",
    ("train/data.py", "read_text"): "what a package says it has",
    ("train/tokens.py", "memmap"): "made by this run",
    ("train/session.py", "memmap"): "made by this run",
}
READERS = {
    *("read_text", "read_bytes", "safe_open", "load_file", "from_file"),
    *("memmap", "fromfile", "loadtxt", "genfromtxt"),
}
LIBRARIES = {"os", "io", "codecs", "gzip", "lzma", "bz2", "zipfile", "tarfile"}


def _readers(path: Path) -> list[str]:
    """Of every call in a file that may read another, its name."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in {"open", *READERS}:
            if ast.unparse(node.func) in ("read_text", "read_bytes"):
                continue  # ours
            found.append(called.id)
        elif isinstance(called, ast.Attribute) and called.attr in READERS:
            found.append(called.attr)
        elif isinstance(called, ast.Attribute) and called.attr in ("open", "fdopen"):
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            modes = [word for word in words if isinstance(word, str)]
            owner = ast.unparse(called.value)
            in_library = owner in LIBRARIES and "devnull" not in ast.unparse(node)
            if any("r" in mode for mode in modes) or (in_library and not modes):
                found.append("open")
    return found


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


def test_nobody_else_reads_files() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "core" / "files.py"
        for name in _readers(path)
    }
    assert found - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - found == set(), "an exception that nobody needs"


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
