"""A block net for a frozen target: the recipe of `outrider train block`.

At many places of a window the net is asked as in a round whose pending token stands there, and
guesses the K tokens behind it. Place k is to say what the target says after the k tokens between,
which the net does not see. Confidence k learns whether the place's first choice is the target's,
from those rounds alone in which all before it were.

Shapes:  B = windows of a batch, T = tokens, A = rounds that are asked, C = context tokens,
         K = places, L = captured layers, D = hidden size, H = heads, P = places (A x K).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.models.configs import HybridConfig, LlamaConfig
from outrider_lab.models.block_net import BlockConfig, config_values
from outrider_lab.train.llama_module import TrainedLlamaLayer, initialise
from outrider_lab.train.loop import Batch
from outrider_lab.train.losses import TopProbs, distillation, faded_mean, top_distributions
from outrider_lab.train.recipe import DrafterRecipe, of_session
from outrider_lab.train.session import Session

# Ids that are kept of a target's distribution.
_NUM_KEPT = 16
# A round is asked at every so many places of a window, at others in the next step.
_STRIDE = 4


class TrainedBlock(nn.Module):
    """Its state has the names and shapes of the files that drafters/block reads."""

    def __init__(self, config: BlockConfig, hidden_size: int) -> None:
        super().__init__()
        self._eps = config.rms_norm_eps
        num_read = (len(config.hidden_layers) + 1) * hidden_size
        sizes = LlamaConfig(
            family="llama",
            vocab_size=0,
            hidden_size=hidden_size,
            ffn_size=config.ffn_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=hidden_size // config.num_heads,
            max_tokens=0,
            rms_norm_eps=config.rms_norm_eps,
        )
        self.fuse = nn.Linear(num_read, hidden_size, bias=False)
        self.distances = nn.Embedding(config.num_context, hidden_size)
        self.queries = nn.Embedding(config.num_places, hidden_size)
        self.layers = nn.ModuleList(TrainedLlamaLayer(sizes) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden_size, config.rms_norm_eps)
        self.confidence = nn.Linear(hidden_size, 1)

    def forward(self, read_ACLD: Tensor) -> tuple[Tensor, Tensor]:
        """What the output head reads of each place, x_AKD, and the logits of its confidence."""
        read = functional.rms_norm(read_ACLD, read_ACLD.shape[-1:], eps=self._eps)
        context_ACD = self.fuse(read.flatten(2)) + self.distances.weight
        x_AKD = self.queries.weight + context_ACD[:, -1:]
        keys_ACD = functional.rms_norm(context_ACD, context_ACD.shape[-1:], eps=self._eps)
        for layer in cast("Iterable[TrainedLlamaLayer]", self.layers):
            y_AKD = layer.input_layernorm(x_AKD)
            # Places see the context and each other.
            read_ASD = torch.cat([keys_ACD, y_AKD], dim=1)
            x_AKD = x_AKD + layer.self_attn.across(y_AKD, read_ASD)
            x_AKD = x_AKD + layer.mlp(layer.post_attention_layernorm(x_AKD))
        x_AKD = self.norm(x_AKD)
        return x_AKD, self.confidence(x_AKD)[..., 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecipe(DrafterRecipe[TrainedBlock]):
    name: str = field(default="block", init=False)
    config: BlockConfig

    @property
    def choices(self) -> Mapping[str, object]:
        config = self.config
        return {
            "sizes": [config.num_places, config.num_context, config.num_layers, config.ffn_size],
            "hidden_layers": list(config.hidden_layers),
        }

    def build(self, generator: torch.Generator) -> TrainedBlock:
        net = TrainedBlock(self.config, self.spec.hidden_size)
        initialise(net, generator, num_layers=self.config.num_layers)
        return net

    def loss(self, module: TrainedBlock, batch: Batch) -> Tensor:
        ids_BT, config = batch.ids_BT, self.config
        last_BTD, read_BTLD = self._read(ids_BT)
        first = config.num_context + batch.step % _STRIDE
        pending = torch.arange(first, ids_BT.shape[1] - config.num_places, _STRIDE)
        x_AKD, sure_AK = module(_contexts(read_BTLD, pending, config.num_context).flatten(0, 1))
        logits_AKV = functional.linear(x_AKD, self.target.head.float())
        # What the target says after the pending token and after each of the tokens behind it.
        asked = pending[:, None] + torch.arange(config.num_places)
        wanted_PD = last_BTD[:, asked].flatten(0, 2)
        distributions = top_distributions(self.target.logits(wanted_PD), _NUM_KEPT)
        right_AK = logits_AKV.argmax(-1) == distributions.ids_PC[:, 0].view(sure_AK.shape)
        # Distributions of one round after the other: those of a place are as far apart as there are
        # places.
        num_places = config.num_places
        of_places = faded_mean(
            distillation(
                logits_AKV[:, place],
                TopProbs(
                    distributions.ids_PC[place::num_places],
                    distributions.logprobs_PC[place::num_places],
                ),
            )
            for place in range(num_places)
        )
        return of_places + _of_confidence(sure_AK, right_AK)

    def accepted(self, module: TrainedBlock, ids_T: Tensor, k: int) -> Tensor:
        """None where the context is shorter than the net's."""
        config = self.config
        accepted_T = torch.zeros_like(ids_T)
        _, read_1TLD = self._read(ids_T[None])
        pending = torch.arange(config.num_context, len(ids_T))
        x_AKD, _ = module(_contexts(read_1TLD, pending, config.num_context)[0])
        going_A = torch.ones_like(pending, device=ids_T.device)
        for place in range(min(k, config.num_places)):
            choices_A = functional.linear(x_AKD[:, place], self.target.head.float()).argmax(-1)
            wanted_A = functional.pad(
                ids_T[config.num_context + 1 + place :], (0, 1 + place), value=-1
            )
            going_A = going_A * (choices_A == wanted_A)
            accepted_T[config.num_context :] += going_A
        return accepted_T

    def values(self, module: TrainedBlock) -> Mapping[str, object]:
        del module
        return config_values(self.config, self.spec)

    def _read(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Last residuals, and of each token its states and the next one's embedding, read_BTLD of
        one token fewer."""
        reading = self.target.read(ids_BT, self.config.hidden_layers)
        next_BTD = functional.embedding(ids_BT[:, 1:], self.target.embedding)
        states_BTLD = reading.hidden_BTKD[:, :-1].float()
        return reading.last_BTD, torch.cat([states_BTLD, next_BTD.float()[:, :, None]], dim=2)


def _contexts(read_BTLD: Tensor, pending: Tensor, num_context: int) -> Tensor:
    """What is read of the tokens before each pending one, of shape [B, A, C, L, D]."""
    return read_BTLD[:, pending[:, None] + torch.arange(-num_context, 0)]


def _of_confidence(sure_AK: Tensor, right_AK: Tensor) -> Tensor:
    """Cross entropy of the places whose forerunners were all right."""
    before_AK = functional.pad(right_AK.long().cumprod(-1)[:, :-1], (1, 0), value=1)
    losses_AK = functional.binary_cross_entropy_with_logits(
        sure_AK.float(), right_AK.float(), reduction="none"
    )
    return (losses_AK * before_AK).sum() / before_AK.sum()


def check_window(window: int, config: BlockConfig) -> None:
    """Raises ConfigError if a window holds no round at some step."""
    needed = config.num_context + config.num_places + _STRIDE
    if window < needed:
        raise ConfigError(
            f"a window of {window} tokens holds no round of {config.num_places} places after "
            f"{config.num_context} tokens.",
            hint=f"use --window {needed} or more",
        )


def block_recipe(session: Session, config: BlockConfig, *, dtype: str) -> BlockRecipe:
    """Raises ConfigError as `check_window` does."""
    check_window(session.text.wish.window, config)
    return BlockRecipe(**of_session(session, dtype), config=config)


def block_sizes(
    target: LlamaConfig | HybridConfig, *, num_places: int, num_context: int, num_layers: int
) -> BlockConfig:
    """A net that reads a middle layer and the last, with the target's own widths."""
    return BlockConfig(
        num_places=num_places,
        num_context=num_context,
        num_layers=num_layers,
        num_heads=target.num_heads,
        ffn_size=target.ffn_size,
        hidden_layers=tuple(sorted({target.num_layers // 2, target.num_layers})),
        rms_norm_eps=target.rms_norm_eps,
    )
