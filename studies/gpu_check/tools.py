"""Kernels by name, and other programs that look at the device: pytest, NVIDIA's memory checker and
its profiler. A program that is not installed skips its section.

    python -m gpu_check.tools      a pass of 8B in bfloat16 and in int4, which `counters` profiles
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from gpu_check import models
from gpu_check.rounds import Bench, captured_pass, read, text
from gpu_check.setting import ROOT, NotRunError, Setting, cell, check
from torch.profiler import DeviceType, ProfilerActivity, profile

from outrider.core.params import SamplingParams

# The names of a launch that takes most time, of which it has dozens.
MOST_KERNELS = 12
ONE_ROUND = (
    "from outrider import LLM, EngineConfig, SamplingParams\n"
    "for temperature in (0, 0.8):\n"
    "    llm = LLM(config=EngineConfig(device='cuda', k=3))\n"
    "    llm.generate('def f(x):', SamplingParams(max_tokens=6, temperature=temperature, seed=1))\n"
)


def graphs(setting: Setting, record: dict[str, Any]) -> None:
    """The tests of captured rounds: graphs give the text of the stages, and allocate nothing."""
    setting.need_cuda("captured rounds, to be tested,")
    if not (find_spec("pytest") and find_spec("hypothesis")):
        raise NotRunError("pytest and hypothesis are not installed")
    words = [sys.executable, "-m", "pytest", "-q", "tests/engine/test_graph_cuda.py"]
    _run(record, "the tests of captured rounds pass", words)


def memcheck(setting: Setting, record: dict[str, Any]) -> None:
    """Rounds of the embedded pair, greedy and sampled, touch no memory that is not theirs."""
    setting.need_cuda("accesses to memory, to be checked,")
    tool = _installed("compute-sanitizer")
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", ONE_ROUND]
    _run(record, "a captured round touches only its own memory", words)


def counters(setting: Setting, record: dict[str, Any]) -> None:
    """Bytes and stalls of the kernels of one pass, as NVIDIA's profiler counts them."""
    setting.need_cuda("counters")
    tool = _installed("ncu")
    sections = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats")
    asked = [word for name in sections for word in ("--section", name)]
    which = ["--kernel-name", "regex:linear|groups|attend", "--launch-count", "16"]
    words = [tool, "--clock-control", "none", "--profile-from-start", "off", *asked, *which]
    done = _program([*words, sys.executable, "-m", "gpu_check.tools"])
    record["report"] = done.stdout
    if done.returncode:
        record["refused"] = done.stderr[-500:]


def _installed(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        raise NotRunError(f"{name} is not installed")
    return found


def _program(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def _run(record: dict[str, Any], name: str, words: Sequence[str]) -> None:
    done = _program(words)
    record["output"] = (done.stdout + done.stderr)[-4000:]
    lines = done.stdout.strip().splitlines() or [""]
    check(record, name, passed=done.returncode == 0, detail=lines[-1])


def kernels(setting: Setting, record: dict[str, Any]) -> None:
    """One launch each of plain decoding of 8B and 1B and of a round of the embedded pair: kernels
    by time, and the share of the time in which none runs."""
    setting.need_cuda("kernels, to be timed,")
    for name, launch in _launches(setting):
        launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            launch()
            torch.cuda.synchronize()
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in found.events() or ()
            if event.device_type == DeviceType.CUDA
        ]
        for row in by_kernel(spans):
            cell(record, launch=name, **row)


def by_kernel(spans: Sequence[tuple[str, float, float]]) -> Iterator[dict[str, object]]:
    """(kernel, begin, end) in microseconds -> a row for the whole, and one for each kernel that
    takes most. One runs at a time."""
    if not spans:
        return
    whole = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    times, calls = Counter[str](), Counter(name for name, _, _ in spans)
    for name, begin, end in spans:
        times[name] += end - begin
    yield {
        "kernel": "(all)",
        "calls": len(spans),
        "us": whole,
        "idle_share": 1 - times.total() / whole,
    }
    for name, us in times.most_common(MOST_KERNELS):
        yield {"kernel": name[:60], "calls": calls[name], "us": us}


def _launches(setting: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    params = SamplingParams(max_tokens=400)
    for name in ("8b", "1b"):
        room = models.room_for(1, 512, rows=128, logits=8)
        model = models.random_model(setting.shapes[name], setting, room)
        rounds = Bench(setting, model, None, k=0, batch=1).launches([text(256, 4096)], params)
        yield f"{name}, plain", rounds.launch
        rounds.close()
        del model, rounds
        models.let_go()
    room = models.room_for(1, 512, rows=160, logits=16)
    target, draft = (models.embedded(name, setting, room) for name in (models.TARGET, models.DRAFT))
    rounds = Bench(setting, target, draft, k=4, batch=1).launches([text(32, 512)], params)
    yield "embedded pair, K=4", rounds.launch
    rounds.close()


def main() -> None:
    setting = Setting(torch.device("cuda"), quick=False)
    for scheme in ("none", "int4"):
        room = models.room_for(1, 4352, rows=128, logits=8)
        model = models.random_model(setting.shapes["8b"], setting, room, scheme, vocab_size=4096)
        read(model, 0, text(4096, 4096))
        launch = captured_pass(model, setting, rows=1, context=4096)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        model.state.close(0)
        del model, launch
        models.let_go()


if __name__ == "__main__":
    main()
