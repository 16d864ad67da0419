"""DFlash layers for a frozen target: the recipe of `outrider train dflash`.

At many positions of a window a block is read as in a round whose pending token stands there: the
pending token and masks, which see the target's states of all tokens before it and each other
(DFlash: Chen et al. 2026, arXiv 2602.06036; plugins/heads/blocks.py). Row i of the block learns
what the target says after the i - 1 tokens behind the pending one, which it does not see.

The output head and the embedding are the target's, and stay as they are. A mask is the id that the
text has least often: its embedding then means nothing else.

Shapes:  B = windows of a batch, T = tokens, A = blocks of a window, S = rows of a block,
         M = rows of all blocks of a window (A x S), D = hidden size, K = layers of the target that
         are read, G = heads, H = head size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.models.configs import LlamaConfig
from outrider_lab.models.inflate_files import llama_json
from outrider_lab.train.eagle import fused_layers
from outrider_lab.train.llama_module import RotaryTables, TrainedLlamaLayer, initialise
from outrider_lab.train.loop import Batch
from outrider_lab.train.losses import faded_mean, head_loss, top_distributions
from outrider_lab.train.recipe import DrafterRecipe, of_session
from outrider_lab.train.session import Session
from outrider_lab.train.shapes import plain_layers
from outrider_lab.train.tokens import rare_id

# Ids that are kept of a target's distribution.
_NUM_KEPT = 16
# Blocks that are read at once where drafts are counted.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of the blocks of a window: `pending_A` has the position of each pending token."""

    pending_A: Tensor
    block_size: int

    def positions(self) -> Tensor:
        """Positions of all rows, block after block."""
        offsets_S = torch.arange(self.block_size, device=self.pending_A.device)
        return (self.pending_A[:, None] + offsets_S).flatten()

    def seen(self, num_tokens: int) -> Tensor:
        """A mask, [M, T + M], of what each row sees: tokens before its block, and its block."""
        device = self.pending_A.device
        pending_M = self.pending_A.repeat_interleave(self.block_size)
        blocks_M = torch.arange(len(pending_M), device=device) // self.block_size
        context_MT = torch.arange(num_tokens, device=device) < pending_M[:, None]
        return torch.cat([context_MT, blocks_M == blocks_M[:, None]], dim=1)


class TrainedBlockLayer(TrainedLlamaLayer):
    """A layer whose rows read the context and their block."""

    def read(
        self, x_BMD: Tensor, context_BTD: Tensor, turns: RotaryTables, rows: BlockRows
    ) -> Tensor:
        """The rows' residual after this layer."""
        seen_MX = rows.seen(context_BTD.shape[1])
        y_BMD = self.input_layernorm(x_BMD)
        found_BMD = self.self_attn.over(y_BMD, context_BTD, turns, rows.positions(), seen_MX)
        x_BMD = x_BMD + found_BMD
        return x_BMD + self.mlp(self.post_attention_layernorm(x_BMD))


class DFlashNet(nn.Module):
    """The net that is trained, with the names and shapes of the files that drafter dflash reads.
    `num_states` layers of the target are fused."""

    def __init__(self, config: LlamaConfig, num_states: int, num_positions: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(num_states * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(TrainedBlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.turns = RotaryTables(config, num_positions)

    def forward(self, x_BMD: Tensor, hidden_BTKD: Tensor, rows: BlockRows) -> Tensor:
        """Rows for the output head, from the embeddings of the rows and the target's
        states."""
        context_BTD = self.hidden_norm(self.fc(hidden_BTKD.flatten(2)))
        for layer in cast("Iterable[TrainedBlockLayer]", self.layers):
            x_BMD = layer.read(x_BMD, context_BTD, self.turns, rows)
        return self.norm(x_BMD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashRecipe(DrafterRecipe[DFlashNet]):
    """`block_size` counts the pending token: a block drafts one token fewer."""

    name: str = field(default="dflash", init=False)
    config: LlamaConfig
    hidden_layers: tuple[int, ...]
    block_size: int
    mask_token: int

    @property
    def choices(self) -> Mapping[str, object]:
        config = self.config
        return {
            "sizes": [config.num_layers, config.ffn_size, config.num_heads, self.block_size],
            "hidden_layers": list(self.hidden_layers),
            "mask": self.mask_token,
        }

    def build(self, generator: torch.Generator) -> DFlashNet:
        longest = self.longest + self.block_size
        net = DFlashNet(self.config, len(self.hidden_layers), longest)
        initialise(net, generator, num_layers=self.config.num_layers)
        size, highest = self.config.hidden_size, int(np.argmax(self.hidden_layers))
        with torch.no_grad():
            net.norm.weight.copy_(self.target.norm)
            net.fc.weight[:, highest * size : (highest + 1) * size] += torch.eye(size)
        return net

    def loss(self, module: DFlashNet, batch: Batch) -> Tensor:
        ids_BT, size = batch.ids_BT, self.block_size
        reading = self.target.read(ids_BT, self.hidden_layers)
        # Blocks lie side by side, and elsewhere in the next step.
        first = 1 + batch.step % size
        pending_A = torch.arange(first, ids_BT.shape[1] - size + 1, size, device=ids_BT.device)
        rows = BlockRows(pending_A, size)
        x_BMD = module(self._embedded(ids_BT, rows), reading.hidden_BTKD.float(), rows)
        x_BASD = x_BMD.unflatten(1, (-1, size))
        asked_AS = rows.positions().view(-1, size)
        return faded_mean(
            head_loss(
                x_BASD[:, :, row].flatten(0, 1),
                self.target.head.float(),
                top_distributions(
                    self.target.logits(reading.last_BTD[:, asked_AS[:, row - 1]]).flatten(0, 1),
                    _NUM_KEPT,
                ),
            )[0]
            for row in range(1, size)
        )

    def accepted(self, module: DFlashNet, ids_T: Tensor, k: int) -> Tensor:
        """Accepted drafts; 0 at the first token, before which there is no state."""
        hidden_1TKD = self.target.read(ids_T[None], self.hidden_layers).hidden_BTKD.float()
        num_drafted = min(k, self.block_size - 1)
        wanted_X = functional.pad(ids_T, (0, num_drafted), value=-1)
        accepted_T = torch.zeros_like(ids_T)
        for pending_A in torch.split(torch.arange(1, len(ids_T), device=ids_T.device), _AT_ONCE):
            rows = BlockRows(pending_A, self.block_size)
            x_1MD = module(self._embedded(ids_T[None], rows), hidden_1TKD, rows)
            x_AKD = x_1MD[0].unflatten(0, (-1, self.block_size))[:, 1 : num_drafted + 1]
            chosen_AK = functional.linear(x_AKD, self.target.head.float()).argmax(-1)
            right_AK = (
                chosen_AK
                == wanted_X[
                    pending_A[:, None] + torch.arange(1, num_drafted + 1, device=ids_T.device)
                ]
            )
            accepted_T[pending_A] = right_AK.long().cumprod(1).sum(1)
        return accepted_T

    def values(self, module: DFlashNet) -> Mapping[str, object]:
        del module
        config = self.config
        return {
            **llama_json(config, self.dtype),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "rope_theta": config.rope.theta,
            "layer_types": ["full_attention"] * config.num_layers,
            "num_target_layers": self.target.config.num_layers,
            "block_size": self.block_size,
            # Layers are counted by their outputs; -1 is the embedding.
            "dflash_config": {
                "mask_token_id": self.mask_token,
                "target_layer_ids": [layer - 1 for layer in self.hidden_layers],
            },
        }

    def _embedded(self, ids_BT: Tensor, rows: BlockRows) -> Tensor:
        """Embeddings of the rows, x_BMD: of each block its pending token, and masks."""
        rows_BAS = ids_BT.new_full(
            (len(ids_BT), len(rows.pending_A), self.block_size), self.mask_token
        )
        rows_BAS[:, :, 0] = ids_BT[:, rows.pending_A]
        return functional.embedding(rows_BAS.flatten(1), self.target.embedding).float()


def dflash_recipe(
    session: Session, *, block_size: int, num_layers: int, ffn_size: int, dtype: str
) -> DFlashRecipe:
    """Layers of the target's width; an `ffn_size` of 0 is the target's. Raises ConfigError for a
    target that is too small, or a window that holds no block at some step."""
    target, window = session.target.config, session.text.wish.window
    if target.num_layers < 2:
        raise ConfigError(
            f"DFlash layers fuse three layers, and the target has {target.num_layers}.",
            hint="train a draft model or an MTP block for it",
        )
    if window < 2 * block_size:
        raise ConfigError(
            f"a window of {window} tokens may hold no block of {block_size}.",
            hint=f"use --window {2 * block_size} or more, or a shorter --block",
        )
    layers = plain_layers(target, num_layers)
    return DFlashRecipe(
        **of_session(session, dtype),
        config=replace(layers, qk_norm=True, ffn_size=ffn_size or target.ffn_size),
        hidden_layers=fused_layers(target.num_layers),
        block_size=block_size,
        mask_token=rare_id(session.text.tokens.tokens, target),
    )
