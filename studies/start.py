"""How soon a process writes its first token, and what memory it takes: `run.py start`."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import socket
from statistics import median
from time import perf_counter, sleep
from typing import Any

from common import Report, cells_before, note, study
from options import Flag, Options

from outrider.core.errors import given
from outrider.core.fields import size
from outrider.models.families import read_native_config
from outrider.models.loading import spec_of_config
from outrider.plugins.measure.turns import rotated
from outrider_lab.measure.store import write_json

SIDE = Path(__file__).with_name("start_side.py")
PROMPT = "The capital of France is"
CHAT = ("--chat-template", "chatml")
WAIT_SECONDS, ASK_SECONDS = 60.0, 0.002


@study(
    file=Flag(kind=Path, text="a GGUF file of about 1 GB"),
    llama=Flag(kind=Path | None, default=None, text="llama.cpp's llama-server"),
    threads=2,
    turns=5,
)
def start(options: Options, report: Report) -> None:
    """How long is the way from PyTorch's import to the first token, and from the process's start?

    New processes take turns, with the file in the system's cache: `outrider run` with a chat, and
    `outrider generate`; with `--llama` also its server without a warm-up, which is asked for one
    token as soon as it is ready. Memory is the peak above that of a process that has the engine's
    modules and the tokenizer, over the file and the KV cache of the text. Cells of an earlier run
    with the same `--output` count.
    """
    file: Path = options.file
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "run": lambda: _ours(options, "run", str(file), PROMPT, *CHAT),
        "generate": lambda: _ours(options, "generate", "--model", str(file), PROMPT),
        "idle": lambda: _side("idle", str(file)),
    }
    if options.llama is not None:
        sides["llama-server"] = lambda: _theirs(options)
    before = cells_before(options.output)
    report["cells"] = list(before)
    for turn in range(len(before), 1 if options.quick else options.turns):
        found = {name: sides[name]() for name in rotated(list(sides), turn)}
        note(report, turn=turn, **found)
        if options.output:
            write_json(options.output, report)
    report |= _summary(report["cells"], file)


def _summary(cells: Sequence[Mapping[str, Any]], file: Path) -> dict[str, Any]:
    """Medians of all turns, and the share of memory."""
    names = [name for name in cells[0] if name != "turn"]
    found: dict[str, Any] = {
        name: {key: round(median([cell[name][key] for cell in cells]), 3) for key in cells[0][name]}
        for name in names
    }
    config = read_native_config(file)
    each = spec_of_config(given(config, "decoder of this project"), "auto").kv_bytes_per_token
    # A prompt of at most a token a byte, and the pages of a few drafts.
    kept = file.stat().st_size + 128 * each
    for name in ("run", "generate"):
        above = found[name]["peak_bytes"] - found["idle"]["peak_bytes"]
        found[name]["memory_ratio"] = round(above / kept, 3)
    for name, one in found.items():
        print(f"{name}: {one.get('total_seconds', 0):.2f} s, {size(int(one['peak_bytes']))}")
    return {"file": file.name, "file_bytes": file.stat().st_size, "medians": found}


def _ours(options: Options, *words: str) -> dict[str, Any]:
    return _side(*words, "--max-tokens", "8", "--threads", str(options.threads))


def _side(*words: str) -> dict[str, Any]:
    """What the process reports, and the seconds from its start to the first text."""
    command = [sys.executable, str(SIDE), *words]
    pipe = subprocess.PIPE
    began = perf_counter()
    with subprocess.Popen(command, bufsize=0, stdout=pipe, stderr=pipe) as process:
        given(process.stdout, "pipe").read(1)
        total = perf_counter() - began
        *_, said = process.communicate()[1].decode().splitlines()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {said}")
    return {"total_seconds": round(total, 3), **json.loads(said)}


def _theirs(options: Options) -> dict[str, Any]:
    """One token of a server that has just started."""
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = f"-t {options.threads} -c 512 -np 1 --no-warmup --port {port}".split()
    command = [str(options.llama), "-m", str(options.file), *words]
    began = perf_counter()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_ready(url):
                if process.poll() is not None or perf_counter() - began > WAIT_SECONDS:
                    raise RuntimeError("llama-server does not start")
                sleep(ASK_SECONDS)
            body = json.dumps({"prompt": PROMPT, "n_predict": 1, "temperature": 0}).encode()
            asked = urllib.request.Request(
                f"{url}/completion", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as answer:
                answer.read()
            total = perf_counter() - began
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return {"total_seconds": round(total, 3), "peak_bytes": 1024 * int(peak.split()[1])}


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0) as answer:
            return answer.status == 200
    except OSError:
        return False
