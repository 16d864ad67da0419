"""Leads: which member of a portfolio drafts where look-ups have nothing better, and how deep.

A model, heads or a copy of the target cost time, so one of them leads at a time. Each has a goodput
controller of its own, which chooses draft lengths as if it drafted alone. The leader is the member
that gains most over plain decoding, and a look-up goes first where its draft gains more than that.
So a portfolio decodes like its best member wherever that member drafts. Where none gains, the one
that loses least leads, and drafts in looks of its controller only.

After the first sweep of each member, another member leads for a few passes. The wait before that
doubles each time that nothing changed, and an `Allowance` (estimate/cost.py) bounds the time that
these trials lose against plain decoding. Statistics count them as trials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.control.goodput import GoodputController
from outrider.core.draft import Draft, RoundTrace
from outrider.estimate.acceptance import FadingMean, OpenPasses
from outrider.estimate.cost import LOSS_SHARE, MOST_SAVED, Allowance

# Passes that call drafters between two trials of other members, at first and at most, and the
# passes of one.
FIRST_WAIT, LONGEST_WAIT, TRIAL = 128, 4096, 4
# Updates over which the gain of a member is averaged: each comes after several passes, or after one
# of a trial.
_GAIN_SHARE = 1 / 4
# A draft counts as at most so many passes: a longer one was interrupted.
_LONGEST_DRAFT = 8.0
# No trial begins if look-ups expect more accepted tokens for each request than this.
_FEW_RIGHT = 0.25


class Lead(NamedTuple):
    """The member that drafts in a round: its depth for each sequence, and how many times as fast as
    plain decoding it is expected to be. A `trial` is a draft that is made to learn."""

    name: str
    depths: Sequence[int]
    gain: float = 1.0
    trial: bool = False


@dataclass(slots=True)
class _Member:
    """A member's controller, and the gain of its best drafts, which is below 1 if they lose; None
    before its first sweep ended."""

    controller: GoodputController
    gain: FadingMean
    is_known: bool = False
    # Passes since the last update of its gain, and those in which it had no draft.
    num_passes: int = 0
    num_missed: int = 0

    def expected(self, seq_ids: Sequence[int]) -> float:
        """Return how many times as fast as plain decoding its rounds are expected to be now."""
        if self.controller.is_trying:
            return 1.0
        choice = self.controller.chosen(seq_ids)[0].choice
        return max((choice and choice.gain) or 1.0, 1.0)

    def learn(self, traces: Sequence[RoundTrace], *, now: bool) -> bool:
        """Learn a pass in which this member drafted or no member did, with others unless `now`.
        Returns whether its controller and gain have changed."""
        self.num_passes += 1
        if not self.controller.learn(traces, now=now):
            return False
        seq_ids = [one.seq_id for one in traces if one.num_emitted]
        if seq_ids and not self.controller.is_trying:
            gain = self.expected(seq_ids)
            best = gain if gain > 1 else self.controller.promise(seq_ids)
            num_made = self.num_passes - self.num_missed
            self.gain.add(1 + (best - 1) * max(num_made, 0) / self.num_passes)
        self.num_passes = self.num_missed = 0
        return True


class Leads:
    """The leads of members called `names`, in drafts of up to `k` tokens. A pure function of the
    observed traces."""

    def __init__(self, names: Sequence[str], *, k: int, num_nodes: int = 0) -> None:
        self._members = {
            name: _Member(
                GoodputController(k=k, num_nodes=num_nodes, by=name), FadingMean(_GAIN_SHARE)
            )
            for name in names
        }
        self._leader, self._tried = names[0], ""
        self._left = self._since = 0
        self._wait = FIRST_WAIT
        self._allowance = Allowance(most=MOST_SAVED)
        self._open = OpenPasses()
        # The last lead, until its member learns.
        self._made: tuple[tuple[object, ...], Lead] | None = None
        self._try_unknown()

    @property
    def name(self) -> str:
        """The member that leads the next round, unless requests name others."""
        return self._tried or self._leader

    def lead(self, seq_ids: Sequence[int], among: Collection[str] = ()) -> Lead:
        """Return the lead of a round of these sequences, `among` the members with these names if
        any are given; one without a name if none of them is a member."""
        name = self.name
        if among and name not in among:
            name = max((own for own in among if own in self._members), key=self._rank, default="")
            if not name:
                return Lead("", [0] * len(seq_ids))
        key = name, *seq_ids
        if self._made is None or self._made[0] != key:
            member = self._members[name]
            trial = member.controller.is_trying or name == self._tried
            depths = [budget.depth for budget in member.controller.chosen(seq_ids)]
            self._made = key, Lead(name, depths, member.expected(seq_ids), trial)
        return self._made[1]

    def repays(
        self, lead: Lead, seq_ids: Sequence[int], depths: Mapping[int, int], looked: Sequence[Draft]
    ) -> bool:
        """Return whether drafts of these `depths` pay next to those that look-ups made."""
        right = sum(sum(draft.accept_probs) for draft in looked)
        count = sum(map(len, looked))
        if lead.trial or not count:
            # All requests wait for a trial.
            return right <= _FEW_RIGHT * len(seq_ids)
        controller = self._members[lead.name].controller
        return controller.repays(seq_ids, depths, looked=right, num_looked=count)

    def missed(self, name: str) -> None:
        """Count that the leader `name` had no draft in the round that begins."""
        self._members[name].num_missed += 1

    def observe(self, trace: RoundTrace) -> None:
        if not (trace.draft_seconds or trace.num_drafted):
            # Drafting rests (control/scored.py): no drafter was called.
            return
        traces = self._open.add(trace)
        if traces is None:
            return
        self._since += 1
        self._allowance.refill(LOSS_SHARE)
        rounds = [one for one in traces if one.num_emitted]
        by = {one.drafter for one in rounds if one.num_drafted}
        led = [name for name in by if name in self._members] if by else [self.name]
        if not led:
            self._members[self.name].controller.passed(traces)
            self._made = None
        has_learnt = False
        for name in led:
            is_tried = name == self._tried
            has_learnt |= self._members[name].learn(traces, now=is_tried)
            if is_tried:
                self._book(name, rounds)
        if self._tried in led or (has_learnt and not self._tried) or self._since >= self._wait:
            self._turn(led)
            has_learnt = True
        if has_learnt:
            self._made = None

    def noting(self, sink: Callable[[RoundTrace], None]) -> Callable[[RoundTrace], None]:
        """Return `sink`, called after the leads have seen the trace."""

        def note(trace: RoundTrace) -> None:
            self.observe(trace)
            sink(trace)

        return note

    def _rank(self, name: str) -> float:
        """The gain of a member; one of which nothing is known comes first."""
        member = self._members[name]
        return (member.gain.value or 1.0) if member.is_known else float("inf")

    def _book(self, name: str, rounds: Sequence[RoundTrace]) -> None:
        """Book the tokens that a trial gained, and the time that it took."""
        own = [one for one in rounds if one.num_drafted and one.drafter == name]
        costs, num_rows = self._members[name].controller.costs, len(rounds)
        plain = costs.target_seconds(num_rows)
        if not own or plain <= 0 or any(one.num_prompt_tokens for one in rounds):
            return
        num_drafted = sum(one.num_drafted for one in own)
        took = own[0].draft_seconds + costs.target_seconds(num_rows + num_drafted) - plain
        gained = sum(one.num_accepted for one in own) / num_rows
        self._allowance.add(gained - min(took / plain, _LONGEST_DRAFT))

    def _turn(self, led: Sequence[str]) -> None:
        """End a trial, or begin one, after a pass that `led` drafted for."""
        if self._tried:
            member = self._members[self._tried]
            self._left -= self._tried in led
            # Others led for so long: it fails for all requests, or they name others.
            is_over = bool(led) and self._tried not in led and self._since >= self._wait
            if not is_over and (self._left > 0 or member.controller.is_trying):
                return
            member.is_known, before = True, self._leader
            self._leader = max(self._members, key=self._rank)
            self._wait = FIRST_WAIT if self._leader != before else min(2 * self._wait, LONGEST_WAIT)
            self._tried, self._since = "", 0
            self._try_unknown()
        else:
            self._leader = max(self._members, key=self._rank)
            if self._since >= self._wait and len(self._members) > 1 and self._allowance.pays(1.0):
                others = [name for name in self._members if name != self._leader]
                self._try(others[self._wait.bit_length() % len(others)])

    def _try_unknown(self) -> None:
        unknown = [name for name, member in self._members.items() if not member.is_known]
        if unknown:
            self._try(unknown[0])

    def _try(self, name: str) -> None:
        self._tried, self._left = name, TRIAL
        member = self._members[name]
        if member.is_known and (member.gain.value or 1.0) <= 1:
            # It would draft nothing.
            member.controller.look()
