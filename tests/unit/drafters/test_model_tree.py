"""Trees of a draft model: the best by its own distributions, and a memory that follows the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from checks.state import fresh_logits
from doubles.counting import CountingLM
from doubles.rig import BRANCHING
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.errors import CapacityError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM, DraftRow
from outrider.core.sampling import SHARPNESS
from outrider.core.tree import ROOT
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.plugins.proof.reports import SAMPLED
from outrider.testing import GREEDY, VOCAB, check_same, check_shape, row

Make = Callable[[], CausalLM]
MODELS: dict[str, Make] = {
    "hybrid": lambda: ToyHybrid(vocab_size=VOCAB, seed=5, num_slots=2048),
    "attention": lambda: TinyAttentionLM(vocab_size=VOCAB, seed=5, num_slots=2048),
}
DRAFT_MODEL = partial(ToyHybrid, seed=5)
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
both_ways = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
TEXT = [1, 2, 0, 1, 3]


def tree_row(
    text: list[int], depth: int, num_nodes: int, params: SamplingParams, seq_id: int = 0
) -> DraftRow:
    asked = row(seq_id, text, depth=depth, params=params)
    return replace(asked, budget=Budget(depth, num_nodes=num_nodes))


def fresh(make: Make, text: list[int], budget: Budget, params: SamplingParams) -> Draft:
    drafter = ModelDrafter(make(), BRANCHING, chunk=64)
    drafter.open(0, text)
    return drafter.propose([tree_row(text, budget.depth, budget.num_nodes, params)])[0]


@pytest.mark.sample(4)
@every_model
@both_ways
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_memory_follows_any_history(make: Make, params: SamplingParams, chunk: int) -> None:
    """Whatever path was accepted, or none, the next tree is that of a drafter that met the text
    just now. Two sequences alternate, and some rounds ask for nothing."""
    rng = random.Random(chunk)
    model = make()
    free = model.state.num_free_tokens
    drafter = ModelDrafter(model, BRANCHING, chunk=chunk)
    texts = [list(TEXT), [4]]
    for seq_id, text in enumerate(texts):
        drafter.open(seq_id, text)
    for _ in range(12):
        budget = Budget(rng.randint(1, 4), num_nodes=rng.randint(5, 12))
        asked = [seq_id for seq_id in (0, 1) if rng.random() < 0.8]
        rows = [tree_row(texts[i], budget.depth, budget.num_nodes, params, i) for i in asked]
        drafts = dict(zip(asked, drafter.propose(rows), strict=True))
        for seq_id, text in enumerate(texts):
            draft = drafts.get(seq_id, Draft.empty())
            check_shape(draft, budget.depth, params)
            assert len(draft) <= budget.size
            if seq_id in drafts:
                check_same(draft, fresh(make, text, budget, params))
            text.extend(Outcome(seq_id, draft, _verdict(rng, draft)).tokens)
    for seq_id in (0, 1):
        drafter.close(seq_id)
    assert model.state.num_free_tokens == free


def _verdict(rng: random.Random, draft: Draft) -> Verdict:
    """Down any path, to any depth."""
    path: list[int] = []
    node = ROOT
    while (children := draft.children(node)) and rng.random() < 0.8:
        node = rng.choice(children)
        path.append(node)
    return Verdict(tuple(path), rng.randrange(VOCAB))


def test_a_greedy_tree_has_the_likeliest_paths() -> None:
    """All paths of the model's own distribution, listed one by one."""
    depth, num_nodes = 3, 9
    worths: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(1, depth + 1):
        for path in product(range(VOCAB), repeat=length):
            logits_V = fresh_logits(DRAFT_MODEL, [*TEXT, *path[:-1]], VOCAB)
            worths[path] = worths[path[:-1]] * float((SHARPNESS * logits_V).softmax(-1)[path[-1]])
    best = sorted((path for path in worths if path), key=lambda path: -worths[path])[:num_nodes]
    draft = fresh(MODELS["hybrid"], TEXT, Budget(depth, num_nodes=num_nodes), GREEDY)
    assert {_path(draft, node) for node in range(len(draft))} == set(best)


def _path(draft: Draft, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node != ROOT:
        path.append(draft.tokens[node])
        node = draft.parents[node]
    return tuple(reversed(path))


def test_a_tree_takes_one_pass_a_level_for_the_whole_batch() -> None:
    model = CountingLM(MODELS["hybrid"]())
    drafter = ModelDrafter(model, BRANCHING, chunk=64)
    for seq_id, text in enumerate(([1], [2, 3])):
        drafter.open(seq_id, text)
    for params in (GREEDY, SAMPLED):
        model.steps.clear()
        rows = [tree_row([1], 3, 9, params), tree_row([2, 3], 2, 9, params, 1)]
        drafter.propose(rows)
        assert [len(feeds) for feeds in model.steps] == [2, 2, 1]


def test_no_budget_means_no_pass() -> None:
    model = CountingLM(MODELS["hybrid"]())
    drafter = ModelDrafter(model, BRANCHING, chunk=64)
    drafter.open(0, TEXT)
    assert drafter.propose([tree_row(TEXT, 0, 9, GREEDY)]) == [Draft.empty()]
    assert drafter.propose([]) == []
    assert not model.steps


def test_memory_that_is_full_leaves_the_drafter_able_to_go_on() -> None:
    """A pass that finds no room stages nothing; the next proposal is a fresh drafter's."""
    model = TinyAttentionLM(vocab_size=VOCAB, seed=5, num_slots=16)
    drafter = ModelDrafter(model, BRANCHING, chunk=64)
    drafter.open(0, TEXT)
    with pytest.raises(CapacityError):
        drafter.propose([tree_row(TEXT, 4, 60, GREEDY)])
    small = Budget(2, num_nodes=5)
    draft = drafter.propose([tree_row(TEXT, 2, 5, GREEDY)])[0]
    check_same(draft, fresh(MODELS["attention"], TEXT, small, GREEDY))


def test_drafts_are_shaped_as_the_target_is_along_each_path() -> None:
    """A penalty no token survives twice: no path repeats what it or the text has."""
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, logit_bias={0: -100.0})
    asked = tree_row(TEXT, 3, 12, params)
    drafter = ModelDrafter(MODELS["hybrid"](), BRANCHING, chunk=64)
    drafter.open(0, TEXT)
    draft = drafter.propose([replace(asked, shaper=LogitsProcessor(params, len(TEXT)))])[0]
    assert 0 not in draft.tokens
    assert torch.tensor(draft.tokens).max() < VOCAB
