"""However few prompt tokens the pace lets a job read, the text stays what it was."""

from __future__ import annotations

from contextlib import closing

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.workload import load_prompts
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_HYBRID
from outrider.sched.pace import LEAST_CHUNK, PromptPace

pytestmark = [pytest.mark.slow, pytest.mark.weights]

# Two of them begin alike, so that pages are shared; the last has little to read.
_LONG = load_prompts("humaneval")[0]
PROMPTS = [_LONG + "\n# one\n", _LONG + "\n# two\n", "import os, sys"]
GREEDY = SamplingParams(max_tokens=10)
WARM = SamplingParams(max_tokens=10, temperature=0.8, seed=7)

# The pace is the target's; drafters by prompt chunks are covered in test_drafter_matrix.py.
RUNS = [
    {"drafter": "none"},
    {"drafter": "model"},
    {"drafter": "model", "schedule": "pdv"},
    {"drafter": "model", "schedule": "ssd"},
    {"drafter": "model", "tree_nodes": 8, "fused_round": False},
    {"drafter": "mtp"},
    {"drafter": "eagle", "tree_nodes": 8},
    {"drafter": "quantised-self"},
    {"drafter": "none", "kv_budget": 64},
    {"drafter": "ngram", "batched_verify": False},
]
HYBRIDS = [
    {"drafter": "none"},
    {"drafter": "model"},
    {"drafter": "mtp", "state_rollback": "replay"},
    {"drafter": "mtp", "state_rollback": "ring", "state_history": 16},
    {"drafter": "ngram", "schedule": "pdv"},
]


def texts(model: str, config: dict[str, object]) -> list[tuple[int, ...]]:
    settings = {"k": 3, "batch_size": 2, "hybrid_threshold": 0, "device": "cpu"} | config
    draft = EMBEDDED_DRAFT if model == EMBEDDED_HYBRID and config["drafter"] == "model" else None
    made = EngineConfig(**settings)  # pyright: ignore[reportArgumentType]
    with closing(LLM(model, draft=draft, config=made)) as llm:
        return [
            result.token_ids
            for params in (GREEDY, WARM)
            for result in llm.generate(PROMPTS, params)
        ]


@pytest.mark.parametrize(
    ("model", "config"),
    [
        *(("outrider/embedded", config) for config in RUNS),
        *((EMBEDDED_HYBRID, config) for config in HYBRIDS),
    ],
    ids=str,
)
def test_a_text_does_not_depend_on_the_pace(
    model: str, config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = texts(model, config)
    asked = list[int]()

    def limit(_: PromptPace) -> int:
        asked.append(LEAST_CHUNK)
        return LEAST_CHUNK

    monkeypatch.setattr(PromptPace, "limit", property(limit))
    assert texts(model, config) == wanted
    assert asked
