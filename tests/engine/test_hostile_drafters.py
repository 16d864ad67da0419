"""A careless drafter changes nothing but time; one that breaks its contract is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from checks.distribution import assert_same_distribution
from checks.engine import PROMPT, check_greedy, greedy
from checks.engine_distribution import FILTERS, engine_distribution, target_distribution
from checks.engine_distribution import PROMPT as DISTRIBUTION_PROMPT
from checks.engine_distribution import VOCAB as DISTRIBUTION_VOCAB
from checks.state import VOCAB
from doubles.drafters import (
    EMPTY,
    NEGATIVE_ID,
    NO_NEEDS,
    OUT_OF_STEP,
    OVER_LONG,
    REPEATS_LAST,
    RowDrafter,
    WrongCount,
    foreign_distribution,
    random_chains,
    unknown_id,
)
from doubles.rig import Rig
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Draft, DraftPart
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow

CARELESS = {
    "empty": EMPTY,
    "random": random_chains(DISTRIBUTION_VOCAB),
    "repeats": REPEATS_LAST,
    "out of step": OUT_OF_STEP,
}
BROKEN: dict[str, Drafter] = {
    "too long": OVER_LONG,
    "negative id": NEGATIVE_ID,
    "unknown id": unknown_id(VOCAB),
    "a draft too many": WrongCount(1),
    "a draft too few": WrongCount(-1),
    "foreign distribution": foreign_distribution(VOCAB),
    "parts of another type": RowDrafter(lambda row: in_parts(("a", (0,), 0.0, False))),
    "parts of other nodes": RowDrafter(lambda row: in_parts(DraftPart("a", ("0",)))),  # pyright: ignore
}


def in_parts(part: object) -> Draft:
    return replace(Draft.chain([1]), parts=(part,))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_drafter_leaves_the_text(name: str) -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), CARELESS[name], k=4, chunk=3)
    check_greedy(rig, ToyHybrid, [PROMPT, (0, 1)], 15)


@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_drafter_leaves_the_distribution(name: str) -> None:
    rig = Rig(ToyHybrid(vocab_size=DISTRIBUTION_VOCAB), CARELESS[name], k=2)
    params = FILTERS[0]
    assert_same_distribution(
        engine_distribution(rig, DISTRIBUTION_PROMPT, params),
        target_distribution(ToyHybrid, DISTRIBUTION_PROMPT, params),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_costs_drafts_before_the_target_sees_one(
    name: str, temperature: float
) -> None:
    """The text is that of plain decoding, and the request says who is to blame."""
    params = SamplingParams(temperature=temperature, max_tokens=8)
    prompts = [PROMPT, (0, 1)]
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), k=0).outputs(prompts, params)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), BROKEN[name], k=2, honest=False)
    assert rig.outputs(prompts, params) == wanted
    assert all("'double'" in seq.no_drafts for seq in rig.sequences)
    assert sum(trace.num_drafted for trace in rig.traces) == 0


def test_a_broken_drafter_is_asked_no_more() -> None:
    asked: list[int] = []

    def broken(row: DraftRow) -> Draft:
        asked.append(row.seq_id)
        return Draft.chain([-1])

    rig = Rig(ToyHybrid(vocab_size=VOCAB), RowDrafter(broken), k=2, honest=False)
    rig.outputs([PROMPT, (0, 1)], greedy(5))
    assert sorted(asked) == [0, 1]


@dataclass(slots=True)
class BreaksFor:
    """Drafts well, but raises at every call in which `culprit` takes part."""

    culprit: int
    name: str = "double"
    needs: DraftNeeds = NO_NEEDS

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        if any(row.seq_id == self.culprit for row in rows):
            raise RuntimeError("broken")
        return REPEATS_LAST.propose(rows)

    def close(self, seq_id: int) -> None: ...


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_drafter_that_fails_for_one_request_drafts_on_for_the_others(culprit: int) -> None:
    prompts = [PROMPT, (0, 1), (3, 3)]
    rig = Rig(ToyHybrid(vocab_size=VOCAB), BreaksFor(culprit), k=2, chunk=64, honest=False)
    check_greedy(rig, ToyHybrid, prompts, 9)
    assert [bool(seq.no_drafts) for seq in rig.sequences] == [i == culprit for i in range(3)]
    assert {t.seq_id for t in rig.traces if t.num_drafted} == {0, 1, 2} - {culprit}


@dataclass(slots=True)
class WithoutRoom:
    """Finds its memory full at every other call."""

    num_asked: int = 0
    name: str = "double"
    needs: DraftNeeds = NO_NEEDS

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked % 2:
            raise CapacityError("full.", hint="none")
        return REPEATS_LAST.propose(rows)

    def close(self, seq_id: int) -> None: ...


def test_full_memory_costs_the_drafts_of_one_round(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outrider.engine.drafting")
    rig = Rig(ToyHybrid(vocab_size=VOCAB), WithoutRoom(), k=2)
    check_greedy(rig, ToyHybrid, [PROMPT], 9)
    assert [seq.no_drafts for seq in rig.sequences] == [""]
    assert 0 < sum(trace.num_drafted > 0 for trace in rig.traces) < len(rig.traces)
    assert "request 0 goes without a draft: full." in caplog.text


@dataclass(slots=True)
class Unopened:
    """Refuses one request from the start."""

    refused: int
    opened: set[int] = field(default_factory=set[int])
    name: str = "double"
    needs: DraftNeeds = NO_NEEDS

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        del prompt
        if seq_id == self.refused:
            raise RuntimeError("no")
        self.opened.add(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        assert {row.seq_id for row in rows} <= self.opened
        return REPEATS_LAST.propose(rows)

    def close(self, seq_id: int) -> None:
        self.opened.remove(seq_id)


def test_a_request_that_a_drafter_does_not_open_runs_without_it() -> None:
    drafter = Unopened(1)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, k=2, honest=False)
    check_greedy(rig, ToyHybrid, [PROMPT, (0, 1)], 9)
    assert "did not start" in rig.sequences[1].no_drafts
    assert not rig.sequences[0].no_drafts
    assert drafter.opened == set()


def test_a_token_without_mass_in_its_own_distribution_is_refused() -> None:
    """Such a token cannot have been drawn; dividing by nothing must not accept it."""

    def lying(token: int) -> RowDrafter:
        probs_NV = torch.zeros(1, VOCAB, dtype=torch.float64)
        probs_NV[0, (token + 1) % VOCAB] = 1
        return RowDrafter(lambda row: Draft.chain([token], probs_NV))

    for token in range(VOCAB):
        rig = Rig(ToyHybrid(vocab_size=VOCAB), lying(token), k=1)
        rig.outputs([PROMPT], SamplingParams(temperature=1.0, max_tokens=6))
        assert [t.num_accepted for t in rig.traces] == [0] * 6
