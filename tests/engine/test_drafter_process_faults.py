"""A drafter's process that lies, cannot start, or is left alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from checks.faults import gone, pid_of, until
from doubles.child_programs import LIAR, LIAR_IN_MEMORY, TESTS, command, toy_options
from outrider.core import env
from outrider.core.draft import Draft
from outrider.core.errors import CapacityError, DrafterError, MachineError
from outrider.kernels.native.build import built_kernels
from outrider.plugins.lanes.process import worker
from outrider.plugins.lanes.process.client import Home, ProcessDrafter
from outrider.plugins.lanes.process.shared import MemoryPipe, SharedProbs
from outrider.plugins.lanes.process.worker import RestartBackoff, WorkerLine
from outrider.testing import row

pytestmark = [
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.wide,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals"),
]

HOME = Home(timeout=5.0, pace=RestartBackoff(first=60.0), command=command(LIAR))
IN_MEMORY = replace(HOME, command=command(LIAR_IN_MEMORY))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("silent", "no answer within"),
        ("garbage", "an invalid message"),
        ("cut", "middle of a message"),
        ("longer", "too many"),
        ("another kind", "HELLO instead of DRAFTS"),
        ("no draft", "0 drafts for 1 rows"),
        ("two drafts", "2 drafts for 1 rows"),
        ("foreign distribution", "shared memory"),
        ("distribution across the end", "shared memory"),
        ("no tree", "no tree"),
    ],
)
def test_a_lie_ends_the_process_and_the_round_goes_on(lie: str, reason: str) -> None:
    drafter = ProcessDrafter(toy_options(name=lie), replace(HOME, timeout=0.5))
    drafter.wait_ready()
    drafter.open(0, [1])
    assert drafter.propose([row(0, [1], depth=3)]) == [Draft.empty()]
    until(lambda: drafter.stats().num_ends == 1)
    assert reason in drafter.stats().reasons[0]
    drafter.shut_down()


@pytest.mark.parametrize(("lie", "kind"), [("fails", DrafterError), ("full", CapacityError)])
def test_errors_inside_are_raised_and_the_process_lives(
    lie: str, kind: type[DrafterError | CapacityError]
) -> None:
    drafter = ProcessDrafter(toy_options(name=lie), HOME)
    drafter.wait_ready()
    drafter.open(0, [1])
    for _ in range(2):
        with pytest.raises(kind, match="out of ideas") as caught:
            drafter.propose([row(0, [1], depth=3)])
        assert caught.value.hint == "think again"
    assert drafter.stats().num_ends == 0
    drafter.shut_down()


@pytest.mark.parametrize(
    ("name", "reason"), [("quits", "no such luck"), ("never ready", "ready within")]
)
def test_a_process_that_cannot_start_is_an_error_with_its_reason(name: str, reason: str) -> None:
    pace = RestartBackoff(first=60.0, start=1.5 if name == "never ready" else 60.0)
    drafter = ProcessDrafter(toy_options(name=name), replace(HOME, pace=pace))
    with pytest.raises(DrafterError, match=reason) as caught:
        drafter.wait_ready()
    assert "--drafter-home" in str(caught.value.hint)
    assert drafter.stats().pid is None


def test_restarts_come_ever_more_rarely() -> None:
    """Pauses of 0.05, 0.1, 0.2, ... seconds: in one second no more than five."""
    home = Home(
        timeout=1,
        pace=RestartBackoff(first=0.05),
        command=(sys.executable, "-I", "-c", "import sys; sys.exit(3)"),
    )
    drafter = ProcessDrafter(toy_options(), home)
    until(lambda: drafter.stats().num_ends > 0)
    began, before = time.monotonic(), drafter.stats().num_ends
    until(lambda: time.monotonic() - began > 1.0)
    num_ends = drafter.stats().num_ends - before
    assert 1 <= num_ends <= 5
    assert "exit code 3" in drafter.stats().reasons[-1]
    drafter.shut_down()
    num_ends = drafter.stats().num_ends
    time.sleep(0.1)
    assert drafter.stats().num_ends == num_ends


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("failed", ["anonymous_file", "message_memory", "SharedProbs"])
def test_no_memory_is_a_start_that_failed_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    def refuse(*_: object) -> int:
        raise MachineError("there is no memory to share", hint="end something")

    with monkeypatch.context() as patch:
        if failed == "SharedProbs":
            patch.setattr(SharedProbs, "over", refuse)
        else:
            patch.setattr(worker, failed, refuse)
        with pytest.raises(DrafterError, match="no memory to share") as caught:
            ProcessDrafter(toy_options(name="silent"), HOME).wait_ready()
        assert caught.value.hint == "end something"
        gc.collect()
        files = num_files()
        home = replace(HOME, pace=RestartBackoff(first=0.01, longest=0.01))
        drafter = ProcessDrafter(toy_options(name="silent"), home)
        until(lambda: drafter.stats().num_ends > 9)
        gc.collect()
        # A launch may be under way: both ends of its line, what is written, and the memory.
        assert num_files() <= files + 5
    until(lambda: drafter.stats().pid is not None)
    drafter.shut_down()


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    ("lie", "reason"),
    [("garbage", "an invalid message"), ("foreign distribution", "shared memory")],
)
def test_a_lie_over_memory_ends_the_process_too(lie: str, reason: str) -> None:
    drafter = ProcessDrafter(toy_options(name=lie), IN_MEMORY)
    drafter.wait_ready()
    drafter.open(0, [1])
    assert drafter.propose([row(0, [1], depth=3)]) == [Draft.empty()]
    until(lambda: drafter.stats().num_ends == 1)
    assert reason in drafter.stats().reasons[0]
    drafter.shut_down()


@pytest.mark.usefixtures("native_library")
def test_who_dies_in_the_middle_of_a_message_over_memory_is_heard_of_at_once() -> None:
    """Memory itself tells nobody."""
    drafter = ProcessDrafter(toy_options(name="cut"), IN_MEMORY)
    drafter.wait_ready()
    drafter.open(0, [1])
    assert drafter.propose([row(0, [1], depth=3)]) == [Draft.empty()]
    until(lambda: drafter.stats().num_ends == 1)
    assert "no answer" not in drafter.stats().reasons[0]
    drafter.shut_down()


def line_of(drafter: ProcessDrafter) -> WorkerLine:
    line = drafter._keeper.line  # pyright: ignore[reportPrivateUsage]
    assert line is not None
    return line


def uses_memory(line: WorkerLine) -> bool:
    return isinstance(line._pipe, MemoryPipe)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.sample(2)
@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    ("program", "reference", "expected"),
    [(LIAR_IN_MEMORY, False, True), (LIAR_IN_MEMORY, True, False), (LIAR, False, False)],
)
def test_messages_go_through_memory_where_both_can(
    program: str, reference: bool, expected: bool
) -> None:
    options = replace(toy_options(name="silent"), force_reference=reference)
    drafter = ProcessDrafter(options, replace(HOME, command=command(program)))
    drafter.wait_ready()
    assert uses_memory(line_of(drafter)) is expected
    drafter.shut_down()


def shared_memories() -> int:
    """How many this process maps. They have no name in any folder that could outlive it."""
    return Path("/proc/self/maps").read_text().count("memfd:outrider-")


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("reference", [False, True])
def test_nothing_is_left_behind(reference: bool) -> None:
    has_kernels = built_kernels(env.compiler(), env.cache_folder()).library is not None
    gc.collect()
    files, memories = num_files(), shared_memories()
    options = replace(toy_options(name="silent"), force_reference=reference)
    drafter = ProcessDrafter(options, HOME)
    drafter.wait_ready()
    pid = pid_of(drafter)
    # For distributions, and for messages.
    assert shared_memories() == memories + (2 if has_kernels and not reference else 1)
    drafter.open(0, [1])
    drafter.shut_down()
    drafter.shut_down()
    assert gone(pid)
    assert drafter.propose([row(0, [1], depth=1)]) == [Draft.empty()]
    drafter.close(0)
    drafter.open(0, [1])
    assert pid_of(drafter) != pid
    drafter.shut_down()
    del drafter
    gc.collect()
    assert (num_files(), shared_memories()) == (files, memories)


def test_a_drafter_that_nobody_holds_takes_its_process_along() -> None:
    drafter = ProcessDrafter(toy_options(name="silent"), HOME)
    drafter.wait_ready()
    pid = pid_of(drafter)
    del drafter
    gc.collect()
    assert gone(pid)


def test_the_process_ends_with_its_engine() -> None:
    """Also where the engine is killed, and cannot end anything itself."""
    script = (
        f"import sys; sys.path.insert(0, {TESTS!r})\n"
        "import os\n"
        "from doubles.child_programs import TOY, command, toy_options\n"
        "from outrider.plugins.lanes.process.client import Home, ProcessDrafter\n"
        "drafter = ProcessDrafter(toy_options(), Home(timeout=5, command=command(TOY)))\n"
        "drafter.wait_ready()\n"
        "print(drafter.stats().pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, stdout=subprocess.PIPE, timeout=120
    )
    assert done.returncode == -9
    pid = int(done.stdout)
    until(lambda: gone(pid))
