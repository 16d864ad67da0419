"""Trees are native calls in an engine too, one that drafts and one that verifies; whatever draft
was made before is judged in a round's call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from doubles.rig import round_of
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import Verdict
from outrider.engine.native_round import NativeRound
from outrider.engine.round import Batch
from outrider.engine.stages import Stages
from outrider.kernels.native.sampling import Grown, NativeTreeDrafts, PlannedTree

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("native_library")]


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("drafter", "dtype"), [("eagle", "auto"), ("mtp", "auto"), ("eagle", "float16")]
)
def test_small_trees_of_one_text_are_made_at_once(
    drafter: str, dtype: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    call = NativeTreeDrafts.__call__

    def counted(self: NativeTreeDrafts, trees: Sequence[PlannedTree]) -> list[Grown] | None:
        grown = call(self, trees)
        made.append(grown is not None)
        return grown

    monkeypatch.setattr(NativeTreeDrafts, "__call__", counted)
    config = EngineConfig(
        drafter=drafter,
        dtype=dtype,
        k=4,
        tree_nodes=8,
        batch_size=1,
        watchdog="off",
        profile=True,
    )
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=0)
    (result,) = LLM(config=config).generate("def add(a, b):", params)
    drafted = [one for one in result.rounds if one.num_drafted]
    assert made == [True] * len(drafted) != []


PROMPTS = (
    "def add(a, b):",
    "Natalia sold clips to 48 of her friends in April. How many",
    "x = [1, 2, 1, 2, 1,",
)
DRAFTS: dict[str, dict[str, object]] = {
    "model": {"k": 6, "tree_nodes": 15},
    "suffix": {"k": 8, "tree_nodes": 16},
    "medusa": {"k": 4, "tree_nodes": 15},
    "eagle": {"k": 4, "tree_nodes": 12},
    "mtp": {"k": 4},
    "eagle-lite": {"k": 3},
    "quantised-self": {"k": 4, "tree_nodes": 9},
    "recycling": {"k": 4, "tree_nodes": 12},
}
WAYS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": True},
    {"temperature": 0.7, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.2, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "stop": ("\n",)},
)


def rounds_of(drafter: str, sampler: str, *, fused: bool) -> list[object]:
    """All that rounds decide, of requests that share batches."""
    llm = LLM(
        config=EngineConfig(
            drafter=drafter, sampler=sampler, fused_round=fused, batch_size=3, watchdog="off",
            profile=True, **DRAFTS[drafter],  # pyright: ignore[reportArgumentType]
        )
    )  # fmt: skip
    assert isinstance(round_of(llm._engine), NativeRound if fused else Stages)  # pyright: ignore[reportPrivateUsage]
    params = [
        SamplingParams(max_tokens=10 + 3 * i, seed=i, **way)  # pyright: ignore[reportArgumentType]
        for i, way in enumerate(WAYS)
    ]
    found: list[object] = []
    for one in llm.generate([PROMPTS[i % 3] for i in range(len(params))], params):
        rounds = [(r.num_drafted, r.num_accepted, r.draft_depth) for r in one.rounds]
        found.append((one.token_ids, one.finish_reason, one.logprobs, rounds))
    return found


# Each drafter and each rule meets the stages. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTS)
@pytest.mark.parametrize("sampler", ["block", "token", "match", "coupled"])
def test_verdicts_on_given_drafts_are_those_of_the_stages(drafter: str, sampler: str) -> None:
    assert rounds_of(drafter, sampler, fused=True) == rounds_of(drafter, sampler, fused=False)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [(name, heat) for name in DRAFTS for heat in (0.0, 0.9)],
)
def test_no_verdict_on_a_given_draft_takes_the_stages(
    drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(drafter=drafter, watchdog="off", profile=True, **DRAFTS[drafter])  # pyright: ignore[reportArgumentType]
    llm = LLM(config=config)

    def refuse(self: Stages, batch: Batch, rows: Sequence[object]) -> list[Verdict]:
        del self, rows
        assert not batch, "a verdict was the stages'"
        return []

    monkeypatch.setattr(Stages, "_judge", refuse)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=0)
    (result,) = llm.generate(PROMPTS[2], params)
    assert any(one.num_drafted for one in result.rounds)


def test_ranks_of_greedy_text_are_those_of_the_stages() -> None:
    """A drafter that reads the target's likely tokens drafts the same after both."""

    def drafted(*, fused: bool) -> list[list[tuple[int, int]]]:
        config = EngineConfig(
            drafter="recycling", fused_round=fused, k=4, tree_nodes=12, batch_size=2, profile=True
        )
        results = LLM(config=config).generate(PROMPTS, SamplingParams(max_tokens=24))
        return [[(r.num_drafted, r.num_accepted) for r in one.rounds] for one in results]

    rounds = drafted(fused=True)
    assert any(accepted for one in rounds for _, accepted in one)
    assert rounds == drafted(fused=False)
