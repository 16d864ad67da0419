"""The environment, read (and once written) here and nowhere else.

Every setting has a variable `OUTRIDER_<NAME>` (`outrider config` lists them); the few others that
change what the program does are listed by `other_variables`. Importing this module reads nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "OUTRIDER_"
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that is no setting: its reader and its meaning."""

    name: str
    reader: str
    meaning: str


@cache
def other_variables() -> Sequence[Variable]:
    """Every variable that is no setting."""
    text = Path(__file__).with_name("other_variables.json").read_text("utf-8")
    return [Variable(*row) for row in json.loads(text)]


def outrider_variables() -> dict[str, str]:
    """Variables with the prefix of settings, valid or not; the settings registry checks them."""
    others = {variable.name for variable in other_variables()}
    return {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 - the one reader
        if name.startswith(PREFIX) and name not in others
    }


def variables_with(prefixes: tuple[str, ...]) -> list[str]:
    """Names of set variables with one of these prefixes."""
    return [name for name in os.environ if name.startswith(prefixes)]  # noqa: TID251 - the one reader


def compiler() -> str | None:
    """The C++ compiler that the user chose."""
    return _read("CXX")


def linears() -> str | None:
    """The kind of native linears that the user chose, unchecked."""
    return _read("OUTRIDER_LINEARS")


def threads() -> int:
    """The variable of the setting `threads`, for users of the library who pass none; 0 if it is
    unset, or invalid on the command line."""
    found = _read(f"{PREFIX}THREADS") or ""
    return int(found) if found.isdecimal() and int(found) <= MOST_THREADS else 0


# The folder of stored calibrations of `outrider plan` within the cache.
CALIBRATIONS = "calibrations"


def cache_folder() -> Path | None:
    """The folder of compiled kernels; it may not exist yet. None for a user without a home.

    A caller that loads code from it first checks, with core/files.py, whether others can write
    there.
    """
    base = _read("XDG_CACHE_HOME")
    if base:
        return Path(base) / "outrider"
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:
        return None


def make_cublas_deterministic() -> None:
    """Give cuBLAS the workspace without which its products may differ from run to run.

    It reads the variable when a process first uses it; a value that is set already stays.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251 - the one writer


def show_gpu(number: int) -> None:
    """Let CUDA show only the `number`th of the visible GPUs. Call it before PyTorch is loaded."""
    name = "CUDA_VISIBLE_DEVICES"
    shown = os.environ.get(name)  # noqa: TID251 - an empty one hides all
    # A GPU that does not exist hides all, so that loading reports the error.
    names = [str(number)] if shown is None else shown.split(",")[number : number + 1]
    os.environ[name] = next(iter(names), "").strip() or "-1"  # noqa: TID251 - the one writer


def ollama_models() -> str | None:
    """Folder of Ollama's store, if the user moved it."""
    return _read("OLLAMA_MODELS")


def api_key() -> str | None:
    """The key that a server requires of its clients."""
    return _read("OUTRIDER_API_KEY")


def notify_socket() -> str | None:
    """The socket on which a supervisor learns that the server is ready."""
    return _read("NOTIFY_SOCKET")


def wants_traces() -> bool:
    """True if OpenTelemetry's variables name a destination of traces, and do not turn them off."""
    is_off = (_read("OTEL_SDK_DISABLED") or "").lower() == "true"
    is_off |= _read("OTEL_TRACES_EXPORTER") == "none"
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return not is_off and any(map(_read, names))


def _read(name: str) -> str | None:
    return os.environ.get(name) or None  # noqa: TID251 - the one reader
