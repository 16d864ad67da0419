"""Drafters that look up, on the embedded pair with all that is native: the text stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from doubles.in_turn import InTurn
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import Draft
from outrider.core.protocols import DraftRow
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.pairs.catalog import EMBEDDED_HEADS

pytestmark = pytest.mark.weights

PROMPTS = (
    "def add(first, second):\n    return first + second\n\ndef add_again(first, second):\n",
    "import os\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "x = 1\n",
)
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    results = LLM(config=EngineConfig(drafter="none")).generate(PROMPTS, PARAMS)
    return [result.token_ids for result in results]


# Chains and trees of every drafter are covered in tests/engine/test_drafter_matrix.py. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["suffix", "recycling", "lookup", "portfolio"])
@pytest.mark.parametrize("tree_nodes", [0, 12])
def test_greedy_text_is_plain_decodings(
    drafter: str, tree_nodes: int, plain: list[tuple[int, ...]]
) -> None:
    """Twice: the second time all of it was written before, and takes fewer rounds."""
    config = EngineConfig(drafter=drafter, k=6, tree_nodes=tree_nodes, batch_size=2)
    llm = LLM(config=config)
    num_rounds = list[int]()
    for _ in range(2):
        results = llm.generate(PROMPTS, PARAMS)
        assert [result.token_ids for result in results] == plain
        num_rounds.append(sum(result.stats.num_rounds for result in results))
    assert num_rounds[1] <= num_rounds[0] < 3 * 32
    llm.close()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tree_nodes"), [("eagle", 0), ("eagle", 12), ("mtp", 0)])
def test_heads_are_the_model_of_a_portfolio(
    heads: str, tree_nodes: int, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read states of rounds that lookups drafted for as well."""
    monkeypatch.setattr("outrider.drafters.portfolio.Leads", InTurn)
    config = EngineConfig(
        drafter="portfolio", k=4, tree_nodes=tree_nodes, batch_size=2, profile=True
    )
    llm = LLM(draft=EMBEDDED_HEADS[heads], config=config)
    by, accepted = set[str](), 0
    for _ in range(2):
        results = llm.generate(PROMPTS, PARAMS)
        assert [result.token_ids for result in results] == plain
        rounds = [trace for result in results for trace in result.rounds]
        by |= {name for trace in rounds if trace.num_drafted for name in trace.drafter.split("+")}
        own = [stats[heads] for result in results if heads in (stats := result.stats.members)]
        accepted += sum(one["num_accepted"] for one in own)
    assert heads in by
    assert len(by) > 1
    assert accepted > 0
    llm.close()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "draft",
    [
        "outrider/embedded-draft,outrider/embedded-eagle",
        "outrider/embedded-eagle,quantised-self",
        "outrider/embedded-draft,quantised-self",
        "outrider/embedded-draft,outrider/embedded-eagle,quantised-self",
    ],
)
def test_several_models_draft_in_one_portfolio(draft: str, plain: list[tuple[int, ...]]) -> None:
    """Auto, and by name with trees: the text is plain decoding's, and each is asked for drafts."""
    named = EngineConfig(drafter="portfolio", k=4, tree_nodes=12, batch_size=2)
    for config in (EngineConfig(batch_size=2), named):
        with LLM(draft=draft, config=config) as llm:
            assert llm.drafter == "portfolio"
            results = llm.generate(PROMPTS, PARAMS)
            assert [result.token_ids for result in results] == plain
            members = {*llm.drafters} - {"portfolio"}
            assert {"model", "eagle", "quantised-self"} & members
            alone = llm.generate(PROMPTS, PARAMS, speculative={"drafters": ["suffix"]})
            assert [result.token_ids for result in alone] == plain
            assert all({*result.stats.members} <= {"suffix"} for result in alone)


@pytest.mark.usefixtures("native_library")
def test_a_leading_model_drafts_within_the_native_round(
    plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a batch; the drafter itself is not asked. A request that reports its rounds,
    which go stage by stage, has the same text."""

    def fails(drafter: ModelDrafter, rows: Sequence[DraftRow]) -> list[Draft]:
        raise AssertionError(drafter, rows)

    monkeypatch.setattr("outrider.drafters.portfolio.Leads", InTurn)
    config = EngineConfig(drafter="portfolio", k=4, batch_size=2)
    with LLM(draft="outrider/embedded-draft", config=config) as llm:
        shown = [llm.generate(PROMPTS[0], PARAMS, round_events=True)[0]]
        monkeypatch.setattr(ModelDrafter, "propose", fails)
        found = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS[0], PARAMS), *shown]
    assert [one.token_ids for one in found] == [*plain, plain[0], plain[0]]
    assert all(one.stats.members["model"]["seconds"] > 0 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pdv", "ssd"])
def test_other_schedules_have_the_same_text(schedule: str, plain: list[tuple[int, ...]]) -> None:
    llm = LLM(config=EngineConfig(drafter="portfolio", k=4, schedule=schedule))
    results = llm.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == plain
    assert not any("turned off" in note for result in results for note in result.notes)
    llm.close()


@pytest.mark.slow
def test_a_guess_and_a_corpus_are_members_of_a_portfolio(
    plain: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The guess is right, or the corpus has the text: then few rounds are left."""
    target = LLM(config=EngineConfig(drafter="none"))
    text = target.tokenizer.decode(plain[0])
    path = tmp_path_factory.mktemp("corpus") / "text.py"
    path.write_text(PROMPTS[0] + text, encoding="utf-8")
    guessed = SamplingParams(max_tokens=32, ignore_eos=True, prediction=text)
    for config, params in (
        (EngineConfig(drafter="lookup", k=8), guessed),
        (EngineConfig(drafter="suffix", k=8, suffix_corpus=str(path)), PARAMS),
    ):
        result = LLM(config=config).generate(PROMPTS[0], params)[0]
        assert result.token_ids == plain[0]
        assert result.stats.num_rounds <= 16


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["match", "coupled"])
def test_text_tied_to_a_seed_stays(sampler: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    texts = set[tuple[int, ...]]()
    for drafter in ("none", "suffix", "recycling", "lookup", "portfolio"):
        llm = LLM(config=EngineConfig(drafter=drafter, k=5, sampler=sampler))
        texts |= {llm.generate(PROMPTS[0], params)[0].token_ids for _ in range(2)}
        llm.close()
    assert len(texts) == 1
