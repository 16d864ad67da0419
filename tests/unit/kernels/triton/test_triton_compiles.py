"""Every kernel is also read by Triton's compiler, for sm_90, up to its own intermediate form.

The interpreter does not check types or what a loop carries. It runs in a process of its own, since
this one has asked for the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide


# Of types and constants the gate reads the first two sets that each kernel is launched with.
@pytest.mark.slow
@pytest.mark.parametrize("most", [2, pytest.param(1000, marks=pytest.mark.deep)])
def test_the_compiler_accepts_every_kernel(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    program = Path(__file__).with_name("compile_all.py")
    root = Path(__file__).parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{root / 'tests'}:{root / 'studies'}")
    done = subprocess.run(
        [sys.executable, str(program), str(most)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = set(done.stdout.split())
    assert len(kernels) == 30, sorted(kernels)
