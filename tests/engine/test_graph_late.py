"""A launched round keeps its pages until it has landed, with lanes on streams of their own.

The device is a queue: a launch adds a round, which runs when its report is read or when work of the
same stream follows. What another stream does meanwhile (prompts of the prefill lane) is done first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from doubles.graphs import PAGE, GraphRig
from doubles.rig import MANY, Request
from doubles.tiny_checkpoints import random_model, variant
from outrider.cache.paged_kv import PagedKV
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.stages import Stages
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.plugins.gpu.rounds import program
from outrider.plugins.gpu.rounds import verify as verifications
from outrider.plugins.gpu.rounds.host_round import HostRound
from outrider.plugins.gpu.rounds.program import GraphCache, Ticket
from outrider.plugins.gpu.rounds.round import GraphRound
from outrider.sched.jobs import ReadyQueues

pytestmark = pytest.mark.wide

SLOTS = 72


@dataclass(slots=True)
class LateDevice:
    """A stream whose work waits. `num_late` counts prompts that another stream read before it,
    `num_settled` closed texts for whose round somebody waited."""

    queue: deque[Callable[[], object]] = field(default_factory=deque[Callable[[], object]])
    num_late: int = 0
    num_settled: int = 0
    is_closing: bool = False

    def flush(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        self.flush()
        prepare()
        return lambda: self.queue.append(program)

    def mailbox(self, like_BR: Tensor) -> LateDevice:
        del like_BR
        return self

    def post(self, report_BR: Tensor) -> Ticket:
        slot_BR = report_BR.clone()
        arrival = Arrival(self)
        self.queue.append(lambda: slot_BR.copy_(report_BR))
        self.queue.append(arrival.reach)
        return Ticket(slot_BR, arrival)  # pyright: ignore[reportArgumentType]

    def behind(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Have work of the same stream follow what was launched."""
        real = getattr(owner, name)

        def later(first: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
            if work:
                self.flush()
            return real(first, work, *args, **kwargs)

        patch.setattr(owner, name, later)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(program, "Mailbox", self.mailbox)
        patch.setattr(verifications, "Mailbox", self.mailbox)
        for owner, name in (
            (GraphRound, "_read"),
            (GraphRound, "_entered"),
            (Stages, "propose"),
            (Stages, "run"),
        ):
            self.behind(patch, owner, name)
        verify, budgets, close = Stages.verify, GraphCache.write_budgets, PagedKV.close

        def closing(memory: PagedKV, seq_id: int) -> None:
            self.is_closing = True
            close(memory, seq_id)
            self.is_closing = False

        patch.setattr(PagedKV, "close", closing)

        def ordered(stages: Stages, batch: Any, chunks: Any, **kwargs: Any) -> Any:
            # Sequences that were in a task wait for it; new ones wait for nothing.
            if batch:
                self.flush()
            self.num_late += bool(self.queue and chunks)
            return verify(stages, batch, chunks, **kwargs)

        def write(cache: GraphCache, values: Sequence[int]) -> None:
            self.queue.append(lambda: budgets(cache, list(values)))

        patch.setattr(Stages, "verify", ordered)
        patch.setattr(GraphCache, "write_budgets", write)


@dataclass(slots=True)
class Arrival:
    """An event behind a report."""

    device: LateDevice
    is_over: bool = False

    def reach(self) -> None:
        self.is_over = True

    def synchronize(self) -> None:
        self.device.num_settled += self.device.is_closing and not self.is_over
        while not self.is_over:
            self.device.queue.popleft()()


def small_model(seed: int) -> LlamaModel:
    """Memory for two texts or three, so that pages are given out again at once."""
    capacity = ModelCapacity(num_slots=SLOTS, page_size=PAGE, max_rows=128, max_logits=64)
    model = random_model(variant("llama2"), seed=seed, capacity=capacity)
    assert isinstance(model, LlamaModel)
    return model


class PromptsFirst:
    """Starts the prefill lane before a lane that waits for what was launched, as threads may."""

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]:
        del pool
        return lanes[::-1]


class LateRig(GraphRig):
    def engine(self, *, captured: bool) -> Engine:
        engine = GraphRig.engine(self, captured=captured)
        engine.order = PromptsFirst()
        return engine


def late_rig(schedule: str, *, threshold: int = 3, drafter: str = "model") -> GraphRig:
    config = EngineConfig(
        k=3,
        batch_size=3,
        drafter=drafter,
        schedule=schedule,
        hybrid_threshold=threshold,
        prefill_chunk=8,
        concurrent_lanes=False,
    )
    draft = small_model(4) if drafter == "model" else None
    return LateRig(small_model(3), draft, config, LateDevice(), num_slots=SLOTS)


def texts(temperature: float) -> list[Request]:
    """Prompts of odd lengths; every other text has a stop that the device cannot know."""

    def ends(tokens: Sequence[int]) -> int | None:
        return 1 if sum(tokens) % 5 == 0 else None

    return [
        Request(
            [(7 * index + 3 * place) % 96 for place in range(3 + 5 * (index % 3))],
            SamplingParams(max_tokens=4 + 3 * (index % 4), temperature=temperature, seed=index),
            match=ends if index % 2 else None,
        )
        for index in range(10)
    ]


def check_late(rigged: GraphRig, temperature: float, patch: pytest.MonkeyPatch) -> LateDevice:
    """The text of the stages, whatever still runs on the device. Returns the device."""
    device = rigged.launcher
    assert isinstance(device, LateDevice)
    wanted = texts(temperature)
    by_stages = rigged.run(wanted, captured=False)
    device.install(patch)
    assert rigged.run(wanted, captured=True) == by_stages
    return device


@pytest.mark.sample(5)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("schedule", "threshold"), [("single", 3), ("pd", 3), ("pdv", 3), ("pdv", 2), ("pdv", 1)]
)
def test_pages_of_a_text_that_ended_are_not_written_by_a_launched_round(
    schedule: str, threshold: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = check_late(late_rig(schedule, threshold=threshold), temperature, monkeypatch)
    if threshold == 3:
        lanes = schedule != "single"
        assert (device.num_late > 0, device.num_settled > 0) == (lanes, lanes)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("schedule", ["single", "pd", "pdv"])
def test_nothing_is_in_flight_when_a_round_of_host_drafts_returns(
    schedule: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigged = late_rig(schedule, drafter="ngram")
    device, verified = rigged.launcher, HostRound.verify
    assert isinstance(device, LateDevice)
    num_landed = 0

    def landed(made: HostRound, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_landed
        outcomes = verified(made, *args, **kwargs)
        assert not device.queue
        num_landed += bool(outcomes)
        return outcomes

    monkeypatch.setattr(HostRound, "verify", landed)
    check_late(rigged, temperature, monkeypatch)
    assert num_landed > 10
    assert device.num_settled == 0


@pytest.mark.parametrize("schedule", ["pd", "pdv"])
def test_pages_of_a_cancelled_text_are_not_written_either(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigged = late_rig(schedule)
    wanted = texts(0.0)
    expected = rigged.run(wanted, captured=False)
    device = rigged.launcher
    assert isinstance(device, LateDevice)
    device.install(monkeypatch)
    engine = rigged.engine(captured=True)
    seqs = rigged.submit(engine, wanted)
    for step in range(MANY):
        if not engine.has_work:
            break
        engine.step()
        live = [i for i in engine.residents.live if i % 3 == 0 and seqs[i].num_emitted]
        if step % 2 and live:
            engine.cancel(live[0])
    cancelled = [seq for seq in seqs if seq.finish is None]
    assert cancelled
    assert not engine.has_work
    for seq, tokens in zip(seqs, expected, strict=True):
        found = seq.tokens[seq.prompt_length :]
        assert found == tokens[: len(found)]
        assert seq in cancelled or found == tokens
