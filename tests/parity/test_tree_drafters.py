"""Drafters of heads and trees on the embedded target: plain decoding's text, whatever they guess.

The heads are random but for what an identity does, so most of their drafts are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from doubles.head_files import block_tensors, medusa_tensors, write_block, write_medusa
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError
from outrider.core.spec import ModelSpec
from outrider.models.families import read_native_config
from outrider.models.loading import resolve
from outrider.plugins.heads.medusa import MedusaConfig
from outrider_lab.bench.workload import load_prompts
from outrider_lab.models.block_net import BlockConfig

PROMPTS = [*load_prompts("humaneval")[:2], "x = 1"]
GREEDY = SamplingParams(max_tokens=16)
PLAIN = EngineConfig(drafter="none")
BLOCK = BlockConfig(
    num_places=4, num_context=3, num_layers=1, num_heads=4, ffn_size=64, hidden_layers=(4, 8)
)

pytestmark = pytest.mark.weights


def texts(config: EngineConfig, draft: str | None = None) -> list[Sequence[int]]:
    """Of the short prompt alone where each number is written out in operators of PyTorch."""
    prompts = PROMPTS[-1:] if config.force_reference else PROMPTS
    with closing(LLM(draft=draft, config=config)) as llm:
        return [result.token_ids for result in llm.generate(prompts, GREEDY)]


@cache
def plain() -> list[Sequence[int]]:
    return texts(PLAIN)


def spec() -> ModelSpec:
    config = read_native_config(resolve("outrider/embedded"))
    return config.spec("", bytes_per_weight=2, bytes_per_kv=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    heads = MedusaConfig(num_heads=3)
    return {
        "medusa": write_medusa(
            root / "medusa", heads, spec(), medusa_tensors(heads, spec(), own=(1,))
        ),
        "block": write_block(root / "block", BLOCK, spec(), block_tensors(BLOCK, spec())),
    }


# Drafters by arrangements are covered in tests/engine/test_drafter_matrix.py. Other combinations
# are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("tree_nodes", [0, 12])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_random_heads(
    folders: dict[str, Path], kind: str, batch_size: int, tree_nodes: int
) -> None:
    config = EngineConfig(k=4, tree_nodes=tree_nodes, batch_size=batch_size, least_confidence=0.0)
    assert texts(config, str(folders[kind])) == plain()


@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "pdv", "batch_size": 3, "hybrid_threshold": 0},
        {"batched_verify": False},
        {"controller": "band", "batch_size": 3},
        {"force_reference": True},
        {"quantise": "int8"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_in_other_surroundings(
    folders: dict[str, Path], kind: str, changes: dict[str, Any]
) -> None:
    """Lanes, token by token, adaptive depth, other kernels."""
    config = EngineConfig(k=4, tree_nodes=12, least_confidence=0.0, **changes)
    kept = {key: changes[key] for key in ("force_reference", "quantise") if key in changes}
    wanted = texts(EngineConfig(drafter="none", **kept)) if kept else plain()
    assert texts(config, str(folders[kind])) == wanted


@pytest.mark.sample(2)
@pytest.mark.parametrize("init", ["tie", "copy", "random"])
def test_lite_heads(init: str) -> None:
    config = EngineConfig(drafter="medusa-lite", head_init=init, lite_heads=3, k=4)
    assert texts(config) == plain()
    assert texts(replace(config, tree_nodes=10, tree_shape="calibrated")) == plain()


def test_a_draft_model_that_branches_beside_prompts() -> None:
    config = EngineConfig(k=4, tree_nodes=16, batch_size=3, schedule="pd")
    assert texts(config) == plain()


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["humaneval", "gsm8k"])
def test_trees_accept_more_tokens_a_round_than_chains_of_as_many_rows(workload: str) -> None:
    """Counts, not seconds; 15 drafts and the pending token are one tile of rows."""
    params = SamplingParams(max_tokens=64)
    configs = (EngineConfig(k=15), EngineConfig(k=14, tree_nodes=15))
    chain, tree = (tokens_per_round(config, workload, params) for config in configs)
    assert tree > chain


@pytest.mark.sample(1)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("workload", ["humaneval", "gsm8k"])
def test_trees_of_the_embedded_heads_bring_more_than_chains(
    workload: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=0)
    chain, tree = (
        tokens_per_round(
            EngineConfig(drafter="medusa", k=4, tree_nodes=tree_nodes), workload, params
        )
        for tree_nodes in (0, 15)
    )
    assert chain > 1.1
    assert tree > chain + 0.1


def tokens_per_round(config: EngineConfig, workload: str, params: SamplingParams) -> float:
    """Of drafts that never rest."""
    with closing(LLM(config=replace(config, watchdog="off"))) as llm:
        stats = [one.stats for one in llm.generate(load_prompts(workload)[10:16], params)]
    return sum(s.num_emitted for s in stats) / sum(s.num_rounds for s in stats)


def test_heads_of_another_kind_than_asked_for_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="medusa heads"):
        LLM(draft=str(folders["block"]), config=EngineConfig(drafter="medusa"))
    with pytest.raises(ConfigError, match="block"):
        LLM(config=EngineConfig(drafter="block"))
