"""The distribution of whole generations under a grammar: that of plain decoding under its masks.

The masks that plain decoding is given here are written by hand, from the words of the grammar.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from checks.distribution import assert_same_distribution, floats, joint_distribution
from checks.engine_distribution import LENGTH, PROMPT, VOCAB, distribution_drafters, shaped
from checks.state import fresh_logits
from doubles.every_branch import Distribution, EveryBranch, Tokens, distribution
from doubles.letters import letters
from doubles.rig import Request, Rig, walking
from doubles.toy_hybrid import ToyHybrid
from outrider.api.grammar import Grammar, Grammars
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, Drafter
from outrider.plugins.proof.distributions import filtered
from outrider.verify.exact import BlockRule

A, B, END = range(VOCAB)
STOPS = frozenset([END])
PARAMS = (
    SamplingParams(temperature=1.2, max_tokens=LENGTH),
    SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, max_tokens=LENGTH),
)


def no_two(text: Tokens) -> tuple[bool, ...]:
    """(ab|b)*a?: no a follows another."""
    if END in text:
        return False, False, True
    return text[-1:] != (A,), True, True


def as_many(text: Tokens) -> tuple[bool, ...]:
    """As many b as there were a."""
    if END in text:
        return False, False, True
    open_ones = text.count(A) - text.count(B)
    return B not in text, open_ones > 0, open_ones == 0


GRAMMARS: dict[str, tuple[str, Callable[[Tokens], tuple[bool, ...]]]] = {
    "no two": ("start: /(ab|b)*a?/", no_two),
    "as many": ('start: "" | "a" start "b"', as_many),
}


def grammar(name: str) -> Grammar:
    found = Grammars(letters("ab"), VOCAB, STOPS).of({"grammar": GRAMMARS[name][0]})
    assert found is not None
    return found


def wanted_distribution(params: SamplingParams, name: str) -> Distribution:
    def allowed(text: Tokens) -> Tensor:
        return torch.tensor(GRAMMARS[name][1](text))

    def conditional(text: Tokens) -> Tensor:
        logits = floats(fresh_logits(ToyHybrid, [*PROMPT, *text], VOCAB))
        masked = shaped(logits, PROMPT, text, params, allowed=lambda ids: allowed(tuple(ids)))
        return torch.tensor(filtered(masked, params), dtype=torch.float64)

    return joint_distribution(conditional, LENGTH)


def check_distribution(
    rule: AcceptanceRule, drafter: Drafter, params: SamplingParams, name: str
) -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB, seed=0), drafter, rule, k=2, chunk=3)
    made = grammar(name)

    def generation(rng: EveryBranch) -> Tokens:
        shaper = LogitsProcessor(params, len(PROMPT), STOPS, constraint=made.start())
        with walking(rng):
            return tuple(rig.run([Request(PROMPT, params, shaper=shaper)])[0])

    found = distribution(generation)
    assert_same_distribution(found, wanted_distribution(params, name))
    assert all(GRAMMARS[name][1](text[:i])[text[i]] for text in found for i in range(LENGTH))


def check_grammar_distribution() -> None:
    for name in GRAMMARS:
        for drafter in ("model", "trees"):
            check_distribution(BlockRule(), distribution_drafters()[drafter](), PARAMS[0], name)
