"""Mixtures of experts: their sizes, and readers of a family's own settings.

A row of family_table.py names a reader; ffn.py computes mixtures. Defaults of absent keys of a
`config.json` are those of transformers. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from outrider.models.json_object import JsonObject, contradictory
from outrider.models.layer_kinds import Gate


class ExpertNames(Enum):
    """The names and layout of a mixture in files: Qwen's, Mixtral's, DeepSeek's, Granite's,
    Gemma's, or gpt-oss's, whose experts are stacked as inputs by outputs, with the outputs of gate
    and up interleaved."""

    QWEN = "qwen"
    MIXTRAL = "mixtral"
    GPT_OSS = "gpt_oss"
    GEMMA = "gemma"
    GRANITE = "granite"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture: each token goes through `num_chosen` of `num_experts`, and through a
    shared expert if that has a size, scaled by a gate of its own if `gates_shared`. Weights of
    experts are the softmax of their scores, or the sigmoid of each (`has_sigmoids`). With
    `normalise`, those of the chosen ones sum to 1; then they are multiplied by `scale`. With
    `has_choice_bias`, experts are chosen by their weights plus a bias. They come from the
    `top_groups` of `num_groups` groups whose `group_best` best experts have the largest sum. They
    read and write a projection of `latent_size`, if that is not 0."""

    num_experts: int
    num_chosen: int
    ffn_size: int
    shared_ffn_size: int = 0
    normalise: bool = True
    gates_shared: bool = True
    has_sigmoids: bool = False
    has_choice_bias: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    biased: bool = False
    gate: Gate = Gate.SILU
    alpha: float = 1.702
    limit: float = 7.0
    latent_size: int = 0
    names: ExpertNames = ExpertNames.QWEN

    def expert_parameters(self, hidden_size: int) -> int:
        """Parameters of all experts that the router chooses from."""
        biases = self.biased * (2 * self.ffn_size + hidden_size)
        width = self.latent_size or hidden_size
        return self.num_experts * ((self.gate.num_up + 1) * width * self.ffn_size + biases)

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the whole mixture, with router, shared expert and its gate."""
        shared = bool(self.shared_ffn_size) * hidden_size
        shared *= (self.gate.num_up + 1) * self.shared_ffn_size + self.gates_shared
        shared += 2 * self.latent_size * hidden_size
        router = self.num_experts * (hidden_size + self.biased + self.has_choice_bias)
        return self.expert_parameters(hidden_size) + router + shared


def sparse_layers(raw: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Layers whose FFN is a mixture."""
    every = raw.integer("decoder_sparse_step", raw.integer("moe_layer_interval", 1))
    first = raw.integer(
        "first_k_dense_replace", raw.integer("moe_layer_start_index", 0, least=0), least=0
    )
    end = raw.integer("moe_layer_end_index", num_layers, least=-1)
    dense = {*raw.integers("mlp_only_layers"), *range(first)}
    if kinds := raw.texts("mlp_layer_types"):
        dense = {index for index, kind in enumerate(kinds) if kind == "dense"}
    dense |= set[int]() if end < 0 else {*range(end + 1, num_layers)}
    return tuple(
        index for index in range(num_layers) if index not in dense and (index + 1) % every == 0
    )


def check_experts(where: str, experts: Experts) -> None:
    """Raise CheckpointError for a token that needs more experts than it may choose from."""
    size, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or experts.top_groups > experts.num_groups:
        raise contradictory(
            where,
            f"{experts.num_experts} experts have no {experts.num_groups} groups (n_group) "
            f"of which a token chooses {experts.top_groups} (topk_group)",
        )
    if experts.num_chosen > experts.top_groups * size:
        raise contradictory(
            where,
            f"num_experts_per_tok {experts.num_chosen} is above num_experts "
            f"{experts.top_groups * size}",
        )


Mixture = Callable[[JsonObject], Experts | None]


def qwen_experts(raw: JsonObject) -> Experts | None:
    if not _count(raw, least=0):
        return None
    return Experts(
        num_experts=_count(raw),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=raw.integer("moe_intermediate_size"),
        shared_ffn_size=raw.integer("shared_expert_intermediate_size", 0, least=0),
        normalise=raw.flag("norm_topk_prob", default=False),
    )


def _count(raw: JsonObject, *, least: int = 1) -> int:
    """Number of experts, under its newer key or its older one."""
    key = "num_local_experts" if raw.has("num_local_experts") else "num_experts"
    return raw.integer(key, least=least)


def mixtral_experts(raw: JsonObject) -> Experts:
    return Experts(
        num_experts=_count(raw),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=raw.integer("intermediate_size"),
        names=ExpertNames.MIXTRAL,
    )


def granite_experts(raw: JsonObject) -> Experts | None:
    if not _count(raw, least=0):
        return None
    return replace(
        olmoe_experts(raw),
        normalise=True,
        shared_ffn_size=raw.integer("shared_intermediate_size", 0, least=0),
        gates_shared=False,
        names=ExpertNames.GRANITE,
    )


def deepseek_experts(raw: JsonObject) -> Experts:
    """A mixture with the keys of DeepSeek's."""
    num_groups = raw.integer("n_group", 1)
    ffn_size = raw.integer("moe_intermediate_size")
    return Experts(
        num_experts=raw.integer("n_routed_experts"),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=ffn_size,
        shared_ffn_size=raw.integer(
            "shared_expert_intermediate_size",
            raw.integer("n_shared_experts", 0, least=0) * ffn_size,
            least=0,
        ),
        normalise=raw.flag("norm_topk_prob", default=True),
        gates_shared=False,
        has_sigmoids=raw.text("scoring_func", "sigmoid") == "sigmoid",
        has_choice_bias=raw.flag("has_choice_bias", default=True),
        scale=raw.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=raw.integer("topk_group", num_groups),
        names=ExpertNames.DEEPSEEK,
    )


def renamed(raw: JsonObject, keys: Mapping[str, str]) -> dict[str, object]:
    """Values of `keys`, which are a family's own, under their usual names, if those are absent."""
    return {
        usual: raw.values[own] for own, usual in keys.items() if raw.has(own) and not raw.has(usual)
    }


def gpt_oss_experts(raw: JsonObject) -> Experts:
    return replace(
        mixtral_experts(raw),
        biased=True,
        gate=Gate.CLAMPED,
        alpha=raw.number("swiglu_alpha", 1.702),
        limit=raw.number("swiglu_limit", 7.0),
        names=ExpertNames.GPT_OSS,
    )


def olmoe_experts(raw: JsonObject) -> Experts:
    return Experts(
        num_experts=_count(raw),
        num_chosen=raw.integer("num_experts_per_tok"),
        ffn_size=raw.integer("intermediate_size"),
        normalise=raw.flag("norm_topk_prob", default=False),
    )
