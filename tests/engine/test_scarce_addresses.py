"""Little address space left, while loading and while generating: an error of capacity, no end of
the process, and the right text once there is memory again.

A process of its own has the limit, and lifts it between steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from doubles.child_programs import TESTS

pytestmark = [
    pytest.mark.wide,
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc"),
]

PROGRAM = """
import json, resource, sys
from contextlib import contextmanager
from outrider import LLM

SOFT, HARD = resource.getrlimit(resource.RLIMIT_AS)

@contextmanager
def left(megabytes):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(megabytes * 2**20), HARD))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (SOFT, HARD))

def ended(call):
    try:
        call()
    except Exception as error:
        planned = " with the plan" if "weights of the target" in str(error) else ""
        return type(error).__name__ + planned
    return "nothing"

llm = LLM(batch_size=4, arena_tokens=2048)
wanted = [one.text for one in llm.generate(["def f(x):" * 8, "x = 1"], max_tokens=16)]
free, found = llm.free_tokens, {}
prompts = [f"def f{i}(x): return {i}" * 8 for i in range(6)]
for megabytes in (0.1, 1.5, 8, 40):
    with left(megabytes):
        loading = ended(lambda: LLM(batch_size=4, arena_tokens=2048))
        running = ended(lambda: llm.generate(prompts, max_tokens=16))
        schema = {"type": "object", "required": [str(megabytes)]}
        masked = ended(lambda: llm.generate("x", max_tokens=8, schema=schema))
    again = [one.text for one in llm.generate(["def f(x):" * 8, "x = 1"], max_tokens=16)]
    found[megabytes] = loading, running, masked, again == wanted, llm.free_tokens == free
print(json.dumps(found))
"""


def test_little_address_space_ends_no_process() -> None:
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {TESTS!r})\n{PROGRAM}"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    assert len(found) == 4
    for megabytes, (loading, running, masked, same_text, same_room) in found.items():
        # What is planned is known before much is read.
        planned = " with the plan" if float(megabytes) >= 40 else ""
        assert loading == f"CapacityError{planned}", (megabytes, child.stderr[-2000:])
        assert masked == "CapacityError", (megabytes, child.stderr[-2000:])
        assert running in ("CapacityError", "nothing"), megabytes
        assert same_text, megabytes
        assert same_room, megabytes
    assert found["0.1"][1] == "CapacityError"
