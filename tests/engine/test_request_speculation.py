"""Speculation that a request chooses: requests of one batch differ in it, and in nothing else."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest

from outrider import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams

pytestmark = pytest.mark.weights

PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i"
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1, seed=7)
# Everything that makes drafts or runs rounds in a way of its own.
ENGINES: dict[str, dict[str, object]] = {
    "native": {"drafter": "model"},
    "stages": {"drafter": "model", "fused_round": False},
    "tree": {"drafter": "model", "tree_nodes": 12},
    "looked up": {"drafter": "ngram"},
    "heads": {"drafter": "eagle", "k": 4},
    "own copy": {"drafter": "quantised-self"},
    "portfolio": {"drafter": "portfolio"},
    "recycled": {"drafter": "recycling", "tree_nodes": 12},
    "goodput": {"drafter": "model", "controller": "goodput"},
    "band": {"drafter": "model", "controller": "band"},
    "pd": {"drafter": "model", "schedule": "pd"},
    "pdv": {"drafter": "model", "schedule": "pdv", "hybrid_threshold": 0},
    "ssd": {"drafter": "model", "schedule": "ssd", "hybrid_threshold": 0},
    "process": {"drafter": "model", "schedule": "ssd", "drafter_home": "process"},
    "none": {"drafter": "none"},
}


def llm_of(engine: str, **more: object) -> LLM:
    settings = {"batch_size": 4, "profile": True, "device": "cpu", **ENGINES[engine], **more}
    return LLM(config=EngineConfig(**settings))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def opened(engine: str) -> Generator[LLM]:
    """One for all tests that take an engine as it is: their requests differ, and nothing else."""
    with llm_of(engine, batch_size=8) as llm:
        yield llm


def together(llm: LLM, params: Sequence[SamplingParams]) -> list[GenerationResult]:
    return llm.generate([PROMPT] * len(params), params)


def drafters_of(result: GenerationResult) -> set[str]:
    """Of the rounds that drafted."""
    return {one.drafter for one in result.rounds if one.num_drafted}


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ENGINES, scope="module")
def test_requests_without_drafts_have_none_beside_others_that_have(
    engine: str, opened: LLM
) -> None:
    results = opened.generate(
        [PROMPT] * 4,
        [
            GREEDY,
            SamplingParams(max_tokens=16, ignore_eos=True, speculative=False),
            SamplingParams(max_tokens=16, ignore_eos=True, k=1),
            SamplingParams(max_tokens=16, ignore_eos=True, k=64),
        ],
    )
    engine_k = 0 if engine == "none" else opened.k
    assert len({one.token_ids for one in results}) == 1
    plain, short = results[1], results[2]
    assert plain.stats.num_drafted == 0
    assert (plain.stats.drafter, plain.stats.k, plain.is_speculative) == ("none", 0, False)
    assert {one.drafter for one in plain.rounds if one.num_emitted} == {"none"}
    assert len([one for one in plain.rounds if one.num_emitted]) == 16
    assert not plain.notes
    assert max(one.draft_depth for one in short.rounds) <= 1
    assert [one.stats.k for one in results] == [engine_k, 0, min(1, engine_k), engine_k]
    assert results[0].stats.drafter == opened.drafter


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["native", "stages", "looked up"])
def test_a_request_without_drafts_has_the_text_that_it_has_alone(engine: str) -> None:
    """Of one seed, under rules that draw plain text with numbers of their own."""
    plain = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1, seed=7, speculative=False)
    with llm_of(engine) as llm, llm_of("none") as other:
        beside = together(llm, [SEEDED, plain, GREEDY])[1]
        assert beside.token_ids == together(other, [SEEDED])[0].token_ids


def test_no_drafts_are_made_for_a_text_under_a_grammar_either() -> None:
    with llm_of("native") as llm:
        (result,) = llm.generate([PROMPT], speculative=False, choices=["a long answer"])
    assert result.text == "a long answer"
    assert result.stats.num_drafted == 0


def test_true_refuses_a_request_that_nothing_would_be_drafted_for() -> None:
    with llm_of("none") as llm, pytest.raises(ConfigError, match="this engine drafts nothing"):
        llm.submit(PROMPT, speculative=True)
    with llm_of("looked up") as llm:
        with pytest.raises(ConfigError, match="k is 0"):
            llm.submit(PROMPT, speculative=True, k=0)
        assert llm.generate([PROMPT], GREEDY, speculative=True)[0].stats.k == llm.k


def test_text_without_drafts_is_exact_under_a_lossy_rule() -> None:
    with llm_of("looked up", sampler="p_min") as llm:
        lossy, plain = together(llm, [GREEDY, SamplingParams(max_tokens=16, speculative=False)])
    assert (lossy.exact, plain.exact) == (False, True)


# What these draft depends on time.
TIMED = ("goodput",)
RULES = ("block", "token", "match", "coupled")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "engine",
    ["native", "stages", "tree", "heads", "own copy", "pdv", "ssd", "process"],
    scope="module",
)
def test_requests_of_one_batch_have_rules_of_their_own(opened: LLM) -> None:
    short = replace(SEEDED, max_tokens=16)
    each = [replace(short, seed=seed, sampler=rule) for seed, rule in enumerate((*RULES, None))]
    each.append(replace(GREEDY, max_tokens=16))
    beside = together(opened, each)
    alone = [together(opened, [one])[0] for one in each]
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    assert all(one.exact and one.stats.num_drafted for one in beside)


# Each rule in each of these is above, beside others; each rule chosen in an engine of each other
# one is among the mutants' checks (`rules_of_requests`). Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", ["native", "stages", "process", "ssd"])
def test_a_rule_gives_the_text_of_an_engine_that_has_it(engine: str, rule: str) -> None:
    """Drafts are drawn for the request's rule as well."""
    with llm_of(engine, sampler="match" if rule == "coupled" else "coupled") as llm:
        chosen = together(llm, [replace(SEEDED, sampler=rule)] * 2)
    with llm_of(engine, sampler=rule) as llm:
        own = together(llm, [SEEDED] * 2)
    assert [one.token_ids for one in chosen] == [one.token_ids for one in own]


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_a_seed_has_one_text_whatever_drafts_for_it(rule: str) -> None:
    tied = replace(SEEDED, sampler=rule)
    each = [
        tied,
        replace(tied, speculative=False),
        replace(tied, k=1),
        replace(tied, drafter="ngram"),
    ]
    texts = set[tuple[int, ...]]()
    for engine in ("native", "looked up", "tree", "none"):
        with llm_of(engine) as llm:
            texts |= {
                one.token_ids for one in together(llm, each if engine != "none" else each[:3])
            }
    assert len(texts) == 1


def test_a_request_cannot_choose_a_lossy_rule() -> None:
    with pytest.raises(ConfigError, match="'typical' is lossy") as refused:
        SamplingParams(sampler="typical")
    assert all(rule in str(refused.value.hint) for rule in RULES)


LOOK_UPS = ("ngram", "suffix", "recycling", "lookup", "prediction", "none")
# Beside those: what an engine's own drafter is called, or is made of.
PARTS = {"portfolio": ("portfolio", "model"), "looked up": (), "none": (), "recycled": ()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "none"], scope="module")
def test_requests_of_one_batch_have_drafters_of_their_own(engine: str, opened: LLM) -> None:
    names = [*LOOK_UPS, *PARTS.get(engine, (opened.drafter,))]
    each = [replace(GREEDY, drafter=name) for name in names]
    results = together(opened, [*each, GREEDY])
    again = together(opened, [*each, GREEDY])
    assert len({one.token_ids for one in (*results, *again)}) == 1
    assert [one.stats.drafter for one in results] == [*names, opened.drafter]
    for name, result in zip(names, again, strict=False):
        assert not result.notes
        if name in ("ngram", "suffix", "recycling") and engine not in TIMED:
            assert drafters_of(result) == {name}
        if name in ("none", "prediction"):
            assert result.stats.num_drafted == 0


def test_a_drafter_that_a_request_chose_forgets_as_the_engines_own_does() -> None:
    with llm_of("native") as llm:
        first = llm.generate([PROMPT], GREEDY, drafter="recycling")[0]
        llm.forget()
        second = llm.generate([PROMPT], GREEDY, drafter="recycling")[0]
    assert [one.num_drafted for one in first.rounds] == [one.num_drafted for one in second.rounds]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("engine", "drafter"),
    [("looked up", "model"), ("native", "eagle"), ("heads", "model"), ("native", "eagle-lite")],
)
def test_a_drafter_that_is_not_here_is_refused_with_those_that_are(
    engine: str, drafter: str
) -> None:
    with llm_of(engine) as llm:
        with pytest.raises(ConfigError, match=f"'{drafter}' cannot be chosen") as refused:
            llm.submit(PROMPT, drafter=drafter)
        assert set(llm.drafters) == {llm.drafter, *LOOK_UPS}
        assert all(name in str(refused.value.hint) for name in llm.drafters)
        assert llm.generate([PROMPT], max_tokens=2)[0].num_tokens == 2


def test_an_engine_without_speculation_has_no_room_for_drafts() -> None:
    with llm_of("none") as llm:
        with pytest.raises(ConfigError, match="this engine drafts nothing"):
            llm.submit(PROMPT, drafter="ngram")
        assert llm.generate([PROMPT], max_tokens=2, drafter="none")[0].num_tokens == 2
        assert llm.drafters == ("none",)


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ENGINES, scope="module")
def test_a_prediction_is_followed_beside_any_drafter(engine: str, opened: LLM) -> None:
    opened.forget()
    (wanted,) = together(opened, [replace(GREEDY, max_tokens=40, speculative=False)])
    right = replace(GREEDY, max_tokens=40, prediction=wanted.text)
    wrong = replace(right, prediction="Once upon a time there was a king, who had a daughter.")
    results = together(
        opened, [right, wrong, replace(right, prediction=""), replace(wrong, drafter="none")]
    )
    assert {one.token_ids for one in results} == {wanted.token_ids}
    if engine not in ("none", *TIMED):
        # A portfolio weighs the guess against its other members.
        assert engine == "portfolio" or "prediction" in drafters_of(results[0])
        assert results[0].stats.num_rounds <= results[2].stats.num_rounds
    assert results[3].stats.num_drafted == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["native", "stages", "looked up", "ssd"])
def test_a_prediction_leaves_the_text_of_a_seed_alone(engine: str) -> None:
    tied = replace(SEEDED, sampler="coupled")
    with llm_of(engine) as llm:
        (wanted,) = together(llm, [tied])
        guessed = replace(tied, prediction=wanted.text)
        assert together(llm, [guessed, guessed])[1].token_ids == wanted.token_ids
