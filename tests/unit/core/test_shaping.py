"""Bias, penalties, bans and masks: each node's row is what its own history makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.effort import examples
from checks.engine_distribution import shaped, shaping_params
from outrider.core.errors import ConfigError
from outrider.core.logits import LogitsProcessor, suffixes_of
from outrider.core.params import SamplingParams

VOCAB = 6
ids = st.integers(0, VOCAB - 1)
texts = st.lists(ids, max_size=6)
LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0, 3.0, -2.0]], dtype=torch.float64)


def only(*tokens: int) -> Callable[[Sequence[int]], Tensor]:
    mask_V = torch.zeros(VOCAB, dtype=torch.bool)
    mask_V[list(tokens)] = True
    return lambda text: mask_V


def after(params: SamplingParams, text: Sequence[int], prompt: Sequence[int] = (0,)) -> list[float]:
    shaper = LogitsProcessor(params, len(prompt))
    return [float(v) for v in shaper.shape(LOGITS, [*prompt, *text], [()])[0]]


@examples(80)
@given(
    params=shaping_params(VOCAB),
    prompt=st.lists(ids, min_size=1, max_size=4),
    text=texts,
    later=texts,
    suffixes=st.lists(st.lists(ids, max_size=3), min_size=1, max_size=4),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3),
    stop_ids=st.frozensets(ids, max_size=2),
    seed=st.integers(0, 2**31),
)
def test_rows_equal_a_slow_reference(
    params: SamplingParams,
    prompt: list[int],
    text: list[int],
    later: list[int],
    suffixes: list[list[int]],
    bad_words: list[tuple[int, ...]],
    stop_ids: frozenset[int],
    seed: int,
) -> None:
    """Also when asked again after the text has grown."""
    rng = torch.Generator().manual_seed(seed)
    shaper = LogitsProcessor(params, len(prompt), stop_ids, tuple(bad_words))
    for written in (text, text + later):
        logits_NV = torch.randn(len(suffixes), VOCAB, generator=rng, dtype=torch.float64)
        before_NV = logits_NV.clone()
        got_NV = shaper.shape(logits_NV, [*prompt, *written], suffixes)
        assert torch.equal(logits_NV, before_NV)
        for node, suffix in enumerate(suffixes):
            wanted = shaped(
                [float(v) for v in logits_NV[node]],
                prompt,
                [*written, *suffix],
                params,
                stop_ids=stop_ids,
                bad_words=bad_words,
            )
            got = [float(v) for v in got_NV[node]]
            assert got == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    assert after(SamplingParams(repetition_penalty=2.0), (), prompt=(4, 1))[4] == 1.5
    assert after(SamplingParams(repetition_penalty=2.0), (), prompt=(4, 1))[1] == -2.0
    assert after(SamplingParams(presence_penalty=1.0), (), prompt=(4,))[4] == 3.0
    assert after(SamplingParams(presence_penalty=1.0), (4, 4))[4] == 2.0
    assert after(SamplingParams(frequency_penalty=1.0), (4, 4))[4] == 1.0


def test_a_bias_is_added_once() -> None:
    got = after(SamplingParams(logit_bias={3: 2.5, 4: -1.0}), (3, 3))
    assert got == [2.0, -1.0, 0.5, 2.5, 2.0, -2.0]


def test_the_last_token_of_a_bad_word_is_banned_after_its_beginning() -> None:
    shaper = LogitsProcessor(SamplingParams(), 1, bad_words=((2, 4), (5,)))
    free, caught = shaper.shape(LOGITS.repeat(2, 1), [0, 1], [(), (2,)])
    assert float(free[4]) == 3.0
    assert float(caught[4]) == -math.inf
    assert float(free[5]) == float(caught[5]) == -math.inf


def test_a_bad_word_that_began_in_the_prompt_is_the_prompts_affair() -> None:
    shaper = LogitsProcessor(SamplingParams(), 2, bad_words=((2, 4),))
    assert float(shaper.shape(LOGITS, [0, 2], [()])[0, 4]) == 3.0


def test_the_text_may_not_end_before_min_tokens() -> None:
    shaper = LogitsProcessor(SamplingParams(min_tokens=2), 1, frozenset([4]))
    early, late = shaper.shape(LOGITS.repeat(2, 1), [0, 1], [(), (1,)])
    assert float(early[4]) == -math.inf
    assert float(late[4]) == 3.0


def test_bans_give_way_when_nothing_would_be_left() -> None:
    everything = tuple((token,) for token in range(VOCAB))
    shaper = LogitsProcessor(SamplingParams(), 1, bad_words=everything)
    assert torch.equal(shaper.shape(LOGITS, [0], [()]), LOGITS)


def test_a_mask_that_allows_nothing_ends_the_text() -> None:
    shaper = LogitsProcessor(SamplingParams(), 1, frozenset([3]), allowed=only())
    got = shaper.shape(LOGITS, [0], [()])[0]
    assert [token for token in range(VOCAB) if float(got[token]) > -math.inf] == [3]
    assert torch.equal(
        LogitsProcessor(SamplingParams(), 1, allowed=only()).shape(LOGITS, [0], [()]), LOGITS
    )


def test_a_mask_sees_the_text_with_the_draft_and_wins_over_bans() -> None:
    seen: list[tuple[int, ...]] = []

    def spy(text: Sequence[int]) -> Tensor:
        seen.append(tuple(text))
        return only(5)(text)

    shaper = LogitsProcessor(SamplingParams(), 2, bad_words=((5,),), allowed=spy)
    got = shaper.shape(LOGITS.repeat(2, 1), [0, 1, 2], [(), (3,)])
    assert seen == [(2,), (2, 3)]
    assert [float(row[5]) for row in got] == [-2.0, -2.0]


@pytest.mark.parametrize("mask_V", [torch.ones(VOCAB - 1, dtype=torch.bool), torch.ones(VOCAB)])
def test_a_mask_of_another_kind_is_refused(mask_V: Tensor) -> None:
    with pytest.raises(ConfigError, match="6 booleans"):
        LogitsProcessor(SamplingParams(), 1, allowed=lambda text: mask_V).shape(LOGITS, [0], [()])


def test_a_shaper_knows_when_it_changes_nothing() -> None:
    assert not LogitsProcessor(SamplingParams(temperature=0.7, top_p=0.9), 1).active
    assert LogitsProcessor(SamplingParams(), 1, allowed=only(1)).active
    for params in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(logit_bias={0: 1.0}),
        SamplingParams(bad_words=("x",)),
        SamplingParams(min_tokens=1),
    ):
        assert LogitsProcessor(params, 1).active


def test_suffixes_follow_the_tree() -> None:
    assert suffixes_of((7, 8, 9, 5), (-1, 0, 0, -1)) == [(), (7,), (7, 8), (7, 9), (5,)]
    assert suffixes_of((), ()) == [()]


@pytest.mark.parametrize(
    "mask_V",
    [
        torch.ones(VOCAB, dtype=torch.bool, device="meta"),
        torch.ones(VOCAB, dtype=torch.bool).to_sparse(),
        "text",
        1.5,
        [True] * VOCAB,
    ],
    ids=["meta", "sparse", "text", "float", "list"],
)
def test_a_mask_that_holds_no_booleans_is_refused(mask_V: Tensor) -> None:
    shaper = LogitsProcessor(SamplingParams(), 1, allowed=lambda text: mask_V)
    with pytest.raises(ConfigError, match="an allowed-token mask must"):
        shaper.shape(LOGITS, [0], [()])
