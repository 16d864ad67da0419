"""What learning costs: members that are wrong lose little time against plain decoding, for ever.

A simulated machine: a pass takes 1 and 0.04 for each row after the first, a member's pass its
share. The shipped controller and portfolio decide; nobody's time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from doubles.clocks import FakeClock
from outrider.control.leads import Leads
from outrider.control.scored import ScoredController
from outrider.core.draft import Draft, Outcome, RoundTrace, Verdict
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.tree import ROOT
from outrider.drafters.common.context import ScoredDraft
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.estimate.cost import FIRST_LOSS, LOSS_SHARE, ROW_COST, Allowance
from outrider.testing import row

K, NODES = 8, 12
PROMPT = 400
# Rounds after which at most 2 % of the time may have been lost.
STATED = 1500
Right = Callable[[int], int]


@dataclass(slots=True)
class Boast:
    """Offers tokens that are right up to `right(position)` of them, and calls them all likely."""

    right: Right
    name: str = "boast"
    needs: DraftNeeds = field(default_factory=DraftNeeds)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        kept = tuple(0.9**place for place in range(1, 5))
        return [ScoredDraft(drafted(one, 4, self.right), kept[: one.budget.depth]) for one in rows]

    def close(self, seq_id: int) -> None: ...


def truth(position: int) -> int:
    return 1 + 7 * position % 1009


def drafted(asked: DraftRow, depth: int, right: Right) -> tuple[int, ...]:
    start, depth = len(asked.tokens), min(depth, asked.budget.depth)
    count = right(start)
    return tuple(truth(start + i) if i < count else 5000 + i for i in range(depth))


@dataclass(slots=True)
class Slow:
    """A model whose pass takes `share`, and the reading of a token `reading`; the next draft is
    `stopped` for so long."""

    clock: FakeClock
    right: Right
    share: float
    reading: float = 0.0
    name: str = "model"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    read: dict[int, int] = field(default_factory=dict[int, int])
    seconds: float = 0.0
    stopped: float = 0.0

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        del prompt
        self.read[seq_id] = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        unread = sum(len(one.tokens) - self.read[one.seq_id] for one in rows)
        took = self.share * max(one.budget.depth for one in rows) + self.reading * unread
        took, self.stopped = took + self.stopped, 0.0
        self.clock.advance(took)
        self.seconds += took
        self.read |= {one.seq_id: len(one.tokens) for one in rows}
        return [Draft.chain(drafted(one, one.budget.depth, self.right)) for one in rows]

    def close(self, seq_id: int) -> None: ...


@dataclass(slots=True)
class Machine:
    """Runs a batch round by round; `plain` is the time in which plain decoding writes as much."""

    batch: int
    models: Sequence[Slow]
    lookups: Sequence[Boast]
    clock: FakeClock
    prompt: int = PROMPT
    depth: int = K
    plain: float = 0.0
    last: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])
    portfolio: PortfolioDrafter = field(init=False)
    leads: Leads = field(init=False)
    controller: ScoredController = field(init=False)

    def __post_init__(self) -> None:
        self.leads = Leads([one.name for one in self.models], k=self.depth)
        self.portfolio = PortfolioDrafter(self.lookups, *self.models, leads=self.leads)
        self.controller = ScoredController(k=self.depth, num_nodes=NODES)

    def run(self, num_rounds: int, *, ends_after: int = 10**9) -> float:
        """How many times as long as plain decoding this took."""
        started, plain = self.clock(), self.plain
        for count in range(num_rounds):
            if not self.texts or count % ends_after == ends_after - 1:
                self._begin()
            self._round(len(self.traces))
        return (self.clock() - started) / (self.plain - plain)

    def _begin(self) -> None:
        for seq_id in self.texts:
            self.portfolio.close(seq_id)
        self.texts = {i: [truth(p) for p in range(self.prompt)] for i in range(self.batch)}
        self.last.clear()
        for seq_id, text in self.texts.items():
            self.portfolio.open(seq_id, text)

    def _round(self, index: int) -> None:
        seq_ids, began = list(self.texts), self.clock()
        rows = [
            replace(row(i, self.texts[i], depth=budget.depth, last=self.last.get(i)), budget=budget)
            for i, budget in zip(seq_ids, self.controller.budgets(seq_ids), strict=True)
            if budget.depth
        ]
        found = dict(zip([one.seq_id for one in rows], self.portfolio.propose(rows), strict=True))
        # A call takes time also where it drafts nothing.
        self.clock.advance(1e-6 * bool(rows))
        drafts, _ = self.controller.trim(seq_ids, [found.get(i, Draft.empty()) for i in seq_ids])
        ended = self.clock()
        num_rows = len(seq_ids) + sum(map(len, drafts))
        self.clock.advance(1 + ROW_COST * (num_rows - 1))
        for seq_id, draft in zip(seq_ids, drafts, strict=True):
            outcome = judged(seq_id, draft, len(self.texts[seq_id]))
            self.last[seq_id] = outcome
            self.texts[seq_id] += outcome.tokens
            took = ended - began, self.clock() - ended, 0.0
            self.traces.append(traced(index, len(seq_ids), outcome, took))
            self.controller.observe(self.traces[-1])
            self.leads.observe(self.traces[-1])
            self.plain += len(outcome.tokens) * (1 + ROW_COST * (self.batch - 1)) / self.batch


def judged(seq_id: int, draft: Draft, start: int) -> Outcome:
    path, node = list[int](), ROOT
    while True:
        own = truth(start + len(path))
        child = next((c for c in draft.children(node) if draft.tokens[c] == own), None)
        if child is None:
            return Outcome(seq_id, draft, Verdict(tuple(path), own))
        path.append(node := child)


def traced(
    index: int, batch: int, outcome: Outcome, took: tuple[float, float, float]
) -> RoundTrace:
    drafting, verifying, accepting = took
    return RoundTrace(
        seq_id=outcome.seq_id,
        pass_index=index,
        drafter=outcome.draft.by,
        batch_size=batch,
        num_target_passes=1,
        num_prompt_tokens=0,
        num_drafted=len(outcome.draft),
        num_accepted=outcome.num_accepted,
        num_emitted=len(outcome.tokens),
        num_rows_copied=0,
        draft_seconds=drafting,
        verify_seconds=verifying,
        accept_seconds=accepting,
        draft_depth=outcome.draft.max_depth,
        members=outcome.members,
    )


def never(position: int) -> int:
    del position
    return 0


def at_first(position: int) -> int:
    return K if position < PROMPT + 600 else 0


def mostly(position: int) -> int:
    """Right up to the next of the tokens that it never knows: the first three, and one of ten."""
    unknown = (
        i for i in range(K) if position + i < PROMPT + 3 or Random(position + i).random() < 0.1
    )
    return next(unknown, K)


def in_turns(position: int) -> int:
    """Right until it is trusted, then wrong until that is noticed."""
    return K if position // 40 % 2 else 0


def machine(
    batch: int, right: Right, *shares: float, reading: float = 0.0, prompt: int = PROMPT
) -> Machine:
    clock = FakeClock()
    models = [
        replace(Slow(clock, right, share, reading), name=f"model {index}")
        for index, share in enumerate(shares)
    ]
    return Machine(batch, models, [Boast(right)], clock, prompt)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shares", [(0.1,), (0.5,), (2.0,), (0.05, 0.2, 0.4)], ids=str)
def test_drafters_that_are_never_right_cost_little(batch: int, shares: tuple[float, ...]) -> None:
    assert machine(batch, never, *shares).run(STATED) <= 1.02


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shares", [(0.1,), (0.5,), (0.05, 0.2, 0.4)], ids=str)
def test_drafters_that_were_right_for_a_while_cost_little(
    batch: int, shares: tuple[float, ...]
) -> None:
    """Counted from the turn on: the good time pays for no bad one."""
    run = machine(batch, at_first, *shares)
    assert run.run(50) < 0.9
    while min(map(len, run.texts.values())) < PROMPT + 600:
        run.run(1)
    assert run.run(STATED) <= 1.02


def test_text_made_to_deceive_costs_little() -> None:
    assert machine(1, in_turns, 0.5).run(STATED) <= 1.02


def test_short_requests_with_long_prompts_cost_little() -> None:
    """Reading a prompt takes four passes, and a request has forty rounds."""
    assert machine(1, never, 0.1, reading=0.01).run(STATED, ends_after=40) <= 1.02


@pytest.mark.parametrize("prompt", [1000, 8000])
def test_a_long_prompt_is_read_by_a_member_that_gains(prompt: int) -> None:
    """One of thirty layers, which reads sixteen tokens in a thirtieth of a pass."""
    run = machine(1, lambda position: 2, 1 / 30, reading=1 / 30 / 16, prompt=prompt)
    run.lookups = ()
    run.__post_init__()
    run.run(200)
    assert run.run(200) < 0.6


def test_long_prompts_of_short_requests_cost_little() -> None:
    """Of requests with forty rounds; the target reads a prompt in 250 passes."""
    run = machine(1, never, 0.1, reading=0.1 / 16, prompt=4000)
    num_requests = 30
    lost = run.run(40 * num_requests, ends_after=40) - 1
    assert lost * run.plain <= 0.02 * (run.plain + 250 * num_requests)


def test_drafters_that_are_right_gain_with_two_members_too() -> None:
    assert machine(2, lambda position: 3, 0.1, 0.3).run(300) < 0.6


def test_trials_and_their_cost_are_in_the_records() -> None:
    run = machine(1, never, 0.1)
    run.run(STATED)
    members = [one for trace in run.traces for one in trace.members if one.name == "model 0"]
    assert all(one.seconds > 0 for one in members)
    assert any(one.trial for one in members)
    assert sum(one.num_drafted for one in members if one.trial) * 0.1 < FIRST_LOSS


def test_an_allowance_bounds_any_loss() -> None:
    """Whoever drafts whenever it may, and always loses."""
    allowance, lost = Allowance(), 0.0
    for _ in range(10_000):
        allowance.add(LOSS_SHARE)
        if allowance.pays(0.5):
            allowance.add(-0.5)
            lost += 0.5
    assert lost <= FIRST_LOSS + LOSS_SHARE * 10_000
    # A long good time pays for no bad one.
    allowance.add(1000.0)
    assert allowance.left == FIRST_LOSS
    allowance.refill(LOSS_SHARE)
    assert allowance.left == FIRST_LOSS


@pytest.mark.parametrize("pause", [0.0, 15.0])
def test_a_member_that_gains_is_not_left_out_for_bad_moments(pause: float) -> None:
    """Its first long drafts are wrong, later ones now and then, and the machine has pauses."""
    run = machine(1, mostly, 0.1)
    run.lookups = ()
    run.__post_init__()
    slow, lost = run.models[0], 0.0
    for _ in range(12):
        run.run(50, ends_after=50)
        # While the member drafts, the machine does something else.
        slow.stopped, lost = pause, lost + pause
    assert run.plain / (run.clock() + slow.stopped - lost) > 2.3


def test_a_member_that_gains_goes_on() -> None:
    run = machine(1, lambda position: 2, 0.1)
    run.run(400)
    assert sum(trace.num_accepted > 0 for trace in run.traces) > 350


def test_a_refusal_makes_the_drafts_of_a_good_member_no_shorter() -> None:
    """A draft of twelve tokens takes six passes, and one token of 127 is not known."""
    run = machine(1, lambda position: min(126 - position % 127, 12), 0.5)
    run.lookups, run.depth = (), 12
    run.__post_init__()
    run.run(100)
    num_before = len(run.traces)
    run.run(200)
    lengths = [trace.num_drafted for trace in run.traces[num_before:]]
    assert sum(lengths) / len(lengths) > 8
