"""Kinds of decoder layers: their norms, windows, rotary positions and experts. No tensors.

A row of family_table.py combines these for a family; llama_layers.py computes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outrider.core.errors import CheckpointError
from outrider.models.json_object import CONTRADICTION, JsonObject
from outrider.models.rope_config import Rope


class Norms(Enum):
    """The norms of a layer: before attention and FFN, after them, before and after, or one norm
    before both, which then read the same tensor."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    PARALLEL = "parallel"


class Gate(Enum):
    """The formula of an FFN's gate g and `up` u: silu(g) * u; gelu(g) * u, with tanh; or gpt-oss's
    g * sigmoid(alpha * g) * (u + 1), with g and u clamped to a limit."""

    SILU = "silu"
    GELU = "gelu"
    CLAMPED = "clamped"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The window and positions of a layer. A token sees the last `window` tokens, itself included;
    0 means all. If `rope` is None, heads do not rotate with positions."""

    window: int = 0
    rope: Rope | None = field(default_factory=Rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """Traits of all layers of a family, and of its embedding and head; the defaults are a Llama's.

    `centred` norms are layer norms without bias. With `from_one`, files hold a norm's weight minus
    1. With `whole_heads`, norms of queries and keys normalise all heads as one vector. Attention
    scores are multiplied by `attention_scale` (0: 1 / sqrt(head_dim)) and softly capped, as logits
    are; a cap of 0 means no cap. The outputs of attention and FFN are multiplied by
    `residual_scale` before they are added to the residual. With `interleaved`, rotary pairs are
    neighbours in a head. `sinks` are learnt scores without a value.
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
    """The names and layout of a mixture in files: Qwen's, Mixtral's, or gpt-oss's, whose experts
    are stacked as inputs by outputs, with the outputs of gate and up interleaved."""

    QWEN = "qwen"
    MIXTRAL = "mixtral"
    GPT_OSS = "gpt_oss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture: each token goes through `num_chosen` of `num_experts`, and through a
    shared expert if that has a size. With `normalise`, weights of the chosen ones sum to 1."""

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
        """Parameters of all experts that the router chooses from."""
        biases = self.biased * (2 * self.ffn_size + hidden_size)
        return self.num_experts * (3 * hidden_size * self.ffn_size + biases)

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the whole mixture, with router, shared expert and its gate."""
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
