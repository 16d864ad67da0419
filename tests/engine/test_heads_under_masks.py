"""Masks that leave a draft head nothing that it knows: drafts go on, for all requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.eagle_heads import EagleFolder
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle

# Ids 1, 4, 7, ... are drafted; the end of text, 0, is not.
HEADS = EagleFolder(256, 8192, ids=tuple(range(1, 8192, 3)), head_dim=64, ffn_size=64, scale=0.02)
PROMPTS = ([5, 6, 7], [9, 6, 7], [9, 6, 1])
NUM_TOKENS = 16


def narrow(text: Sequence[int]) -> Tensor:
    """At every fourth place two ids, of which the heads know neither."""
    at_V = torch.ones(8192, dtype=torch.bool)
    if len(text) % 4 == 2:
        at_V[:] = False
        at_V[[300, 302]] = True
    return at_V


# Trees and chains, greedy and sampled. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree_nodes", [0, 12])
def test_every_request_is_drafted_for(tmp_path: Path, tree_nodes: int, temperature: float) -> None:
    config = EngineConfig(
        k=3, tree_nodes=tree_nodes, batch_size=3, context=64, watchdog="off", profile=True
    )
    llm = LLM(draft=HEADS.write(tmp_path), config=config)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=0)
    tickets: list[RequestHandle] = []
    for prompt, allowed in zip(PROMPTS, (narrow, None, None), strict=True):
        tickets.append(llm.submit(prompt, params, allowed=allowed))
    while llm.has_work:
        llm.advance()
    for ticket in tickets:
        result = ticket.result()
        # The first round has no states to draft from, the last no room; a text may end early.
        asked = [one.num_drafted for one in result.rounds][1:-1]
        assert asked
        assert all(asked)
