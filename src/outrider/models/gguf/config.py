"""config.json of a GGUF file: its sizes and settings under the names of Hugging Face.

A key that is not read here is refused, unless its value changes nothing, if llama.cpp reads it for
an architecture or another model of the same name has it; any other unknown key is noted. The file
holds numbers as float32; the shortest decimal that rounds to the same float32 is the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from outrider.core.errors import CheckpointError
from outrider.models.gguf.reader import Entry, Header, Texts, map_file
from outrider.models.gguf.tensors import QKV_BIASED, first_missing
from outrider.models.gguf.vocabulary import special_ids
from outrider.models.json_object import CONTRADICTION, OTHER_CHECKPOINT, JsonObject
from outrider.models.rope import frequencies
from outrider.models.rope_config import Rope

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Architectures by the families that their config.json names.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
}
MIXTURES, GEMMAS = ("qwen2moe", "qwen3moe", "gpt-oss"), ("gemma2", "gemma3")
# Architectures whose layers differ in windows and in the base of their positions.
MIXED_WINDOWS = (*GEMMAS, "gpt-oss")
_READ = frozenset((
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    # They change nothing.
    "rope.scaling.finetuned", "tensor_data_layout",
))  # fmt: skip
# Keys that are read of some architectures only.
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "expert_count": MIXTURES,
    "expert_used_count": MIXTURES,
    "expert_feed_forward_length": MIXTURES,
    "expert_shared_feed_forward_length": ("qwen2moe",),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": GEMMAS,
    "attention.sliding_window_pattern": MIXED_WINDOWS,
    "rope.freq_base_swa": MIXED_WINDOWS,
}
# Values that change nothing, besides 0 and false. None stands for another key's value.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (),
    "attention.max_alibi_bias": (),
    "attention.scale": (),
    "attention.temperature_scale": (),
    "attn_logit_softcapping": (),
    "embedding_scale": (1,),
    "expert_count": (),
    "expert_group_count": (1,),
    "expert_used_count": (),
    "expert_weights_scale": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "nextn_predict_layers": (),
    "residual_scale": (1,),
    "rope.scaling.alpha": (),
    "rope.scaling.yarn_log_multiplier": (),
    "use_parallel_residual": (),
}
# Keys for sizes of sliding layers or of the output, and the keys that they must agree with.
_SAME_AS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "embedding_length_out": "embedding_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}
_MAX_NAMED = 5
# Numbers of layers of Gemma's largest models, which do not scale queries by the size of a head.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
# Settings that may have a value for each layer.
_BY_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
)


def architecture_of(header: Header) -> str:
    """The architecture of a file. Raises CheckpointError if it is not supported."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    if found not in MODEL_TYPES:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=f"supported: {', '.join(MODEL_TYPES)}. The folder with safetensors that the file "
            "was made from may run; `outrider models pull` fetches it",
        )
    return found


def head_dim_of(header: Header) -> int:
    return _Sizes(header).head_dim


def config_of(header: Header) -> dict[str, Any]:
    """The contents of config.json. Raises CheckpointError, naming file and key, for a bad value."""
    sizes = _Sizes(header)
    arch = sizes.arch
    _refuse_keys(header, arch, sizes.usual)
    common = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": HEAD not in header.entries,
        "dtype": _dtype(header),
        **special_ids(header),
    }
    return common | (_gpt2(sizes) if arch == "gpt2" else _llama(sizes))


def missing_in(header: Header) -> str | None:
    """The name of a tensor that the file lacks, if it lacks one."""
    sizes = _Sizes(header)
    return first_missing(header, sizes.arch, sizes.integer("block_count"))


def notes_of(header: Header) -> tuple[str, ...]:
    """A note that names the unknown keys of the architecture, if there are any."""
    arch = architecture_of(header)
    known = _NEUTRAL.keys() | _SAME_AS.keys()
    unknown = sorted(
        f"{arch}.{key}"
        for key in _own_keys(header, arch)
        if key not in known and not _is_read(key, arch)
    )
    if not unknown:
        return ()
    more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
    return (f"the file has settings that are not read: {', '.join(unknown[:_MAX_NAMED])}{more}",)


def _refuse_keys(header: Header, arch: str, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError for an unread key that changes the logits; `sizes` are by key."""
    for key, value in _own_keys(header, arch).items():
        if _is_read(key, arch):
            continue
        neutral = (sizes[_SAME_AS[key]],) if key in _SAME_AS else _NEUTRAL.get(key)
        if neutral is not None and not _is_neutral(key, value, neutral):
            raise CheckpointError(
                f"{header.path}: {arch}.{key} {_shown(value)} is not supported.",
                hint=OTHER_CHECKPOINT,
            )


def _own_keys(header: Header, arch: str) -> dict[str, object]:
    prefix = f"{arch}."
    return {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }


def _is_read(key: str, arch: str) -> bool:
    return key in _READ or arch in _READ_BY.get(key, ())


def _is_neutral(key: str, value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, Texts | str | list):
        return False
    if key == "attention.causal":
        return value is True
    return all(not one or one in neutral for one in np.ravel(np.asarray(value)).tolist())


def _shown(value: object) -> str:
    return f"of {len(value)} texts" if isinstance(value, Texts) else f"{value!r:.40}"


class _Sizes:
    """Sizes that several settings are made of."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.arch = architecture_of(header)
        self.raw = JsonObject(str(header.path), header.metadata)
        self.hidden = self.integer("embedding_length")
        self.num_heads = self.integer("attention.head_count")
        self.head_dim = self.integer("attention.key_length", max(1, self.hidden // self.num_heads))
        if self.integer("attention.value_length", self.head_dim) != self.head_dim:
            raise CheckpointError(
                f"{self.raw.where}: keys and values of different sizes are not supported.",
                hint=OTHER_CHECKPOINT,
            )
        embedding = header.entries.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self.raw.where}: the matrix {EMBEDDING} is missing.",
                hint="is it the file of a whole language model?",
            )
        self.vocab_size = embedding.shape[0]

    @property
    def turning(self) -> int:
        """Number of dimensions of a head that rotate with positions."""
        return self.integer("rope.dimension_count", self.head_dim)

    @property
    def usual(self) -> dict[str, int]:
        """Sizes by key that other keys may repeat."""
        return {
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "embedding_length": self.hidden,
            "rope.dimension_count": self.turning,
        }

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        full = f"{self.arch}.{key}"
        listed = self.raw.values.get(full)
        if key not in _BY_LAYER or not isinstance(listed, np.ndarray):
            return self.raw.integer(full, default, least=least)
        values: list[object] = listed.tolist()
        if len(values) != self.integer("block_count") or values.count(values[0]) < len(values):
            raise CheckpointError(
                f"{self.raw.where}: {full} has no one value for all layers, which is not "
                f"supported: {values!r:.60}.",
                hint=OTHER_CHECKPOINT,
            )
        return JsonObject(self.raw.where, {full: values[0]}).integer(full, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        return shortest(self.raw.number(f"{self.arch}.{key}", default))

    def has(self, key: str) -> bool:
        return self.raw.has(f"{self.arch}.{key}")

    def is_set(self, key: str) -> bool:
        """True if the file has the key with another value than 0."""
        return self.raw.values.get(f"{self.arch}.{key}") not in (None, 0)


def _llama(sizes: _Sizes) -> dict[str, Any]:
    entries = sizes.header.entries
    found: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.integer("feed_forward_length"),
        "num_hidden_layers": sizes.integer("block_count"),
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.integer("attention.head_count_kv", sizes.num_heads),
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.integer("context_length"),
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": sizes.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        # No key says which biases there are.
        "attention_bias": sizes.arch not in QKV_BIASED and _has_bias(entries, "attn_"),
        "mlp_bias": _has_bias(entries, "ffn_"),
    }
    found |= _window(sizes) | _experts(sizes) | _gemma(sizes)
    if sizes.turning != sizes.head_dim:
        found["partial_rotary_factor"] = sizes.turning / sizes.head_dim
    return found | _positions(sizes, found)


def _has_bias(entries: Iterable[str], kind: str) -> bool:
    """True if attention (`attn_`) or FFN (`ffn_`) of a layer has a bias; not that of experts."""
    ends = tuple(f".{kind}{part}.bias" for part in ("q", "k", "v", "output", "gate", "up", "down"))
    return any(name.endswith(ends) for name in entries)


def _experts(sizes: _Sizes) -> dict[str, Any]:
    if sizes.arch not in MIXTURES:
        return {}
    chosen = sizes.integer("expert_used_count")
    usual = None if sizes.arch == "gpt-oss" else sizes.integer("feed_forward_length")
    ffn = sizes.integer("expert_feed_forward_length", usual and max(1, usual // chosen))
    found: dict[str, Any] = {
        "num_local_experts": sizes.integer("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": sizes.arch == "qwen3moe",
    }
    if sizes.arch == "gpt-oss":
        found["intermediate_size"] = ffn
    if sizes.arch == "qwen2moe":
        shared = sizes.integer("expert_shared_feed_forward_length", usual)
        found["shared_expert_intermediate_size"] = shared
    return found


def _gemma(sizes: _Sizes) -> dict[str, Any]:
    if sizes.arch not in GEMMAS:
        return {}
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    for name in ("attn", "final"):
        key = f"{name}_logit_softcapping"
        if sizes.has(key) or sizes.arch == "gemma3":
            found[key] = sizes.number(key) if sizes.is_set(key) else None
    largest = sizes.integer("block_count") == _LARGEST_GEMMA[sizes.arch]
    scalar = sizes.hidden // sizes.num_heads if largest else sizes.head_dim
    return found | {"query_pre_attn_scalar": scalar}


def _gpt2(sizes: _Sizes) -> dict[str, Any]:
    return {
        "n_embd": sizes.hidden,
        "n_inner": sizes.integer("feed_forward_length"),
        "n_layer": sizes.integer("block_count"),
        "n_head": sizes.num_heads,
        "n_positions": sizes.integer("context_length"),
        "layer_norm_epsilon": sizes.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _window(sizes: _Sizes) -> dict[str, Any]:
    """Settings of sliding layers under the family's names; a `llama` with them is a Mistral."""
    if sizes.arch in MIXED_WINDOWS:
        return _mixed_windows(sizes)
    window = sizes.integer("attention.sliding_window", 0, least=0)
    if sizes.arch.startswith("qwen"):
        return {
            "use_sliding_window": window > 0,
            "sliding_window": window or None,
            "max_window_layers": 0,
        }
    if not window:
        return {}
    found = {"sliding_window": window}
    return found | ({"model_type": "mistral"} if sizes.arch == "llama" else {})


def _mixed_windows(sizes: _Sizes) -> dict[str, Any]:
    """Settings of models in which some layers slide: all but every n-th, or those of a list."""
    usual = {"gemma2": 4096, "gemma3": 0}
    window = sizes.integer("attention.sliding_window", usual.get(sizes.arch), least=0)
    key = "attention.sliding_window_pattern"
    if not window or not sizes.has(key):
        return {"sliding_window": window or None}
    num_layers = sizes.integer("block_count")
    given = sizes.raw.values[f"{sizes.arch}.{key}"]
    if isinstance(given, np.ndarray):
        slides = [bool(one) for one in given.tolist()]
    else:
        every = sizes.integer(key, least=0)
        slides = [not every or index % every < every - 1 for index in range(num_layers)]
    if len(slides) != num_layers:
        raise CheckpointError(
            f"{sizes.raw.where}: {sizes.arch}.{key} has {len(slides)} entries for {num_layers} "
            "layers.",
            hint=CONTRADICTION,
        )
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"sliding_window": window, "layer_types": kinds}


def _positions(sizes: _Sizes, found: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that stretch rotary positions, by kind of layer if the kinds differ."""
    window, theta = found["max_position_embeddings"], found["rope_theta"]
    positions = Positions(sizes.header, sizes.arch, sizes.turning, window, theta)
    whole = positions.scaling()
    if sizes.arch in MIXED_WINDOWS:
        local = positions.local_scaling() if sizes.arch == "gemma3" else whole
        usual = 10000.0 if sizes.arch == "gemma3" else theta
        local = {**local, "rope_theta": sizes.number("rope.freq_base_swa", usual)}
        whole = {**whole, "rope_theta": theta}
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    if not whole:
        return {}
    # Phi-3 has this key at the top of its config.
    key = "original_max_position_embeddings"
    return {"rope_scaling": whole} | ({key: whole[key]} if key in whole else {})


def _dtype(header: Header) -> str:
    """The dtype of matrices in memory: as stored, or bfloat16 if they are quantised."""
    kinds = {entry.kind for entry in header.entries.values() if len(entry.shape) > 1}
    names = {kind.name for kind in kinds}
    if any(kind.is_quantised for kind in kinds) or "BF16" in names:
        return "bfloat16"
    return "float16" if "F16" in names else "float32"


_MAX_FACTORS = 4096


def shortest(number: float) -> float:
    return float(str(np.float32(number)))


@dataclass(frozen=True)
class Positions:
    """Rotary settings of heads that rotate in `turning` dimensions. Raises CheckpointError.

    Old keys are read as llama.cpp reads them: a factor without a type is linear, and
    `rope.scale_linear` is such a factor."""

    header: Header
    arch: str
    turning: int
    window: int
    theta: float

    @cached_property
    def raw(self) -> JsonObject:
        return JsonObject(str(self.header.path), self.header.metadata)

    @cached_property
    def kind(self) -> str:
        found = self.raw.text(f"{self.arch}.rope.scaling.type", "linear")
        if found not in ("none", "linear", "yarn", "longrope"):
            raise self._unsupported(found)
        return found

    @cached_property
    def factor(self) -> float:
        """The divisor of positions; 1 leaves them unchanged."""
        key = f"{self.arch}.rope.scaling.factor"
        if not self.raw.has(key):
            key = f"{self.arch}.rope.scale_linear"
        found = shortest(self.raw.number(key)) if self.raw.values.get(key) else 1.0
        if self.kind != "none" or found == 1.0:
            return found
        if self.arch in ("gemma2", "gpt-oss"):
            # llama.cpp then stretches the positions of sliding layers, and of no others.
            raise self._unsupported("none with a factor")
        return 1.0

    @cached_property
    def strength(self) -> float:
        """The factor of the tables of cos and sin."""
        return self._number("attn_factor", 1.0)

    def scaling(self) -> dict[str, Any]:
        entries = self.header.entries
        if (entry := entries.get("rope_freqs.weight")) is not None:
            return self._by_factors(self._factors(entry))
        if (entry := entries.get("rope_factors_short.weight")) is not None:
            return self._long(entry)
        if self.kind == "longrope":
            raise self._unsupported("longrope without its factors")
        if self.kind == "yarn" and self.factor != 1.0:
            return self._yarn()
        if self.strength != 1.0 or (self.arch == "phi3" and self.factor != 1.0):
            return self._everywhere([self.factor] * (self.turning // 2))
        if self.factor == 1.0:
            # gpt-oss has a scaling where its settings say none.
            return {"rope_type": "default"} if self.arch == "gpt-oss" else {}
        return {"rope_type": "linear", "factor": self.factor}

    def local_scaling(self) -> dict[str, Any]:
        """The scaling of sliding layers, whose frequencies are not stretched."""
        if self.strength == 1.0:
            return {"rope_type": "default"}
        return self._everywhere([1.0] * (self.turning // 2))

    def _number(self, name: str, default: float) -> float:
        return shortest(self.raw.number(f"{self.arch}.rope.scaling.{name}", default))

    def _original(self) -> int:
        key = f"{self.arch}.rope.scaling.original_context_length"
        return self.raw.integer(key, self.window)

    def _unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.raw.where}: {self.arch}.rope.scaling.type {what!r} is not supported.",
            hint=OTHER_CHECKPOINT,
        )

    def _yarn(self) -> dict[str, Any]:
        if self.arch == "phi3":
            raise self._unsupported("yarn")
        found: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self._original(),
        }
        for name in ("beta_fast", "beta_slow"):
            if self.raw.has(f"{self.arch}.rope.scaling.yarn_{name}"):
                found[name] = self._number(f"yarn_{name}", 1.0)
        own = self.raw.has(f"{self.arch}.rope.scaling.yarn_attn_factor")
        if own or self.strength != 1.0:
            usual = 0.1 * math.log(max(1.0, self.factor)) + 1.0
            found["attention_factor"] = self._number("yarn_attn_factor", usual) * self.strength
        return found | ({"truncate": False} if self.arch == "gpt-oss" else {})

    def _long(self, short: Entry) -> dict[str, Any]:
        """Longrope: factors for short texts, and for long ones if the file has them."""
        long = self.header.entries.get("rope_factors_long.weight")
        self._refuse_both(short)
        return {
            "rope_type": "longrope",
            "short_factor": self._times(self._factors(short)),
            "long_factor": None if long is None else self._times(self._factors(long)),
            "original_max_position_embeddings": self._original(),
            "attention_factor": self.strength,
        }

    def _by_factors(self, factors: list[float]) -> dict[str, Any]:
        """A scaling that divides each frequency by its factor. If Llama 3's formula gives the same
        frequencies, that is used, for the bits of its checkpoints."""
        self._refuse_both(self.header.entries["rope_freqs.weight"])
        found = None if self.factor * self.strength != 1.0 else self._llama3(factors)
        return found or self._everywhere(self._times(factors))

    def _llama3(self, factors: Sequence[float]) -> dict[str, Any] | None:
        dim = 2 * len(factors)
        divided = frequencies(Rope(theta=self.theta), dim) / torch.tensor(factors)
        for original in (1 << exponent for exponent in range(4, 21)):
            stretched = Rope(
                kind="llama3",
                theta=self.theta,
                factor=max(factors),
                original_tokens=original,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            )
            if torch.allclose(frequencies(stretched, dim), divided, rtol=1e-5, atol=0.0):
                return {
                    "rope_type": "llama3",
                    "factor": max(factors),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
        return None

    def _everywhere(self, factors: Sequence[float]) -> dict[str, Any]:
        """Short factors that hold in the whole window."""
        return {
            "rope_type": "longrope",
            "short_factor": list(factors),
            "original_max_position_embeddings": self.window,
            "attention_factor": self.strength,
        }

    def _times(self, factors: Sequence[float]) -> list[float]:
        return [shortest(factor * self.factor) for factor in factors]

    def _refuse_both(self, entry: Entry) -> None:
        if self.kind == "yarn" and self.factor != 1.0:
            raise self._unsupported(f"yarn with {entry.name}")

    def _factors(self, entry: Entry) -> list[float]:
        if len(entry.shape) != 1 or entry.num_values > _MAX_FACTORS or entry.kind.name != "F32":
            raise CheckpointError(
                f"{self.header.path}: {entry.name} is no short list of float32.",
                hint=CONTRADICTION,
            )
        with map_file(entry.path) as memory:
            raw = memory[entry.offset : entry.offset + entry.num_bytes]
        found: list[float] = np.frombuffer(raw, "<f4").tolist()
        if not all(0 < factor < 1e9 for factor in found):
            raise CheckpointError(
                f"{self.header.path}: {entry.name} has a factor that is not above 0.",
                hint=CONTRADICTION,
            )
        return found
