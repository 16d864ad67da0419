"""How each peer is started, and what gets one that is missing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from outrider.bench.peers.contestants import LLAMA, OPENVINO, OURS, READ_GGUF, TRANSFORMERS

HERE = Path(__file__).parent
_PACKAGE = "outrider.bench.peers"
BUILD = "scripts/peers"


def command_of(peer: str, folder: Path, tokenizer: Path) -> list[str] | None:
    """The command that starts `peer`; None if it is not there. `folder` is where scripts/peers
    builds; a name that is no peer of ours is a server's, whose tokens `tokenizer` counts."""
    if peer == OURS:
        return _own("side_outrider")
    if peer == TRANSFORMERS:
        return _own("side_transformers") if find_spec("transformers") else None
    if peer == OPENVINO:
        python = folder / "openvino" / "bin" / "python"
        # Safe path: this folder's own files must not stand in for libraries.
        alien = [str(python), "-P", str(HERE / "start.py"), "side_openvino"]
        return alien if python.exists() else None
    if peer == LLAMA:
        binaries = folder / "llama.cpp" / "build" / "bin"
        there = shutil.which("llama-server", path=binaries) is not None
        return [*_own("side_llama"), str(binaries)] if there else None
    return [*_own("side_http"), str(tokenizer)]


def any_reads_gguf(peers: Iterable[str], folder: Path) -> bool:
    """Whether one of them is there that loads GGUF files."""
    readers = [name for name in peers if name in READ_GGUF]
    return any(command_of(name, folder, folder) is not None for name in readers)


def how_to_get(peer: str, folder: Path) -> str:
    """The command that brings a missing one."""
    built = f"{BUILD} {folder} (in a checkout of the sources)"
    return "pip install 'outrider[hf]'" if peer == TRANSFORMERS else built


def _own(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"{_PACKAGE}.{module}"]
