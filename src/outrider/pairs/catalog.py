"""Named pairs of target and draft, with the memory that they need; catalog.json has them.

Weights are in the named dtype, in GB of 10^9 bytes, rounded as published. KV bytes are per token at
two bytes a number: 2 x layers x KV heads x head size x 2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.plugins import KINDS

EMBEDDED_TARGET = "outrider/embedded"
EMBEDDED_DRAFT = "outrider/embedded-draft"
# Another target, most of whose layers are recurrences, with an MTP block of its own.
EMBEDDED_HYBRID = "outrider/embedded-hybrid"
# Keyed by the drafter that reads them.
EMBEDDED_HEADS: Mapping[str, str] = {
    "eagle": "outrider/embedded-eagle",
    "medusa": "outrider/embedded-medusa",
    "mtp": "outrider/embedded-mtp",
}
# Tokens of each model's KV in the memory estimate.
ESTIMATE_TOKENS = 4096

Vocabulary = Literal["same", "bridge"]


@dataclass(frozen=True, slots=True)
class PairedModel:
    """One side of a pair. `gated` models need an account that accepted their licence."""

    model_id: str
    weights_gb: float
    kv_bytes_per_token: int
    dtype: str = "float16"
    gated: bool = False

    def memory_gb(self, num_tokens: int) -> float:
        """Memory of the weights and of the KV of `num_tokens` positions, in GB."""
        return self.weights_gb + num_tokens * self.kv_bytes_per_token / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A draft and a target that work together.

    `vocabulary` is "same" if every id means the same token to both, and "bridge" if drafts must be
    spelled anew (`--drafter bridge`). With `self_quantise` the target drafts for itself, in int8 or
    int4, with its own KV cache. `refusal` is the reason if the pair does not run yet.
    """

    pair_name: str
    draft: PairedModel
    target: PairedModel
    licence: str
    notes: str
    vocabulary: Vocabulary = "same"
    self_quantise: str | None = None
    refusal: str | None = None

    @property
    def drafter(self) -> str:
        """The drafter that the pair needs; auto for an unchanged draft model."""
        if self.self_quantise is not None:
            return "quantised-self"
        return "bridge" if self.vocabulary == "bridge" else "auto"

    @property
    def draft_to_load(self) -> str | None:
        """The value of --draft; None if the target drafts for itself."""
        return None if self.self_quantise is not None else self.draft_model_id

    @property
    def draft_model_id(self) -> str:
        return self.draft.model_id

    @property
    def target_model_id(self) -> str:
        return self.target.model_id

    @property
    def target_dtype(self) -> str:
        return self.target.dtype

    @property
    def supported(self) -> bool:
        return self.refusal is None

    @property
    def gated(self) -> bool:
        return self.draft.gated or self.target.gated

    @property
    def weights_gb(self) -> float:
        """Weights of both models, in GB."""
        return self.draft.weights_gb + self.target.weights_gb

    def memory_gb(self, num_tokens: int = ESTIMATE_TOKENS) -> float:
        """GB of both models' weights, and of the KV of `num_tokens` positions in each."""
        return self.draft.memory_gb(num_tokens) + self.target.memory_gb(num_tokens)

    def command(self) -> str:
        """The command line that generates with this pair."""
        if self.target_model_id == EMBEDDED_TARGET:
            return "outrider generate PROMPT"
        words = [f"--target {self.target_model_id}"]
        words += [f"--draft {self.draft_to_load}"] if self.draft_to_load else []
        words += [f"--drafter {self.drafter}"] if self.drafter != "auto" else []
        words += [f"--self-quantise {self.self_quantise}"] if self.self_quantise else []
        dtype = self.target_dtype
        return f"outrider generate {' '.join(words)} --dtype {dtype} PROMPT"


def _read() -> Iterator[ModelPair]:
    """The pairs of catalog.json, the embedded one first."""
    for one in json.loads(files("outrider.pairs").joinpath("catalog.json").read_text("utf-8")):
        sides = {side: PairedModel(**one[side]) for side in ("draft", "target")}
        yield ModelPair(**one | sides)


PAIRS: Mapping[str, ModelPair] = {pair.pair_name: pair for pair in _read()}
# The smallest published model that answers, for users who have none yet.
FIRST_MODEL = PAIRS["smollm2"].draft_model_id


class UnknownPairError(ConfigError, KeyError):
    """No pair has this name; the hint lists all names."""

    def __str__(self) -> str:
        # KeyError would show the message in quotation marks.
        return str(self.args[0])


def list_pairs() -> tuple[ModelPair, ...]:
    """Every pair, the embedded one first."""
    return tuple(PAIRS.values())


# Models without a pair here that people name by their first word, the smallest first.
_NAMED = (
    *("google/gemma-3-270m-it", "google/gemma-3-1b-it", "google/gemma-2-2b-it"),
    *("allenai/OLMo-2-0425-1B-Instruct", "ibm-granite/granite-3.3-2b-instruct"),
    *("Qwen/Qwen2.5-Coder-1.5B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    *("HuggingFaceTB/SmolLM3-3B", "microsoft/Phi-4-mini-instruct", "microsoft/phi-4"),
    *("meta-llama/Llama-2-7b-chat-hf", "mistralai/Mistral-7B-Instruct-v0.3"),
    *("openai/gpt-oss-20b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
)


def is_called(model_id: str, name: str) -> bool:
    """True if `name` is short for the model: "smollm2:135m" for org/SmolLM2-135M-Instruct, and
    "llama3.2" for org/Llama-3.2-1B-Instruct."""
    parts = [part for part in re.split(r"[^a-z0-9.]+", name.lower()) if part]
    model = re.sub(r"[^a-z0-9.]+", "", model_id.rpartition("/")[2].lower())
    return bool(parts) and model.startswith(parts[0]) and all(part in model for part in parts)


def models_called(name: str) -> list[str]:
    """Published models that `name` is short for: first those of pairs, the smallest first."""
    if "/" in name:
        return []
    sides = [side for pair in PAIRS.values() for side in (pair.target, pair.draft)]
    sides.sort(key=lambda side: side.weights_gb)
    known = dict.fromkeys([*(side.model_id for side in sides), *_NAMED])
    return [model for model in known if is_called(model, name)]


def get_pair(name: str) -> ModelPair:
    """The pair called `name`. Raises UnknownPairError, a ConfigError and a KeyError."""
    if name not in PAIRS:
        hint = did_you_mean(name, PAIRS)
        raise UnknownPairError(f"no pair {name!r}. {hint}", hint="outrider models pairs")
    return PAIRS[name]


def partner_of(target: str) -> ModelPair | None:
    """The pair of `target` whose draft model is loaded: with the same vocabulary if there is one,
    and then with the smallest draft. A repository of GGUF files stands for the model of its name:
    somebody/Qwen3-8B-GGUF for Qwen/Qwen3-8B."""
    original = target.rpartition("/")[2].lower()
    is_gguf = original.endswith("-gguf")
    original = original.removesuffix("-gguf")

    def is_meant(model: str) -> bool:
        return model == target or (is_gguf and model.rpartition("/")[2].lower() == original)

    known = [
        pair
        for pair in list_pairs()
        if is_meant(pair.target_model_id) and pair.supported and pair.draft_to_load
    ]
    return min(
        known, key=lambda pair: (pair.vocabulary != "same", pair.draft.weights_gb), default=None
    )


def draft_of(target: str, drafter: str = "auto") -> str | None:
    """The draft that comes with `target` by default, for this drafter: the embedded target's draft
    model, or its heads, of those kinds that ship."""
    if target != EMBEDDED_TARGET:
        return None
    reads_heads = drafter in KINDS and KINDS[drafter].source == "heads"
    return EMBEDDED_HEADS.get(drafter, None if reads_heads else EMBEDDED_DRAFT)
