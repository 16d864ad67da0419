"""Where a number comes from: command, commit, versions, machine. Stored beside every result."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from outrider.core.files import Kind, read_text
from outrider.kernels.native.cpu import num_physical_cores

PACKAGES = ("outrider", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def provenance() -> dict[str, object]:
    """Everything needed to repeat a run on a like machine."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_sources(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "physical_cores": num_physical_cores(),
        "torch_threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path, record: dict[str, object]) -> None:
    """Write `record` in one piece: a reader never sees half a file."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` in one piece, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _sources() -> dict[str, object]:
    """The commit that this file belongs to; None where it is of no repository, as if installed."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": None, "dirty": None}
    changed = _git("status", "--porcelain", "--untracked-files=no", ":/")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(changed)}


def _git(*arguments: str) -> str | None:
    """The answer of git about the folder of this file; None if it has none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """As the processor calls itself."""
    try:
        lines = read_text(Path("/proc/cpuinfo"), Kind.SYSTEM).splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
