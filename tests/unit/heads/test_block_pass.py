"""The native pass of block drafters against its operators: the same numbers and the same drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doubles.published_drafters import CASES, Case
from outrider.core.draft import Budget, Draft
from outrider.core.errors import NumericsError, given
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.rng import KeyedRng
from outrider.plugins.heads.blocks import Backbone
from outrider.plugins.heads.native_blocks import NativeBlocks, RefinerWeights, TokenBefore, Written
from outrider.testing import GREEDY
from unit.heads.test_published_drafters import Pair, drafter_in

pytestmark = pytest.mark.usefixtures("native_library")
# Candidates; logits after the token before, behind a gate and by a state along the path.
ALONG_PATHS = ("dflash2", "dspark-vanilla", "dspark-gated", "dspark-rnn", "dspark-deepspec")
# Plain layers, windows of both kinds, fewer ids; logits by rounds.
NAMES = (
    *("dflash", "dflash-window", "dflash-zlab", "xpress", "xpress-from-anchor"),
    *ALONG_PATHS,
)
SAMPLED = SamplingParams(temperature=1.0, seed=3)
LENGTHS = ((6, 4), (13, 20), (30, 21))


def none(_backbone: Backbone) -> None:
    """No native pass."""


def unrefined(_native: NativeBlocks, _net: RefinerWeights) -> None:
    """Logits of the layers alone."""


def pairs(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: str = "float32",
    tree_nodes: int = 0,
) -> tuple[Pair, Pair, list[Written]]:
    """A drafter with a native pass, an equal one without, and what native calls wrote."""
    case = Case.read(CASES / f"{name}.json")

    def pair(place: str) -> Pair:
        written = case.write(folder / place)
        return Pair(case, *drafter_in(written, chunk=8, dtype=dtype, tree_nodes=tree_nodes))

    native = pair("one")
    with monkeypatch.context() as patch:
        patch.setattr(Backbone, "_native_pass", none)
        plain = pair("other")
    calls: list[Written] = []
    called = NativeBlocks.__call__

    def counted(self: NativeBlocks, *args: object, **kwargs: object) -> Written:
        written = called(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        calls.append(given(written, "blocks"))
        return calls[-1]

    monkeypatch.setattr(NativeBlocks, "__call__", counted)
    return native, plain, calls


def tokens_of(rounds: list[list[Draft]]) -> list[tuple[int, ...]]:
    return [draft.tokens for drafts in rounds for draft in drafts]


def drafts_of(pair: Pair, both: Sequence[SamplingParams], num_nodes: int = 0) -> list[list[Draft]]:
    """Drafts of two texts at once, that grow; with logits processors, if parameters have any."""
    found: list[list[Draft]] = []
    for seq_id in (0, 1):
        pair.open(seq_id)
    for lengths in LENGTHS:
        rows = [pair.states(seq_id, length) for seq_id, length in enumerate(lengths)]
        budgets = [Budget(depth, num_nodes=num_nodes) for depth in (3, 2)]
        pick = pair.target.kernels.sampling.pick
        asked = [
            replace(
                row,
                params=params,
                budget=budget,
                rng=KeyedRng(params.rng_seed, 0, len(row.tokens), choose=pick),
                shaper=LogitsProcessor(params, prompt_length=2) if params.shapes_logits else None,
            )
            for row, budget, params in zip(rows, budgets, both, strict=True)
        ]
        found.append(pair.drafter.propose(asked))
    for seq_id in (0, 1):
        pair.target.state.close(seq_id)
        pair.drafter.close(seq_id)
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in NAMES), ("dspark-gated", "bfloat16"), ("dflash2", "bfloat16")],
)
def test_one_call_writes_what_the_operators_write(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, plain, calls = pairs(name, tmp_path, monkeypatch, dtype=dtype)
    for both in ((GREEDY, GREEDY), (SAMPLED, SAMPLED), (GREEDY, SAMPLED)):
        for num_nodes in (0, 6):
            ours = drafts_of(native, both, num_nodes)
            assert len(calls) == len(LENGTHS), "one call a round, for both texts"
            # Of all positions at once, trees are grown from the logits.
            assert {bool(one.drafts) for one in calls} == {num_nodes == 0 or name in ALONG_PATHS}
            calls.clear()
            same_drafts(ours, drafts_of(plain, both, num_nodes))
            assert not calls


@pytest.mark.parametrize("name", ALONG_PATHS)
def test_one_call_grows_the_trees_of_the_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, plain, calls = pairs(name, tmp_path, monkeypatch, tree_nodes=9)
    branches = 0
    for both in ((GREEDY, GREEDY), (SAMPLED, SAMPLED), (GREEDY, SAMPLED)):
        ours = drafts_of(native, both, 9)
        assert [bool(one.drafts) for one in calls] == [True] * len(LENGTHS)
        calls.clear()
        same_drafts(ours, drafts_of(plain, both, 9))
        branches += sum(not draft.is_chain for drafts in ours for draft in drafts)
    assert branches > 6


def same_drafts(own: list[list[Draft]], other: list[list[Draft]]) -> None:
    assert tokens_of(own) == tokens_of(other)
    for one, two in zip(own, other, strict=True):
        assert [draft.parents for draft in one] == [draft.parents for draft in two]
        same_probs(one, two)


def same_probs(own: list[Draft], other: list[Draft]) -> None:
    for one, two in zip(own, other, strict=True):
        assert (one.probs_NV is None) == (two.probs_NV is None)
        if one.probs_NV is not None and two.probs_NV is not None:
            torch.testing.assert_close(one.probs_NV, two.probs_NV, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["dflash", "dspark-gated", "dspark-rnn", "dflash2"])
def test_penalties_are_those_of_the_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the call where logits are of all ids and are known after each token."""
    native, plain, calls = pairs(name, tmp_path, monkeypatch)
    for params in (GREEDY, SAMPLED):
        shaped = replace(params, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={6: 6.0})
        own, other = (drafts_of(pair, (shaped, params)) for pair in (native, plain))
        assert {bool(one.drafts) for one in calls} == {name in ("dspark-rnn", "dflash2")}
        same_drafts(own, other)
        assert tokens_of(own) != tokens_of(drafts_of(native, (params, params)))
        calls.clear()


@pytest.mark.parametrize("name", ["dspark-gated", "dspark-rnn", "dflash2", "xpress"])
def test_a_call_that_left_the_gate_out_would_be_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.read(CASES / f"{name}.json")
    whole = Pair(case, *drafter_in(case.write(tmp_path / "one"), chunk=8))
    follow = NativeBlocks.follow

    def without(self: NativeBlocks, before: TokenBefore) -> None:
        if before.after_VR is None:
            follow(self, replace(before, gate=None, joint=None))

    monkeypatch.setattr(NativeBlocks, "follow", without)
    monkeypatch.setattr(NativeBlocks, "refine", unrefined)
    bare = Pair(case, *drafter_in(case.write(tmp_path / "other"), chunk=8))
    own, other = (drafts_of(pair, (SAMPLED, SAMPLED)) for pair in (whole, bare))
    with pytest.raises(AssertionError, match="not close"):
        same_probs(own[0], other[0])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_are_an_error(tmp_path: Path, params: SamplingParams) -> None:
    case = Case.read(CASES / "dspark-vanilla.json")
    pair = Pair(case, *drafter_in(case.write(tmp_path), chunk=8))
    pair.open(0)
    row = pair.states(0, 9)
    hidden = given(row.hidden, "hidden state")

    def broken(start: int, stop: int) -> torch.Tensor:
        return torch.full_like(hidden.read(start, stop), torch.nan)

    rng = KeyedRng(3, 0, 9, choose=pair.target.kernels.sampling.pick)
    with pytest.raises(NumericsError, match="DSpark"):
        pair.drafter.propose(
            [replace(row, hidden=replace(hidden, read=broken), params=params, rng=rng)]
        )


def test_a_mask_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    case = Case.read(CASES / "dflash.json")
    pair = Pair(case, *drafter_in(case.write(tmp_path), chunk=8))
    pair.open(0)
    row = pair.states(0, 9)
    with pytest.raises(IndexError, match="vocabulary"):
        pair.drafter.propose([replace(row, tokens=[*row.tokens[:-1], 1 << 20])])
    (draft,) = pair.drafter.propose([row])
    assert draft.tokens
