"""Drafters that look up, in the engine: the text is plain decoding's, and the distribution is the
target's.

They share memory over requests, so unlike others they draft by what was written before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.distribution import assert_same_distribution
from checks.effort import examples
from checks.engine import PROMPT, Kind, check_greedy, greedy, plain
from checks.engine_distribution import LENGTH, target_distribution
from checks.engine_distribution import PROMPT as DISTRIBUTION_PROMPT
from checks.engine_distribution import VOCAB as DISTRIBUTION_VOCAB
from checks.state import VOCAB
from doubles.counting import Guessing
from doubles.every_branch import EveryBranch, Tokens, distribution
from doubles.in_turn import InTurn
from doubles.rig import Request, Rig, model_drafter, walking
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.portfolio import ForcedDrafter, PortfolioDrafter, ReplayScored
from outrider.drafters.suffix import SuffixDrafter
from outrider.verify.exact import BlockRule, MatchRule, TokenRule
from outrider_lab.drafters.recycling import RecyclingDrafter

CORPUS = ((0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 2), (1, 1, 1, 2, 0, 1))


def members(
    vocab_size: int,
) -> list[ForcedDrafter | ReplayScored | SuffixDrafter | RecyclingDrafter]:
    return [
        ForcedDrafter(),
        ReplayScored(Guessing((0, 1, 1, 2, 0, 1, 2))),
        SuffixDrafter(corpus=CORPUS),
        RecyclingDrafter(vocab_size=vocab_size),
        ReplayScored(NgramDrafter(max_n=2, min_n=1)),
    ]


def portfolio(vocab_size: int) -> Drafter:
    model = model_drafter(ToyHybrid(vocab_size=vocab_size, seed=7), chunk=2)
    return PortfolioDrafter(members(vocab_size), model, leads=InTurn(["model"], k=6))


DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "suffix": lambda vocab_size: SuffixDrafter(corpus=CORPUS),
    "recycling": lambda vocab_size: RecyclingDrafter(vocab_size=vocab_size),
    "lookup": lambda vocab_size: PortfolioDrafter(members(vocab_size)),
    "portfolio": portfolio,
}
every_drafter = pytest.mark.parametrize("name", DRAFTERS)
prompts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4
)


def rig(
    kind: Kind, drafter: Drafter, rule: AcceptanceRule, *, k: int, num_nodes: int, batch_size: int
) -> Rig:
    return Rig(
        kind(vocab_size=VOCAB),
        drafter,
        rule,
        k=k,
        chunk=3,
        batch_size=batch_size,
        spare=16,
        controller=FixedController(Budget(k, num_nodes=num_nodes)),
    )


@every_drafter
@examples(12)
@given(
    kind=st.sampled_from([ToyHybrid, TinyAttentionLM]),
    rule=st.sampled_from([TokenRule(), MatchRule()]),
    k=st.integers(1, 6),
    num_nodes=st.sampled_from([0, 0, 5, 12]),
    prompts=prompts,
    batch_size=st.integers(1, 3),
    num_tokens=st.integers(1, 20),
)
def test_greedy_text_is_plain_decodings(
    name: str,
    kind: Kind,
    rule: AcceptanceRule,
    k: int,
    num_nodes: int,
    prompts: list[list[int]],
    batch_size: int,
    num_tokens: int,
) -> None:
    """Twice: the second time all of it was written before."""
    drafter = DRAFTERS[name](VOCAB)
    for _ in range(2):
        one = rig(kind, drafter, rule, k=k, num_nodes=num_nodes, batch_size=batch_size)
        check_greedy(one, kind, prompts, num_tokens)


@pytest.mark.parametrize("num_nodes", [0, 6])
def test_what_was_written_before_is_drafted_and_kept(num_nodes: int) -> None:
    drafter = SuffixDrafter()
    passes = list[int]()
    for _ in range(3):
        one = rig(ToyHybrid, drafter, TokenRule(), k=5, num_nodes=num_nodes, batch_size=1)
        check_greedy(one, ToyHybrid, [PROMPT], 24)
        passes.append(len({trace.pass_index for trace in one.traces}))
    assert passes[-1] < passes[0]
    assert passes[-1] <= 14


def test_records_say_which_member_proposed() -> None:
    drafter = portfolio(VOCAB)
    one = rig(ToyHybrid, drafter, TokenRule(), k=4, num_nodes=0, batch_size=1)
    check_greedy(one, ToyHybrid, [PROMPT, (0, 0, 1)], 40)
    drafting = {name for trace in one.traces for name in trace.drafter.split("+")} - {drafter.name}
    assert drafting <= {"forced", "prediction", "suffix", "recycling", "ngram", "model"}
    assert len(drafting) >= 2


def test_forced_tokens_take_no_rounds_of_their_own() -> None:
    """A mask that names the token at four places of five."""

    def allowed(text: Sequence[int]) -> Tensor | None:
        if len(text) % 5 == 0:
            return None
        mask_V = torch.zeros(VOCAB, dtype=torch.bool)
        mask_V[len(text) % VOCAB] = True
        return mask_V

    def run(drafter: Drafter) -> tuple[list[int], int]:
        params = SamplingParams(max_tokens=25)
        one = Rig(ToyHybrid(vocab_size=VOCAB), drafter, k=6)
        shaper = LogitsProcessor(params, len(PROMPT), allowed=allowed)
        text = one.run([Request(PROMPT, params, shaper=shaper)])[0]
        return text, len({trace.pass_index for trace in one.traces})

    wanted, num_plain = run(NoDrafter())
    found, num_drafted = run(PortfolioDrafter([ForcedDrafter()]))
    assert found == wanted
    # The first token is of a round of its own; then four and the next one at once.
    assert (num_plain, num_drafted) == (25, 6)


DISTRIBUTIONS = (SamplingParams(temperature=1.3, max_tokens=LENGTH),)


# Each drafter, rule and shape has its distribution. Other combinations are `deep`.
@pytest.mark.covering(1)
@every_drafter
@pytest.mark.parametrize("num_nodes", [0, 4])
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=lambda rule: type(rule).__name__)
@pytest.mark.slow
def test_the_distribution_is_the_targets(name: str, num_nodes: int, rule: AcceptanceRule) -> None:
    """Enumerated, with a memory that has read the corpus; each generation starts from there."""
    params = DISTRIBUTIONS[0]

    def generation(rng: EveryBranch) -> Tokens:
        one = Rig(
            ToyHybrid(vocab_size=DISTRIBUTION_VOCAB, seed=0),
            DRAFTERS[name](DISTRIBUTION_VOCAB),
            rule if not num_nodes else TokenRule(),
            k=2,
            chunk=3,
            spare=16,
            controller=FixedController(Budget(2, num_nodes=num_nodes)),
        )
        with walking(rng):
            return tuple(one.run([Request(DISTRIBUTION_PROMPT, params)])[0])

    assert_same_distribution(
        distribution(generation),
        target_distribution(ToyHybrid, DISTRIBUTION_PROMPT, params, DISTRIBUTION_VOCAB),
    )


def test_pre_emption_and_a_small_arena() -> None:
    """Requests that are closed and opened again read their text anew, and it is the same."""
    drafter = DRAFTERS["portfolio"](VOCAB)
    target = TinyAttentionLM(vocab_size=VOCAB, num_slots=64, page_size=2)
    one = Rig(target, drafter, k=3, page_size=2, chunk=3, reserve=0.2)
    wanted = [PROMPT[i:] + PROMPT[:i] for i in range(5)] * 2
    outputs = one.outputs(wanted, greedy(12))
    for prompt, output in zip(wanted, outputs, strict=True):
        assert output == list(plain(TinyAttentionLM, prompt, 12))
