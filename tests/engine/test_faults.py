"""A fault in any lane at any stage costs one request, or only its drafts, and no page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from checks.faults import CULPRIT, PROMPTS, Fault, FaultError, keep_drafting_ahead, run, written
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import Draft
from outrider.core.protocols import DraftRow

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

# (schedule, whether lanes run at once, whether a round is one native call)
LANES = [
    ("single", False, False),
    *((schedule, True, False) for schedule in ("pd", "pdv", "ssd")),
    ("single", False, True),
    ("ssd", True, True),
]
# In turns, as the stages of one round are: what lanes at once do that this does not is above.
IN_TURNS = [("pdv", False, False), ("ssd", False, False)]
OF_TARGET = [
    *((place, before) for place in ("pass", "rule") for before in (True, False)),
    ("commit", True),
    ("commit of one", True),
]
OF_DRAFTER = [(place, before) for place in ("propose", "draft pass") for before in (True, False)]
AHEAD = [("propose_after", before) for before in (True, False)]


def config(schedule: str, concurrent: bool, fused: bool) -> EngineConfig:
    return EngineConfig(
        schedule=schedule,
        concurrent_lanes=concurrent,
        hybrid_threshold=0,
        k=3,
        batch_size=len(PROMPTS),
        prefill_chunk=16,
        fused_round=fused,
        device="cpu",
    )


def comes_once(llm: LLM, place: int) -> bool:
    """Whether the fault comes once or always, in turns by place and by lanes."""
    own = llm.config
    lanes = [*LANES, *IN_TURNS].index((own.schedule, own.concurrent_lanes, own.fused_round))
    return (lanes + place) % 2 == 0


@pytest.fixture(autouse=True)
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of drafting ahead need somebody who does it."""
    keep_drafting_ahead(monkeypatch)


@pytest.fixture(
    scope="module",
    params=[*LANES, *(pytest.param(lanes, marks=pytest.mark.deep) for lanes in IN_TURNS)],
    ids=str,
)
def llm(request: pytest.FixtureRequest) -> Generator[LLM]:
    """One for all faults: what one of them leaves behind, the next would find."""
    llm = LLM(config=config(*request.param))
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[list[int]]:
    seqs = run(llm)
    assert not any(seq.no_drafts or seq.error for seq in seqs)
    return written(seqs)


@pytest.mark.sample(7)
@pytest.mark.parametrize(("place", "before"), OF_TARGET)
def test_a_fault_of_the_target_ends_one_request_or_none(
    llm: LLM, wanted: list[list[int]], place: str, before: bool
) -> None:
    """None if it was passing: all of the batch are tried again."""
    once = comes_once(llm, OF_TARGET.index((place, before)))
    if llm.config.fused_round and "commit" not in place:
        pytest.skip("the round is one call, and only memory is asked besides")
    fault = Fault(place, before, once)
    seqs = run(llm, fault)
    assert fault.num_raised
    assert [type(seq.error) for seq in seqs] == [
        FaultError if i == CULPRIT and not once else type(None) for i in range(len(PROMPTS))
    ]
    for index, (seq, got) in enumerate(zip(seqs, written(seqs), strict=True)):
        assert got == (wanted[index] if seq.error is None else wanted[index][: len(got)])
    assert not any(seq.no_drafts for seq in seqs)


@pytest.mark.sample(7)
@pytest.mark.parametrize(("place", "before"), [*OF_DRAFTER, *AHEAD])
def test_a_fault_of_the_drafter_ends_no_request(
    llm: LLM, wanted: list[list[int]], place: str, before: bool
) -> None:
    """It ends the culprit's drafts, with a reason, if it comes again."""
    once = comes_once(llm, [*OF_DRAFTER, *AHEAD].index((place, before)))
    if llm.config.fused_round and llm.config.schedule == "single":
        pytest.skip("the round is one call, drafts included")
    if (place, before) in AHEAD and llm.config.schedule != "ssd":
        pytest.skip("nobody drafts ahead")
    fault = Fault(place, before, once)
    seqs = run(llm, fault)
    assert fault.num_raised
    assert written(seqs) == wanted
    assert not any(seq.error for seq in seqs)
    assert [bool(seq.no_drafts) for seq in seqs] == [
        i == CULPRIT and not once for i in range(len(PROMPTS))
    ]
    if not once:
        assert place in seqs[CULPRIT].no_drafts


def too_many(row: DraftRow) -> Draft:
    return Draft.chain([0] * (row.budget.depth + 1))


def foreign(_: DraftRow) -> Draft:
    return Draft.chain([-1])


def no_distribution(_: DraftRow) -> Draft:
    """Only sampled requests look at it."""
    return Draft.chain([0], torch.full((1, 8192), torch.nan))


@pytest.mark.sample(6)
@pytest.mark.parametrize("broken", [too_many, foreign, no_distribution], ids=lambda f: f.__name__)
def test_a_draft_that_breaks_its_contract_ends_the_drafts_of_its_request(
    llm: LLM,
    wanted: list[list[int]],
    broken: Callable[[DraftRow], Draft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if llm.config.fused_round and llm.config.schedule == "single":
        pytest.skip("the round is one call, drafts included")
    drafter: Any = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    culprits: list[int] = []
    propose = drafter.propose

    def lying(rows: Sequence[DraftRow]) -> list[Draft]:
        culprits[:] = [row.seq_id for row in rows if row.params.seed == 100 + CULPRIT] or culprits
        drafts = propose(rows)
        return [
            broken(row) if row.seq_id in culprits else draft
            for row, draft in zip(rows, drafts, strict=True)
        ]

    monkeypatch.setattr(drafter, "propose", lying)
    seqs = run(llm)
    assert written(seqs) == wanted
    assert not any(seq.error for seq in seqs)
    told = [bool(seq.no_drafts) for seq in seqs]
    # Greedily nobody reads a distribution.
    assert told == [i == CULPRIT and broken is not no_distribution for i in range(len(PROMPTS))]


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["propose", "propose_after"])
@pytest.mark.parametrize("schedule", ["pdv", "ssd"])
def test_a_drafter_that_hangs_costs_drafts_and_no_request(
    schedule: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lane is left to it, and it is never asked again."""
    if (schedule, place) == ("pdv", "propose_after"):
        pytest.skip("nobody drafts ahead")
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = LLM(config=EngineConfig(drafter="none", device="cpu"))
    wanted = [result.token_ids for result in plain.generate(PROMPTS, greedy)]
    llm = LLM(
        config=EngineConfig(
            schedule=schedule, hybrid_threshold=0, k=3, drafter_timeout=0.3, device="cpu"
        )
    )
    drafter: Any = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    over, call = threading.Event(), getattr(drafter, place)
    asked: list[int] = []

    def hanging(rows: Sequence[Any]) -> Any:
        asked.append(len(rows))
        if len(asked) == 2:
            over.wait(30)
        return call(rows)

    monkeypatch.setattr(drafter, place, hanging)
    tickets = [llm.submit(prompt, greedy) for prompt in PROMPTS]
    while llm.has_work:
        llm.advance()
    over.set()
    assert [ticket.result().token_ids for ticket in tickets] == wanted
    assert all("no answer" in ticket.reader.seq.no_drafts for ticket in tickets)
    assert len(asked) == 2
    llm.close()
