"""Kernels are compiled before the first request: which, how, and what becomes of failures.

The interpreter compiles nothing, so both programs run in processes of their own: one traces engines
on PyTorch's meta device, the other compiles for a device that is made up.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.tiny_checkpoints import random_llama, variant
from outrider.kernels.operators import Kernels
from outrider.models import loading
from outrider.models.decoder import ModelCapacity
from outrider.plugins.gpu.kernels import trial
from outrider.plugins.gpu.kernels.build import triton_kernels
from outrider.plugins.gpu.kernels.tiles import Launch, launch, noted

ROOT = Path(__file__).parents[4]


class Kernel:
    """As much of a kernel as launches look at."""

    __name__ = "a_kernel"
    arg_names = ("x_ptr", "anywhere_ptr", "num_rows", "size", "BLOCK")
    do_not_specialize = ("num_rows",)
    do_not_specialize_on_alignment = ("anywhere_ptr",)

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*_: object, **__: object) -> None:
            self.grids.append(grid)

        return run


def form(rows: int, size: int, *, offset: int = 0, elsewhere: int = 0, block: int = 4) -> object:
    memory = torch.empty(64)
    arguments = (memory[offset:], memory[elsewhere:], rows, size)
    return Launch(Kernel(), (1,), arguments, {"BLOCK": block}).form


def test_launches_that_share_a_binary_have_one_form() -> None:
    plain = form(1, 32)
    for other in (form(7, 32), form(16, 48), form(1, 32, offset=4), form(1, 32, elsewhere=1)):
        assert other == plain
    others = [form(1, 33), form(1, 1), form(1, 32, offset=1), form(1, 32, block=8), form(2**31, 32)]
    assert len({plain, *others}) == 1 + len(others)


def test_launches_are_noted_and_not_made() -> None:
    kernel, x = Kernel(), torch.empty(64)

    def work() -> None:
        for size in (32, 48, 33, 0):
            launch(kernel, (size,), x, x, 3, size, BLOCK=4)

    found = noted(work)
    assert [one.by_name["size"] for one in found] == [32, 33]
    assert kernel.grids == []
    with pytest.raises(ZeroDivisionError):
        noted(lambda: 1 // 0)
    work()
    assert kernel.grids == [(32,), (48,), (33,)]


@pytest.mark.wide
def test_what_loading_rehearses_stays_in_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of a load, as they would be compiled."""
    found: list[str] = []

    def compile_launches(_: torch.device, work: Any) -> None:
        found.extend(one.kernel.__name__ for one in noted(work))

    def chosen(**_: object) -> Kernels:
        return triton_kernels(torch.device("cpu"), torch.float32, "none", (), exact=True)

    monkeypatch.setattr(trial, "compile_launches", compile_launches)
    monkeypatch.setattr(loading, "choose", chosen)
    space = ModelCapacity(num_slots=64, page_size=8, max_rows=8, max_logits=1)
    model = random_llama(variant("qwen3"), capacity=space)
    assert {"attend_kernel", "linear_kernel", "norm_kernel", "pick_kernel", "edge_kernel"} < {
        *found
    }
    assert found.count("attend_kernel") == 2, "a chain and a tree"
    model.state.check()
    assert model.state.num_free_tokens == space.num_slots
    assert model.state.open(1, (0, 0)) == 0


def run(program: str, **more: str) -> str:
    paths = f"{ROOT / 'src'}:{ROOT / 'studies'}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


TRACED = """
import torch
from gpu_compile import trace
from gpu_compile.meta import pretend

torch.set_num_threads(1)
recorder = pretend()
trace.DRAFTERS["copy"] = {"drafter": "quantised-self", "k": 3}
every = ("greedy", "sampled", "top-k and top-p", "penalties", "mask")
chosen = (
    ("bfloat16", "none", 160, ("model",), every),
    ("bfloat16", "none", 160, ("eagle tree",), ("greedy", "mask")),
    ("float16", "int4", 480, ("mtp",), ("penalties",)),
    ("bfloat16", "none", 160, ("copy",), ("sampled",)),
)
print(len(list(trace.engines(recorder, chosen))))
trace.hybrid(recorder)
"""


@pytest.mark.wide
@pytest.mark.slow
def test_no_request_launches_what_loading_has_not_compiled() -> None:
    """With captured rounds and stage by stage."""
    assert run(TRACED).split()[0] == str(2 * (5 + 2 + 1 + 1))


COMPILED = """
import logging
import threading

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from outrider.plugins.gpu.kernels import pointwise, trial
from outrider.plugins.gpu.kernels.eager import EagerProbs
from outrider.plugins.gpu.kernels.ops import TritonOps
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.tiles import launch

made, launched, asked = [], [], []


class Launcher:
    def __init__(self, source, metadata):
        made.append((metadata.name, threading.current_thread().name))
        self.name = metadata.name

    def __call__(self, *_):
        launched.append(self.name)


class Device:
    launcher_cls = Launcher
    utils = None

    def __init__(self):
        self.utils = self

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 99 << 10}

    def load_binary(self, name, *_):
        return 1, 2, 32, 0, 1024


def hook(**about):
    asked.append(about["fn"].name if hasattr(about["fn"], "name") else str(about["fn"]))
    return False


driver.set_active(Device())
knobs.runtime.jit_cache_hook = hook
CPU, x = torch.device("cpu"), torch.zeros(2, 48)
ops, trial._COMPILERS, trial._PATIENCE_SECONDS = TritonOps(Workspace(CPU)), 2, 1e9


def work():
    ops.rms_norm(x, x[0], 1e-5, x)
    ops.silu_mul(torch.zeros(2, 96), x)
    for _ in range(3):
        ops.gelu(x, x)
    launch(pointwise.gelu_kernel, (1,), x, x, 48, 48, 48, BLOCK=3)
    ops.gelu(x[:, 1:33], x[:, :32])


class Loud(logging.Handler):
    lines, error = [], None

    def emit(self, record):
        self.lines.append(record.getMessage())
        if self.error:
            raise self.error


loud = Loud()
trial.progress.addHandler(loud)
trial.progress.setLevel(logging.INFO)
trial.compile_launches(CPU, work)
assert loud.lines == [], loud.lines
assert len(asked) == 5 and len(made) == 4 and not launched, (asked, made, launched)
assert all(thread.startswith("compiler") for _, thread in made), made
try:
    work()
except Exception as error:
    assert type(error).__name__ == "CompilationError", error
else:
    raise AssertionError("a kernel of three numbers compiles")
assert len(asked) == 6 and len(made) == 4, (asked, made)
assert launched == ["norm_kernel", "silu_mul_kernel"] + 3 * ["gelu_kernel"], launched

trial._PATIENCE_SECONDS = -1
eager = EagerProbs(Workspace(CPU), CPU)
loud.error, trial._COMPILERS = KeyboardInterrupt(), 1
before = len(asked)
try:
    trial.compile_launches(CPU, lambda: eager.rehearse(40))
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("nothing was interrupted")
assert loud.lines[0].startswith("Compiled 1 of "), loud.lines
of = int(loud.lines[0].split()[3])
assert len(asked) - before < of, (asked[before:], of)
loud.error, loud.lines[:] = None, []
trial.compile_launches(CPU, lambda: eager.rehearse(40))
assert [int(line.split()[1]) for line in loud.lines] == list(range(1, of + 1)), loud.lines
count = len(asked)
eager.softmax(torch.zeros(1, 40), 1.0, torch.zeros(1, 40))
assert len(asked) == count, asked[count:]
"""


@pytest.mark.wide
@pytest.mark.slow
def test_kernels_are_compiled_in_threads_and_fail_where_they_are_launched(tmp_path: Path) -> None:
    """Each form once, with what launches it; an interrupt leaves out those that have not begun, and
    all can be compiled afterwards."""
    run(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
