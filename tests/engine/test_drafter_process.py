"""A drafter in a process of its own: the same drafts, and no text lost when it is."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from checks.drafters import GREEDY, SAMPLED, VOCAB, MakeDrafter, check_memory, row
from checks.engine import PROMPT, check_greedy
from doubles.rig import Rig
from doubles.toy_child import NAP_SECONDS, TESTS, command, toy_drafter, toy_options
from doubles.toy_hybrid import ToyHybrid
from outrider.core.budget import Budget
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.errors import CapacityError, DrafterError
from outrider.core.noise import KeyedNoise, Pick
from outrider.core.params import SamplingParams
from outrider.core.protocols import AheadRow, DraftNeeds, DraftRow
from outrider.core.shaping import Shaper
from outrider.drafters.model import ModelDrafter
from outrider.drafters.process.client import Home, ProcessDrafter
from outrider.drafters.process.keeper import Pace
from outrider.drafters.process.options import AheadChoices, ChildOptions
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model, resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals"),
]

TIMEOUT = 2.0
TOY = Home(timeout=TIMEOUT, pace=Pace(first=0.05), command=command("toy"))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Seconds until it held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether the process ended; one that nobody waited for yet counts as well."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except OSError:
        return True


def pid_of(drafter: ProcessDrafter) -> int:
    pid = drafter.stats().pid
    assert pid is not None
    return pid


def serving(drafter: ProcessDrafter) -> bool:
    return drafter.stats().pid is not None


@pytest.fixture(scope="module")
def toys() -> Generator[ProcessDrafter]:
    drafter = ProcessDrafter(toy_options(ahead=True), TOY)
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
    """`inner`, whose process gets a signal before the fourth question."""

    inner: ProcessDrafter
    signal: int
    needs: DraftNeeds = DraftNeeds()  # noqa: RUF009 - frozen
    name: str = "sabotaged"
    num_asked: int = 0

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.inner.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked == 4:
            os.kill(pid_of(self.inner), self.signal)
        return self.inner.propose(rows)

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "no answer within 2 seconds")],
    ids=["killed", "stopped"],
)
def test_a_lost_process_costs_drafts_and_no_text(
    toy: ProcessDrafter, number: int, reason: str
) -> None:
    before, pid = toy.stats(), pid_of(toy)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), Sabotaged(toy, number), chunk=3)
    check_greedy(rig, ToyHybrid, [PROMPT, (0, 0, 0)], 24)
    drafted = [trace.num_drafted for trace in rig.traces]
    assert max(drafted[:4]) > 0
    assert drafted[-1] == 0
    until(lambda: toy.stats().num_ends > before.num_ends, 1.0)
    after = toy.stats()
    assert after.num_unserved > before.num_unserved
    assert reason in after.reasons[-1]
    assert any("lost" in note for note in toy.notes)
    assert gone(pid)
    until(lambda: serving(toy))
    rig = Rig(ToyHybrid(vocab_size=VOCAB), toy, chunk=3)
    check_greedy(rig, ToyHybrid, [PROMPT], 12)
    assert max(trace.num_drafted for trace in rig.traces) > 0


def test_an_end_is_noticed_at_once_and_open_sequences_go_on(toy: ProcessDrafter) -> None:
    text, num_ends = [1, 2, 3], toy.stats().num_ends
    toy.open(0, text)
    first = toy.propose([row(0, text, depth=4)])[0]
    text += [*first.tokens, 2]
    os.kill(pid_of(toy), signal.SIGKILL)
    # Nobody asks it anything meanwhile.
    assert until(lambda: toy.stats().num_ends > num_ends) < 1.0
    assert toy.propose([row(0, text, depth=4)]) == [Draft.empty()]
    until(lambda: serving(toy))
    inside = toy_inside()
    inside.open(0, text)
    assert toy.propose([row(0, text, depth=4)])[0].tokens == (
        inside.propose([row(0, text, depth=4)])[0].tokens
    )
    toy.close(0)


def test_drafting_ahead_is_told_everything_and_not_waited_for(toy: ProcessDrafter) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    text = [1, 2, 3]
    toy.open(0, text)
    draft = toy.propose([row(0, text, depth=3, params=params)])[0]
    began = time.monotonic()
    ahead_before = toy.stats().ahead_seconds
    toy.propose_after(
        [
            AheadRow(
                seq_id=0,
                start=3,
                pending=3,
                draft=draft,
                budget=Budget(2),
                params=params,
                noise_after=lambda count: KeyedNoise(3, 0, 3 + count),
            )
        ]
    )
    assert time.monotonic() - began < NAP_SECONDS / 2
    last = Outcome(0, draft, Verdict((0, 1), 4))
    text += last.tokens
    answer = toy.propose([row(0, text, depth=3, params=params, last=last)])[0]
    assert time.monotonic() - began >= NAP_SECONDS
    # Accepted so far, then what was told ahead: with it the laws, which stayed in the process.
    assert answer.tokens == (2, 3, 3, 2, 3, *draft.tokens)
    assert answer.hit is True
    assert toy.stats().ahead_seconds - ahead_before >= NAP_SECONDS
    toy.close(0)


def test_closing_does_not_wait_for_an_answer(toy: ProcessDrafter) -> None:
    for seq_id in (0, 1):
        toy.open(seq_id, [1])
    toy.propose([row(0, [1], depth=1), row(1, [1], depth=1)])
    os.kill(pid_of(toy), signal.SIGSTOP)
    began = time.monotonic()
    toy.close(0)
    toy.close(1)
    assert time.monotonic() - began < TIMEOUT / 2
    os.kill(pid_of(toy), signal.SIGCONT)
    assert toy.ping()
    assert toy.propose([row(1, [1], depth=1)]) == [Draft.empty()]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("silent", "no answer within"),
        ("garbage", "no message"),
        ("cut", "middle of a message"),
        ("longer", "too many"),
        ("another kind", "PONG where DRAFTS"),
        ("no draft", "0 drafts for 1 rows"),
        ("two drafts", "2 drafts for 1 rows"),
        ("foreign law", "shared memory"),
        ("law across the end", "shared memory"),
        ("no tree", "no tree"),
    ],
)
def test_a_lie_ends_the_process_and_the_round_goes_on(lie: str, reason: str) -> None:
    home = Home(timeout=0.3, pace=Pace(first=60.0), command=command("liar"))
    drafter = ProcessDrafter(toy_options(name=lie), home)
    drafter.wait_ready()
    drafter.open(0, [1])
    assert drafter.propose([row(0, [1], depth=3)]) == [Draft.empty()]
    until(lambda: drafter.stats().num_ends == 1, 1.0)
    assert reason in drafter.stats().reasons[0]
    drafter.shut_down()


@pytest.mark.parametrize(("lie", "kind"), [("fails", DrafterError), ("full", CapacityError)])
def test_errors_inside_are_raised_and_the_process_lives(
    lie: str, kind: type[DrafterError | CapacityError]
) -> None:
    drafter = ProcessDrafter(toy_options(name=lie), replace(TOY, command=command("liar")))
    drafter.wait_ready()
    drafter.open(0, [1])
    for _ in range(2):
        with pytest.raises(kind, match="out of ideas") as caught:
            drafter.propose([row(0, [1], depth=3)])
        assert caught.value.hint == "think again"
    assert drafter.stats().num_ends == 0
    drafter.shut_down()


@pytest.mark.parametrize(("name", "reason"), [("quits", "no such luck"), ("never ready", "ready")])
def test_a_process_that_cannot_start_is_an_error_with_its_reason(name: str, reason: str) -> None:
    pace = Pace(first=60.0, start=1.5 if name == "never ready" else 60.0)
    drafter = ProcessDrafter(
        toy_options(name=name), Home(timeout=1, pace=pace, command=command("liar"))
    )
    with pytest.raises(DrafterError, match=reason) as caught:
        drafter.wait_ready()
    assert "--drafter-home" in str(caught.value.hint)
    assert not serving(drafter)


def test_restarts_come_ever_more_rarely() -> None:
    """Pauses of 0.05, 0.1, 0.2, ... seconds: in one second no more than five."""
    home = Home(timeout=1, pace=Pace(first=0.05), command=(sys.executable, "-S", "-c", "exit(3)"))
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


def shared_names() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()  # noqa: PTH208


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0


def test_nothing_is_left_behind() -> None:
    names, files = shared_names(), num_files()
    for _ in range(2):
        drafter = ProcessDrafter(
            toy_options(name="silent"), replace(TOY, timeout=0.2, command=command("liar"))
        )
        drafter.wait_ready()
        pid = pid_of(drafter)
        assert shared_names() == names
        drafter.open(0, [1])
        drafter.shut_down()
        assert gone(pid)
        assert drafter.propose([row(0, [1], depth=1)]) == [Draft.empty()]
        drafter.close(0)
    del drafter
    gc.collect()
    assert num_files() <= files


def test_the_process_ends_with_its_engine() -> None:
    """Also where the engine is killed, and cannot end anything itself."""
    script = (
        f"import sys; sys.path.insert(0, {TESTS!r})\n"
        "import os, time\n"
        "from doubles.toy_child import command, toy_options\n"
        "from outrider.drafters.process.client import Home, ProcessDrafter\n"
        "drafter = ProcessDrafter(toy_options(), Home(timeout=5, command=command('toy')))\n"
        "drafter.wait_ready()\n"
        "print(drafter.stats().pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, stdout=subprocess.PIPE, timeout=120
    )
    assert done.returncode == -9
    pid = int(done.stdout)
    until(lambda: gone(pid), 5.0)


def draft_model() -> Decoder:
    room = Room(num_slots=2048, page_size=32, max_rows=64, max_logits=48)
    return load_model(resolve("outrider/embedded-draft"), LoadOptions(room=room, threads=1))


def real_inside(model: Decoder) -> ModelDrafter:
    return ModelDrafter(model, model.kernels.argmax, chunk=64, sampling=model.kernels.sampling)


@pytest.fixture(scope="module")
def real() -> Generator[ProcessDrafter]:
    """The embedded draft, drafting ahead, in the process that users get."""
    options = ChildOptions(
        folder=str(resolve("outrider/embedded-draft")),
        vocab_size=draft_model().spec.vocab_size,
        num_laws=16,
        num_slots=1024,
        page_size=32,
        max_rows=64,
        max_logits=48,
        chunk=64,
        threads=1,
        ahead=AheadChoices(k=4, fan_out=8),
    )
    drafter = ProcessDrafter(options, Home(timeout=60.0))
    drafter.wait_ready()
    yield drafter
    drafter.shut_down()


@dataclass(slots=True)
class Request:
    """One sequence, followed by hand. `pick` is what noise in this process draws with."""

    seq_id: int
    text: list[int]
    params: SamplingParams
    pick: Pick
    shaper: Shaper | None = None
    last: Outcome | None = None

    def row(self, depth: int) -> DraftRow:
        noise = self.noise_after(0)
        budget = Budget(depth)
        return DraftRow(
            self.seq_id, list(self.text), self.last, budget, self.params, noise, (), self.shaper
        )

    def noise_after(self, count: int) -> KeyedNoise:
        return KeyedNoise(self.params.seed, 1, len(self.text) + count, self.pick)

    def go_on(self, draft: Draft, num_accepted: int, token: int) -> None:
        self.last = Outcome(self.seq_id, draft, Verdict(tuple(range(num_accepted)), token))
        self.text += self.last.tokens


def requests(pick: Pick) -> list[Request]:
    """Greedy, sampled, and sampled from shaped laws."""
    shaped = SamplingParams(temperature=0.8, repetition_penalty=1.3, logit_bias={7: 3.0}, seed=5)
    prompt = [11, 205, 17, 900, 33, 205, 17]
    return [
        Request(0, [*prompt], SamplingParams(), pick),
        Request(1, [*prompt, 4], SamplingParams(temperature=0.8, top_p=0.95, seed=2**40), pick),
        Request(2, [*prompt], shaped, pick, Shaper(shaped, len(prompt))),
    ]


def assert_equal(left: Draft, right: Draft) -> None:
    """To the bit."""
    assert (left.tokens, left.parents) == (right.tokens, right.parents)
    assert (left.probs_NV is None) == (right.probs_NV is None)
    if left.probs_NV is not None and right.probs_NV is not None:
        assert torch.equal(left.probs_NV, right.probs_NV)


@pytest.mark.weights
def test_drafts_of_the_embedded_model_are_the_same_to_the_bit(real: ProcessDrafter) -> None:
    model, rng = draft_model(), random.Random(1)
    inside = real_inside(model)
    live = requests(model.kernels.sampling.pick)
    for one in live:
        real.open(one.seq_id, one.text)
        inside.open(one.seq_id, one.text)
    for _ in range(6):
        rows = [one.row(rng.randint(1, 4)) for one in live]
        drafts = real.propose(rows)
        for one, draft, wanted in zip(live, drafts, inside.propose(rows), strict=True):
            assert_equal(draft, wanted)
            one.go_on(draft, rng.randint(0, len(draft)), rng.randrange(1000))
    for one in live:
        real.close(one.seq_id)


@pytest.mark.weights
def test_what_is_drafted_ahead_is_what_would_be_drafted_later(real: ProcessDrafter) -> None:
    """The verdict that the draft model itself would give is foreseen."""
    model = draft_model()
    inside = real_inside(model)
    live = requests(model.kernels.sampling.pick)[:2]
    hits: list[bool | None] = []
    for one in live:
        real.open(one.seq_id, one.text)
        inside.open(one.seq_id, one.text)
    drafts = real.propose([one.row(4) for one in live])
    for _ in range(4):
        real.propose_after(
            [
                AheadRow(
                    one.seq_id,
                    len(one.text),
                    one.text[-1],
                    draft,
                    Budget(4),
                    one.params,
                    one.noise_after,
                )
                for one, draft in zip(live, drafts, strict=True)
            ]
        )
        for one, draft in zip(live, drafts, strict=True):
            longer = replace(one.row(4), tokens=[*one.text, *draft.tokens], params=GREEDY)
            following = inside.propose([longer])[0].tokens[0]
            one.go_on(draft, len(draft), following)
        rows = [one.row(4) for one in live]
        drafts = real.propose(rows)
        hits += [draft.hit for draft in drafts]
        for draft, wanted in zip(drafts, inside.propose(rows), strict=True):
            assert_equal(draft, wanted)
    assert all(hits)
    assert real.stats().ahead_seconds > 0
    for one in live:
        real.close(one.seq_id)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.weights
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_flat_over_many_requests(real: ProcessDrafter) -> None:
    """The arena has room for 16 such requests, so a page that is not given back is an error."""
    pids = (os.getpid(), pid_of(real))
    sizes: list[list[int]] = []
    for cycle in range(220):
        text = [cycle % 100, *range(100, 150)]
        real.open(cycle, text)
        params = SamplingParams(temperature=0.8, seed=cycle)
        assert len(real.propose([row(cycle, text, depth=4, params=params)])[0]) == 4
        real.close(cycle)
        if cycle in (20, 219):
            sizes.append([resident_bytes(pid) for pid in pids])
    assert pids[1] == pid_of(real)
    for before, after in zip(*sizes, strict=True):
        assert after - before < 4 << 20
