"""What decides the bits of a text: engines that have all of it in common write the same texts.

A text that was begun at one engine goes on at another only where these words are the same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from outrider.api.llm import LLM
from outrider.core.env import cache_folder, compiler
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import cpu_identity
from outrider.kernels.native.tuning import library_key
from outrider.kernels.operators import Choice
from outrider.models.weight_files import weight_files

_SHOWN = 16
# Of a large file, so many blocks of so many bytes are read.
_NUM_BLOCKS, _BLOCK = 64, 1 << 16
_BESIDE = (".json", ".jinja", ".model", ".txt")


def numerics_of(llm: LLM) -> str:
    """Hardware, model, number format and every operator's kernel."""
    config = llm.config
    kernels = map(_kernel, llm.kernels.choices)
    kept = [f"kv_budget {config.kv_budget} {config.kv_window}"] if config.kv_budget else []
    return ", ".join([
        _hardware(llm.device),
        f"model {model_digest(llm.folder)}",
        f"{config.dtype} {config.quantise}",
        f"kv {config.kv_dtype}",
        *kept,
        *kernels,
    ])  # fmt: skip


def _kernel(choice: Choice) -> str:
    # Kinds of which the faster one was measured have the same bits.
    kind = "" if choice.timings else choice.kind
    return f"{choice.op}={choice.name} {kind}".strip()


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} {major}.{minor}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    library = built_kernels(compiler(), cache_folder()).library
    native = "" if library is None else library_key(library)
    of_cpu = hashlib.sha256(f"{cpu_identity()}\0{native}".encode()).hexdigest()[:_SHOWN]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {capability} {of_cpu}, torch {torch.__version__}"


def model_digest(model: Path) -> str:
    """Of a folder or GGUF file: names, sizes and contents. Weights are read at places that any
    other model differs at, not whole."""
    beside = () if model.is_file() else (one for one in model.iterdir() if one.suffix in _BESIDE)
    digest = hashlib.sha256()
    for file in sorted({*weight_files(model), *filter(Path.is_file, beside)}):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= _NUM_BLOCKS * _BLOCK:
                digest.update(opened.read())
                continue
            for number in range(_NUM_BLOCKS):
                opened.seek((size - _BLOCK) * number // (_NUM_BLOCKS - 1))
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()[:_SHOWN]
