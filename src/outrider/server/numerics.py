"""Identity of an engine's arithmetic: engines with equal identities write the same texts.

A text that one engine began is continued at another one only if their identities are equal.
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
# Number and size in bytes of the blocks that are read of a large file.
_NUM_BLOCKS, _BLOCK = 64, 1 << 16
_SMALL_FILES = (".json", ".jinja", ".model", ".txt")


def numerics_of(llm: LLM) -> str:
    """Return the identity: hardware, model, number formats and every operator's kernel."""
    config = llm.config
    kernels = map(_kernel, llm.kernels.choices)
    budget = [f"kv_budget {config.kv_budget} {config.kv_window}"] if config.kv_budget else []
    return ", ".join([
        _hardware(llm.device),
        f"model {model_digest(llm.folder)}",
        f"{config.dtype} {config.quantise}",
        f"kv {config.kv_dtype}",
        *budget,
        *kernels,
    ])  # fmt: skip


def _kernel(choice: Choice) -> str:
    # Kinds among which a timing chose compute the same bits, so the kind does not matter.
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
    """Return a digest of a folder or GGUF file: names, sizes and contents. Large weight files are
    not read whole: blocks spread over the file are enough to distinguish models."""
    entries = () if model.is_file() else model.iterdir()
    small = (one for one in entries if one.suffix in _SMALL_FILES)
    digest = hashlib.sha256()
    for file in sorted({*weight_files(model), *filter(Path.is_file, small)}):
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
