"""Trees that grow on hidden states: what they are, what the net keeps, and the distributions
reported."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from checks.distribution import TOLERANCE
from doubles.every_branch import EveryBranch, Tokens, distribution
from doubles.rig import BRANCHING
from doubles.toy_heads import ToyNet, state_row, states_of
from outrider.core.draft import Budget, Draft
from outrider.core.errors import CapacityError, NumericsError
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow, HiddenStates, StepRow
from outrider.core.rng import Rng
from outrider.core.sampling import sharp_shares
from outrider.core.tree import ROOT
from outrider.estimate.cost import LEAST_WORTH
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
from outrider.plugins.heads.passes import NetOutput
from outrider.plugins.proof.reports import SAMPLED
from outrider.testing import GREEDY, check_same

VOCAB = 5
LIMITS = HeadLimits(chunk=3, reach=5, window=1000, first=1)
TEXT = (1, 2, 0, 4, 1, 3)
SAMPLER = replace(BRANCHING, model_name="the heads")
both_ways = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def drafter(net: ToyNet | None = None, limits: HeadLimits = LIMITS) -> HiddenDrafter:
    return HiddenDrafter("eagle", [net or ToyNet(vocab_size=VOCAB)], SAMPLER, limits)


def row(
    seq_id: int,
    text: Sequence[int],
    *,
    depth: int = 3,
    size: int = 7,
    params: SamplingParams = GREEDY,
    rng: Rng | None = None,
) -> DraftRow:
    return state_row(text, Budget(depth, num_nodes=size), params, seq_id, rng)


def fresh_draft(one: DraftRow, limits: HeadLimits = LIMITS) -> Draft:
    fresh = drafter(limits=limits)
    fresh.open(one.seq_id, one.tokens)
    return fresh.propose([one])[0]


@both_ways
def test_memory_follows_any_history(params: SamplingParams) -> None:
    """Rounds keep some, all or none of a path or go by unasked; two texts alternate."""
    net = ToyNet(vocab_size=VOCAB)
    asked = drafter(net)
    rng = random.Random(3)
    texts = [[1, 2, 0, 1], [3, 3]]
    for seq_id, text in enumerate(texts):
        asked.open(seq_id, text)
    for _ in range(25):
        ids = [seq_id for seq_id in (0, 1) if rng.random() < 0.7]
        depth = rng.randint(1, 4)
        rows = [row(i, texts[i], depth=depth, size=2 * depth + i, params=params) for i in ids]
        drafts = dict(zip(ids, asked.propose(rows), strict=True))
        for one in rows:
            draft = drafts[one.seq_id]
            check_same(draft, fresh_draft(one))
            assert draft.max_depth <= one.budget.depth
            assert 0 < len(draft) <= one.budget.size
        assert [net.state.num_staged(i) for i in (0, 1)] == [0, 0]
        assert [net.state.length(i) for i in ids] == [len(texts[i]) - 1 for i in ids]
        for seq_id, text in enumerate(texts):
            text += [*_some_path(drafts.get(seq_id, Draft.empty()), rng), rng.randrange(VOCAB)]


def _some_path(draft: Draft, rng: random.Random) -> list[int]:
    path: list[int] = []
    node = ROOT
    while (below := draft.children(node)) and rng.random() < 0.7:
        node = rng.choice(below)
        path.append(draft.tokens[node])
    return path


@pytest.mark.parametrize(("depth", "size"), [(1, 3), (2, 6), (3, 12)])
def test_a_greedy_tree_is_the_likeliest_paths(depth: int, size: int) -> None:
    """Against all paths of the net, each read by itself, whose parents are worth being read."""
    worths: dict[Tokens, float] = {}
    for first in range(VOCAB):
        _walk((first,), depth, worths)
    best = sorted(worths, key=lambda path: -worths[path])[:size]
    draft = fresh_draft(row(0, TEXT, depth=depth, size=size))
    found = {_path(draft, node) for node in range(len(draft))}
    # What is worth next to nothing is not drafted; what is drafted is the best there is.
    assert found == set(best[: len(found)])
    assert len(found) >= min(depth, size)


def _walk(path: Tokens, depth: int, worths: dict[Tokens, float]) -> None:
    worths[path] = _worth(path)
    if len(path) < depth and worths[path] >= LEAST_WORTH:
        for token in range(VOCAB):
            _walk((*path, token), depth, worths)


def _worth(path: Tokens) -> float:
    """The probability of a path, the net fed its own states below the text."""
    net = ToyNet(vocab_size=VOCAB)
    net.state.open(0, ())
    before = net.fuse(states_of(TEXT, 0, len(TEXT) - 1))
    out = net.step([StepRow.chain(0, TEXT[1:])], before)
    worth = 1.0
    for place, token in enumerate(path):
        logits_1V = out.logits_MV[-1:]
        worth *= float(sharp_shares(logits_1V[:, [token]], logits_1V))
        row_below = StepRow.chain(0, (token,), parent=len(TEXT) - 2 + place)
        out = net.step([row_below], out.hidden_ND[-1:])
    return worth


def _path(draft: Draft, node: int) -> Tokens:
    path: list[int] = []
    while node != ROOT:
        path.append(draft.tokens[node])
        node = draft.parents[node]
    return tuple(reversed(path))


@both_ways
def test_rows_are_drafted_independently(params: SamplingParams) -> None:
    asked = drafter()
    rows = [
        row(0, TEXT, depth=4, params=params),
        row(1, (3, 1), depth=1, size=4, params=params),
        row(2, TEXT[:3], depth=2, size=0, params=params),
        row(3, (4,), params=params),
    ]
    for one in rows:
        asked.open(one.seq_id, one.tokens)
    for draft, one in zip(asked.propose(rows), rows, strict=True):
        check_same(draft, fresh_draft(one))
    assert asked.propose([]) == []


@pytest.mark.parametrize("length", [0, len(TEXT) - 2])
def test_nothing_is_drafted_before_the_target_has_read_the_text(length: int) -> None:
    one = row(0, TEXT)
    asked = drafter()
    asked.open(0, TEXT)
    early = HiddenStates(length, partial(states_of, TEXT))
    for hidden in (early, None):
        assert asked.propose([replace(one, hidden=hidden)]) == [Draft.empty()]
    check_same(asked.propose([one])[0], fresh_draft(one))
    assert asked.propose([one]) == [Draft.empty()], "the text has nothing new"


@pytest.mark.parametrize(("window", "wanted"), [(6, 1), (8, 3), (5, 0), (3, 0), (100, 3)])
def test_trees_end_where_the_window_does(window: int, wanted: int) -> None:
    limits = HeadLimits(chunk=3, reach=5, window=window, first=1)
    assert fresh_draft(row(0, TEXT), limits).max_depth == wanted


class Faulty(ToyNet):
    """Fails, or gives no numbers, at pass number `at`."""

    def __init__(self, at: int, error: Exception | None) -> None:
        super().__init__(vocab_size=VOCAB)
        self.at, self.error = at, error

    def step(self, rows: Sequence[StepRow], hidden_ND: torch.Tensor) -> NetOutput:
        self.at -= 1
        if self.at == 0 and self.error is not None:
            raise self.error
        out = super().step(rows, hidden_ND)
        return NetOutput(out.logits_MV * math.nan, out.hidden_ND) if self.at == 0 else out


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_net_that_fails_keeps_text_alone(at: int) -> None:
    """Memory that is full for a moment costs that round's draft."""
    net = Faulty(at, CapacityError("full"))
    asked = drafter(net, HeadLimits(chunk=2, reach=3, window=1000, first=1))
    asked.open(0, TEXT)
    with pytest.raises(CapacityError):
        asked.propose([row(0, TEXT)])
    assert net.state.num_staged(0) == 0
    longer = row(0, (*TEXT, 2))
    check_same(asked.propose([longer])[0], fresh_draft(longer))


def test_logits_that_are_no_numbers_are_told() -> None:
    asked = drafter(Faulty(3, None))
    asked.open(0, TEXT)
    with pytest.raises(NumericsError, match="the heads gave logits that are not numbers"):
        asked.propose([row(0, TEXT)])


@pytest.mark.parametrize("size", [3, 4])
def test_drawn_trees_follow_the_distributions_that_are_reported(size: int) -> None:
    """Enumerated: a tree has the probability that its reported distributions give it, node by node;
    siblings differ, and a distribution has no mass on elder ones."""
    params = SamplingParams(temperature=1.3, top_k=3)
    reports: dict[Tokens, Draft] = {}

    def drafting(rng: EveryBranch) -> Tokens:
        one = row(0, TEXT, depth=2, size=size, params=params, rng=rng.at(len(TEXT)))
        draft = fresh_draft(one)
        reports[draft.tokens] = draft
        return draft.tokens

    found = distribution(drafting)
    assert max(len(draft) for draft in reports.values()) == size
    for tokens, draft in reports.items():
        assert draft.probs_NV is not None
        wanted = 1.0
        for node, (token, probs_V) in enumerate(zip(tokens, draft.probs_NV, strict=True)):
            wanted *= float(probs_V[token])
            elder = [n for n in draft.children(draft.parents[node]) if n < node]
            assert all(float(probs_V[tokens[n]]) == 0 for n in elder)
        assert abs(found[tokens] - wanted) <= TOLERANCE
