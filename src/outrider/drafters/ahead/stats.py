"""What drafting ahead did: plain counts, from which every rate is derived."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Looks:
    """How often a verdict was looked up, and how often it was found."""

    asked: int = 0
    found: int = 0

    def add(self, *, found: bool) -> None:
        self.asked += 1
        self.found += found

    @property
    def share(self) -> float:
        """p_hit; 0 if nothing was looked up."""
        return self.found / self.asked if self.asked else 0.0


@dataclass(slots=True)
class AheadStats:
    """Since the drafter was made. First rounds look nothing up.

    `looks` are all look-ups; `by_accepted` the same by how many tokens the verdict had accepted;
    `bonus` those after a draft that was accepted whole. `num_made_good` hits were forced and not
    really found. `num_prepared` is how many rounds something was prepared for, `num_tree_nodes`
    what the draft model was fed for their trees. `recovered_ranks` and `bonus_ranks` say how often
    the target's own token was the i-th of the draft model's list; their last entry counts those
    beyond it.
    """

    looks: Looks = field(default_factory=Looks)
    by_accepted: dict[int, Looks] = field(default_factory=dict[int, Looks])
    bonus: Looks = field(default_factory=Looks)
    num_made_good: int = 0
    num_prepared: int = 0
    num_branches: int = 0
    num_tree_nodes: int = 0
    recovered_ranks: tuple[int, ...] = ()
    bonus_ranks: tuple[int, ...] = ()

    def add(self, accepted: int, depth: int, *, found: bool) -> None:
        """A verdict that accepted so many of `depth` drafted tokens was looked up."""
        self.looks.add(found=found)
        self.by_accepted.setdefault(accepted, Looks()).add(found=found)
        if accepted == depth:
            self.bonus.add(found=found)
