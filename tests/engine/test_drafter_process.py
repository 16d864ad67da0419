"""A drafter in a process of its own: the same drafts, and no text lost when it is."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from checks.engine import PROMPT, check_greedy
from checks.faults import gone, pid_of, serving, until
from doubles.child_programs import PAGED, TOY, command, toy_options
from doubles.rig import Rig
from doubles.toy_child import NAP_SECONDS, toy_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.cache.pages import salted
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.params import SamplingParams
from outrider.core.protocols import AheadRow, DraftNeeds, DraftRow
from outrider.core.rng import KeyedRng
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.plugins.lanes.process.client import Home, ProcessDrafter
from outrider.plugins.lanes.process.worker import RestartBackoff
from outrider.plugins.proof.reports import SAMPLED, MakeDrafter
from outrider.testing import GREEDY, VOCAB, check_memory, row

pytestmark = [
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.wide,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals"),
]

TIMEOUT = 2.0
HOME = Home(timeout=TIMEOUT, pace=RestartBackoff(first=0.05), command=command(TOY))


@pytest.fixture(scope="module")
def toys() -> Generator[ProcessDrafter]:
    drafter = ProcessDrafter(toy_options(ahead=True), HOME)
    drafter.wait_ready()
    yield drafter
    drafter.shut_down()


@pytest.fixture
def toy(toys: ProcessDrafter) -> ProcessDrafter:
    """The same process for all tests, started again if a test before ended it."""
    until(lambda: serving(toys))
    return toys


def toy_inside() -> ModelDrafter:
    return toy_drafter(toy_options())


def first_of(drafter: ProcessDrafter) -> MakeDrafter:
    """Gives `drafter`, then ones inside this process to compare it with."""
    made = itertools.chain([drafter], iter(toy_inside, None))
    return lambda: next(made)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_any_history_gives_the_drafts_of_a_drafter_inside(
    toy: ProcessDrafter, params: SamplingParams
) -> None:
    check_memory(first_of(toy), params)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_run_with_it_as_with_one_inside(toy: ProcessDrafter, temperature: float) -> None:
    prompts = [PROMPT, (0, 0, 0), (4,)]
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=4)
    runs: list[tuple[list[list[int]], list[tuple[int, int]]]] = []
    for drafter in (toy, toy_inside()):
        rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, chunk=3)
        outputs = rig.outputs(prompts, params)
        runs.append((outputs, [(t.num_drafted, t.num_accepted) for t in rig.traces]))
    assert runs[0] == runs[1]


@dataclass(slots=True)
class Sabotaged:
    """`inner`, to whose process `harm` is done before the fourth question."""

    inner: ProcessDrafter
    harm: Callable[[], None]
    name: str = "sabotaged"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    num_asked: int = 0

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.inner.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked == 4:
            self.harm()
        return self.inner.propose(rows)

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)


def test_a_process_shares_pages_of_the_same_salt_alone() -> None:
    """The salt of a request goes with it, and with what a later process is sent again."""
    drafter = ProcessDrafter(toy_options(), replace(HOME, command=command(PAGED)))
    drafter.wait_ready()
    text, known = [1, 2, 3, 4] * 3, list[int]()

    def ask(seq_id: int) -> None:
        known.append(drafter.propose([row(seq_id, text, depth=1)])[0].tokens[0])

    for seq_id, salt in enumerate(("", "mine", "yours", "mine", "\ud800", "\ud801", "")):
        with salted(salt):
            drafter.open(seq_id, text)
        ask(seq_id)
    assert known == [0, 0, 0, 3, 0, 0, 3]
    os.kill(pid_of(drafter), signal.SIGKILL)
    assert until(lambda: drafter.stats().num_starts > 1 and serving(drafter)) < TIMEOUT
    known.clear()
    for seq_id in (1, 2, 3, 0):
        ask(seq_id)
    assert known == [0, 0, 3, 0]
    drafter.shut_down()


@pytest.mark.sample(1)
@pytest.mark.parametrize("harm", ["killed", "stopped"])
def test_a_lost_process_costs_drafts_and_no_text(toy: ProcessDrafter, harm: str) -> None:
    """A sequence that was open before is drafted for again by the next process."""
    before, pid = toy.stats(), pid_of(toy)
    text = [1, 2, 3]
    toy.open(100, text)
    text += [*toy.propose([row(100, text, depth=4)])[0].tokens, 2]

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        # Nobody asks it anything meanwhile.
        until(lambda: toy.stats().num_ends > before.num_ends)

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)

    rig = Rig(ToyHybrid(vocab_size=VOCAB), Sabotaged(toy, kill if harm == "killed" else stop))
    check_greedy(rig, ToyHybrid, [PROMPT, (0, 0, 0)], 24)
    drafted = [trace.num_drafted for trace in rig.traces]
    assert max(drafted) > 0
    assert drafted[-1] == 0
    until(lambda: toy.stats().num_ends > before.num_ends)
    after = toy.stats()
    assert after.num_unserved > before.num_unserved
    reason = "signal 9" if harm == "killed" else "no answer within 1.6 seconds"
    assert reason in after.reasons[-1]
    assert any("lost" in note for note in toy.notes)
    assert gone(pid)
    until(lambda: serving(toy))
    inside = toy_inside()
    inside.open(100, text)
    asked = [row(100, text, depth=4)]
    assert toy.propose(asked)[0].tokens == inside.propose(asked)[0].tokens
    toy.close(100)


def test_drafting_ahead_is_told_everything_and_not_waited_for(toy: ProcessDrafter) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    text = [1, 2, 3]
    toy.open(0, text)
    draft = toy.propose([row(0, text, depth=3, params=params)])[0]
    ahead_before, pid = toy.stats().ahead_seconds, pid_of(toy)
    # Who waited for its answer would end it.
    os.kill(pid, signal.SIGSTOP)
    toy.propose_after(
        [
            AheadRow(
                seq_id=0,
                start=3,
                pending=3,
                draft=draft,
                budget=Budget(2),
                params=params,
                rng_after=lambda count: KeyedRng(3, 0, 3 + count),
            )
        ]
    )
    os.kill(pid, signal.SIGCONT)
    began = time.monotonic()
    last = Outcome(0, draft, Verdict((0, 1), 4))
    text += last.tokens
    answer = toy.propose([row(0, text, depth=3, params=params, last=last)])[0]
    assert time.monotonic() - began >= NAP_SECONDS
    assert pid_of(toy) == pid
    # Accepted so far, then what was told ahead: with it the distributions, which stayed in the
    # process.
    assert answer.tokens == (2, 3, 3, 2, 3, *draft.tokens)
    assert answer.hit is True
    assert toy.stats().ahead_seconds - ahead_before >= NAP_SECONDS
    toy.close(0)


def test_closing_does_not_wait_for_an_answer(toy: ProcessDrafter) -> None:
    for seq_id in (0, 1):
        toy.open(seq_id, [1])
    toy.propose([row(0, [1], depth=1), row(1, [1], depth=1)])
    pid = pid_of(toy)
    # Who waited for its answer would end it.
    os.kill(pid, signal.SIGSTOP)
    toy.close(0)
    toy.close(1)
    os.kill(pid, signal.SIGCONT)
    toy.open(2, [1])
    assert [len(draft) for draft in toy.propose([row(2, [1], depth=1)])] == [1]
    assert toy.propose([row(1, [1], depth=1)]) == [Draft.empty()]
