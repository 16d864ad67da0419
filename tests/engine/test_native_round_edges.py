"""Native rounds where they could differ from the stages: at edges, on no numbers, beside others.

Everything is told twice, by rounds in one call and stage by stage, and must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from doubles.rig import exchange_round, round_of
from outrider import LLM
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget, RoundTrace
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.drafters.common import draft_model as drafter_module
from outrider.engine import native_round as round_module
from outrider.engine import stages as stages_module
from outrider.engine.native_round import NativeRound
from outrider.engine.stages import Stages
from outrider.models.llama import LlamaModel

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("native_library")]

PROMPTS = (
    "def fibonacci(n):\n",
    "x = [" + ", ".join(map(str, range(30))) + "]\n",
    [5],
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i",
)
MIX = (
    SamplingParams(max_tokens=1, temperature=0.9, seed=0),
    SamplingParams(max_tokens=9, temperature=1e-30, seed=0),
    SamplingParams(max_tokens=13, temperature=100.0, seed=0),
    SamplingParams(max_tokens=8, temperature=1.0, top_k=1, seed=2**63 - 1),
    SamplingParams(max_tokens=12, temperature=1.0, seed=0, top_k=2**31 - 1),
    SamplingParams(max_tokens=10, temperature=1.2, seed=0, top_p=0.0),
    SamplingParams(max_tokens=9, temperature=1.2, seed=0, min_p=1.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=14, temperature=0.9, n=3, seed=4, stop=("\n\n", "(", "zz")),
    SamplingParams(max_tokens=16, temperature=1.0, seed=0, top_p=0.9, min_p=0.1, top_k=30),
)


@dataclass
class _Scripted:
    """A draft length that comes and goes, and differs among the sequences of a round."""

    depths: Sequence[int]
    num_rounds: dict[int, int] = field(default_factory=dict[int, int])

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        turns = [self.num_rounds.get(seq_id, 0) + seq_id for seq_id in seq_ids]
        return [Budget(self.depths[turn % len(self.depths)]) for turn in turns]

    def observe(self, trace: RoundTrace) -> None:
        self.num_rounds[trace.seq_id] = self.num_rounds.get(trace.seq_id, 0) + 1


def _llm(fused: bool, depths: Sequence[int] = (), **config: Any) -> LLM:
    llm = LLM(config=EngineConfig(fused_round=fused, profile=True, **config))
    engine = llm._engine  # pyright: ignore[reportPrivateUsage]
    made = round_of(engine)
    assert isinstance(made, NativeRound if fused else Stages)
    if depths and isinstance(made, NativeRound):
        stages = replace(made.stages, controller=_Scripted(depths))
        exchange_round(engine, replace(made, stages=stages))
    elif depths and isinstance(made, Stages):
        exchange_round(engine, replace(made, controller=_Scripted(depths)))
    return llm


def _told(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[object]:
    results = llm.generate(prompts, params)
    _check_memory(llm)
    return [
        (
            one.token_ids,
            one.finish_reason,
            one.text,
            [(r.num_drafted, r.num_accepted, r.num_prompt_tokens) for r in one.rounds],
        )
        for one in results
    ]


def _check_memory(llm: LLM) -> None:
    pair = llm._pair  # pyright: ignore[reportPrivateUsage]
    for model in (pair.target, pair.draft):
        if model is not None:
            model.state.check()  # pyright: ignore


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"k": 6, "page_size": 1, "batch_size": 4, "dtype": "float16"},
        {"k": 64, "page_size": 4096, "batch_size": 2, "sampler": "token"},
        {"k": 4, "context": 60, "page_size": 7, "quantise": "int4", "threads": 2},
        {"k": 5, "depths": (5, 0, 0, 3, 0, 1, 5, 0, 0, 0), "batch_size": 3, "dtype": "float32"},
        {"k": 5, "depths": (0, 4, 1), "batch_size": 16, "sampler": "match", "prefill_chunk": 3},
        {"k": 6, "drafter": "ngram", "page_size": 2, "quantise": "int8"},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_edges_share_batches(config: dict[str, Any]) -> None:
    """Ragged and empty drafts, room for one token, one-token prompts, tables that widen, pages
    that completions share, extreme filters and temperatures, stop strings, the window's end."""
    prompts = [PROMPTS[i % 3 if "context" in config else i % 4] for i in range(len(MIX))]
    fused, staged = (
        _told(_llm(on, **config), [p if isinstance(p, list) else p[:40] for p in prompts], MIX)
        for on in (True, False)
    )
    assert fused == staged


def test_a_broken_draft_model_is_told_of_and_leaves_no_trace() -> None:
    params = [SamplingParams(max_tokens=6, temperature=t, seed=1) for t in (0.0, 0.7)]
    told: list[object] = []
    for fused in (True, False):
        llm = _llm(fused, k=3, batch_size=2)
        before = _told(llm, PROMPTS[:2], params)
        draft = llm._pair.draft  # pyright: ignore[reportPrivateUsage]
        assert isinstance(draft, LlamaModel)
        norm_D = draft._tables.norm_D  # pyright: ignore[reportPrivateUsage]
        kept_D = norm_D.clone()
        norm_D.fill_(float("nan"))
        without = llm.generate(PROMPTS[:2], params)
        norm_D.copy_(kept_D)
        _check_memory(llm)
        notes = [(result.token_ids, result.notes) for result in without]
        assert all("not numbers" in result.notes[-1] for result in without)
        told.append((notes, before, _told(llm, PROMPTS[:2], params)))
    assert told[0] == told[1]


@pytest.mark.slow
def test_a_draft_beyond_all_room_goes_by_stages() -> None:
    """A controller's good manners are not what memory depends on."""
    params = [SamplingParams(max_tokens=40, temperature=0.6, seed=0)]
    fused, staged = (
        _told(_llm(on, k=6, batch_size=16, depths=(70, 66)), PROMPTS[:1], params)
        for on in (True, False)
    )
    assert fused == staged


def _read_until_broken(llm: LLM, params: SamplingParams) -> list[object]:
    told: list[object] = []
    try:
        for event in llm.stream(PROMPTS[3], params):
            told += event.token_ids
    except NumericsError as error:
        told.append(str(error))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["block", "token", "match"])
def test_numbers_may_end_at_any_place_of_a_round(sampler: str) -> None:
    """From some position on one model has none: at the first, the last or no node of a round that
    is looked at."""
    llms = [_llm(on, k=3, batch_size=1, sampler=sampler) for on in (True, False)]
    start = len(llms[0].requests.ids(PROMPTS[3]))
    for position in range(start, start + 2):
        for at in range(4):
            params = SamplingParams(max_tokens=8, temperature=0.9 * (at % 2), seed=position)
            fused, staged = (_with_nan(llm, at < 2, position, params) for llm in llms)
            assert fused == staged
            assert "not numbers" in str(fused[-1]) or len(fused) == 8


def _with_nan(llm: LLM, of_target: bool, position: int, params: SamplingParams) -> list[object]:
    pair = llm._pair  # pyright: ignore[reportPrivateUsage]
    model = pair.target if of_target else pair.draft
    assert isinstance(model, LlamaModel)
    turn_H = model._operators[0].turns[0][position]  # pyright: ignore[reportPrivateUsage]
    kept_H = turn_H.clone()
    turn_H.fill_(float("nan"))
    try:
        return _read_until_broken(llm, params)
    finally:
        turn_H.copy_(kept_H)
        _check_memory(llm)


def test_what_the_draft_model_reads_of_a_prompt_is_drafting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that is longer than one pass takes is read before the round."""
    llm, seconds = _llm(True, k=2, batch_size=1, prefill_chunk=4), [0.0]
    feed = drafter_module.ModelDrafter._read  # pyright: ignore[reportPrivateUsage]

    def feed_a_second(*args: Any) -> None:
        seconds[0] += 1
        feed(*args)

    monkeypatch.setattr(drafter_module.ModelDrafter, "_read", feed_a_second)
    for module in (round_module, stages_module):
        monkeypatch.setattr(module, "perf_counter", lambda: seconds[0])
    rounds = llm.generate(PROMPTS[1], SamplingParams(max_tokens=4))[0].rounds
    first = next(one for one in rounds if one.num_drafted)
    assert first.draft_seconds >= 1
    assert first.accept_seconds == 0


@pytest.mark.slow
def test_two_engines_share_one_team() -> None:
    """In two threads at once, as each does alone."""
    params = [replace(MIX[9], max_tokens=12), SamplingParams(max_tokens=12)]
    makes = ({"k": 4}, {"k": 3, "sampler": "token"})

    def run(make: dict[str, Any]) -> list[object]:
        return _told(_llm(True, threads=2, **make), PROMPTS[:2], params)

    alone = [run(make) for make in makes]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, makes)) == alone
