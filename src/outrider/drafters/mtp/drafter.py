"""Drafts by the MTP block of a target: the wiring of net and loop.

Every round is one pass of the first block over what is new in each text, and one more for each
draft after the first (drafters/hidden_chain.py), or for each level of a tree (hidden_tree.py).
"""

from __future__ import annotations

import logging

from outrider.core.protocols import CausalLM, Drafter
from outrider.drafters.beside import normed_target
from outrider.drafters.growing import Growth
from outrider.drafters.head_pass import whole_chains
from outrider.drafters.hidden_chain import ChainLimits, HiddenChainDrafter
from outrider.drafters.hidden_tree import HiddenTreeDrafter, Plant
from outrider.drafters.mtp.config import read_mtp_config
from outrider.drafters.mtp.net import load_mtp
from outrider.drafters.tree_pass import head_trees
from outrider.models.heads import Heads

_log = logging.getLogger(__name__)


def mtp_drafter(
    heads: Heads,
    target: CausalLM,
    growth: Growth,
    *,
    chunk: int,
    batch_size: int,
    plant: Plant | None = None,
) -> Drafter:
    """Trees with `plant` where there is one block, otherwise chains.

    Raises CheckpointError for a block that is damaged or another target's, ConfigError for a target
    that shares no tables.
    """
    host = normed_target(target)
    config = read_mtp_config(heads.folder, target.spec)
    nets = load_mtp(heads.folder, config, host, heads.room)
    window, wanted = config.block.max_tokens, target.spec.max_tokens
    if window < wanted:
        _log.warning(
            "The MTP block has %d positions and the target %d: nothing is drafted beyond.",
            window,
            wanted,
        )
    limits = ChainLimits(
        chunk=min(chunk, heads.room.max_rows),
        reach=max(heads.room.max_rows // batch_size, 1),
        window=min(window, wanted),
    )
    if plant is not None and len(nets) == 1:
        trees = head_trees(nets[0].native, nets[0].fuse, batch_size=batch_size)
        return HiddenTreeDrafter("mtp", nets[0], plant, limits, trees)
    if plant is not None:
        _log.warning("%d MTP blocks take turns in a path: chains are drafted, no trees.", len(nets))
    whole = None
    if len(nets) == 1:
        whole = whole_chains(nets[0].native, nets[0].fuse, growth, batch_size=batch_size)
    return HiddenChainDrafter("mtp", nets, growth, limits, whole)
