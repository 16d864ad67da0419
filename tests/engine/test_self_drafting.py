"""A target that drafts in its own memory writes what it would have written without drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import PROMPT, check_greedy, check_pre_emption
from checks.engine_distribution import (
    FILTERS,
    check_engine_distribution,
    check_reported_distribution,
)
from checks.engine_distribution import VOCAB as DISTRIBUTION_VOCAB
from checks.runs import half_read_text
from checks.state import VOCAB
from doubles.lanes import SCHEDULES
from doubles.own_target import Breaking, Poisoned, over, self_drafter
from doubles.rig import SAMPLER, Request, Rig
from doubles.tiny_attention import TinyAttentionLM
from outrider.core.draft import Budget, Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, Drafter, DraftNeeds, DraftRow, StepRow
from outrider.core.rng import KeyedRng, race_node
from outrider.drafters.common.draft_model import SelfDrafter
from outrider.engine.drafting import DrafterHandle
from outrider.engine.round import StepwiseLM
from outrider.sched.jobs import LaneSizes
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

PAGE_SIZE = 2
RULES: Mapping[str, AcceptanceRule] = {
    "token": TokenRule(),
    "block": BlockRule(),
    "match": MatchRule(),
}
prompts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("poisoned", [False, True])
@examples(8)
@given(
    k=st.integers(1, 8),
    prompts=prompts,
    chunk=st.integers(1, 10),
    batch_size=st.integers(1, 4),
    num_tokens=st.integers(1, 12),
    seed=st.sampled_from([0, 7]),
)
def test_any_run_is_plain_decoding(
    rule: str,
    poisoned: bool,
    k: int,
    prompts: list[list[int]],
    chunk: int,
    batch_size: int,
    num_tokens: int,
    seed: int,
) -> None:
    """Also when all that it drafted turns into NaN before the target's pass."""
    target = TinyAttentionLM(vocab_size=VOCAB)
    drafter: Drafter = self_drafter(target, seed)
    if poisoned:
        drafter = Poisoned(target, self_drafter(target, seed))
    rig = Rig(target, drafter, RULES[rule], k=k, chunk=chunk, batch_size=batch_size)
    check_greedy(rig, TinyAttentionLM, prompts, num_tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_target_itself_is_always_accepted(temperature: float) -> None:
    """From the first round on: before it, a pass reads the rest of the prompt."""
    target = TinyAttentionLM(vocab_size=VOCAB)
    rig = Rig(target, self_drafter(target, seed=0), k=3)
    params = SamplingParams(temperature=temperature, max_tokens=16)
    rig.outputs([PROMPT, (0,), (2, 4, 4, 1, 0, 2, 3)], params)
    rounds = [trace for trace in rig.traces if trace.num_emitted]
    assert [trace.num_accepted for trace in rounds] == [3] * 12
    assert sum(trace.num_prompt_tokens for trace in rounds) == 0


def test_a_text_that_was_not_read_to_its_end_is_not_drafted_for() -> None:
    half_read_text()


def test_token_by_token_verification_over_the_same_memory() -> None:
    target = TinyAttentionLM(vocab_size=VOCAB)
    rig = Rig(StepwiseLM(target), self_drafter(target), k=4, chunk=3)
    check_greedy(rig, TinyAttentionLM, [PROMPT, (4,), (0, 0, 0, 0)], 11)


@pytest.mark.parametrize("fatal", range(1, 6))
def test_a_copy_that_breaks_costs_drafts_and_leaves_nothing_staged(fatal: int) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB)
    model = Breaking(over(target), fatal)
    drafter = SelfDrafter(model, SAMPLER, name="layer-skip")
    rig = Rig(target, drafter, k=3, honest=False)
    check_greedy(rig, TinyAttentionLM, [PROMPT, (4, 1)], 9)
    target.state.check()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_distribution_of_a_generation_is_the_targets(rule: AcceptanceRule) -> None:
    target = TinyAttentionLM(vocab_size=DISTRIBUTION_VOCAB, page_size=2, num_slots=64)
    for params in FILTERS[1:3]:
        rig = Rig(target, self_drafter(target), rule, k=2, page_size=2)
        check_engine_distribution(rig, TinyAttentionLM, params)


@pytest.mark.slow
def test_the_distribution_with_a_drafter_that_races_along() -> None:
    target = TinyAttentionLM(vocab_size=DISTRIBUTION_VOCAB, page_size=2, num_slots=64)
    rig = Rig(target, self_drafter(target, draw=race_node), CoupledRule(), k=2, page_size=2)
    check_engine_distribution(rig, TinyAttentionLM, FILTERS[0])


@dataclass(slots=True)
class Read:
    """A self-drafter whose target has read the text of `check_reported_distribution` when it is
    opened."""

    target: TinyAttentionLM
    drafter: SelfDrafter
    name: str = "layer-skip"
    needs: DraftNeeds = SelfDrafter.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.target.state.open(seq_id, ())
        self.target.step([StepRow.chain(seq_id, prompt)], DraftNeeds())
        self.target.state.commit({seq_id: range(len(prompt))})
        self.drafter.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return self.drafter.propose(rows)

    def close(self, seq_id: int) -> None:
        self.drafter.close(seq_id)
        self.target.state.close(seq_id)


@pytest.mark.parametrize("params", FILTERS, ids=["temperature", "top-k", "top-p", "min-p"])
def test_it_reports_the_distributions_that_it_draws_from(params: SamplingParams) -> None:
    target = TinyAttentionLM(vocab_size=DISTRIBUTION_VOCAB, page_size=2, num_slots=64)
    check_reported_distribution(lambda: Read(target, self_drafter(target)), params)


def small_rig(num_slots: int, name: str, chunk: int, reserve: float) -> Rig:
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=PAGE_SIZE, num_slots=num_slots)
    return Rig(
        target,
        self_drafter(target),
        k=3,
        batch_size=6,
        page_size=PAGE_SIZE,
        spare=4,
        reserve=reserve,
        schedule=SCHEDULES[name](LaneSizes(chunk)),
        is_watched=True,
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
@examples(6)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=8),
    num_slots=st.integers(26, 60),
    chunk=st.integers(1, 8),
    reserve=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_in_little_memory_on_every_schedule(
    name: str, sizes: list[tuple[int, int]], num_slots: int, chunk: int, reserve: float
) -> None:
    """Drafting takes no page that verifying would not; whoever is pre-empted goes on later."""
    check_pre_emption(small_rig(num_slots, name, chunk, reserve), sizes)


def test_who_is_pre_empted_draws_the_same_text() -> None:
    """A first round drafts too, so a round has a draft wherever it begins."""
    texts, params = [PROMPT[:4], PROMPT[1:], PROMPT[2:]], SamplingParams(max_tokens=14, seed=5)
    params = replace(params, temperature=1.2)
    alone = TinyAttentionLM(vocab_size=VOCAB)
    wanted = Rig(alone, self_drafter(alone), k=3).run([Request(text, params) for text in texts])
    rig = small_rig(36, "single", 2, 0.0)
    assert rig.run([Request(text, params) for text in texts]) == wanted
    assert rig.counts.preempted > 0


def test_in_the_targets_memory_it_keeps_nothing_and_closes_nothing() -> None:
    target = TinyAttentionLM(vocab_size=VOCAB)
    target.state.open(0, ())
    target.step([StepRow.chain(0, (1, 2))], DraftNeeds())
    target.state.commit({0: range(2)})
    drafter, text = self_drafter(target), [1, 2, 3]
    for _ in range(2):
        drafter.open(0, text)
        for _ in range(2):
            row = DraftRow(0, text, None, Budget(3), SamplingParams(), KeyedRng(0, 0, len(text)))
            (draft,) = drafter.propose([row])
            assert len(draft) == 3
            assert (target.state.length(0), target.state.num_staged(0)) == (2, 0)
        drafter.close(0)
        assert target.state.length(0) == 2


def test_a_drafter_in_the_targets_memory_never_counts_as_hung() -> None:
    """It could still write there when it was given up."""
    drafting = DrafterHandle(self_drafter(TinyAttentionLM()), timeout=math.inf)
    assert SelfDrafter.needs.shares_memory
    deadline = drafting.allowance(5)
    assert drafting.patience({"decode": deadline}) is None
    assert not drafting.overdue({"decode": deadline})
    assert DrafterHandle(self_drafter(TinyAttentionLM())).patience({"decode": 1e9}) is not None
