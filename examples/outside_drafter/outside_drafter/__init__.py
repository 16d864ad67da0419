"""What this package adds to Outrider. Descriptions import nothing that runs."""

from outrider.core.drafter_kinds import DrafterKind
from outrider.core.plugins import ControllerKind, RuleKind

BIGRAM = DrafterKind(name="bigram", builder="outside_drafter.drafter:build")
LOOKALIKE = RuleKind(name="lookalike", builder="outside_drafter.rule:Lookalike", exact=True)
HALVES = ControllerKind(name="halves", builder="outside_drafter.controller:Halves")
