"""Native calls of block drafters and of heads against their operators: the same drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.published_drafters import CASES, CUTS, Case
from outrider.core.draft import Budget, Draft
from outrider.core.errors import NumericsError, SequenceError, given
from outrider.core.logits import AllowedTokens, LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.rng import KeyedRng
from outrider.kernels.native.rounds import NativeChains
from outrider.plugins.heads import masked
from outrider.plugins.heads.blocks import Backbone
from outrider.plugins.heads.native_blocks import NativeBlocks, RefinerWeights, TokenBefore, Written
from outrider.plugins.heads.native_choice import NativeChoice
from outrider.plugins.heads.native_heads import NativeHeads
from outrider.testing import GREEDY
from unit.heads.test_published_drafters import Pair, drafter_in

# Heads of a state and the tokens of the path.
PATH_HEADS = ("hydra", "hydra-prefix", "mlp-speculator")
# Passes over masks; heads of a state alone.
AT_ONCE = ("peagle", "pard", "medusa")
MEDUSA = Case(
    "medusa",
    {"model_type": "medusa", "medusa_num_heads": 4},
    {
        **{f"{head}.0.linear.weight": (64, 64) for head in range(4)},
        **{f"{head}.0.linear.bias": (64,) for head in range(4)},
        # Two of the heads share the target's matrix.
        **{f"{head}.1.weight": (96, 64) for head in range(2)},
    },
    {CUTS[-1]: (0, 0, 0)},
    torch.empty(0),
    None,
)
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


def none(*_args: object, **_kwargs: object) -> None:
    """No native call."""


def case_of(name: str) -> Case:
    return MEDUSA if name == MEDUSA.name else Case.read(CASES / f"{name}.json")


def unrefined(_native: NativeBlocks, _net: RefinerWeights) -> None:
    """Logits of the layers alone."""


def pairs(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: str = "float32",
    tree_nodes: int = 0,
) -> tuple[Pair, Pair, list[bool]]:
    """A drafter with native calls, an equal one without, and whether each call made drafts."""
    case = case_of(name)

    def pair(place: str) -> Pair:
        written = case.write(folder / place)
        return Pair(case, *drafter_in(written, chunk=8, dtype=dtype, tree_nodes=tree_nodes))

    native = pair("one")
    with monkeypatch.context() as patch:
        patch.setattr(Backbone, "_native_pass", none)
        patch.setattr(NativeHeads, "of", none)
        patch.setattr(masked, "fused_model_drafts", none)
        patch.setattr(masked, "KeyedChains", none)
        patch.setattr(masked, "NativeChoice", none)
        patch.setattr(masked, "FusedChains", none)
        plain = pair("other")
    calls: list[bool] = []
    for kind in (NativeBlocks, NativeHeads, NativeChains, NativeChoice):
        monkeypatch.setattr(kind, "__call__", counted(kind.__call__, calls))
    return native, plain, calls


def counted(call: Callable[..., Any], calls: list[bool]) -> Callable[..., Any]:
    def count(*args: object, **kwargs: object) -> object:
        made = given(call(*args, **kwargs), "drafts")
        calls.append(not isinstance(made, Written) or bool(made.drafts))
        return made

    return count


def tokens_of(rounds: list[list[Draft]]) -> list[tuple[int, ...]]:
    return [draft.tokens for drafts in rounds for draft in drafts]


def drafts_of(
    pair: Pair,
    both: Sequence[SamplingParams],
    num_nodes: int = 0,
    allowed: AllowedTokens | None = None,
) -> list[list[Draft]]:
    """Drafts of two texts at once, that grow; with logits processors, if parameters have any, or
    for the mask `allowed`, which comes with bans."""

    def shaper(params: SamplingParams) -> LogitsProcessor | None:
        if allowed is not None:
            return LogitsProcessor(params, 2, bad_words=((8,), (9, 4)), allowed=allowed)
        return LogitsProcessor(params, prompt_length=2) if params.shapes_logits else None

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
                shaper=shaper(params),
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
    [
        *((name, "float32") for name in (*NAMES, *PATH_HEADS, *AT_ONCE)),
        *((name, "bfloat16") for name in ("dspark-gated", "dflash2", "mlp-speculator")),
    ],
)
def test_one_call_writes_what_the_operators_write(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, plain, calls = pairs(name, tmp_path, monkeypatch, dtype=dtype)
    for both in ((GREEDY, GREEDY), (SAMPLED, SAMPLED), (GREEDY, SAMPLED)):
        for num_nodes in (0, 6):
            ours = drafts_of(native, both, num_nodes)
            # Trees of a pass over masks are made of its logits, in a call for each text.
            masks = num_nodes > 0 and name in ("peagle", "pard")
            count = len(LENGTHS) * (1 + masks)
            assert calls == [True] * count, "one call a round, for both texts"
            calls.clear()
            same_drafts(ours, drafts_of(plain, both, num_nodes))
            assert not calls


@pytest.mark.parametrize("name", [*ALONG_PATHS, *PATH_HEADS])
def test_one_call_grows_the_trees_of_the_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, plain, calls = pairs(name, tmp_path, monkeypatch, tree_nodes=9)
    branches = 0
    for both in ((GREEDY, GREEDY), (SAMPLED, SAMPLED), (GREEDY, SAMPLED)):
        ours = drafts_of(native, both, 9)
        assert calls == [True] * len(LENGTHS)
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


@pytest.mark.parametrize(
    "name",
    ["dflash", "dspark-gated", "dspark-rnn", "dflash2", "pard", "medusa", "hydra"],
)
def test_penalties_are_those_of_the_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the call; of the first position alone if all are drafted at once."""
    native, plain, calls = pairs(name, tmp_path, monkeypatch)
    for params in (GREEDY, SAMPLED):
        shaped = replace(params, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={6: 6.0})
        own, other = (drafts_of(pair, (shaped, params)) for pair in (native, plain))
        assert calls == [True] * len(LENGTHS)
        same_drafts(own, other)
        assert tokens_of(own) != tokens_of(drafts_of(native, (params, params)))
        calls.clear()


def one_or_some(text: Sequence[int]) -> torch.Tensor:
    """Two thirds of the tokens; at some places one that heads of fewer ids do not draft."""
    ids_V = torch.arange(96)
    return ids_V == 95 if len(text) % 3 == 1 else ids_V % 3 != len(text) % 3


@pytest.mark.parametrize("num_nodes", [0, 9])
@pytest.mark.parametrize(
    "name",
    ["dflash", "dspark-gated", "dspark-rnn", "dflash2", "pard", "peagle", "medusa", "hydra"],
)
def test_masks_and_bans_are_those_of_the_paths(
    name: str, num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, plain, calls = pairs(name, tmp_path, monkeypatch, tree_nodes=num_nodes)
    params = replace(SAMPLED, repetition_penalty=1.5)
    own = drafts_of(native, (GREEDY, params), num_nodes, one_or_some)
    assert set(calls) == {True}
    same_drafts(own, drafts_of(plain, (GREEDY, params), num_nodes, one_or_some))
    assert any(95 in draft.tokens for drafts in own for draft in drafts)


def test_a_mask_that_fails_is_its_request_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, _, _ = pairs("hydra", tmp_path, monkeypatch)

    def broken(text: Sequence[int]) -> torch.Tensor:
        raise LookupError(f"after {len(text)} tokens")

    with pytest.raises(SequenceError) as caught:
        drafts_of(native, (GREEDY, GREEDY), allowed=broken)
    assert str(caught.value.__cause__) == "after 4 tokens"


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
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dspark-vanilla", "DSpark"),
        ("medusa", "Medusa"),
        ("hydra", "Hydra"),
        ("peagle", "P-EAGLE|model"),
    ],
)
def test_logits_that_are_no_numbers_are_an_error(
    name: str, said: str, tmp_path: Path, params: SamplingParams
) -> None:
    pair = Pair(case_of(name), *drafter_in(case_of(name).write(tmp_path), chunk=8))
    pair.open(0)
    row = pair.states(0, 9)
    hidden = given(row.hidden, "hidden state")

    def broken(start: int, stop: int) -> torch.Tensor:
        return torch.full_like(hidden.read(start, stop), torch.nan)

    rng = KeyedRng(3, 0, 9, choose=pair.target.kernels.sampling.pick)
    with pytest.raises(NumericsError, match=said):
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
