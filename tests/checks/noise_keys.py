"""The production keys of whole generations: no number may decide two things."""

from __future__ import annotations

import pytest

from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.core.noise import philox_uniform
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter
from outrider.verify.match import MatchRule
from outrider.verify.token import TokenRule


def check_no_number_is_used_twice() -> None:
    """Every counter that reaches the generator, over all rounds of a request, is new."""
    drafters: list[Drafter] = [
        model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5)),
        random_trees(VOCAB),
    ]
    for drafter in drafters:
        for rule in (TokenRule(), MatchRule()):
            used: list[tuple[int, int, int, int]] = []

            def recorded(
                seed: int,
                counter: tuple[int, int, int, int],
                used: list[tuple[int, int, int, int]] = used,
            ) -> float:
                used.append(counter)
                return philox_uniform(seed, counter)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("outrider.core.noise.philox_uniform", recorded)
                rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, rule, k=3)
                rig.run([Request((1, 2, 0), SamplingParams(temperature=1.2, max_tokens=25))])
            assert len(used) > 25
            assert len(set(used)) == len(used)
