"""The production keys of whole generations: no number may decide two things."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import pytest
from torch import Tensor

from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.philox import Counter, Floats, Word, philox_exponentials, philox_uniform
from outrider.core.protocols import AcceptanceRule, Drafter
from outrider.core.rng import KeyedRng, race_node
from outrider.verify.exact import BlockRule, TokenRule
from outrider.verify.match import CoupledRule, MatchRule

PROMPT = (1, 2, 0)
NUM_TOKENS = 25
ASKED = [Request(PROMPT, SamplingParams(temperature=1.2, max_tokens=NUM_TOKENS))]
Used = list[tuple[int, ...]]


def check_no_number_is_used_twice() -> None:
    """Every counter that reaches the generator, over all rounds of a request, is new."""
    for rule in (TokenRule(), BlockRule(), MatchRule(), CoupledRule()):
        for drafter in (model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5)), random_trees(VOCAB)):
            used = counters_of(drafter, rule)
            assert len(used) > NUM_TOKENS
            assert len(set(used)) == len(used)


def counters_of(drafter: Drafter, rule: AcceptanceRule) -> Used:
    """All counters that a generation draws with; a race has one for every id."""
    with recording() as used:
        Rig(ToyHybrid(vocab_size=VOCAB), drafter, rule, k=3).run(ASKED)
    return used


@contextmanager
def recording() -> Generator[Used]:
    used: Used = []

    def one(seed: int, counter: tuple[int, int, int, int]) -> float:
        used.append(counter)
        return philox_uniform(seed, counter)

    def many(seed: Word, counter: Counter) -> Floats:
        rows = np.stack(np.broadcast_arrays(*counter), -1).reshape(-1, 4)
        used.extend(tuple(int(word) for word in row) for row in rows)
        return philox_exponentials(seed, counter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.core.rng.philox_uniform", one)
        patch.setattr("outrider.core.rng.philox_exponentials", many)
        yield used


def check_each_emitted_token_has_its_own_race() -> None:
    """The coupled rule races once at the place of each token that it emits, and nowhere else.

    A drafter that draws with numbers of its own does not change that, and one that races along
    does not change the text.
    """
    plain = Rig(ToyHybrid(vocab_size=VOCAB), rule=CoupledRule(), k=0).run(ASKED)
    for k in (1, 3):
        with raced_places() as places:
            drafted = Rig(ToyHybrid(vocab_size=VOCAB), random_trees(VOCAB), CoupledRule(), k=k)
            assert drafted.run(ASKED) == plain
        assert places == list(range(len(PROMPT), len(PROMPT) + NUM_TOKENS))
        along = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5), draw=race_node)
        assert Rig(ToyHybrid(vocab_size=VOCAB), along, CoupledRule(), k=k).run(ASKED) == plain


@contextmanager
def raced_places() -> Generator[list[int]]:
    """The absolute places of all races, in order."""
    places: list[int] = []
    race_at = KeyedRng.race_at

    def recorded(noise: KeyedRng, weights_V: Tensor, depth: int) -> int:
        places.append(noise.start + depth)
        return race_at(noise, weights_V, depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyedRng, "race_at", recorded)
        yield places
