"""What a drafter ahead must keep to: the text's distribution, and the very text of drafting in
turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from checks.distribution import assert_same_distribution
from checks.engine_distribution import FILTERS, PROMPT, VOCAB, target_distribution
from doubles.ahead import AheadRig, Ways, ahead_drafter
from doubles.every_branch import Distribution, EveryBranch, Tokens, distribution
from doubles.racing import SharedNumbers
from doubles.rig import Request, first_maximum, walking
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, CausalLM
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import ChangeProbs, DraftSampler
from outrider.plugins.lanes.ahead.forecast import Saguaro
from outrider.plugins.lanes.ahead.table import PreparedRound, SpeculationCache
from outrider.testing import row
from outrider.verify.exact import TokenRule

Kind = Callable[..., CausalLM]
PROMPTS = ((1, 2, 3), (0,), (4, 4, 5, 6, 7))
SLOTS = 4096
ONE_EACH = Ways(k=1, batch=1, fan_out=2, policy="uniform")


def requests(temperature: float, batch: int = 3, max_tokens: int = 20) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5)
    return [Request(prompt, params) for prompt in PROMPTS[:batch]]


def text_in_turns(
    kind: Kind,
    rule: AcceptanceRule,
    wanted: Sequence[Request],
    k: int,
    change: ChangeProbs | None = None,
) -> list[list[int]]:
    """What drafting and verifying in turns writes."""
    model = kind(seed=7, num_slots=SLOTS)
    sampler = DraftSampler(first_maximum, "the draft model", change=change)
    drafter = ModelDrafter(model, sampler, chunk=256)
    return AheadRig(kind(seed=0, num_slots=SLOTS), drafter, rule, k).run(wanted)


def rig_ahead(
    kind: Kind, rule: AcceptanceRule, ways: Ways, change: ChangeProbs | None = None
) -> AheadRig:
    drafter = ahead_drafter(kind(seed=7, num_slots=SLOTS), ways, change=change)
    return AheadRig(kind(seed=0, num_slots=SLOTS), drafter, rule, ways.k)


def distribution_ahead(
    params: SamplingParams,
    ways: Ways,
    rule: AcceptanceRule,
    *,
    change: ChangeProbs | None = None,
    ahead: Callable[[int], bool] = lambda index: index == 0,
) -> tuple[Distribution, set[bool | None]]:
    """The distribution of a whole generation, and whether drafts of it were hits. A fresh drafter
    on every branch: what it learned on one must not be known on the next."""
    seen: set[bool | None] = set()

    def generation(rng: EveryBranch) -> Tokens:
        drafter = ahead_drafter(ToyHybrid(vocab_size=VOCAB, seed=7), ways, change=change)
        rig = AheadRig(ToyHybrid(vocab_size=VOCAB, seed=0), drafter, rule, ways.k, ahead=ahead)
        with walking(SharedNumbers(rng)):
            text = tuple(rig.run([Request(PROMPT, params)])[0])
        seen.update(rig.hits)
        return text

    return distribution(generation), seen


def check_distribution_ahead(
    params: SamplingParams,
    ways: Ways,
    rule: AcceptanceRule,
    *,
    change: ChangeProbs | None = None,
    ahead: Callable[[int], bool] = lambda index: index == 0,
) -> set[bool | None]:
    """Whether drafts were hits, over all branches."""
    found, seen = distribution_ahead(params, ways, rule, change=change, ahead=ahead)
    assert_same_distribution(found, target_distribution(ToyHybrid, PROMPT, params))
    return seen


def check_ahead_is_exact() -> None:
    """One verdict foreseen after a refusal and one after a whole draft."""
    for params in FILTERS[1:]:
        assert check_distribution_ahead(params, ONE_EACH, TokenRule()) == {None, True, False}


def check_ahead_is_the_text_in_turns() -> None:
    """Where all verdicts are foreseen, and any number of tokens is accepted."""
    wanted = requests(3.0)
    rig = rig_ahead(ToyHybrid, TokenRule(), Ways(k=3, fan_out=44))
    assert rig.run(wanted) == text_in_turns(ToyHybrid, TokenRule(), wanted, 3)
    assert set(rig.hits) == {None, True}
    assert {trace.num_accepted for trace in rig.traces} == {0, 1, 2, 3}


def check_saguaro_is_exact(weight: float = 0.3) -> None:
    change = Saguaro(weight, [1])
    seen: set[bool | None] = set()
    for params in FILTERS[1:]:
        for fan_out in (2, 4):
            ways = replace(ONE_EACH, fan_out=fan_out)
            seen |= check_distribution_ahead(params, ways, TokenRule(), change=change)
    assert seen == {None, True, False}


def check_left_over_is_not_found() -> None:
    """What was prepared for a round is of no use for a later one, though the verdict reads the
    same: here both rounds verified nothing, and the one between asked for no draft."""
    branch = Draft.chain((1, 2))
    table = SpeculationCache()
    table.put(0, PreparedRound(4, (), {(0, 9): branch}, [[9]]))
    later = Outcome(0, Draft.empty(), Verdict((), 9))
    assert table.take(row(0, [0] * 6 + [9], depth=3, last=later)) is None
    table.put(0, PreparedRound(6, (), {(0, 9): branch}, [[9]]))
    assert table.take(row(0, [0] * 6 + [9], depth=3, last=later)) is not None


def no_places(draft: Sequence[int]) -> list[int]:
    """Replacement of `masked_positions`: the refused token is predicted too."""
    del draft
    return []
