"""Servers that are started here and asked over HTTP: their command lines for a setup of a peer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider_lab.bench.peers.sides import MAX_NGRAM, Setup

# vLLM compiles a model before it serves it.
START_SECONDS, COMPILE_SECONDS = 180.0, 800.0


def _no_variables(_setup: Setup, _folder: Path) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Program:
    """A server as it is started: `words` is its command line after the program, for a setup and a
    port, and `variables` its environment, as NAME=VALUE, for a setup and the program's folder; a
    request has `more` members; `version` is a command of that folder that prints which one it is.
    """

    words: Callable[[Setup, int], list[str]]
    version: tuple[str, ...]
    more: Mapping[str, object]
    variables: Callable[[Setup, Path], list[str]] = _no_variables
    start_seconds: float = START_SECONDS


def _ik_words(setup: Setup, port: int) -> list[str]:
    """Flags of ik_llama.cpp, whose server has other names for speculation than llama.cpp's."""
    threads, kind = str(setup.threads), setup.options.get("kind")
    words = ["-m", setup.target, "-t", threads, "-tb", threads, "-np", "1"]
    words += ["-c", str(setup.options.get("context", 2048)), "--cache-ram", "0"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    if setup.drafter == "model":
        words += ["-md", setup.draft, "--draft-max", str(setup.k)]
        words += ["--draft-p-min", str(setup.options.get("p_min", 0.0))]
    elif kind:
        words += ["--spec-type", kind, "--draft-max", str(setup.k)]
        words += ["--spec-ngram-size-n", str(MAX_NGRAM), "--spec-ngram-size-m", str(setup.k)]
    return [*words, *(["--spec-autotune"] if setup.options.get("autotune") else [])]


def _vllm_words(setup: Setup, port: int) -> list[str]:
    words = ["serve", setup.target, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "float32" if setup.form == "f32" else "bfloat16", "--max-num-seqs", "1"]
    words += ["--max-model-len", str(setup.options.get("context", 2048))]
    # Prompts are read anew, and sampling is what a request says.
    words += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
    drafts: dict[str, dict[str, object]] = {
        "model": {"method": "draft_model", "model": setup.draft},
        "ngram": {"method": "ngram", "prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": 1},
    }
    if setup.drafter != "none":
        told = {**drafts[setup.drafter], "num_speculative_tokens": setup.k}
        words += ["--speculative-config", json.dumps(told)]
    return words


def _vllm_variables(setup: Setup, folder: Path) -> list[str]:
    """Keys and values in one GiB, so many threads, the OpenMP that it is fastest with, and nothing
    asked of the network."""
    threads = f"VLLM_CPU_OMP_THREADS_BIND=0-{setup.threads - 1}"
    found = ["VLLM_CPU_KVCACHE_SPACE=1", threads, "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1"]
    library = folder.parent / "lib" / "libiomp5.so"
    return [*found, *([f"LD_PRELOAD={library}"] if library.exists() else [])]


PROGRAMS: Mapping[str, Program] = {
    "ik_llama.cpp": Program(
        words=_ik_words,
        version=("llama-server", "--version"),
        more={"cache_prompt": False, "top_k": 0, "min_p": 0.0},
    ),
    "vllm-cpu": Program(
        words=_vllm_words,
        version=(
            "python",
            "-c",
            "from importlib.metadata import version; print(version('vllm-cpu'))",
        ),
        more={},
        variables=_vllm_variables,
        start_seconds=COMPILE_SECONDS,
    ),
}
