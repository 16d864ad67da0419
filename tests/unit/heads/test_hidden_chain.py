"""The loop of blocks that read hidden states: what they read, what they keep, what they draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from checks.distribution import TOLERANCE
from doubles.every_branch import EveryBranch, Tokens, distribution
from doubles.rig import first_maximum
from doubles.toy_heads import LAYER, ToyNet, state_row, states_of
from outrider.core.draft import Budget, Draft
from outrider.core.errors import CapacityError, NumericsError
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow, HiddenStates, StepRow
from outrider.core.rng import Rng
from outrider.drafters.common.growth import DraftSampler
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
from outrider.plugins.heads.passes import NetOutput
from outrider.plugins.proof.reports import SAMPLED
from outrider.testing import GREEDY, check_same

VOCAB = 5
LIMITS = HeadLimits(chunk=3, reach=5, window=1000)
TEXT = (1, 2, 0, 4, 1, 3)
both_ways = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
every_depth = pytest.mark.parametrize("depth", [1, 2, 3])
every_first = pytest.mark.parametrize("first", [0, 1])


def nets(count: int) -> tuple[ToyNet, ...]:
    return tuple(ToyNet(vocab_size=VOCAB, seed=7 + index) for index in range(count))


def drafter(blocks: Sequence[ToyNet], limits: HeadLimits = LIMITS) -> HiddenDrafter:
    return HiddenDrafter("mtp", blocks, DraftSampler(first_maximum, "the blocks"), limits)


def row(
    seq_id: int,
    text: Sequence[int],
    *,
    depth: int = 4,
    params: SamplingParams = GREEDY,
    rng: Rng | None = None,
) -> DraftRow:
    return state_row(text, Budget(depth), params, seq_id, rng)


def fresh_draft(count: int, limits: HeadLimits, one: DraftRow) -> Draft:
    """Of blocks that meet the whole text at once."""
    fresh = drafter(nets(count), limits)
    fresh.open(one.seq_id, one.tokens)
    return fresh.propose([one])[0]


@pytest.mark.covering(1)
@every_first
@every_depth
@both_ways
def test_memory_follows_any_history(params: SamplingParams, depth: int, first: int) -> None:
    """Rounds keep some, all or none of a draft or go by unasked; two texts alternate."""
    limits = HeadLimits(chunk=3, reach=3, window=1000, first=first)
    blocks = nets(depth)
    asked = drafter(blocks, limits)
    rng = random.Random(3)
    texts = [[1, 2, 0, 1], [3, 3]]
    for seq_id, text in enumerate(texts):
        asked.open(seq_id, text)
    for _ in range(8):
        ids = [seq_id for seq_id in (0, 1) if rng.random() < 0.7]
        rows = [row(i, texts[i], depth=rng.randint(1, 5), params=params) for i in ids]
        drafts = dict(zip(ids, asked.propose(rows), strict=True))
        for one in rows:
            check_same(drafts[one.seq_id], fresh_draft(depth, limits, one))
            assert len(drafts[one.seq_id]) == one.budget.depth
        for block in blocks:
            assert [block.state.num_staged(i) for i in (0, 1)] == [0, 0]
            assert [block.state.length(i) for i in ids] == [len(texts[i]) - first for i in ids]
        for seq_id, text in enumerate(texts):
            tokens = drafts[seq_id].tokens if seq_id in drafts else ()
            text += [*tokens[: rng.randint(0, len(tokens))], rng.randrange(VOCAB)]


@every_depth
def test_drafts_are_those_of_the_definition(depth: int) -> None:
    """Block j reads what block j - 1 made of the token before; the last goes on by itself."""
    wanted = defined(nets(depth), TEXT, 5)
    assert list(fresh_draft(depth, LIMITS, row(0, TEXT, depth=5)).tokens) == wanted


def defined(blocks: Sequence[ToyNet], text: Sequence[int], count: int) -> list[int]:
    """Every draft by passes over the whole text and all drafts before it."""
    tokens, last = list(text), len(blocks) - 1

    def states(block: int, count: int) -> Tensor:
        """What `block` reads in place of the token before each of the first `count` tokens."""
        known = min(count, len(text) + block)
        if block == 0:
            targets_PKD = states_of(text, 0, known - 1)
            zero_1KD = torch.zeros(1, *targets_PKD.shape[1:], dtype=torch.float64)
            found_PD = blocks[0].fuse(torch.cat([zero_1KD, targets_PKD]))
        else:
            before_PD = output(block - 1, known - 1).hidden_ND
            found_PD = torch.cat([torch.zeros_like(before_PD[:1]), before_PD])
        while len(found_PD) < count:
            own = read_alone(blocks[block], tokens[: len(found_PD)], found_PD)
            found_PD = torch.cat([found_PD, own.hidden_ND[-1:]])
        return found_PD

    def output(block: int, count: int) -> NetOutput:
        return read_alone(blocks[block], tokens[:count], states(block, count))

    for number in range(count):
        logits_MV = output(min(number, last), len(tokens)).logits_MV
        tokens.append(int(logits_MV[-1].argmax()))
    return tokens[len(text) :]


def read_alone(net: ToyNet, tokens: Sequence[int], states_PD: Tensor) -> NetOutput:
    net.state.open(99, ())
    out = net.step([StepRow.chain(99, tokens)], states_PD)
    net.state.close(99)
    return out


def test_rows_are_drafted_independently() -> None:
    asked = drafter(nets(2))
    rows = [row(0, TEXT, depth=4), row(1, (3,), depth=1), row(2, TEXT[:3], depth=6)]
    for one in rows:
        asked.open(one.seq_id, one.tokens)
    for draft, one in zip(asked.propose(rows), rows, strict=True):
        check_same(draft, fresh_draft(2, LIMITS, one))
    assert asked.propose([]) == []


def test_it_says_what_it_reads() -> None:
    assert drafter(nets(1)).needs.hidden_layers == (LAYER,)


@pytest.mark.parametrize("length", [0, len(TEXT) - 2])
def test_nothing_is_drafted_before_the_target_has_read_the_text(length: int) -> None:
    one = row(0, TEXT)
    asked = drafter(nets(1))
    asked.open(0, TEXT)
    early = HiddenStates(length, partial(states_of, TEXT))
    for hidden in (early, None):
        assert asked.propose([replace(one, hidden=hidden)]) == [Draft.empty()]
    check_same(asked.propose([one])[0], fresh_draft(1, LIMITS, one))


def test_a_text_is_drafted_for_once() -> None:
    asked = drafter(nets(1))
    asked.open(0, TEXT)
    assert len(asked.propose([row(0, TEXT)])[0]) == 4
    assert asked.propose([row(0, TEXT)]) == [Draft.empty()]
    longer = row(0, (*TEXT, 2))
    check_same(asked.propose([longer])[0], fresh_draft(1, LIMITS, longer))


@pytest.mark.parametrize(("window", "wanted"), [(6, 1), (8, 3), (5, 0), (3, 0), (100, 4)])
def test_drafts_end_where_the_window_does(window: int, wanted: int) -> None:
    limits = HeadLimits(chunk=3, reach=5, window=window)
    assert len(fresh_draft(1, limits, row(0, TEXT))) == wanted


class Faulty(ToyNet):
    """Fails, or gives no numbers, at pass number `at`."""

    def __init__(self, at: int, error: Exception | None) -> None:
        super().__init__(vocab_size=VOCAB)
        self.at, self.error = at, error

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        self.at -= 1
        if self.at == 0 and self.error is not None:
            raise self.error
        out = super().step(rows, hidden_ND)
        return NetOutput(out.logits_MV * torch.nan, out.hidden_ND) if self.at == 0 else out


def nan_aware(logits_MV: Tensor) -> list[int]:
    return [-1 if bool(row_V.isnan().any()) else int(row_V.argmax()) for row_V in logits_MV]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_block_that_fails_leaves_all_blocks_in_step(at: int, faulty: int) -> None:
    """Memory that is full for a moment costs that round's draft, whichever block it meets."""
    blocks = list(nets(2))
    blocks[faulty] = Faulty(at, CapacityError("full"))
    asked = drafter(blocks, HeadLimits(chunk=2, reach=3, window=1000))
    asked.open(0, TEXT)
    with pytest.raises(CapacityError):
        asked.propose([row(0, TEXT, depth=3)])
    lengths = {block.state.length(0) for block in blocks}
    assert len(lengths) == 1
    assert lengths <= {0, 2, 3, 6}
    assert all(block.state.num_staged(0) == 0 for block in blocks)
    longer = (*TEXT, 2)
    assert len(asked.propose([row(0, longer)])[0]) == 4


@every_depth
@pytest.mark.parametrize("at", [1, 3, 5])
def test_what_failed_beside_others_can_be_asked_for_alone(depth: int, at: int) -> None:
    """So the engine finds out for whom it fails, and the others lose nothing."""
    blocks: list[ToyNet] = [*nets(depth)[:-1], Faulty(at, RuntimeError("broken"))]
    asked = drafter(blocks)
    others = drafter([*nets(depth)[:-1], ToyNet(vocab_size=VOCAB)])
    rows = [row(0, TEXT), row(1, TEXT[::-1])]
    for one in rows:
        asked.open(one.seq_id, one.tokens)
        others.open(one.seq_id, one.tokens)
    with pytest.raises(RuntimeError, match="broken"):
        asked.propose(rows)
    for one, wanted in zip(rows, others.propose(rows), strict=True):
        check_same(asked.propose([one])[0], wanted)


def test_logits_that_are_no_numbers_are_told() -> None:
    sampler = DraftSampler(nan_aware, "the MTP block")
    asked = HiddenDrafter("mtp", [Faulty(2, None)], sampler, LIMITS)
    asked.open(0, TEXT)
    with pytest.raises(NumericsError, match="the MTP block gave logits that are not numbers"):
        asked.propose([row(0, TEXT)])


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_follow_the_distributions_that_are_reported(depth: int) -> None:
    """Enumerated: what is drawn has the very frequencies of the distribution reported for its
    node."""
    params = SamplingParams(temperature=1.3, top_k=3)
    reports: dict[Tokens, Draft] = {}

    def drafting(rng: EveryBranch) -> Tokens:
        one = row(0, TEXT, depth=3, params=params, rng=rng.at(len(TEXT)))
        draft = fresh_draft(depth, LIMITS, one)
        reports[draft.tokens] = draft
        return draft.tokens

    found = distribution(drafting)
    assert len(found) == 27
    for tokens, draft in reports.items():
        assert draft.probs_NV is not None
        wanted = 1.0
        for token, probs_V in zip(tokens, draft.probs_NV, strict=True):
            wanted *= float(probs_V[token])
        assert abs(found[tokens] - wanted) <= TOLERANCE
