"""Every rule that claims to keep the target's law, with the way its drafters draw."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.config import EXACT_SAMPLERS
from outrider.core.protocols import AcceptanceRule
from outrider.core.rng import DrawNode, pick_node, race_node
from outrider.verify.rules import rule_for


@dataclass(frozen=True, slots=True)
class Sampler:
    """A rule by the name that `--sampler` takes; `draw` draws the nodes of a chain for it."""

    name: str
    rule: AcceptanceRule
    draw: DrawNode


def exact_samplers() -> list[Sampler]:
    """Each of EngineConfig's exact samplers, wired as engine/build.py wires it."""
    return [
        Sampler(name, rule_for(name), race_node if name == "coupled" else pick_node)
        for name in EXACT_SAMPLERS
    ]
