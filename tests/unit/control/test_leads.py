"""Which member of a portfolio leads, on a machine of given costs and acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from outrider.control.leads import FIRST_WAIT, LONGEST_WAIT, TRIAL, Lead, Leads
from outrider.core.draft import Draft, RoundTrace
from outrider.estimate.cost import FIRST_LOSS, LOSS_SHARE

K = 6
# A pass takes 1, and this more for each drafted row.
ROW = 0.04
# A drafter that is called takes so long at least.
CALL = 1e-6


class Machine:
    """Rounds of one request: a token of member m takes `costs[m]` and is right with `rates[m]`. A
    look-up drafts all tokens of every `lookups`-th round, if that is above 0."""

    def __init__(
        self, costs: Mapping[str, float], rates: Mapping[str, float], lookups: int = 0
    ) -> None:
        self.leads = Leads([*costs], k=K)
        self.costs, self.rates, self.lookups = costs, dict(rates), lookups
        self.dice, self.index, self.seconds, self.tokens = Random(0), 0, 0.0, 0
        self.made = list[Lead]()

    def run(self, num_rounds: int) -> float:
        """Play so many rounds; return their tokens in the time of a pass."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(num_rounds):
            self._round()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _round(self) -> None:
        lead = self.leads.lead([0])
        by, depth, drafting = lead.name, lead.depths[0], CALL
        if self.lookups and self.index % self.lookups == 0:
            by, depth, accepted = "suffix", K, K
        else:
            drafting += depth * self.costs[by]
            right = (self.dice.random() >= self.rates[by] for _ in range(depth))
            accepted = next((i for i, wrong in enumerate(right) if wrong), depth)
            if depth:
                self.made.append(lead)
        verifying = 1 + ROW * depth
        self.seconds += drafting + verifying
        self.tokens += accepted + 1
        self.leads.observe(traced(self.index, by, depth, accepted, drafting, verifying))
        self.index += 1

    def drafts(self, name: str) -> list[Lead]:
        return [lead for lead in self.made if lead.name == name]


def traced(
    index: int,
    by: str,
    depth: int,
    accepted: int,
    drafting: float,
    verifying: float,
    *,
    seq_id: int = 0,
    batch: int = 1,
) -> RoundTrace:
    return RoundTrace(
        seq_id=seq_id,
        pass_index=index,
        drafter=by if depth else "portfolio",
        batch_size=batch,
        num_target_passes=1,
        num_prompt_tokens=0,
        num_drafted=depth,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        num_rows_copied=0,
        draft_seconds=drafting,
        verify_seconds=verifying,
        accept_seconds=0.0,
        draft_depth=depth,
    )


@pytest.mark.parametrize("lookups", [0, 3])
def test_the_member_that_gains_most_leads(lookups: int) -> None:
    costs, rates = {"slow": 0.6, "good": 0.1, "wrong": 0.05}, {"slow": 0.9, "good": 0.8}
    machine = Machine(costs, {**rates, "wrong": 0.1}, lookups)
    machine.run(200)
    num_before = len(machine.made)
    gain = machine.run(400)
    others = [lead for lead in machine.made[num_before:] if lead.name != "good"]
    assert len(others) <= 3 * TRIAL
    assert all(lead.trial for lead in others)
    alone = Machine({"good": 0.1}, {"good": 0.8}, lookups)
    alone.run(200)
    assert gain > 0.95 * alone.run(400)


def test_another_member_leads_after_the_text_has_changed() -> None:
    machine = Machine({"first": 0.1, "second": 0.1}, {"first": 0.85, "second": 0.2})
    machine.run(300)
    assert machine.leads.name == "first"
    machine.rates = {"first": 0.2, "second": 0.85}
    machine.run(6 * FIRST_WAIT)
    num_before = len(machine.drafts("second"))
    machine.run(100)
    assert len(machine.drafts("second")) - num_before > 80


def test_of_members_that_lose_the_one_that_loses_least_leads_and_is_looked_at_again() -> None:
    machine = Machine({"wrong": 0.5, "near": 0.2}, {"wrong": 0.05, "near": 0.1})
    machine.run(300)
    assert machine.leads.lead([0])[:2] == ("near", [0])
    num_before = len(machine.made)
    machine.run(600)
    lost = sum(lead.depths[0] * machine.costs[lead.name] for lead in machine.made[num_before:])
    assert lost < 0.02 * 600
    machine.rates = {"wrong": 0.05, "near": 0.9}
    machine.run(300)
    assert machine.leads.lead([0]).gain > 1.2


def test_looks_may_cost_a_share_of_the_time_in_which_look_ups_draft() -> None:
    alone, helped = (Machine({"wrong": 2.0}, {"wrong": 0.05}, lookups) for lookups in (0, 2))
    alone.run(2000)
    helped.run(4000)
    assert len(helped.made) > 1.3 * len(alone.made)


def test_trials_of_members_that_never_gain_are_bounded_and_become_rare() -> None:
    machine = Machine({"good": 0.1, "slow": 1.0}, {"good": 0.8, "slow": 0.3})
    machine.run(100)
    num_rounds = 6000
    num_before = len(machine.drafts("slow"))
    machine.run(num_rounds)
    trials = machine.drafts("slow")[num_before:]
    assert all(lead.trial for lead in trials)
    lost = sum(lead.depths[0] for lead in trials) * 1.0
    assert lost <= FIRST_LOSS + LOSS_SHARE * num_rounds + K
    # A wait that doubles, against one for every first wait.
    assert 0 < len(trials) < num_rounds / FIRST_WAIT * TRIAL / 3
    assert FIRST_WAIT < LONGEST_WAIT


def test_a_lead_is_among_the_members_that_a_request_names() -> None:
    machine = Machine({"good": 0.1, "other": 0.1}, {"good": 0.9, "other": 0.5})
    machine.run(200)
    assert machine.leads.lead([0]).name == "good"
    assert machine.leads.lead([0], ["other"]).name == "other"
    assert machine.leads.lead([0, 1], ["suffix"]) == Lead("", [0, 0])


def test_rounds_in_which_drafting_rests_bring_no_trial_nearer() -> None:
    machine = Machine({"good": 0.1, "other": 0.1}, {"good": 0.9, "other": 0.5})
    while not machine.made or machine.leads.lead([0]).trial:
        machine.run(1)
    for index in range(machine.index, machine.index + LONGEST_WAIT):
        machine.leads.observe(traced(index, "good", 0, 0, 0.0, 1.0))
    machine.index += LONGEST_WAIT
    machine.run(2)
    assert not machine.leads.lead([0]).trial


def test_of_a_pass_with_several_drafters_each_learns_its_own() -> None:
    """A look-up that is always right, next to a member that never is."""
    leads = Leads(["model"], k=K)
    for index in range(60):
        lead = leads.lead([0, 1])
        took = 0.2 * max(lead.depths)
        for seq_id, by, depth in ((0, "model", lead.depths[0]), (1, "suffix", K)):
            accepted = depth if by == "suffix" else 0
            leads.observe(traced(index, by, depth, accepted, took, 1.5, seq_id=seq_id, batch=2))
    assert leads.lead([0, 1]).depths == [0, 0]


def test_a_batch_waits_for_the_leader_only_where_that_pays() -> None:
    machine = Machine({"good": 0.3}, {"good": 0.8})
    machine.run(200)
    leads, batch = machine.leads, [*range(8)]
    lead = Lead("good", [4] * 8)
    sure = Draft.chain((1,) * K, accept_probs=(0.9,) * K)
    doubtful = Draft.chain((1,), accept_probs=(0.1,))
    assert leads.repays(lead, [0], {0: 4}, [])
    assert leads.repays(lead, batch, dict.fromkeys(range(7), 4), [doubtful])
    # Seven requests with six tokens each wait for one with three.
    assert not leads.repays(lead, batch, {0: 4}, [sure] * 7)
    trial = lead._replace(trial=True)
    assert leads.repays(trial, batch, {0: 4}, [doubtful] * 7)
    assert not leads.repays(trial, batch, {0: 4}, [sure] * 7)


@pytest.mark.parametrize("drafts_every", [4, 10**9])
def test_a_leader_gains_only_in_rounds_in_which_it_drafts(drafts_every: int) -> None:
    machine = Machine({"heads": 0.02, "model": 0.02}, {"heads": 0.9, "model": 0.6})
    machine.run(4 * FIRST_WAIT)
    leads, name = machine.leads, machine.leads.name
    assert name == "heads"
    for index in range(machine.index, machine.index + FIRST_WAIT):
        lead = leads.lead([0])
        if lead.name == name and index % drafts_every:
            leads.missed(name)
            leads.observe(traced(index, name, 0, 0, CALL, 1.0))
        elif lead.name == name:
            depth = lead.depths[0]
            leads.observe(traced(index, name, depth, depth, 0.02 * depth, 1 + ROW * depth))
    assert leads.name == "model"


def test_a_trial_of_a_member_that_never_drafts_ends() -> None:
    """Every request has other members only, as where one fails for all of them."""
    leads = Leads(["broken", "good", "wrong"], k=K)
    dice, rates = Random(0), {"good": 0.8, "wrong": 0.1}
    made = list[str]()
    for index in range(6 * FIRST_WAIT):
        lead = leads.lead([0], ["good", "wrong"])
        right = (dice.random() >= rates[lead.name] for _ in range(lead.depths[0]))
        accepted = next((i for i, wrong in enumerate(right) if wrong), lead.depths[0])
        drafting, verifying = 0.1 * lead.depths[0], 1 + ROW * lead.depths[0]
        traces = traced(index, lead.name, lead.depths[0], accepted, drafting, verifying)
        leads.observe(traces)
        made.append(lead.name)
    assert made[-FIRST_WAIT:].count("good") > 0.8 * FIRST_WAIT
