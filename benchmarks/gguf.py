"""GGUF files beside llama.cpp: `run.py gguf --files FILE... --peers FOLDER [--output FILE]`."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from common import NEEDS, Report, note, study
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.frame import medians, paired_ratio
from outrider.bench.workload import builtin_texts
from outrider.core.errors import ConfigError
from outrider.core.protocols import StepRow
from outrider.models.decoder import Room
from outrider.models.loading import LoadOptions, load_model

THREADS = (1, 2)
NUM_PROMPT, NUM_WRITTEN = 512, 64
# Texts for the distance between distributions: so many windows of so many tokens, of which the
# second half counts, as llama-perplexity counts them.
WINDOW, NUM_WINDOWS = 128, 24
_F32_CACHE = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
# What llama-perplexity prints.
_FIGURES = {
    "mean_kl": r"Mean +KLD: +([\d.]+)",
    "median_kl": r"Median +KLD: +([\d.]+)",
    "p99_kl": r"99.0% +KLD: +([\d.]+)",
    "same_choice": r"Same top p: +([\d.]+)",
}


@study(files=[], peers="", repeats=5, tokenizer="")
def gguf(options: Namespace, report: Report) -> bool | None:
    """Do quantised files run here at least as fast as in llama.cpp, and as near to their numbers?

    For each file and one and two threads, ours and llama-bench write 64 tokens and read prompts of
    512, in turns; ratios are ours over theirs, with 95 % intervals. Then both compare the
    distributions of the file with those of its numbers in float32, on the same text. --peers is the
    folder that scripts/peers filled; --tokenizer reads the text where a file's own rule is unknown.
    """
    if not options.files:
        raise ConfigError("no file is named.", hint="--files MODEL.gguf")
    programs = Path(options.peers) / "llama.cpp" / "build" / "bin"
    for file in map(Path, options.files):
        config = EngineConfig(drafter="none", tokenizer=options.tokenizer, batch_size=1)
        note(report, file=file.name, **_loading(file, config))
        for threads in THREADS:
            note(report, file=file.name, **_speeds(file, config, threads, programs, options))
        note(report, file=file.name, **_distances(file, config, programs, options.quick))
    return None


def _loading(file: Path, config: EngineConfig) -> dict[str, Any]:
    """The second time, when the file is in memory, kernels are there and tokens were made."""
    _loaded(file, config)
    return _loaded(file, config) | {"file_bytes": file.stat().st_size}


def _loaded(file: Path, config: EngineConfig) -> dict[str, Any]:
    started = perf_counter()
    with closing(LLM(file, config=config)) as llm:
        loaded = perf_counter() - started
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))
        return {
            "load_seconds": round(loaded, 3),
            "first_token_seconds": round(perf_counter() - started, 3),
            "weight_bytes": llm.spec.weight_bytes,
        }


def _speeds(
    file: Path, config: EngineConfig, threads: int, programs: Path, options: Namespace
) -> dict[str, Any]:
    """Tokens a second, by turns."""
    seconds = defaultdict[str, list[tuple[str, float]]](list)
    with closing(LLM(file, config=config, threads=threads)) as llm:
        for turn in range(2 if options.quick else options.repeats):
            for name, value in (_ours(llm, turn) | _theirs(file, threads, programs)).items():
                seconds[name].append((str(turn), value))
    found: dict[str, Any] = {"threads": threads}
    for work in ("written", "read"):
        ours, theirs = seconds[f"ours {work}"], seconds[f"llama.cpp {work}"]
        found[f"{work}_per_second"] = round(1 / statistics.median(value for _, value in ours), 1)
        ratio = paired_ratio(medians(theirs), medians(ours))
        found[f"{work}_over_llama.cpp"] = None if ratio is None else round(ratio.value, 3)
        found[f"{work}_ratio"] = None if ratio is None else asdict(ratio)
    return found


def _ours(llm: LLM, turn: int) -> dict[str, float]:
    """Seconds a token."""
    llm.forget()
    ids = [1 + (7 * i * i + turn) % 1000 for i in range(NUM_PROMPT)]
    written = SamplingParams(max_tokens=NUM_WRITTEN + 1, ignore_eos=True)
    (result,) = llm.generate([ids[:1]], written)
    spent = result.token_seconds[-1] - result.token_seconds[0]
    (read,) = llm.generate([ids], SamplingParams(max_tokens=1, ignore_eos=True))
    return {"ours written": spent / NUM_WRITTEN, "ours read": read.token_seconds[0] / NUM_PROMPT}


def _theirs(file: Path, threads: int, programs: Path) -> dict[str, float]:
    words = ["-t", threads, "-p", NUM_PROMPT, "-n", NUM_WRITTEN, "-r", 1, "-o", "json"]
    told = json.loads(_run(programs / "llama-bench", "-m", file, *words).stdout)
    read, written = (1 / one["samples_ts"][0] for one in told)
    return {"llama.cpp written": written, "llama.cpp read": read}


def _distances(file: Path, config: EngineConfig, programs: Path, quick: bool) -> dict[str, Any]:
    """From the distributions of the same numbers in float32, in both programs."""
    count = 2 if quick else NUM_WINDOWS
    text = "\n\n".join(text for name in ("code", "maths") for text in builtin_texts(name)[:60])
    with closing(LLM(file, config=config)) as llm:
        ids = llm.tokenizer.encode(text)
    windows = [ids[first * WINDOW : (first + 1) * WINDOW] for first in range(count)]
    exact, own = (_log_probs(file, windows, dtype) for dtype in ("float32", "auto"))
    kl = _listed((exact.exp() * (exact - own)).sum(-1).sort().values)
    same = _listed((exact.argmax(-1) == own.argmax(-1)).float())
    ours = {
        "mean_kl": round(statistics.fmean(kl), 6),
        "median_kl": round(statistics.median(kl), 6),
        "p99_kl": round(kl[int(0.99 * len(kl))], 6),
        "same_choice": round(100 * statistics.fmean(same), 3),
    }
    return {
        "num_tokens": len(kl),
        **ours,
        "llama.cpp": _their_distances(file, text, count, programs),
    }


def _listed(numbers: Tensor) -> list[float]:
    return [float(number) for number in numbers]


def _log_probs(file: Path, windows: Sequence[Sequence[int]], dtype: str) -> Tensor:
    room = Room(num_slots=2 * WINDOW, max_rows=WINDOW, max_logits=WINDOW)
    model = load_model(file, LoadOptions(room=room, device="cpu", dtype=dtype))
    found: list[Tensor] = []
    for number, ids in enumerate(windows):
        model.state.open(number, ())
        logits_MV = model.step([StepRow.chain(number, ids)], NEEDS).logits_MV
        found.append(logits_MV[WINDOW // 2 : WINDOW - 1].clone())
        model.state.commit({number: range(len(ids))})
        model.state.close(number)
    return torch.cat(found).log_softmax(-1)


def _their_distances(file: Path, text: str, count: int, programs: Path) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        exact, base, texts = (Path(folder) / name for name in ("f32.gguf", "base", "text"))
        texts.write_text(text)
        _run(programs / "llama-quantize", "--allow-requantize", file, exact, "F32")
        words = ["-f", texts, "-c", WINDOW, "-b", WINDOW, "--chunks", count, *_F32_CACHE]
        words += ["--kl-divergence-base", base]
        _run(programs / "llama-perplexity", "-m", exact, *words)
        told = _run(programs / "llama-perplexity", "-m", file, *words, "--kl-divergence")
    lines = told.stdout + told.stderr
    found = {name: re.search(pattern, lines) for name, pattern in _FIGURES.items()}
    return {name: float(match[1]) for name, match in found.items() if match is not None}


def _run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, check=True, timeout=1800
    )
