"""GGUF files beside llama.cpp: `run.py gguf --files FILE... --peers FOLDER [--output FILE]`."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from common import NEEDS, Report, cells_before, note, study
from options import Options
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.output import ProcessGauge
from outrider.core.errors import ConfigError
from outrider.core.protocols import StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from outrider_lab.bench.workload import builtin_texts
from outrider_lab.measure.frame import medians, paired_ratio
from outrider_lab.measure.store import write_json

THREADS = (1, 2)
NUM_PROMPT, NUM_LONG_PROMPT, NUM_WRITTEN = 512, 2000, 64
# What loading and one request may take, over the file with the keys and values.
MEMORY_BAR = 1.1
# Texts for the distance between distributions: so many windows of so many tokens, of which the
# second half counts, as llama-perplexity counts them.
WINDOW, NUM_WINDOWS = 128, 24
_READS = {"read": NUM_PROMPT, "long_read": NUM_LONG_PROMPT}
_F32_CACHE = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
# What llama-perplexity prints.
_FIGURES = {
    "mean_kl": r"Mean +KLD: +([\d.]+)",
    "median_kl": r"Median +KLD: +([\d.]+)",
    "p99_kl": r"99.0% +KLD: +([\d.]+)",
    "same_choice": r"Same top p: +([\d.]+)",
}


@study(files=[], peers="", repeats=5, tokenizer="")
def gguf(options: Options, report: Report) -> bool | None:
    """Do quantised files run here at least as fast as in llama.cpp, and as near to their numbers?

    For each file and one and two threads, ours and llama-bench write 64 tokens and read prompts of
    512 and 2,000, in turns; ratios are ours over theirs, with 95 % intervals. Then both compare the
    distributions of the file with those of its numbers in float32, on the same text. Memory is what
    a process of its own holds at most, over what it held before. --peers is the folder that
    scripts/peers filled; --tokenizer reads the text where a file's own rule is unknown.

    Cells that --output has are not measured again.
    """
    if not options.files:
        raise ConfigError("no file is named.", hint="--files MODEL.gguf")
    programs = Path(options.peers) / "llama.cpp" / "build" / "bin"
    report["cells"] = cells_before(options.output)
    done = {cell.get("cell") for cell in report["cells"]}
    for file in map(Path, options.files):
        config = EngineConfig(drafter="none", tokenizer=options.tokenizer, batch_size=1)
        work: dict[str, Callable[[], dict[str, Any]]] = {
            "loading": partial(_loading, file, config),
            "memory": partial(_memory, file, config),
            **{
                f"speed {threads}": partial(_speeds, file, config, threads, programs, options)
                for threads in THREADS
            },
            "distance": partial(_distances, file, config, programs, options.quick),
        }
        for name, measured in work.items():
            cell = f"{file.name} {name}"
            if cell not in done:
                note(report, cell=cell, file=file.name, **measured())
                if options.output:
                    write_json(options.output, report)
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


def _memory(file: Path, config: EngineConfig) -> dict[str, Any]:
    """In a process of its own, which has nothing but the program before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        held = executor.submit(_held, file, config).result()
    kept = held["file_bytes"] + held["kv_bytes"]
    ratio = held["peak_bytes"] / kept
    return held | {"memory_ratio": round(ratio, 3), "memory_bar": MEMORY_BAR}


def _held(file: Path, config: EngineConfig) -> dict[str, Any]:
    """At most, beside the program, for one request; and what that is for."""
    before = ProcessGauge().now()
    with closing(LLM(file, config=config, context=NUM_PROMPT + NUM_WRITTEN)) as llm:
        ids = [1 + i % 1000 for i in range(NUM_PROMPT - 1)]
        params = SamplingParams(max_tokens=NUM_WRITTEN, ignore_eos=True)
        (result,) = llm.generate([ids], params)
        return {
            "peak_bytes": (result.peak_memory_bytes or 0) - before,
            "program_bytes": before,
            "kv_bytes": (NUM_PROMPT + NUM_WRITTEN) * llm.spec.kv_bytes_per_token,
            "file_bytes": file.stat().st_size,
            "memory": dict(llm.memory),
        }


def _speeds(
    file: Path, config: EngineConfig, threads: int, programs: Path, options: Options
) -> dict[str, Any]:
    """Tokens a second, by turns."""
    seconds = defaultdict[str, list[tuple[str, float]]](list)
    with closing(LLM(file, config=config, threads=threads)) as llm:
        for turn in range(2 if options.quick else options.repeats):
            for name, value in (_ours(llm, turn) | _theirs(file, threads, programs)).items():
                seconds[name].append((str(turn), value))
    found: dict[str, Any] = {"threads": threads}
    for work in ("written", "read", "long_read"):
        ours, theirs = seconds[f"ours {work}"], seconds[f"llama.cpp {work}"]
        if not ours:
            continue
        found[f"{work}_per_second"] = round(1 / statistics.median(value for _, value in ours), 1)
        ratio = paired_ratio(medians(theirs), medians(ours))
        found[f"{work}_over_llama.cpp"] = None if ratio is None else round(ratio.value, 3)
        found[f"{work}_ratio"] = None if ratio is None else asdict(ratio)
    return found


def _ours(llm: LLM, turn: int) -> dict[str, float]:
    """Seconds a token."""
    llm.forget()
    ids = [1 + (7 * i * i + turn) % 1000 for i in range(NUM_LONG_PROMPT)]
    written = SamplingParams(max_tokens=NUM_WRITTEN + 1, ignore_eos=True)
    (result,) = llm.generate([ids[:1]], written)
    spent = result.token_seconds[-1] - result.token_seconds[0]
    found = {"ours written": spent / NUM_WRITTEN}
    for work, length in _READS.items():
        if length < llm.spec.max_tokens:
            # No page of another prompt is found again.
            prompt = [length % 1000, *ids[: length - 1]]
            (read,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
            found[f"ours {work}"] = read.token_seconds[0] / length
    return found


def _theirs(file: Path, threads: int, programs: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for work, length in {"written": 0, **_READS}.items():
        words = ["-t", threads, "-p", length, "-n", 0 if length else NUM_WRITTEN, "-r", 1]
        # A warm-up would read all of a long prompt once more.
        words += ["--no-warmup"] if length == NUM_LONG_PROMPT else []
        (told,) = json.loads(
            _run(programs / "llama-bench", "-m", file, *words, "-o", "json").stdout
        )
        found[f"llama.cpp {work}"] = 1 / told["samples_ts"][0]
    return found


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
    capacity = ModelCapacity(num_slots=2 * WINDOW, max_rows=WINDOW, max_logits=WINDOW)
    model = load_model(file, LoadOptions(capacity=capacity, device="cpu", dtype=dtype))
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
