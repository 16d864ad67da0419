"""A folder and a GGUF file answer the same questions; the format is found once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from doubles.gguf_writer import small_llama
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError
from outrider.models.checkpoint import FolderCheckpoint, open_checkpoint
from outrider.models.gguf import reader
from outrider.models.gguf.checkpoint import GgufCheckpoint
from outrider.models.gguf.reader import Header, read_header
from outrider.models.weights import SafetensorsFile

DOCUMENTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def test_a_folder_has_the_documents_and_weights_that_lie_in_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("qwen3"))
    found = open_checkpoint(folder)
    assert found == FolderCheckpoint(folder)
    assert not found.is_gguf
    assert found.has("config.json")
    assert not found.has("tokenizer.json")
    assert found.file("config.json") == folder / "config.json"
    assert found.document("config.json").text("model_type") == "qwen3"
    assert found.files() == (folder / "model.safetensors",)
    assert found.num_bytes == (folder / "model.safetensors").stat().st_size
    assert (found.notes, found.tokenizer_notes) == ((), ())
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        found.document("tokenizer.json")


def test_a_gguf_file_has_the_documents_that_its_header_stands_for(tmp_path: Path) -> None:
    path = small_llama({"llama.unknown_key": ("u32", 3)}).write(tmp_path / "a.gguf")
    found = open_checkpoint(path)
    assert found == GgufCheckpoint(path)
    assert found.is_gguf
    assert [name for name in (*DOCUMENTS, "chat_template.jinja") if found.has(name)] == [*DOCUMENTS]
    assert {found.file(name) for name in DOCUMENTS} == {None}
    assert found.document("config.json").text("model_type") == "llama"
    assert found.document("config.json").where == str(path)
    assert found.files() == (path,)
    assert found.num_bytes == path.stat().st_size
    assert found.notes == ("the file has settings that are not read: llama.unknown_key",)
    with pytest.raises(CheckpointError, match=r"has no params\.json") as caught:
        found.document("params.json")
    assert "Hugging Face folder" in str(caught.value.hint)


def test_both_open_their_weights_alike(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", variant("llama2"))
    file = small_llama().write(tmp_path / "a.gguf")
    for source in map(open_checkpoint, (folder, file)):
        (path,) = source.files()
        opened = source.tensors(path) or SafetensorsFile(path)
        name = "model.embed_tokens.weight"
        assert name in opened.keys()  # noqa: SIM118 - a file is no mapping
        assert opened.dtype_of(name) == opened.get_tensor(name).dtype
        assert bool(opened.blocks(name)) == source.is_gguf
        assert bool(opened.held_bytes) == source.is_gguf
        before = opened.get_tensor(name).clone()
        opened.let_go()
        assert (opened.get_tensor(name) == before).all()


def test_a_checkpoint_is_a_value(tmp_path: Path) -> None:
    """It is a key of caches, so it may not change."""
    for path in (tmp_path, small_llama().write(tmp_path / "a.gguf")):
        found = open_checkpoint(path)
        assert hash(found) == hash(open_checkpoint(path))
        with pytest.raises(FrozenInstanceError):
            found.path = tmp_path  # pyright: ignore[reportAttributeAccessIssue]


def test_a_load_reads_the_header_of_a_gguf_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_llama().write(tmp_path / "a.gguf")
    read: list[Path] = []

    def counted(file: Path) -> Header:
        read.append(file)
        return read_header(file)

    monkeypatch.setattr(reader, "read_header", counted)
    with LLM(path, config=EngineConfig(drafter="none", threads=1)) as llm:
        llm.generate("a", SamplingParams(max_tokens=1))
    assert read == [path]


def test_documents_of_a_folder_are_read_without_pytorch(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("qwen3"))
    script = (
        "import sys, pathlib\n"
        "from outrider.models.checkpoint import open_checkpoint\n"
        f"found = open_checkpoint(pathlib.Path({str(folder)!r}))\n"
        "assert found.document('config.json').has('model_type') and found.files()\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=240)
    assert done.returncode == 0
