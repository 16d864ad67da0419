"""A block net for a frozen target: the recipe of `outrider train block`.

At many places of a window the net is asked as in a round whose pending token stands there, and
guesses the K tokens behind it. Place k is to say what the target says after the k tokens between,
which the net does not see; its loss counts 0.8 ** k, since a later draft counts where earlier ones
were right. Confidence k learns whether the place's first choice is the target's, from those rounds
alone in which all before it were.

Shapes:  B = windows of a batch, T = tokens, A = rounds that are asked, C = context tokens,
         K = places, L = captured layers, D = hidden size, H = heads, P = places (A x K).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.core.spec import ModelSpec
from outrider.drafters.block import BlockConfig, config_values
from outrider.models.families import LlamaConfig
from outrider.models.loading import DTYPES
from outrider.train.exam import Exam
from outrider.train.llama_module import FFN, as_dtype, initialise
from outrider.train.loop import Batch, Export
from outrider.train.losses import TopProbs, distillation, top_laws
from outrider.train.session import Session
from outrider.train.target import FrozenTarget

_DECAY = 0.8
# Ids that are kept of a target's law.
_NUM_KEPT = 16
# A round is asked at every so many places of a window, at others in the next step.
_STRIDE = 4


class BlockAttention(nn.Module):
    """Queries see the context and each other."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, y_AKD: Tensor, context_ACD: Tensor) -> Tensor:
        keys_ATD = torch.cat([context_ACD, y_AKD], dim=1)
        found = functional.scaled_dot_product_attention(
            self._heads(self.q_proj(y_AKD)),
            self._heads(self.k_proj(keys_ATD)),
            self._heads(self.v_proj(keys_ATD)),
        )
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self._num_heads, -1).transpose(1, 2)


class TrainedBlockLayer(nn.Module):
    def __init__(self, sizes: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = BlockAttention(sizes.hidden_size, sizes.num_heads)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = FFN(sizes)

    def forward(self, x_AKD: Tensor, context_ACD: Tensor) -> Tensor:
        x_AKD = x_AKD + self.self_attn(self.input_layernorm(x_AKD), context_ACD)
        return x_AKD + self.mlp(self.post_attention_layernorm(x_AKD))


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
        self.layers = nn.ModuleList(TrainedBlockLayer(sizes) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden_size, config.rms_norm_eps)
        self.confidence = nn.Linear(hidden_size, 1)

    def forward(self, read_ACLD: Tensor) -> tuple[Tensor, Tensor]:
        """What the output head reads of each place, x_AKD, and the logits of its confidence."""
        read = functional.rms_norm(read_ACLD, read_ACLD.shape[-1:], eps=self._eps)
        context_ACD = self.fuse(read.flatten(2)) + self.distances.weight
        x_AKD = self.queries.weight + context_ACD[:, -1:]
        keys_ACD = functional.rms_norm(context_ACD, context_ACD.shape[-1:], eps=self._eps)
        for layer in self.layers:
            x_AKD = layer(x_AKD, keys_ACD)
        x_AKD = self.norm(x_AKD)
        return x_AKD, self.confidence(x_AKD)[..., 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecipe:
    """A `Recipe`. `spec` is the target's."""

    target: FrozenTarget
    config: BlockConfig
    spec: ModelSpec
    exam: Exam
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return "block"

    @property
    def facts(self) -> Mapping[str, object]:
        config = self.config
        return {
            "target": str(self.target.folder),
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
        laws = top_laws(self.target.logits(wanted_PD), _NUM_KEPT)
        right_AK = logits_AKV.argmax(-1) == laws.ids_PC[:, 0].view(sure_AK.shape)
        return self._of_places(logits_AKV, laws) + _of_confidence(sure_AK, right_AK)

    def _of_places(self, logits_AKV: Tensor, laws: TopProbs) -> Tensor:
        num_places = self.config.num_places
        total = logits_AKV.new_zeros(())
        weights = [_DECAY**place for place in range(num_places)]
        for place, weight in enumerate(weights):
            part = TopProbs(laws.ids_PC[place::num_places], laws.logprobs_PC[place::num_places])
            total = total + weight * distillation(logits_AKV[:, place], part)
        return total / sum(weights)

    def measure(self, module: TrainedBlock) -> Mapping[str, float]:
        accepted = partial(self.accepted, module)
        return {"tokens_per_round": self.exam.tokens_per_round(accepted)}

    def accepted(self, module: TrainedBlock, ids_T: Tensor, k: int) -> Tensor:
        """accepted_T, as exam.py wants it; none where the context is shorter than the net's."""
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

    def export(self, module: TrainedBlock) -> Export:
        values = config_values(self.config, self.spec)
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        return Export(as_dtype(module.state_dict(), self.dtype), values)

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
    return BlockRecipe(
        target=session.target,
        config=config,
        spec=session.target.config.spec("", bytes_per_weight=4, bytes_per_kv=4),
        exam=session.exam,
        dtype=DTYPES[dtype],
    )


def block_sizes(
    target: LlamaConfig, *, num_places: int, num_context: int, num_layers: int
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
