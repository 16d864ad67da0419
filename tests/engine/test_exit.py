"""A process may end while a lane's thread runs a model: it waits for that, and for nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.wide]

# The end of the process comes while `BUSY` seconds of matrix products run in a lane, whose engine
# is gone by then or not.
SCRIPT = """
import atexit, sys, time
import torch
from outrider.engine.lanes import LaneWork
from outrider.plugins.lanes.threads import ThreadLanes

def call(task):
    task.append("began")
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        torch.mm(matrix, matrix)
    task.append("done")
    return LaneWork()

matrix, task = torch.ones(64, 64), []
lanes = ThreadLanes({"draft": call}, lambda number: None, {})
atexit.register(lambda: print(*task, time.monotonic() - ended < 4))
lanes.start("draft", task)
while not task:
    time.sleep(0.001)
if sys.argv[2] == "dropped":
    del lanes
ended = time.monotonic()
raise SystemExit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("busy", "how", "code"),
    [("0.4", "kept", 0), ("0.4", "dropped", 7), ("0", "kept", 0)],
)
def test_the_process_ends_after_its_lanes(busy: str, how: str, code: int) -> None:
    command = [sys.executable, "-c", SCRIPT, busy, how, str(code)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (code, "began done True\n", "")
