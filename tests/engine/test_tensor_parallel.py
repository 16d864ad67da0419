"""A target among processes: the same tokens as in one, and nothing left behind whatever ends."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checks.faults import until
from doubles.bell import Bell
from doubles.child_programs import all_gone
from doubles.kinds import close_to, stored
from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.parallel import comm as torch_comm
from outrider.plugins.parallel import sharded
from outrider.plugins.parallel.comm import RankError
from outrider.plugins.parallel.meeting import Meeting
from outrider.plugins.parallel.ranks import RankGroup
from outrider.plugins.parallel.sharded import ShardedLM, load_sharded

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.wide, pytest.mark.slow]

PROMPTS = [
    "def quicksort(items):",
    "def fibonacci(n):\n    ",
    "import json\n\nclass Reader:",
    "for i in range(",
    "The capital of France is",
    "Once upon a time, there was",
    "Question: What is 3 plus 4?\nAnswer:",
    "If a train travels 60 miles in",
    "Hello! How are you",
    "User: Tell me about the sea.\nAssistant:",
    "return sorted(",
    "A",
]
GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
OPTIONS = LoadOptions(capacity=ModelCapacity(num_slots=512, page_size=8), device="cpu")
MEETING = functools.partial(Meeting.on, torch.device("cpu"), 2, native=False)
TWO = EngineConfig(dtype="float32", tensor_parallel=2, context=512)


# How long rank 0 waits for another one in a pass.
PATIENCE_SECONDS = {"none": 4.0, "model": 60.0, "ngram": 60.0}


def target_of(llm: LLM) -> ShardedLM:
    target = llm.models["target"]
    assert isinstance(target, ShardedLM)
    return target


@pytest.mark.weights
@pytest.mark.parametrize(
    ("drafter", "schedule"), [("none", "single"), ("model", "ssd"), ("ngram", "pdv")]
)
def test_text_is_that_of_one_process(
    drafter: str,
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then one way of three in which such an LLM may end."""
    monkeypatch.setattr(torch_comm, "SILENCE_SECONDS", PATIENCE_SECONDS[drafter])
    monkeypatch.setattr(sharded, "SILENT_SECONDS", 60.0)
    config = replace(TWO, drafter=drafter, schedule=schedule)
    caplog.set_level(logging.INFO)
    split, whole = LLM(config=config), LLM(config=replace(config, tensor_parallel=1))
    for params in (GREEDY, SAMPLED):
        wanted = [result.token_ids for result in whole.generate(PROMPTS, params)]
        assert [result.token_ids for result in split.generate(PROMPTS, params)] == wanted
    assert split.exact
    # Rounds of the one are native calls where those of the other are.
    assert caplog.text.count("stage by stage") in (0, 2)
    check_logits(split, whole)
    {"none": check_hang, "model": check_close, "ngram": check_loss}[drafter](split, whole)
    processes = target_of(split).process_ids
    del split
    gc.collect()
    assert all_gone(processes)


def check_logits(split: LLM, whole: LLM) -> None:
    rows = [StepRow.chain(-1, range(5, 200), logits_from=192), StepRow.chain(-2, range(30, 34))]
    logits: list[Tensor] = []
    for llm in (split, whole):
        model = llm.models["target"]
        assert isinstance(model, LlamaModel | ShardedLM)
        for row in rows:
            model.state.open(row.seq_id, ())
        logits.append(model.step(rows, DraftNeeds()).logits_MV.clone())
    got, wanted = logits
    assert float((got - wanted).abs().max()) < 1e-4


def check_hang(split: LLM, whole: LLM) -> None:
    """A rank that was stopped is not waited for for ever."""
    del whole
    (process_id,) = target_of(split).process_ids
    os.kill(process_id, signal.SIGSTOP)
    with pytest.raises(RankError, match="a pass failed"):
        split.generate(PROMPTS[1], GREEDY)
    assert all_gone([process_id], seconds=0.0)


def check_close(split: LLM, whole: LLM) -> None:
    """A reader that leaves early gives memory back; an LLM that is closed, its processes."""
    del whole
    num_free = split.free_tokens
    stream = split.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert split.free_tokens == num_free
    split.close()
    assert all_gone(target_of(split).process_ids, seconds=0.0)
    with pytest.raises(RankError, match="ended when it was closed"):
        split.generate(PROMPTS[0], GREEDY)


def check_loss(split: LLM, whole: LLM) -> None:
    """A rank that was killed is named within seconds, and from then on."""
    del whole
    (process_id,) = target_of(split).process_ids
    stream = split.stream(PROMPTS[1], GREEDY)
    next(stream)
    os.kill(process_id, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankError, match=rf"rank 1 \(process {process_id}\) was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - began < 10
    for _ in range(2):
        with pytest.raises(RankError, match="was killed by SIGKILL") as caught:
            split.generate(PROMPTS[0], GREEDY)
        assert caught.value.hint is not None


@pytest.fixture(scope="module")
def others() -> set[str]:
    """Sockets that other tests have left in this process."""
    return inet_sockets("self")


@pytest.fixture(scope="module")
def shared(others: set[str]) -> Iterator[ShardedLM]:
    """A tiny target of two processes for what needs no text."""
    del others
    model = load_sharded(stored("qwen2", 0), OPTIONS, size=2)
    yield model
    processes = model.process_ids
    model.close()
    assert all_gone(processes, seconds=0.0)
    model.state.open(1, ())
    with pytest.raises(RankError, match="ended when it was closed"):
        model.step([StepRow.chain(1, (1,))], DraftNeeds())


def inet_sockets(process_id: int | str) -> set[str]:
    """Inodes of the sockets of a process that any address family of the internet has. Empty where
    the machine does not say."""
    if not Path("/proc/self/net").exists():
        return set()
    held: set[str] = set()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.add(str(link.readlink()))
    found: set[str] = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{process_id}/net/{name}").read_text().splitlines()[1:]
        found |= {f"socket:[{line.split()[9]}]" for line in lines}
    return held & found


on_linux = pytest.mark.skipif(not Path("/proc/self/net").exists(), reason="asks Linux for sockets")


def check_no_ports(model: ShardedLM, before: set[str]) -> None:
    # What other tests left in this process may ask somebody meanwhile, for a moment.
    until(lambda: inet_sockets("self") <= before)
    for process_id in model.process_ids:
        assert not inet_sockets(process_id)


@on_linux
def test_no_rank_has_a_port(shared: ShardedLM, others: set[str]) -> None:
    shared.state.open(1, ())
    shared.step([StepRow.chain(1, (1, 2, 3))], DraftNeeds())
    shared.state.close(1)
    before = inet_sockets("self")
    with socket.create_server(("127.0.0.1", 0)):
        assert inet_sockets("self") - before
    check_no_ports(shared, others)


@on_linux
def test_without_native_kernels_ranks_speak_through_sockets_without_a_port() -> None:
    before = inet_sockets("self")
    options = replace(OPTIONS, force_reference=True)
    whole, model = (
        load_model(stored("qwen2", 0), options),
        load_sharded(stored("qwen2", 0), options, size=2),
    )
    for one in (whole, model):
        one.state.open(0, ())
    row = StepRow.chain(0, range(60))
    close_to(*(one.step([row], DraftNeeds()).logits_MV for one in (model, whole)))
    check_no_ports(model, before)
    model.close()


def test_logits_agree_with_grouped_heads(shared: ShardedLM) -> None:
    whole = load_model(stored("qwen2", 0), OPTIONS)
    row = StepRow.chain(0, range(60))
    for model in (whole, shared):
        model.state.open(0, ())
    close_to(*(model.step([row], DraftNeeds()).logits_MV for model in (shared, whole)))
    shared.state.close(0)


@pytest.mark.alone
def test_an_interrupt_leaves_the_ranks_together(shared: ShardedLM) -> None:
    """As a user's Ctrl-C, which may fall anywhere into a pass."""
    shared.state.open(7, ())
    shared.step([StepRow.chain(7, range(40))], DraftNeeds())
    shared.state.commit({7: range(40)})
    probe = StepRow.chain(7, (3, 5))
    wanted = shared.step([probe], DraftNeeds()).logits_MV.clone()
    shared.state.commit({7: ()})
    bell = Bell(KeyboardInterrupt, once=True)
    previous = signal.signal(signal.SIGALRM, bell.ring)
    try:
        for delay_ms in range(0, 12, 2):
            try:
                bell.armed = True
                signal.setitimer(signal.ITIMER_REAL, (delay_ms + 0.1) / 1000)
                while True:
                    shared.step([StepRow.chain(7, (1,))], DraftNeeds())
                    shared.state.commit({7: ()})
            except KeyboardInterrupt:
                shared.state.commit({7: ()})
            close_to(shared.step([probe], DraftNeeds()).logits_MV, wanted)
            shared.state.commit({7: ()})
    finally:
        bell.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    shared.state.close(7)


SCRIPT = """
import os, sys, tempfile
from pathlib import Path
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.decoder import LoadOptions
from outrider.plugins.parallel.sharded import load_sharded
tempfile.tempdir = sys.argv[3]
options = LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu")
model = load_sharded(Path(sys.argv[1]), options, size=2)
print(*model.process_ids, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


def test_followers_end_with_the_leader(tmp_path: Path) -> None:
    """And leave no file, not even if the leader is killed."""
    folder = str(stored("llama2", 0))
    leaders = {
        ending: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, folder, ending, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ending in ("ended", "killed")
    }
    for ending, leader in leaders.items():
        printed, complaints = leader.communicate(timeout=120)
        assert leader.returncode == {"ended": 0, "killed": -signal.SIGKILL}[ending], complaints
        assert all_gone([int(word) for word in printed.split()])
        assert not complaints
    assert not [path for path in tmp_path.rglob("*") if "ranks" in path.name]
    assert not list(Path("/dev/shm").glob("*outrider*"))


def test_a_follower_that_cannot_start_says_why() -> None:
    ranks = RankGroup("outrider.plugins.parallel.ranks", MEETING(), {"folder": "/nowhere"})
    with pytest.raises(RankError, match="KeyError"):
        ranks.hear("here")
    assert all_gone(ranks.process_ids)


def test_a_follower_that_says_nothing_is_not_waited_for() -> None:
    # This one of Python's reads to the end of its pipe before it says anything.
    ranks = RankGroup("json.tool", MEETING(), {})
    with pytest.raises(RankError, match=r"rank 1 did not report 'here' within 0\.2 s"):
        ranks.hear("here", 0.2)
    assert all_gone(ranks.process_ids)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (functools.partial(LLM, config=replace(TWO, tensor_parallel=4)), "2 key/value heads"),
        (functools.partial(LLM, config=replace(TWO, quantise="int8")), "quantised"),
        (lambda: EngineConfig(tensor_parallel=0), "tensor_parallel"),
    ],
)
@pytest.mark.weights
def test_bad_wishes_are_refused_before_anything_starts(
    make: Callable[[], object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make()
    assert caught.value.exit_code == 2
