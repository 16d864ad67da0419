"""Drafts of the tests' own in captured verifications that run eagerly: trees and chains of any
size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from doubles.drafters import RowDrafter, random_chains, random_trees, row_random
from doubles.graphs import GraphRig
from doubles.rig import exchange_round, round_of
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget, Draft
from outrider.core.protocols import DraftRow
from outrider.engine.engine import Engine
from outrider.engine.stages import Stages
from outrider.plugins.gpu.rounds.program import EagerLauncher

VOCAB = 96


@dataclass(slots=True)
class Counting(EagerLauncher):
    """Counts launches of graphs, and the graphs."""

    num_launched: int = 0
    num_graphs: int = 0

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        launch = EagerLauncher.make(self, program, prepare)
        self.num_graphs += 1

        def counted() -> None:
            self.num_launched += 1
            launch()

        return counted


def soft_trees(salt: int) -> RowDrafter:
    """Trees and chains of any size that were drawn, and some that were chosen."""
    drawn, chains = random_trees(VOCAB, num_nodes=6), random_chains(VOCAB)

    def draft(row: DraftRow) -> Draft:
        choice = row_random(row, salt).randrange(4)
        if choice == 0:
            return chains.draft(row)
        made = drawn.draft(row)
        assert made.probs_NV is not None
        size = row_random(row, salt + 1).randint(0, len(made))
        probs_NV = made.probs_NV.float() if choice > 1 else None
        return Draft(made.tokens, made.parents, probs_NV).first(size)

    return RowDrafter(draft, num_nodes=6)


@dataclass(slots=True)
class DoubleRig(GraphRig):
    """With a drafter of the tests' own."""

    drafter: RowDrafter = field(default_factory=lambda: soft_trees(0))

    def engine(self, *, captured: bool) -> Engine:
        engine = GraphRig.engine(self, captured=False)
        stages = round_of(engine)
        assert isinstance(stages, Stages)
        budget = Budget(self.config.most_k, num_nodes=self.config.tree_nodes)
        stages = replace(stages, drafter=self.drafter, controller=FixedController(budget))
        exchange_round(engine, stages)
        engine.residents.drafting.drafter = self.drafter
        if captured:
            self.made = self.captured(stages)
            exchange_round(engine, self.made)
        return engine
