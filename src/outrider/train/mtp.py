"""MTP blocks for a frozen target: the recipe of `outrider train mtp`.

What a block does in the engine it does here, for all places of a window at once. Draft number s of
a round whose pending token is at p comes from block min(s, n - 1) at place p + s. Up to the last
block's turn a block reads the whole text alike, causally. Beyond it the last block goes on by
itself: at place e it has text up to e - r, read as ever, and r places that were read with its own
states. So in its r-th turn a query sees the keys of its first turn up to e - r, and one key of each
later turn: what EAGLE-3 calls training-time test (Li et al. 2025, arXiv 2503.01840, 3.2).

At every place all turns are to say what the target says there: the loss is the divergence of their
laws from the target's law, turn s at 0.8 ** s, since a later draft counts where earlier ones were
right. Embedding and output head are the target's and stay as they are.

Shapes:  B = windows of a batch, T = tokens, D = hidden size, V = vocabulary, G = heads,
         H = head size, P = places (B x T).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.drafters.mtp.config import MtpConfig, config_values
from outrider.models.llama_config import LlamaConfig
from outrider.models.loading import DTYPES
from outrider.models.rope_config import Rope
from outrider.train.exam import Exam
from outrider.train.llama_module import Layer, Turns, as_dtype, initialise
from outrider.train.loop import Batch, Export
from outrider.train.losses import TopLaws, distillation, top_laws
from outrider.train.session import Session
from outrider.train.target import FrozenTarget
from outrider.train.turns import Heads, attend, heads_of, later

_DECAY = 0.8
# Ids that are kept of a target's law.
_NUM_KEPT = 32


class SharedHead(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(Layer):
    """A decoder layer behind the matrix that joins token and state; names as in checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self._config = config
        self.enorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def turn(
        self, embedded_BTD: Tensor, states_BTD: Tensor, turns: Turns, kept: list[Heads]
    ) -> Tensor:
        """The block's states in its next turn; `kept` has keys and values of its turns so far."""
        pair = torch.cat([self.enorm(embedded_BTD), self.hnorm(states_BTD)], dim=-1)
        x_BTD = self.eh_proj(pair)
        heads = heads_of(self.self_attn, self._config, self.input_layernorm(x_BTD), turns)
        x_BTD = x_BTD + self.self_attn.o_proj(attend(*heads, kept))
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Blocks(nn.Module):
    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MtpLayer(config) for _ in range(config.num_layers))
        self.turns = Turns(config, num_positions)


class Mtp(nn.Module):
    """All blocks. Its state has the names and shapes of the files that drafters/mtp reads."""

    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        self.model = Blocks(config, num_positions)

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
    one for each block."""

    target: FrozenTarget
    block: LlamaConfig
    exam: Exam
    window: int
    num_turns: int
    dtype: torch.dtype = torch.bfloat16

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
        }

    def build(self, generator: torch.Generator) -> Mtp:
        longest = max([self.window, *(len(text.ids) for text in self.exam.texts)])
        net = Mtp(self.block, longest)
        initialise(net, generator, num_layers=self.block.num_layers)
        return net

    def loss(self, module: Mtp, batch: Batch) -> Tensor:
        last_BTD = self.target.read(batch.ids_BT).last_BTD
        laws = top_laws(self.target.logits(last_BTD).flatten(0, 1), _NUM_KEPT)
        found = self._turns(module, batch.ids_BT, last_BTD, self.num_turns)
        shape = batch.ids_BT.shape
        total = last_BTD.new_zeros((), dtype=torch.float32)
        weights = [_DECAY**turn for turn in range(self.num_turns)]
        for turn, (own_BTD, weight) in enumerate(zip(found, weights, strict=True)):
            # Of the first places no turn but the first comes behind a pending token.
            part = TopLaws(
                laws.ids_PC.view(*shape, -1)[:, turn:].flatten(0, 1),
                laws.logprobs_PC.view(*shape, -1)[:, turn:].flatten(0, 1),
            )
            logits_PV = functional.linear(own_BTD[:, turn:].flatten(0, 1), self.target.head)
            total = total + weight * distillation(logits_PV, part)
        return total / sum(weights)

    def measure(self, module: Mtp) -> Mapping[str, float]:
        def accepted(ids_T: Tensor, k: int) -> Tensor:
            """Draft number s of a round whose pending token is at p is right if turn s is, at
            p + s: what it follows were accepted drafts, which are the text."""
            last_1TD = self.target.read(ids_T[None]).last_BTD
            accepted_T, going_T = torch.zeros_like(ids_T), torch.ones_like(ids_T)
            for turn, own_1TD in enumerate(self._turns(module, ids_T[None], last_1TD, k)):
                choices_T = functional.linear(own_1TD[0], self.target.head).argmax(-1)
                right_T = torch.zeros_like(ids_T)
                right_T[: max(len(ids_T) - 1 - turn, 0)] = choices_T[turn:-1] == ids_T[turn + 1 :]
                going_T = going_T * right_T
                accepted_T += going_T
            return accepted_T

        return {"tokens_per_round": self.exam.tokens_per_round(accepted)}

    def export(self, module: Mtp) -> Export:
        values = config_values(MtpConfig(block=self.block)) | {
            "dtype": str(self.dtype).removeprefix("torch.")
        }
        return Export(as_dtype(module.state_dict(), self.dtype), values)

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
    block = LlamaConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        ffn_size=target.ffn_size,
        num_layers=num_blocks,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_tokens=target.max_tokens,
        rms_norm_eps=target.rms_norm_eps,
        rope=Rope(theta=target.rope.theta),
    )
    return MtpRecipe(
        target=session.target,
        block=block,
        exam=session.exam,
        window=session.text.wish.window,
        num_turns=num_turns,
        dtype=DTYPES[dtype],
    )
