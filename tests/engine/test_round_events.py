"""Round events: every drafted node with p, q and its verdict, for requests that ask, at no cost in
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from checks.engine import PROMPT
from checks.state import VOCAB, fresh_logits
from doubles.drafters import EMPTY, random_chains, random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from outrider import LLM
from outrider.core.draft import Draft, NodeTrace, Outcome, RoundEvent
from outrider.core.params import SamplingParams
from outrider.core.philox import philox_uniform
from outrider.core.protocols import Drafter
from outrider.core.rng import KeyedRng, Role
from outrider.core.sampling import processed_probs
from outrider.core.tree import ROOT
from outrider.engine.stages import verdicts_of
from outrider.verify.rules import EXACT, rule_for

PROMPTS = (PROMPT, (0, 3), (4, 4, 1, 0, 2))
SAMPLED = SamplingParams(max_tokens=14, temperature=0.9, top_k=4, seed=3)
GREEDY = SamplingParams(max_tokens=14)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": lambda: EMPTY,
    "chosen chains": lambda: random_chains(VOCAB),
    "drawn chains": lambda: model_drafter(TinyAttentionLM(vocab_size=VOCAB, seed=5)),
    "drawn trees": lambda: random_trees(VOCAB),
}


def run(
    drafter: str, sampler: str, params: SamplingParams, *, stop: int | None = None, k: int = 4
) -> Rig:
    rig = Rig(
        TinyAttentionLM(vocab_size=VOCAB), DRAFTERS[drafter](), rule_for(sampler), k, batch_size=2
    )
    stop_ids = frozenset[int]() if stop is None else frozenset({stop})
    rig.run([Request(prompt, params, stop_ids) for prompt in PROMPTS])
    return rig


def rounds(rig: Rig) -> list[tuple[Sequence[int], Outcome]]:
    """The text before each round, and what came of it."""
    found: list[tuple[Sequence[int], Outcome]] = []
    texts = [list(prompt) for prompt in PROMPTS]
    for outcome in (outcome for job in rig.jobs for outcome in job):
        found.append((tuple(texts[outcome.seq_id]), outcome))
        texts[outcome.seq_id] += outcome.tokens
    assert texts == [seq.tokens for seq in rig.sequences]
    return found


def events(rig: Rig) -> list[tuple[Sequence[int], Draft, RoundEvent]]:
    return [
        (text, outcome.draft, event) for text, outcome in rounds(rig) for event in outcome.events
    ]


# Any two of drafter, rule and temperature meet; the product is `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sampler", [*EXACT, "typical"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_events_tell_what_happened_and_change_nothing(
    drafter: str, sampler: str, params: SamplingParams
) -> None:
    plain = run(drafter, sampler, params, stop=2)
    assert not any(outcome.nodes or outcome.events for _, outcome in rounds(plain))
    asked = run(drafter, sampler, replace(params, round_events=True), stop=2)
    assert [seq.tokens for seq in asked.sequences] == [seq.tokens for seq in plain.sequences]
    told = rounds(asked)
    assert [[o.tokens for o in job] for job in asked.jobs] == [
        [o.tokens for o in job] for job in plain.jobs
    ]
    assert [event.trace for _, _, event in events(asked)] == [
        trace for trace in asked.traces if trace.num_emitted
    ]
    for _, outcome in told:
        (event,) = outcome.events
        drafted = event.nodes[: len(outcome.draft)]
        assert tuple(node.token_id for node in drafted) == outcome.draft.tokens
        assert tuple(node.parent for node in drafted) == outcome.draft.parents
        assert tuple(node.token_id for node in event.emitted) == outcome.tokens
        if sampler in EXACT:
            assert tuple(node.verdict for node in event.emitted) == outcome.origins


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_p_is_the_targets_processed_probability_and_q_the_drafts(
    drafter: str, params: SamplingParams
) -> None:
    for text, draft, event in events(run(drafter, "token", replace(params, round_events=True))):
        for number, node in enumerate(event.nodes):
            logits_V = fresh_logits(TinyAttentionLM, [*text, *above(event.nodes, node.parent)])
            at_one = float(logits_V.softmax(-1)[node.token_id])
            if params.greedy:
                assert node.p == float(node.token_id == int(logits_V.argmax()))
                assert node.p_soft == pytest.approx(at_one, abs=1e-6)
            else:
                p_NV = processed_probs(logits_V[None].clone(), params)
                assert node.p == pytest.approx(float(p_NV[0, node.token_id]), abs=1e-6)
                assert node.p_soft is None
            if number < len(draft) and draft.probs_NV is not None:
                assert node.q == float(draft.probs_NV[number, node.token_id])
            else:
                assert node.q is None


def above(nodes: Sequence[NodeTrace], node: int) -> list[int]:
    return [] if node == ROOT else [*above(nodes, nodes[node].parent), nodes[node].token_id]


def test_a_token_is_accepted_exactly_when_the_rule_says_so_of_p_and_q() -> None:
    """The coin min(1, p/q) of a first child; later siblings are judged by what is left of p."""
    seen: set[str] = set()
    for drafter in ("chosen chains", "drawn chains", "drawn trees"):
        for seed in range(4):
            params = replace(SAMPLED, seed=seed, round_events=True)
            for text, draft, event in events(run(drafter, "token", params)):
                coins = KeyedRng(seed, 0, len(text))
                for number in tried(draft, event):
                    node = event.nodes[number]
                    ratio = node.p / (1 if node.q is None else node.q)
                    heads = coins.coin(ratio, number, Role.ACCEPT)
                    assert node.verdict == ("accepted" if heads else "refused")
                    seen.add(node.verdict)
    assert seen == {"accepted", "refused"}


def tried(draft: Draft, event: RoundEvent) -> list[int]:
    """First children of the root and of accepted nodes after which the text went on."""
    accepted = [i for i in range(len(draft)) if event.nodes[i].verdict == "accepted"]
    has_own = len(event.nodes) > len(draft)
    leaves = [ROOT, *accepted] if has_own else [ROOT, *accepted[:-1]]
    return [children[0] for leaf in leaves if (children := draft.children(leaf))]


def test_the_block_rule_keeps_a_whole_chain_by_the_product_of_p_over_q() -> None:
    seen: set[bool] = set()
    for seed in range(8):
        params = replace(SAMPLED, seed=seed, round_events=True)
        for text, draft, event in events(run("drawn chains", "block", params, k=2)):
            if not len(draft) or len(event.nodes) == len(draft):
                continue
            share = 1.0
            for node in event.nodes[:-1]:
                assert node.q
                share = min(1.0, share * node.p / node.q)
            whole = event.nodes[-1].verdict == "bonus"
            assert whole == KeyedRng(seed, 0, len(text)).coin(share, len(draft) - 1, Role.ACCEPT)
            seen.add(whole)
    assert seen == {True, False}


def test_greedily_a_token_is_accepted_exactly_when_it_is_the_likeliest() -> None:
    for drafter in ("chosen chains", "drawn chains", "drawn trees"):
        for _, draft, event in events(run(drafter, "block", replace(GREEDY, round_events=True))):
            for number in tried(draft, event):
                assert (event.nodes[number].verdict == "accepted") == (event.nodes[number].p == 1)


def test_what_was_not_tried_is_not_called_refused() -> None:
    """Siblings after the accepted one, what is below a refused node, and what is past the end."""
    draft = Draft((7, 5, 6, 8, 4), (ROOT, ROOT, 1, 1, ROOT))
    assert verdicts_of(draft, (1, 3), ended=False) == [
        *("refused", "accepted", "refused", "accepted", "unused")
    ]
    assert verdicts_of(draft, (1,), ended=True) == [
        *("refused", "accepted", "unused", "unused", "unused")
    ]
    assert verdicts_of(draft, (), ended=False) == [
        *("refused", "refused", "unused", "unused", "refused")
    ]


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_results_and_their_json_have_the_events(temperature: float) -> None:
    """Beside a request that asks for none, and that a native round serves."""
    with LLM(k=3, batch_size=2, max_waiting=4) as llm:
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=5)
        asked = replace(params, round_events=True)
        alone = llm.generate("def f(x):", params)[0]
        assert alone.round_events == ()
        told, untold = llm.generate(["def f(x):"] * 2, [asked, params])
        assert told.token_ids == untold.token_ids == alone.token_ids
        assert untold.round_events == ()
        streamed = list(llm.stream("def f(x):", asked))
    events = tuple(event for one in streamed for event in one.round_events)
    assert [event.nodes for event in events] == [event.nodes for event in told.round_events]
    emitted = [node.token_id for event in told.round_events for node in event.emitted]
    assert tuple(emitted) == told.token_ids
    assert type(told).from_dict(told.to_dict()) == told
    assert "round_events" not in untold.to_dict()


def number_of(start: int, node: int, role: Role) -> float:
    return philox_uniform(SAMPLED.rng_seed, (node + 1, start, 0, int(role)))


@pytest.mark.parametrize("sampler", ["token", "block"])
def test_a_coin_falls_as_its_number_says(sampler: str) -> None:
    """`chance` and `draw` are those that the verdict came from: of the keyed numbers, and below the
    chance where a token was accepted by its own coin."""
    fell: set[bool] = set()
    for drafter in ("chosen chains", "drawn chains", "drawn trees"):
        params = replace(SAMPLED, round_events=True)
        for text, draft, event in events(run(drafter, sampler, params)):
            key = partial(number_of, len(text))
            accepted = [i for i, node in enumerate(event.nodes) if node.verdict == "accepted"]
            for i, node in enumerate(event.nodes[: len(draft)]):
                if node.draw is None:
                    assert node.chance in (None, 0, 1)
                    continue
                assert node.draw == key(i, Role.ACCEPT)
                assert node.chance is not None
                assert 0 < node.chance < 1
                if node.verdict != "unused":
                    heads = node.draw < node.chance
                    assert heads == (node.verdict == "accepted")
                    fell.add(heads)
            if len(event.nodes) > len(draft):
                leaf = accepted[-1] if accepted else ROOT
                assert event.nodes[-1].draw == key(leaf, Role.NEXT)
                assert event.nodes[-1].chance is None
    assert fell == {True, False}


def test_rules_that_toss_no_coin_tell_none() -> None:
    """A greedy coin is certain; match draws its own tokens, and a race is no single number."""
    asked = replace(SAMPLED, round_events=True)
    greedy = replace(GREEDY, round_events=True)
    for _, draft, event in events(run("drawn chains", "token", greedy)):
        assert all(node.draw is None for node in event.nodes)
        assert {node.chance for node in event.nodes[: len(draft)]} <= {None, 0.0, 1.0}
    for sampler, has_pick in (("match", True), ("coupled", False)):
        for _, draft, event in events(run("drawn chains", sampler, asked)):
            assert all(node.chance is None for node in event.nodes)
            assert all(node.draw is None for node in event.nodes[: len(draft)])
            for own in event.nodes[len(draft) :]:
                assert (own.draw is not None) == has_pick


def test_an_event_has_the_budget_of_its_draft() -> None:
    asked = replace(GREEDY, round_events=True)
    for _, _, event in events(run("drawn chains", "token", asked, k=3)):
        assert event.budget is not None
        assert event.budget.depth == 3
