"""EAGLE 3 heads for a frozen target: the recipe of `outrider train eagle`.

The layer reads token p with the target's fused states of token p - 1 and says what the target says
after token p. It begins at a text's second token, since the first has no state before it; so entry
e of a window is of token e + 1. Later drafts are learned in turns (`attend`).

Only the ids that the text has most often are drafted, `draft_vocab_size` of them: the output head
is most of what a draft reads. The loss is the divergence of all turns' distributions from the
target's over these ids. The output head begins as those rows of the target's, and the fused state
as the target's highest layer that is read.

Shapes:  B = windows of a batch, T = tokens, D = hidden size, K = layers of the target that are
         read, W = ids that are drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.models.configs import LlamaConfig
from outrider.plugins.heads.eagle import EagleConfig, config_values
from outrider_lab.train.llama_module import (
    Heads,
    RotaryTables,
    TrainedLlamaLayer,
    divergence,
    initialise,
    later,
)
from outrider_lab.train.loop import Batch, Export
from outrider_lab.train.recipe import DrafterRecipe, of_session
from outrider_lab.train.session import Session
from outrider_lab.train.shapes import plain_layers
from outrider_lab.train.target import accepted_drafts
from outrider_lab.train.tokens import digest_of_ids, frequent_ids


class TrainedEagleLayer(TrainedLlamaLayer):
    """Names as in published files."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def turn(
        self, embedded_BTD: Tensor, states_BTD: Tensor, turns: RotaryTables, kept: list[Heads]
    ) -> Tensor:
        """The layer's states in its next turn; `kept` has keys and values of its turns so far."""
        pair = [self.input_layernorm(embedded_BTD), self.hidden_norm(states_BTD)]
        x_BTD = states_BTD + self.self_attn(torch.cat(pair, dim=-1), turns, kept)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Eagle(nn.Module):
    """What is trained. Its state has the names and shapes of the files that drafter eagle reads.
    `num_states` layers of the target are fused."""

    def __init__(self, config: EagleConfig, num_states: int, num_positions: int) -> None:
        super().__init__()
        layer = config.layer
        size = layer.hidden_size
        self.fc = nn.Linear(num_states * size, size, bias=False)
        self.midlayer = TrainedEagleLayer(layer)
        self.norm = nn.RMSNorm(size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.turns = RotaryTables(layer, num_positions)

    def forward(self, embedded_BTD: Tensor, hidden_BTKD: Tensor, num_turns: int) -> list[Tensor]:
        """logits_BTW of each turn; entry e has token e + 1 and the target's states of token e."""
        states_BTD = self.fc(hidden_BTKD.flatten(2))
        kept = list[Heads]()
        found: list[Tensor] = []
        for number in range(num_turns):
            before_BTD = later(states_BTD, 1) if number else states_BTD
            states_BTD = self.midlayer.turn(embedded_BTD, before_BTD, self.turns, kept)
            found.append(self.lm_head(self.norm(states_BTD)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleRecipe(DrafterRecipe[Eagle]):
    """`ids_W` are the ids that are drafted, in rising order."""

    name: str = field(default="eagle", init=False)
    config: EagleConfig
    hidden_layers: tuple[int, ...]
    ids_W: Tensor
    num_turns: int

    @property
    def choices(self) -> Mapping[str, object]:
        layer = self.config.layer
        return {
            "sizes": [layer.hidden_size, layer.ffn_size, layer.num_heads, len(self.ids_W)],
            "hidden_layers": list(self.hidden_layers),
            "ids": digest_of_ids(self.ids_W),
            "turns": self.num_turns,
        }

    def build(self, generator: torch.Generator) -> Eagle:
        net = Eagle(self.config, len(self.hidden_layers), self.longest)
        initialise(net, generator, num_layers=1)
        size = self.config.layer.hidden_size
        highest = int(np.argmax(self.hidden_layers))
        with torch.no_grad():
            net.lm_head.weight.copy_(self.target.head_of(self.ids_W))
            net.norm.weight.copy_(self.target.norm)
            net.fc.weight[:, highest * size : (highest + 1) * size] += torch.eye(size)
        return net

    def loss(self, module: Eagle, batch: Batch) -> Tensor:
        found, last_BTD = self._turns(module, batch.ids_BT, self.num_turns)
        return divergence(found, self.target.logits(last_BTD[:, 1:], self.ids_W))

    def accepted(self, module: Eagle, ids_T: Tensor, k: int) -> Tensor:
        found, _ = self._turns(module, ids_T[None], k)
        ids_W = self.ids_W.to(ids_T.device)
        # Nothing is drafted after the first token.
        chosen = (functional.pad(ids_W[one[0].argmax(-1)], (1, 0), value=-1) for one in found)
        return accepted_drafts(ids_T, chosen)

    def values(self, module: Eagle) -> Mapping[str, object]:
        del module
        return config_values(self.config, self.hidden_layers)

    def export(self, module: Eagle) -> Export:
        found = DrafterRecipe[Eagle].export(self, module)
        ids_W, size = self.ids_W.cpu(), self.config.layer.vocab_size
        tables = {
            "d2t": ids_W - torch.arange(len(ids_W)),
            "t2d": torch.zeros(size, dtype=torch.bool).index_fill(0, ids_W, value=True),
        }
        return replace(found, tensors={**found.tensors, **tables})

    def _turns(self, module: Eagle, ids_BT: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
        """Logits of each turn, of entries; the target's last residuals, of tokens."""
        reading = self.target.read(ids_BT, self.hidden_layers)
        embedded_BTD = functional.embedding(ids_BT[:, 1:], self.target.embedding)
        found = module(embedded_BTD.float(), reading.hidden_BTKD[:, :-1].float(), count)
        return found, reading.last_BTD


def eagle_recipe(
    session: Session, *, draft_vocab_size: int, ffn_size: int, num_turns: int, dtype: str
) -> EagleRecipe:
    """Heads of the target's width. 0 leaves a size to the target. Raises ConfigError for a target
    that is too small."""
    target = session.target.config
    if target.num_layers < 2:
        raise ConfigError(
            f"EAGLE heads fuse three layers, and the target has {target.num_layers}.",
            hint="train a draft model or an MTP block for it",
        )
    num_ids = min(draft_vocab_size or target.vocab_size, target.vocab_size)
    layer = replace(plain_layers(target, 1), ffn_size=ffn_size or target.ffn_size)
    return EagleRecipe(
        **of_session(session, dtype),
        config=EagleConfig(layer, fused=True, draft_vocab_size=num_ids),
        hidden_layers=fused_layers(target.num_layers),
        ids_W=frequent_ids(session.text.tokens.tokens, target, num_ids),
        num_turns=num_turns,
    )


def fused_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high: small targets have little to say below, so high is their last."""
    return num_layers // 4, num_layers * 5 // 8, num_layers
