"""A process of a shared model that is stopped, not ended: the others neither hang nor give up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from doubles.child_programs import all_gone
from doubles.kinds import stored
from outrider.core.errors import MachineError, given
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.plugins.parallel import sharded
from outrider.plugins.parallel.sharded import ShardedLM, load_sharded

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.wide, pytest.mark.slow]

OPTIONS = LoadOptions(capacity=ModelCapacity(num_slots=512, page_size=8), device="cpu")


def run_a_pass(model: ShardedLM) -> None:
    model.state.open(0, ())
    model.step([StepRow.chain(0, (1, 2, 3))], DraftNeeds())


def send_more_than_is_held_on_the_way(model: ShardedLM) -> None:
    tell = given(model.state.on_copy, "what ranks are told by")
    tell(range(100_000), range(100_000))
    run_a_pass(model)


CALLS: dict[str, Callable[[ShardedLM], None]] = {
    "a pass": run_a_pass,
    "a message": send_more_than_is_held_on_the_way,
}


@pytest.mark.parametrize("during", ["a pass", "a message"])
def test_a_stopped_follower_is_given_up_within_seconds(
    during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "SILENT_SECONDS", 2.0)
    model = load_sharded(stored("llama2", 0), OPTIONS, size=2)
    (process_id,) = model.process_ids
    os.kill(process_id, signal.SIGSTOP)
    began = time.monotonic()
    stopped = rf"rank 1 \(process {process_id}\) is stopped or hangs"
    with pytest.raises(MachineError, match=stopped) as caught:
        CALLS[during](model)
    # A user's waits 8 s; a minute was the time of a pass before.
    assert time.monotonic() - began < 30
    assert caught.value.hint is not None
    assert all_gone([process_id])
    with pytest.raises(MachineError, match=stopped):
        model.step([StepRow.chain(0, (4,))], DraftNeeds())


def test_a_follower_that_is_killed_in_a_pass_is_named_at_once() -> None:
    model = load_sharded(stored("llama2", 0), OPTIONS, size=2)
    (process_id,) = model.process_ids
    os.kill(process_id, signal.SIGSTOP)
    model.state.open(0, ())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(model.step, [StepRow.chain(0, (1, 2, 3))], DraftNeeds())
        # It waits for its peer; that a moment was too short for that is no failure.
        wait([running], 0.3)
        assert not running.done()
        began = time.monotonic()
        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(MachineError, match=rf"process {process_id}\) was killed by SIGKILL"):
            running.result()
    # Not the 8 s of one that is silent.
    assert time.monotonic() - began < 6


LEADER = """
import os, sys, time
from pathlib import Path
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import ModelCapacity
from outrider.models.decoder import LoadOptions
from outrider.plugins.parallel import sharded

sharded.SILENT_SECONDS = 2.0
options = LoadOptions(capacity=ModelCapacity(num_slots=512, page_size=8), device="cpu")
model = sharded.load_sharded(Path(sys.argv[1]), options, size=2)
print("loaded", flush=True)
sys.stdin.readline()
model.state.open(0, ())
model.step([StepRow.chain(0, (1, 2, 3))], DraftNeeds())
print("done", flush=True)
"""


def test_a_leader_that_was_stopped_goes_on() -> None:
    """In a group of its own: Linux hangs up on a group that has a stopped process and loses its
    last parent outside, as that of a suite without a terminal does."""
    command = [sys.executable, "-c", LEADER, str(stored("llama2", 0))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        assert leader.stdout.readline() == "loaded\n"
        leader.send_signal(signal.SIGSTOP)
        time.sleep(4)
        leader.send_signal(signal.SIGCONT)
        leader.stdin.write("\n")
        leader.stdin.flush()
        assert leader.stdout.readline() == "done\n"
