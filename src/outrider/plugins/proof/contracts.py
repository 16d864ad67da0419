"""The contracts of a drafter and of an acceptance rule, as tests that their authors run:
docs/extending.md shows how.

A test file subclasses `DrafterContract` or `RuleContract`, and pytest runs what the class inherits;
pytest itself is not imported. The checks are functions that raise AssertionError with a sentence;
our own drafters are tested by the same ones. They use a vocabulary of five tokens, so that texts
repeat.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.params import SamplingParams
from outrider.core.plugins import KINDS, drafter_named
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import KeyedRng
from outrider.engine.drafting import check_draft
from outrider.plugins.proof.algebra import prove_rule
from outrider.plugins.proof.cases import FIXED, generated
from outrider.plugins.proof.check import PROMPTS, Effort
from outrider.plugins.proof.distributions import exact_samplers
from outrider.plugins.proof.reports import SAMPLED, TEXTS, MakeDrafter, drawings, misreports

VOCAB = 5
GREEDY = SamplingParams()

_NUM_TEXTS = 21
_NUM_ROUNDS = 30
_NUM_PROMPTS = 3
_NUM_TOKENS = 40
_NUM_CASES = Effort().num_generated


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def row(
    seq_id: int,
    text: Sequence[int],
    *,
    depth: int,
    params: SamplingParams = GREEDY,
    last: Outcome | None = None,
) -> DraftRow:
    """A request for a draft of `text`, as the engine makes it."""
    rng = KeyedRng(params.rng_seed, 0, len(text))
    return DraftRow(seq_id, list(text), last, Budget(depth), params, rng)


def fresh_draft(
    make: MakeDrafter,
    text: Sequence[int],
    depth: int,
    params: SamplingParams = GREEDY,
    *,
    prompt: Sequence[int] | None = None,
) -> Draft:
    """The draft of a drafter that gets the whole text at once, as a prompt unless it has one."""
    drafter = make()
    drafter.open(0, text if prompt is None else prompt)
    draft = drafter.propose([row(0, text, depth=depth, params=params)])[0]
    drafter.close(0)
    return draft


def check_same(left: Draft, right: Draft, why: str = "") -> None:
    """Check that two drafts are equal; distributions to the last few bits."""
    shapes = f"{_words(left)}, and {_words(right)}"
    same = (left.tokens, left.parents) == (right.tokens, right.parents)
    _must(same, f"{why or 'two drafts differ'}: {shapes}")
    a_NV, b_NV = left.probs_NV, right.probs_NV
    _must((a_NV is None) == (b_NV is None), f"one of two drafts of {shapes} reports distributions")
    if a_NV is not None and b_NV is not None:
        _must(torch.allclose(a_NV, b_NV, atol=1e-6), f"{why or 'distributions'} differ")


def _words(draft: Draft) -> str:
    is_chain = draft.parents == Draft.chain(draft.tokens).parents
    return str(draft.tokens) if is_chain else f"{draft.tokens} with parents {draft.parents}"


def _proposed(drafter: Drafter, rows: Sequence[DraftRow]) -> list[Draft]:
    drafts = drafter.propose(rows)
    _must(len(drafts) == len(rows), f"propose gave {len(drafts)} drafts for {len(rows)} rows")
    return drafts


def check_shape(draft: Draft, depth: int, params: SamplingParams) -> None:
    """Check that a draft is within budget and vocabulary, and that its distributions are valid and
    give every drawn token some mass."""
    _must(draft.max_depth <= depth, f"{draft.max_depth} tokens in a row, where {depth} are allowed")
    known = all(0 <= token < VOCAB for token in draft.tokens)
    _must(known, f"{draft.tokens} has an id outside the vocabulary of {VOCAB}")
    if draft.probs_NV is None:
        return
    _must(not params.greedy, "greedy decoding draws nothing, but distributions are reported")
    shape = tuple(draft.probs_NV.shape)
    _must(shape == (len(draft), VOCAB), f"distributions of {shape} for {len(draft)} tokens")
    sums_N = draft.probs_NV.sum(-1).double()
    is_one = torch.allclose(sums_N, torch.ones(len(draft)).double())
    _must(is_one and float(draft.probs_NV.min()) >= 0, f"these are no distributions: {sums_N}")
    for probs_V, token in zip(draft.probs_NV, draft.tokens, strict=True):
        _must(bool(probs_V[token] > 0), f"token {token} was drawn from a distribution without it")


def check_budgets(make: MakeDrafter, params: SamplingParams) -> None:
    """Check that drafts keep to depth, size and vocabulary, and are equal for equal texts."""
    rng = random.Random(7)
    for number in range(_NUM_TEXTS):
        text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        depth = number % 7
        drafter, asked = make(), row(0, text, depth=depth, params=params)
        drafter.open(0, text)
        draft = _proposed(drafter, [asked])[0]
        drafter.close(0)
        check_draft(drafter.name, asked, draft, VOCAB)
        check_shape(draft, depth, params)
        why = f"the draft of {text} differs when it is requested again"
        check_same(draft, fresh_draft(make, text, depth, params), why)


def check_memory(make: MakeDrafter, params: SamplingParams) -> None:
    """Check that after any history a drafter proposes what a new drafter would.

    Rounds accept some, all or none of a draft, or pass without a request; two sequences alternate.
    """
    rng = random.Random(3)
    drafter = make()
    prompts = [(1, 2, 0, 1), (3,)]
    texts = [list(prompt) for prompt in prompts]
    lasts: list[Outcome | None] = [None, None]
    for seq_id, text in enumerate(texts):
        drafter.open(seq_id, text)
    for _ in range(_NUM_ROUNDS):
        asked = [seq_id for seq_id in (0, 1) if rng.random() < 0.7]
        depth = rng.randint(1, 5)
        rows = [row(i, texts[i], depth=depth, params=params, last=lasts[i]) for i in asked]
        proposed = _proposed(drafter, rows) if asked else []
        drafts = dict(zip(asked, proposed, strict=True))
        for seq_id, text in enumerate(texts):
            draft = drafts.get(seq_id, Draft.empty())
            check_shape(draft, depth, params)
            if seq_id in drafts:
                again = fresh_draft(make, text, depth, params, prompt=prompts[seq_id])
                why = f"after {text} it drafts otherwise than a new drafter that reads this text"
                check_same(draft, again, f"{why}, so it remembers what the text does not have")
            # Chains: any number of tokens from the start is a path.
            path = tuple(range(rng.randint(0, len(draft))))
            outcome = Outcome(seq_id, draft, Verdict(path, rng.randrange(VOCAB)))
            lasts[seq_id] = outcome
            text.extend(outcome.tokens)
    drafter.close(0)
    drafter.close(1)


def check_rows_alone(make: MakeDrafter, params: SamplingParams) -> None:
    """Check that a batch of different depths and lengths gives each row the draft it gets alone."""
    drafter = make()
    asked = [((1, 2, 1), 4), ((0,), 1), ((3, 3, 3, 3, 3), 0), ((2, 0, 2, 0), 6), ((1,), 3)]
    for seq_id, (text, _) in enumerate(asked):
        drafter.open(seq_id, text)
    rows = [row(i, text, depth=depth, params=params) for i, (text, depth) in enumerate(asked)]
    for draft, (text, depth) in zip(_proposed(drafter, rows), asked, strict=True):
        alone = fresh_draft(make, text, depth, params)
        check_same(draft, alone, f"{list(text)} has another draft in a batch than alone")
    _proposed(drafter, [])


def check_draws(make: MakeDrafter) -> None:
    """Check that on every branch of its random numbers a drafter draws by the distributions that it
    reports, and draws nothing if it reports none. A rule cannot see a wrong report."""
    for text in TEXTS:
        for finding in misreports(text, drawings(make, text), secret=True):
            _must(False, finding)


def check_ids_again(make: MakeDrafter) -> None:
    """Check that the number of a closed sequence may be used again, with another text."""
    drafter = make()
    for text in ((1, 2, 1, 2), (3, 0, 3), (1,), (1, 2, 1, 2)):
        drafter.open(7, text)
        draft = drafter.propose([row(7, text, depth=3)])[0]
        why = f"{list(text)} has another draft under a number that was used before"
        check_same(draft, fresh_draft(make, text, 3, GREEDY), why)
        drafter.close(7)


def check_texts(name: str) -> None:
    """Check that the embedded model writes the same text with the installed drafter `name` and
    without: one text at a time and several, short and long drafts, drafts of changing length, trees
    if it branches, and at a temperature under the rule that ties a text to its seed."""
    kind = drafter_named(name)
    ways: list[dict[str, Any]] = [
        {"k": 1},
        {"k": 4, "batch_size": 1},
        {"k": 6, "controller": "band"},
        *([{"k": 4, "tree_nodes": 12}] if kind.branches else []),
    ]
    plain = _written("none", {})
    for way in ways:
        _must(_written(name, way) == plain, f"with {way} the text is not that of plain decoding")


def _written(drafter: str, way: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Texts at temperature 0, then at a temperature."""
    greedy = SamplingParams(max_tokens=_NUM_TOKENS)
    with LLM(config=EngineConfig(drafter=drafter, sampler="coupled", **way)) as llm:
        results = [
            result
            for params in (greedy, replace(greedy, temperature=0.8, seed=5))
            for result in llm.generate(PROMPTS[:_NUM_PROMPTS], params)
        ]
    for result in results:
        _must(not result.drafter_failed, f"the engine gave the drafter up: {result.notes}")
    return [result.token_ids for result in results]


class ProposalContract:
    """Contract of a drafter's proposals. A subclass whose name begins with Test defines `make`."""

    def make(self) -> Drafter:
        """A new drafter each time; over VOCAB tokens, if it has to know."""
        raise NotImplementedError

    def test_drafts_keep_to_budget_and_vocabulary(self) -> None:
        for params in (GREEDY, SAMPLED):
            check_budgets(self.make, params)

    def test_memory_follows_any_history(self) -> None:
        for params in (GREEDY, SAMPLED):
            check_memory(self.make, params)

    def test_rows_are_drafted_independently(self) -> None:
        for params in (GREEDY, SAMPLED):
            check_rows_alone(self.make, params)

    def test_draws_follow_the_distributions_that_are_reported(self) -> None:
        check_draws(self.make)

    def test_ids_may_be_used_again_after_closing(self) -> None:
        check_ids_again(self.make)


class DrafterContract(ProposalContract):
    """Contract of proposals and of the text written with them. `name` is the entry point's name."""

    name = ""

    def test_it_is_installed_under_its_name(self) -> None:
        known = KINDS.names()
        missing = f"no installed package has an entry point {self.name!r} in the group"
        _must(self.name in known, f"{missing} outrider.drafters: pip install yours, then test it")
        _must(KINDS.load(self.name).name == self.make().name, "it reports another name")

    def test_text_is_the_targets_own(self) -> None:
        check_texts(self.name)


class RuleContract:
    """The first check of `outrider verify --sampler NAME` alone: an installed rule preserves the
    target's distribution, by enumeration. `name` is the name of its entry point."""

    name = ""

    def test_it_keeps_the_targets_distribution(self) -> None:
        proof = prove_rule(
            exact_samplers(self.name)[-1], [*FIXED, *islice(generated(0), _NUM_CASES)]
        )
        _must(proof.holds, f"{proof.rule}, {proof.finding}")
