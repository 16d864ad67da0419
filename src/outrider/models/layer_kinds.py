"""What sets decoder layers apart: norms and their places, windows, positions, experts. No tensors.

A family is a row of these (family_table.py); llama_layers.py computes them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outrider.core.errors import CheckpointError
from outrider.models.json_object import CONTRADICTION, JsonObject
from outrider.models.rope_config import Rope


class Norms(Enum):
    """Where a layer normalises: before attention and FFN, after them, before and after, or once
    before both, which then read the same."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    PARALLEL = "parallel"


class Gate(Enum):
    """What an FFN makes of its gate g and of `up` u: silu(g) * u; gelu(g) * u, with tanh; or
    gpt-oss's g * sigmoid(alpha * g) * (u + 1), both cut at a limit."""

    SILU = "silu"
    GELU = "gelu"
    CLAMPED = "clamped"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A token sees the last `window` tokens, its own included; 0 is all. Without a `rope` heads do
    not turn with positions."""

    window: int = 0
    rope: Rope | None = field(default_factory=Rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """What all layers of a family share, and what comes before and after them; the defaults are a
    Llama's.

    Norms are `centred` (layer norms without bias); `from_one` says that files hold what is to be
    added to 1. Norms of queries and keys take all heads as one if `whole_heads`. Attention's scores
    are multiplied by `attention_scale` (0: 1 / sqrt(head_dim)) and softly capped, as logits are; a
    cap of 0 is none. What attention and FFN add is multiplied by `residual_scale`. `interleaved`
    turns neighbours of a head. `sinks` are learnt scores without a value.
    """

    norms: Norms = Norms.BEFORE
    centred: bool = False
    from_one: bool = False
    whole_heads: bool = False
    gate: Gate = Gate.SILU
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    sinks: bool = False
    interleaved: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0


PLAIN_LAYERS = LayerTraits()


class ExpertNames(Enum):
    """How files call and lay out a mixture: Qwen's, Mixtral's, or gpt-oss's, whose experts are
    stacked as inputs by outputs, with gate and up in turn."""

    QWEN = "qwen"
    MIXTRAL = "mixtral"
    GPT_OSS = "gpt_oss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture's sizes: each token goes through `num_chosen` of `num_experts` and through one that
    all share, if it has a size. `normalise` makes the weights of the chosen ones sum to 1."""

    num_experts: int
    num_chosen: int
    ffn_size: int
    shared_ffn_size: int = 0
    normalise: bool = True
    biased: bool = False
    gate: Gate = Gate.SILU
    alpha: float = 1.702
    limit: float = 7.0
    names: ExpertNames = ExpertNames.QWEN

    def expert_parameters(self, hidden_size: int) -> int:
        """Of all experts that are chosen from."""
        biases = self.biased * (2 * self.ffn_size + hidden_size)
        return self.num_experts * (3 * hidden_size * self.ffn_size + biases)

    def num_parameters(self, hidden_size: int) -> int:
        """Router, shared expert and its gate included."""
        shared = bool(self.shared_ffn_size) * hidden_size * (3 * self.shared_ffn_size + 1)
        router = self.num_experts * (hidden_size + self.biased)
        return self.expert_parameters(hidden_size) + router + shared


def sparse_layers(raw: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Layers whose FFN is a mixture."""
    every = raw.integer("decoder_sparse_step", 1)
    dense = set(raw.integers("mlp_only_layers"))
    return tuple(
        index for index in range(num_layers) if index not in dense and (index + 1) % every == 0
    )


def check_experts(where: str, experts: Experts) -> None:
    """Raise CheckpointError for a token that needs more experts than there are."""
    if experts.num_chosen > experts.num_experts:
        raise CheckpointError(
            f"{where}: num_experts_per_tok {experts.num_chosen} is above num_experts "
            f"{experts.num_experts}.",
            hint=CONTRADICTION,
        )
