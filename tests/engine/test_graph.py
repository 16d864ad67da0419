"""Captured rounds, run eagerly: the text of the stages, for every K, batch and rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.graphs import PAGE, WINDOW, GraphRig, requests, rig, tiny
from doubles.rig import Request, round_of
from outrider.core.config import EngineConfig
from outrider.core.errors import CapacityError, MachineError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.drafters.common.context import LoadedModels
from outrider.engine.build import build_engine
from outrider.engine.stages import Stages
from outrider.metrics import summarise
from outrider.plugins.gpu.rounds import program
from outrider.plugins.gpu.rounds.build import captured_round
from outrider.plugins.gpu.rounds.program import GraphCache, Ticket
from outrider.plugins.gpu.rounds.round import GraphRound

pytestmark = pytest.mark.wide

VOCAB = 96
# An untrained model's greedy text soon repeats itself, so this one is met now and then.
STOPS = frozenset({3, 50, 77})


def check_same(rig: GraphRig, wanted: Sequence[Request]) -> None:
    by_stages = rig.run(wanted, captured=False)
    assert rig.run(wanted, captured=True) == by_stages
    assert rig.made is not None
    assert rig.made.refusals.failed is None


# Any two of rule, length, filters and temperatures meet. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("sampler", ["token", "block"])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("temperatures", [(1.5,) * 3, (0, 0.9, 2.5)])
@pytest.mark.parametrize("filtered", [False, True])
def test_text_is_that_of_the_stages(
    k: int, sampler: str, temperatures: tuple[float, ...], filtered: bool
) -> None:
    check_same(rig(k, sampler), requests(temperatures, filtered=filtered))


@pytest.mark.slow
@examples(8)
@given(
    k=st.integers(0, 6),
    batch_size=st.integers(1, 5),
    temperatures=st.lists(st.sampled_from([0, 0.4, 1.0, 3.0]), min_size=1, max_size=5),
    max_tokens=st.integers(1, 20),
    sampler=st.sampled_from(["token", "block"]),
    chunk=st.integers(2, 12),
    filtered=st.booleans(),
)
def test_text_is_that_of_the_stages_whatever_the_batch(
    k: int,
    batch_size: int,
    temperatures: list[float],
    max_tokens: int,
    sampler: str,
    chunk: int,
    filtered: bool,
) -> None:
    """Sequences come and go, prompts are read in chunks beside rounds, stops end some early."""
    rigged = rig(k, sampler, batch_size=batch_size, chunk=chunk)
    wanted = requests(temperatures, max_tokens=max_tokens, stops=STOPS, filtered=filtered)
    check_same(rigged, wanted)


@pytest.mark.parametrize("k", [0, 3])
def test_a_short_text_does_not_pay_for_the_window(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a round, and so the grid of its attention, hold the text and little more: twice
    that at most. They grow with the text, which does not change."""
    monkeypatch.setattr(program, "LEAST_POSITIONS", 2 * PAGE)
    launch = GraphCache.launch
    longest: list[tuple[int, int]] = []

    def launched(self: GraphCache) -> Ticket:
        held = self.buffers.target_pages_BP.shape[1]
        assert self.buffers.draft_slots_BT.shape[1] == held * PAGE
        ticket = launch(self)
        longest.append((int(self.buffers.length_B.max()), held))
        return ticket

    monkeypatch.setattr(GraphCache, "launch", launched)
    check_same(rig(k), requests((0, 0.9, 0), max_tokens=50))
    assert all(length + k <= held * PAGE for length, held in longest)
    assert all(held * PAGE <= 2 * (length + 2 * (k + 1) + PAGE) for length, held in longest)
    assert len({held for _, held in longest}) > 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "attention_bias"])
def test_other_families(family: str) -> None:
    config = EngineConfig(k=3, batch_size=4, drafter="model")
    check_same(GraphRig(tiny(family, 3), tiny(family, 3, "draft"), config), requests((0, 0.8, 0)))


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    config = EngineConfig(k=4, batch_size=2, drafter="model")
    rigged = GraphRig(tiny("llama2", 3), tiny("llama2", 3, "draft"), config)
    rigged.run(requests((0, 1.0), max_tokens=15), captured=True)
    stats = summarise(rigged.traces, drafter="model", k=4, total_seconds=1.0)
    assert stats.num_accepted == stats.num_drafted > 0
    assert stats.num_target_passes >= stats.num_rounds / 2


@pytest.mark.parametrize("sampler", ["match", "coupled"])
def test_any_exact_sampler_may_be_greedy(sampler: str) -> None:
    check_same(rig(3, sampler), requests((0, 0)))


def test_stop_strings_end_a_text_a_round_late() -> None:
    """The device cannot know them: one round too many is launched, and never read."""

    def ends(tokens: Sequence[int]) -> int | None:
        return 1 if sum(tokens) % 5 == 0 else None

    wanted = [replace(request, match=ends) for request in requests((0, 1.2, 0.7))]
    rigged = rig(3)
    check_same(rigged, wanted)
    assert any(seq.finish == "stop" for seq in rigged.sequences)


def test_a_seed_has_one_text_however_rounds_are_run() -> None:
    """A request that needs other rounds sends its batch through the stages until it has ended."""
    rigged = rig(3, batch_size=2)

    def mixed() -> list[Request]:
        plain, shaped, last = requests((0.9, 0.9, 0.9))
        params = replace(shaped.params, repetition_penalty=1.3, max_tokens=6)
        shaper = LogitsProcessor(
            params, len(shaped.prompt)
        )  # counts its text, so each run has its own
        return [plain, replace(shaped, params=params, shaper=shaper), last]

    by_stages = rigged.run(mixed(), captured=False)
    assert rigged.run(mixed(), captured=True) == by_stages


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(max_tokens=6, logprobs=True), "log-probabilities"),
        (SamplingParams(max_tokens=6, round_events=True), "round events"),
    ],
)
def test_requests_that_need_other_rounds(
    params: SamplingParams, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="outrider.plugins.gpu.rounds.round"):
        check_same(rig(2), [Request([1, 2, 3], params), Request([4, 5], params, sample=1)])
    assert len([r for r in caplog.records if reason in r.message]) == 1


@pytest.mark.parametrize("sampler", ["match", "block"])
def test_rounds_that_the_device_cannot_carry_are_verified_by_one_launch(
    sampler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Draws by position; a text that may pass the window."""
    params = SamplingParams(max_tokens=WINDOW, temperature=0.9, seed=2)
    with caplog.at_level(logging.INFO, logger="outrider.plugins.gpu.rounds.round"):
        check_same(rig(2, sampler), [Request([1, 2, 3], params), Request([4, 5], params, sample=1)])
    assert "stage by stage" not in caplog.text


def test_only_a_change_of_batch_costs_a_call_without_outcomes() -> None:
    rigged = rig(2, batch_size=2)
    rigged.run(requests((0, 0), max_tokens=12), captured=True)
    silent = [index for index, outcomes in enumerate(rigged.jobs) if not outcomes]
    assert silent[0] == 0
    assert len(silent) <= 2


def test_traces_add_up() -> None:
    rigged = rig(2, chunk=4)
    rigged.run(requests((0, 0.8, 0, 0)), captured=True)
    for seq in rigged.sequences:
        own = [trace for trace in rigged.traces if trace.seq_id == seq.seq_id]
        assert sum(trace.num_emitted for trace in own) == seq.num_emitted
        assert sum(trace.num_emitted > 0 for trace in own) == seq.num_rounds
        assert sum(trace.num_prompt_tokens for trace in own) <= seq.prompt_length - 1
        assert all(trace.verify_seconds >= 0 for trace in own)
    for index in {trace.pass_index for trace in rigged.traces}:
        shared = [trace for trace in rigged.traces if trace.pass_index == index]
        assert {trace.batch_size for trace in shared} == {len(shared)}


def test_logits_that_are_no_numbers_cost_one_request() -> None:
    """The others of its batch run the round again, with the same numbers."""
    rig(2, batch_size=2).check_poison(requests((0.8, 0.8)))


class CompilationError(Exception):
    """In the manner of a compiler's own: no RuntimeError."""


class Refusing:
    """A device that captures nothing."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        del program
        prepare()
        raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("not permitted when\ncapturing"), "(RuntimeError: not permitted when)"),
        (CompilationError("at 25:4"), "(CompilationError: at 25:4)"),
        (ValueError(), "(ValueError: )"),
        (MachineError("no such kernel."), "(MachineError: no such kernel.)"),
        (CapacityError("no memory."), "(CapacityError: no memory.)"),
    ],
)
def test_stages_take_over_where_a_capture_fails(
    error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    rigged = rig(3)
    wanted = requests((0, 0.8, 0.8))
    by_stages = rigged.run(wanted, captured=False)
    rigged.launcher = Refusing(error)
    assert rigged.run(wanted, captured=True) == by_stages
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"Rounds go stage by stage: a capture failed {words}." in caplog.text


def refusal(config: EngineConfig, *, draft: bool = True) -> str:
    rigged = GraphRig(tiny("llama2", 3), tiny("llama2", 4) if draft else None, config)
    stages = round_of(rigged.engine(captured=False))
    assert isinstance(stages, Stages)
    made = captured_round(config, stages, draft=rigged.draft, window=lambda: WINDOW)
    assert isinstance(made, str)
    return made


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EngineConfig(drafter="ngram", page_size=PAGE), "on cuda, not on cpu"),
        (EngineConfig(drafter="recycling", page_size=PAGE), "on cuda, not on cpu"),
        (EngineConfig(sampler="typical", page_size=PAGE), "lossy"),
        (
            EngineConfig(batched_verify=False, page_size=PAGE),
            "cannot be run one by one",
        ),
        (EngineConfig(schedule="ssd", page_size=PAGE), "schedule 'ssd' drafts ahead"),
        (EngineConfig(schedule="pd", page_size=PAGE), "on cuda, not on cpu"),
        (EngineConfig(page_size=PAGE), "on cuda, not on cpu"),
    ],
)
def test_what_cannot_be_captured(config: EngineConfig, reason: str) -> None:
    assert reason in refusal(config)


def test_an_engine_on_a_cpu_captures_nothing() -> None:
    model = tiny("llama2", 3)
    parts = LoadedModels(model, None, model.kernels.argmax)
    config = EngineConfig(page_size=PAGE, drafter="none")
    engine = build_engine(parts.resolve(config), parts, num_slots=64, sink=lambda _: None)
    assert not isinstance(round_of(engine), GraphRound)


def test_controllers_may_change_the_draft_from_round_to_round() -> None:
    """They hear of a round after the next one was launched, so only greedy text is the stages'."""
    config = EngineConfig(k=5, batch_size=3, drafter="model", controller="band")
    rigged = GraphRig(tiny("llama2", 3), tiny("llama2", 4, "draft"), config)
    check_same(rigged, requests((0, 0, 0), max_tokens=30))
    assert len({trace.num_drafted for trace in rigged.traces}) > 2
