"""Acceptance is a property of the pair: batch, chunks and the drafter's place do not change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from checks.engine import PROMPT, greedy
from checks.state import VOCAB
from doubles.rig import Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from outrider.core.draft import Draft
from outrider.core.protocols import CausalLM, Drafter, DraftNeeds, DraftRow
from outrider.engine.round import StepwiseLM

PROMPTS = [PROMPT, (0,), (2, 4, 4, 1, 0, 2, 3), (3, 3), (1, 0, 4, 4)]


@dataclass(frozen=True, slots=True)
class OtherThread:
    """Every call of `drafter` runs in a thread of its own."""

    drafter: Drafter
    pool: ThreadPoolExecutor

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def needs(self) -> DraftNeeds:
        return self.drafter.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.pool.submit(self.drafter.open, seq_id, prompt).result()

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return self.pool.submit(self.drafter.propose, rows).result()

    def close(self, seq_id: int) -> None:
        self.pool.submit(self.drafter.close, seq_id).result()


@dataclass(frozen=True, slots=True)
class RowByRow:
    """Every row of a batch is proposed alone."""

    drafter: Drafter

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def needs(self) -> DraftNeeds:
        return self.drafter.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.drafter.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [draft for row in rows for draft in self.drafter.propose([row])]

    def close(self, seq_id: int) -> None:
        self.drafter.close(seq_id)


def drafter(chunk: int = 256) -> Drafter:
    return model_drafter(TinyAttentionLM(vocab_size=VOCAB, seed=3), chunk=chunk)


def counts(target: CausalLM, drafter: Drafter, *, batch_size: int, chunk: int) -> list[int]:
    """Drafted and accepted tokens of every request, over its whole text."""
    rig = Rig(target, drafter, k=3, batch_size=batch_size, chunk=chunk)
    rig.outputs(PROMPTS, greedy(17))
    found: list[int] = []
    for seq_id in range(len(PROMPTS)):
        traces = [trace for trace in rig.traces if trace.seq_id == seq_id]
        found += [sum(t.num_drafted for t in traces), sum(t.num_accepted for t in traces)]
    return found


def target() -> CausalLM:
    return TinyAttentionLM(vocab_size=VOCAB)


# Batches by chunks are covered in test_invariance.py. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("chunk", [2, 256])
def test_whatever_the_batch_and_the_chunks(batch_size: int, chunk: int) -> None:
    alone = counts(target(), drafter(), batch_size=1, chunk=256)
    assert 0 < sum(alone[1::2]) < sum(alone[::2])
    assert counts(target(), drafter(chunk), batch_size=batch_size, chunk=chunk) == alone


Arrange = Callable[[ThreadPoolExecutor], tuple[CausalLM, Drafter]]
PLACES: dict[str, Arrange] = {
    "in another thread": lambda pool: (target(), OtherThread(drafter(), pool)),
    "row by row": lambda pool: (target(), RowByRow(drafter())),
    "verified token by token": lambda pool: (StepwiseLM(target()), drafter()),
}


@pytest.mark.parametrize("arrange", PLACES.values(), ids=PLACES.keys())
def test_wherever_the_drafter_runs(arrange: Arrange) -> None:
    usual = counts(target(), drafter(), batch_size=3, chunk=8)
    with ThreadPoolExecutor(1) as pool:
        model, placed = arrange(pool)
        assert counts(model, placed, batch_size=3, chunk=8) == usual
