"""MTP blocks for a frozen target: the recipe of `outrider train mtp`.

What a block does in the engine it does here, for all places of a window at once. Draft number s of
a round whose pending token is at p comes from block min(s, n - 1) at place p + s. Up to the last
block's turn a block reads the whole text alike, causally. Beyond it the last block goes on by
itself: at place e it has text up to e - r, read as ever, and r places that were read with its own
states. So in its r-th turn a query sees the keys of its first turn up to e - r, and one key of each
later turn: what EAGLE-3 calls training-time test (Li et al. 2025, arXiv 2503.01840, 3.2).

The loss is the divergence of all turns' laws from the target's (turns.py). Laws are compared over
the ids that make up most of the text, since the output head is most of the arithmetic. Embedding
and output head are the target's and stay as they are. Blocks begin as the target's last layer where
they have its shapes (warm_start.py).

Shapes:  B = windows of a batch, T = tokens, D = hidden size, V = vocabulary, G = heads,
         H = head size, W = ids that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.drafters.mtp import MtpConfig, config_values
from outrider.models.families import LlamaConfig
from outrider.models.loading import DTYPES
from outrider.train.exam import Exam
from outrider.train.llama_module import (
    Heads,
    RotaryTables,
    TrainedLlamaLayer,
    accepted_drafts,
    as_dtype,
    attend,
    divergence,
    heads_of,
    initialise,
    later,
)
from outrider.train.loop import Batch, Export
from outrider.train.session import Session
from outrider.train.shapes import plain_layers
from outrider.train.target import FrozenTarget, begin_as_last_layer, fits_last_layer
from outrider.train.tokens import Windows, covering_ids, digest_of_ids

# Batches that a fit reads, at most.
_FITTED = 32
# Of the text's tokens, those whose ids are compared.
_COVERED = 0.97


class SharedHead(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(TrainedLlamaLayer):
    """A decoder layer behind the matrix that joins token and state; names as in checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self._config = config
        self.enorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def pair(self, embedded_BTD: Tensor, states_BTD: Tensor) -> Tensor:
        return torch.cat([self.enorm(embedded_BTD), self.hnorm(states_BTD)], dim=-1)

    def turn(
        self, embedded_BTD: Tensor, states_BTD: Tensor, turns: RotaryTables, kept: list[Heads]
    ) -> Tensor:
        """The block's states in its next turn; `kept` has keys and values of its turns so far."""
        x_BTD = self.eh_proj(self.pair(embedded_BTD, states_BTD))
        heads = heads_of(self.self_attn, self._config, self.input_layernorm(x_BTD), turns)
        x_BTD = x_BTD + self.self_attn.o_proj(attend(*heads, kept))
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class TrainedMtpBlocks(nn.Module):
    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MtpLayer(config) for _ in range(config.num_layers))
        self.turns = RotaryTables(config, num_positions)


class Mtp(nn.Module):
    """All blocks. Its state has the names and shapes of the files that drafters/mtp reads."""

    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        self.model = TrainedMtpBlocks(config, num_positions)

    def forward(self, embedded_BTD: Tensor, last_BTD: Tensor, num_turns: int) -> list[Tensor]:
        """What the output head reads in each turn. `last_BTD` are the target's residuals."""
        layers = cast("Sequence[MtpLayer]", self.model.layers)
        states_BTD, kept = last_BTD, list[Heads]()
        found: list[Tensor] = []
        for number in range(num_turns):
            layer = layers[min(number, len(layers) - 1)]
            if number < len(layers):
                kept = []
            states_BTD = layer.turn(embedded_BTD, later(states_BTD, 1), self.model.turns, kept)
            found.append(layer.shared_head.norm(states_BTD))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpRecipe:
    """A `Recipe` of `block.num_layers` blocks. Each place is learned in `num_turns` turns, at least
    one for each block. Laws are compared over `ids_W`, in rising order; None is all ids. Of `text`
    the first windows are what blocks begin with; without it they begin as noise."""

    target: FrozenTarget
    block: LlamaConfig
    exam: Exam
    window: int
    num_turns: int
    dtype: torch.dtype = torch.bfloat16
    ids_W: Tensor | None = None
    text: Windows | None = None

    @property
    def name(self) -> str:
        return "mtp"

    @property
    def facts(self) -> Mapping[str, object]:
        block = self.block
        return {
            "target": str(self.target.folder),
            "sizes": [block.hidden_size, block.ffn_size, block.num_heads, block.num_layers],
            "turns": self.num_turns,
            "ids": None if self.ids_W is None else digest_of_ids(self.ids_W),
            "warm": self.text is not None,
        }

    def build(self, generator: torch.Generator) -> Mtp:
        longest = max([self.window, *(len(text.ids) for text in self.exam.texts)])
        net = Mtp(self.block, longest)
        initialise(net, generator, num_layers=self.block.num_layers)
        if self.text is not None:
            self._begin(net, self.text)
        return net

    def loss(self, module: Mtp, batch: Batch) -> Tensor:
        last_BTD = self.target.read(batch.ids_BT).last_BTD
        wanted_BTW = self.target.logits(last_BTD, self.ids_W)
        head_WD = self.target.head_of(self.ids_W)
        found = self._turns(module, batch.ids_BT, last_BTD, self.num_turns)
        return divergence((functional.linear(own_BTD, head_WD) for own_BTD in found), wanted_BTW)

    def measure(self, module: Mtp) -> Mapping[str, float]:
        def accepted(ids_T: Tensor, k: int) -> Tensor:
            last_1TD = self.target.read(ids_T[None]).last_BTD
            found = self._turns(module, ids_T[None], last_1TD, k)
            head = self.target.head
            chosen = (functional.linear(own_1TD[0], head).argmax(-1) for own_1TD in found)
            return accepted_drafts(ids_T, chosen)

        return {"tokens_per_round": self.exam.tokens_per_round(accepted)}

    def export(self, module: Mtp) -> Export:
        values = config_values(MtpConfig(block=self.block)) | {
            "dtype": str(self.dtype).removeprefix("torch.")
        }
        return Export(as_dtype(module.state_dict(), self.dtype), values)

    def _begin(self, net: Mtp, text: Windows) -> None:
        """All blocks alike: the states that the first hands on are what it was fitted to read."""
        last = self.target.net.model
        # No window is read twice.
        steps = range(max(1, min(_FITTED, text.num_windows // text.batch_size)))
        for layer in cast("Sequence[MtpLayer]", net.model.layers):
            if fits_last_layer(layer, self.target):
                batches = (text.batch(step, self.target.device).ids_BT for step in steps)
                begin_as_last_layer(layer, self.target, batches)
                with torch.no_grad():
                    layer.shared_head.norm.weight.copy_(last.norm.weight)

    def _turns(self, module: Mtp, ids_BT: Tensor, last_BTD: Tensor, count: int) -> list[Tensor]:
        embedded_BTD = functional.embedding(ids_BT, self.target.embedding)
        return module(embedded_BTD.float(), last_BTD.float(), count)


def mtp_recipe(session: Session, *, num_blocks: int, num_turns: int, dtype: str) -> MtpRecipe:
    """Blocks with the sizes of the target's layers. Raises ConfigError if a block has no turn."""
    if num_turns < num_blocks:
        raise ConfigError(
            f"{num_blocks} blocks cannot learn in {num_turns} turns: each has one of its own.",
            hint=f"use --turns {num_blocks} or more",
        )
    target = session.target.config
    windows = session.text.windows()
    return MtpRecipe(
        target=session.target,
        block=plain_layers(target, num_blocks),
        exam=session.exam,
        window=session.text.wish.window,
        num_turns=num_turns,
        dtype=DTYPES[dtype],
        ids_W=covering_ids(windows.ids, target, _COVERED).to(session.target.device),
        text=windows,
    )
