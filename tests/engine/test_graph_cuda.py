"""Captured rounds on a CUDA device: graphs give the text of the stages, and allocate nothing."""

from __future__ import annotations

import pytest
import torch

from doubles.rig import exchange_round, round_of
from outrider import LLM, EngineConfig, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.stages import Stages
from outrider.plugins.gpu.rounds.round import GraphRound

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = ["def quicksort(items):", "Question: Tom has 12 apples.", "import os\n"]


def engine_of(llm: LLM) -> Engine:
    return llm._engine  # pyright: ignore[reportPrivateUsage]


def texts(config: EngineConfig, params: SamplingParams, *, captured: bool) -> list[str]:
    llm = LLM(config=config)
    made = round_of(engine_of(llm))
    assert isinstance(made, GraphRound)
    if not captured:
        exchange_round(engine_of(llm), made.stages)
    return [result.text for result in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 3])
def test_text_is_that_of_the_stages(k: int, temperature: float) -> None:
    config = EngineConfig(device="cuda", k=k, batch_size=2, dtype="float32")
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    by_stages = texts(config, params, captured=False)
    assert texts(config, params, captured=True) == by_stages


def test_rounds_allocate_nothing() -> None:
    llm = LLM(config=EngineConfig(device="cuda", k=3))
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(5):
        next(stream)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        next(stream)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert not isinstance(round_of(engine_of(llm)), Stages)
    stream.close()
