"""Several kinds of heads that draft together: each reads its own of the layers that are stored."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)

from doubles.eagle_heads import EagleFolder
from doubles.in_turn import InTurn
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.loading import load_pair
from outrider.api.memory import files_of, memory_parts
from outrider.api.result import GenerationResult
from outrider.core.errors import CheckpointError, ConfigError
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve
from outrider_lab.bench.workload import load_prompts

pytestmark = pytest.mark.weights

HEADS = {kind: f"outrider/embedded-{kind}" for kind in ("eagle", "mtp", "medusa")}
# The target stores layers 8, 2 and 5: the block reads the first one, EAGLE all in another order.
TWO = f"{HEADS['mtp']},{HEADS['eagle']}"
PROMPTS = load_prompts("humaneval")[:2]
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)
# Each member drafts three tokens whenever it is asked.
ALWAYS = EngineConfig(drafter="portfolio", k=3, controller="fixed", batch_size=2, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def _in_turn() -> Generator[None]:
    """Members lead in turn, whether that pays or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.drafters.portfolio.Leads", InTurn)
        yield


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    with closing(LLM(config=EngineConfig(drafter="none", device="cpu"))) as llm:
        return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def two() -> Generator[LLM]:
    with closing(LLM(draft=TWO, config=ALWAYS)) as llm:
        yield llm


@pytest.mark.parametrize("tree_nodes", [0, 12])
def test_greedy_text_with_all_drafts_is_plain_decodings(
    tree_nodes: int, plain: list[tuple[int, ...]]
) -> None:
    draft = f"{HEADS['eagle']},{HEADS['mtp']},outrider/embedded-draft,quantised-self"
    with closing(LLM(draft=draft, config=replace(ALWAYS, tree_nodes=tree_nodes))) as llm:
        drafted = set[str]()
        for _ in range(2):
            results = llm.generate(PROMPTS, PARAMS)
            assert [one.token_ids for one in results] == plain
            drafted |= {name for one in results for name in one.stats.members}
    assert {"eagle", "mtp"} <= drafted


def test_a_hybrid_drafts_with_its_own_block_and_with_heads(tmp_path: Path) -> None:
    """Auto takes the block too where heads are named."""
    hybrid = "outrider/embedded-hybrid"
    folder = EagleFolder(256, 8192, layers=(2, 1, 3), head_dim=64).write(tmp_path)
    with closing(LLM(hybrid, drafter="none")) as llm:
        wanted = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
    with closing(LLM(hybrid, draft=str(folder))) as llm:
        results = llm.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in results] == wanted
    assert {"eagle", "mtp"} <= {name for one in results for name in one.stats.members}


def nodes_of(result: GenerationResult) -> list[list[int]]:
    """The drafted tokens of each round."""
    return [[one.token_id for one in event.nodes] for event in result.round_events]


def alone(kind: str, params: SamplingParams, prompt: str) -> GenerationResult:
    config = replace(ALWAYS, drafter=kind)
    with closing(LLM(draft=HEADS[kind], config=config)) as llm:
        return llm.generate(prompt, params)[0]


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_member_drafts_what_it_drafts_alone(two: LLM, kind: str) -> None:
    params = replace(PARAMS, round_events=True)
    # The prompt is read anew, as it is alone.
    together = two.generate(PROMPTS[0], replace(params, drafter=kind), cache_salt=kind)[0]
    found, wanted = nodes_of(together), nodes_of(alone(kind, params, PROMPTS[0]))
    assert found == wanted
    assert sum(len(nodes) > 1 for nodes in wanted) > 5
    assert together.stats.num_accepted > 0


def test_a_request_names_one_of_two_kinds(two: LLM, plain: list[tuple[int, ...]]) -> None:
    for kind in ("eagle", "mtp"):
        params = replace(PARAMS, speculative={"drafters": [kind]})
        results = two.generate(PROMPTS, params)
        assert [one.token_ids for one in results] == plain
        assert {name for one in results for name in one.stats.members} == {kind}


def test_memory_is_planned_for_the_states_of_both_and_for_both_caches() -> None:
    def parts(draft: str) -> dict[str, int]:
        found = load_pair("outrider/embedded", draft, replace(ALWAYS, context=256))
        assert isinstance(found.target, LlamaModel)
        told = memory_parts(found.plan, files_of(found.plan))
        taken = found.target.state.hidden_SKD.nbytes
        sizes = {part.name.partition(",")[0]: part.num_bytes for part in told}
        assert taken == pytest.approx(sizes["hidden states of the target"], rel=0.1)
        return sizes

    both, one = parts(TWO), parts(f"{HEADS['mtp']},outrider/embedded-draft")
    # A layer that both read is stored once.
    assert both["hidden states of the target"] == 3 * one["hidden states of the target"]
    assert {"KV arena of the eagle heads", "KV arena of the mtp heads"} <= both.keys()
    assert "KV arena of the eagle heads" not in one


@pytest.mark.parametrize(
    ("draft", "settings", "why"),
    [
        (TWO, {"schedule": "pd"}, "one lane"),
        (TWO, {"drafter": "eagle"}, "one source of drafts"),
        (TWO, {"tensor_parallel": 2}, "draft heads share tables"),
    ],
)
def test_heads_that_cannot_join_are_refused(
    draft: str, settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM(draft=draft, config=EngineConfig(**settings))  # pyright: ignore[reportArgumentType]


def test_two_folders_of_one_kind_are_refused(tmp_path: Path) -> None:
    shutil.copytree(resolve(HEADS["eagle"]), tmp_path / "eagle")
    with pytest.raises(ConfigError, match="eagle, eagle: several drafts must be of different"):
        LLM(draft=f"{HEADS['eagle']},{tmp_path / 'eagle'}")


def test_named_heads_that_are_broken_are_refused(tmp_path: Path) -> None:
    shutil.copytree(resolve(HEADS["eagle"]), tmp_path / "eagle")
    weights = tmp_path / "eagle" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if "fc" not in name}, weights)
    with pytest.raises(CheckpointError, match="fc"):
        LLM(draft=f"{tmp_path / 'eagle'},{HEADS['mtp']}")
