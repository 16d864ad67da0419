"""Drafts of EAGLE heads, by the loops that they share with MTP: chains (hidden_chain.py) and trees
(hidden_tree.py)."""

from __future__ import annotations

from outrider.core.protocols import Drafter
from outrider.drafters.growing import Growth
from outrider.drafters.heads import HeadNet
from outrider.drafters.hidden_chain import ChainLimits, HiddenChainDrafter, WholeChains
from outrider.drafters.hidden_tree import HiddenTreeDrafter, Plant, WholeTrees

NAME = "eagle"


def eagle_drafter(
    net: HeadNet,
    growth: Growth,
    limits: ChainLimits,
    plant: Plant | None,
    whole: WholeChains | None = None,
    whole_trees: WholeTrees | None = None,
) -> Drafter:
    """Without `plant` it drafts chains, by `whole` where that can be; with it trees, by
    `whole_trees` where that can be."""
    if plant is None:
        return HiddenChainDrafter(NAME, [net], growth, limits, whole)
    return HiddenTreeDrafter(NAME, net, plant, limits, whole_trees)
