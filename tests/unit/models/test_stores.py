"""Models that Ollama and LM Studio keep on this machine are found, and nothing else of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.gguf_writer import small_llama
from outrider.models.names import stored_models

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("outrider.models.names._OLLAMA", (".ollama/models",))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    return tmp_path


def manifest(store: Path, name: str, content: Any) -> None:
    path = store / "manifests" / "registry.ollama.ai" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def ollama(store: Path, name: str = "library/tiny/q4") -> Path:
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"},
    ]
    manifest(store, name, {"layers": layers})
    (store / "blobs").mkdir(exist_ok=True)
    return small_llama().write(store / "blobs" / f"sha256-{DIGEST}")


def test_ollamas_models_are_found_by_their_manifests(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = ollama(home / ".ollama" / "models")
    assert stored_models() == [(blob, "tiny:q4 of Ollama")]
    moved = ollama(home / "moved", "someone/tiny/q8")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "moved"))
    assert stored_models() == [(moved, "someone/tiny:q8 of Ollama")]


@pytest.mark.parametrize(
    "content",
    [
        "{oops",
        "[]",
        {"layers": 7},
        {"layers": [7]},
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../x"}]},
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": None}]},
    ],
)
def test_wrong_manifests_name_no_file(home: Path, content: Any) -> None:
    store = home / ".ollama" / "models"
    manifest(store, "library/bad/latest", content)
    blob = ollama(store)
    assert stored_models() == [(blob, "tiny:q4 of Ollama")]


def test_lm_studios_models_are_found(home: Path) -> None:
    folder = home / ".lmstudio" / "models" / "org" / "tiny-GGUF"
    folder.mkdir(parents=True)
    path = small_llama().write(folder / "tiny.gguf")
    small_llama().write(folder / "mmproj-tiny.gguf")
    (folder / "half-00001-of-00002.gguf").write_bytes(b"GGUF")
    assert stored_models() == [(path, "tiny-GGUF/tiny.gguf of LM Studio")]
