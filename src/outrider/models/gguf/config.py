"""config.json of a GGUF file: its sizes and settings under the names of Hugging Face.

`Part`s make the settings from the keys of a file; a row of architectures.py names those of an
architecture. A key that is not read is refused, unless its value changes nothing, if llama.cpp
reads it for an architecture or another model of the same name has it; any other unknown key is
noted. The file holds numbers as float32; the shortest decimal that rounds to the same float32 is
the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.reader import Entry, Header, Texts, map_file
from outrider.models.gguf.vocabulary import special_ids
from outrider.models.json_object import JsonObject, contradictory, unsupported
from outrider.models.rope_config import Rope

# PyTorch is imported where tensors are made: documents are read before it (gguf/packing.py).
if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Keys of every architecture; the last two change nothing.
_READ = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned", "tensor_data_layout",
)  # fmt: skip
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
# Settings that may have a value for each layer.
_BY_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
)


@dataclass(frozen=True, slots=True)
class Part:
    """Settings of some architectures: `read` makes them from `keys` that no other one has."""

    read: Callable[[Sizes], Mapping[str, Any]]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """An architecture's ways with rotary positions. If `by_kind`, sliding layers have settings of
    their own: those of the others, whose base is `local_theta` unless that is 0, and which are not
    stretched unless `stretches_local`. With `has_factors`, a scaling is a list of factors, and the
    types of the common ones mean nothing. `log_factor` is the key of YaRN's scale of scores. If
    `is_yarn`, config.json means YaRN if it says nothing, and YaRN's bounds are not rounded. With
    `in_windows` kinds differ only in files with a window. If `is_silent`, config.json means
    stretched positions if it says nothing. With `ignores_factors` frequencies are never divided."""

    by_kind: bool = False
    stretches_local: bool = True
    local_theta: float = 0.0
    has_factors: bool = False
    is_yarn: bool = False
    log_factor: str = ""
    in_windows: bool = False
    is_silent: bool = False
    ignores_factors: bool = False


@dataclass(frozen=True, slots=True)
class Values:
    """Value heads of recurrent layers: `groups` of `shared` heads, which share a key head, with
    values of `dim`. Files have one of each group after another if they are `tiled`, else group by
    group as checkpoints. `num_keys` rows of queries and keys come first."""

    groups: int
    shared: int
    dim: int
    num_keys: int
    tiled: bool

    def rows_of(self, part: str) -> Tensor | None:
        """order_O: the row in the file of each row of the checkpoint's tensor; None if none moves.
        Rows of z and columns of the output stay tiled (`HybridConfig.tiled_values`)."""
        import torch

        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            return torch.cat([torch.arange(self.num_keys), self.num_keys + self._order(self.dim)])
        single = ("in_proj_b.weight", "in_proj_a.weight", "dt_bias", "A_log")
        return self._order(1) if part in single else None

    def _order(self, dim: int) -> Tensor:
        import torch

        tiles = torch.arange(self.groups * self.shared * dim).view(self.shared, self.groups, dim)
        return tiles.transpose(0, 1).flatten()

    def halves(self) -> tuple[Tensor, Tensor]:
        """The rows of b and those of a, which Qwen3-Next stores key head by key head."""
        import torch

        rows = torch.arange(2 * self.groups * self.shared).view(self.groups, 2, self.shared)
        return rows[:, 0].flatten(), rows[:, 1].flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture: the `family` that its config.json names, and its differences from a Llama.

    `parts` and constant `settings` make config.json. `names` are those of a layer's tensors in
    checkpoints, under `stem` and the number of the layer; files have no `absent` ones. `outer` are
    the names of the other tensors. Rows of queries and keys are paired as neighbours if `paired`;
    norms are 1 larger if `above_one`; matrices of `transposed` tensors are inputs by outputs in
    checkpoints. With `qkv_bias`, queries, keys and values have biases, and nothing else has;
    without `out_bias`, they may have them without the output.
    With `turns_in_part`, only a part of a head turns with positions where config.json is silent.
    Files with `mtp` may have an MTP block behind the last layer, under names of its own or, if
    `numbered_mtp`, those of one more layer. Value heads may be `tiled`. Heads of `latent` ones
    attend over latents: their sizes of keys and values are those of a row of the cache or a head.
    A file that `drafts` holds heads of a target. If `uneven`, sizes are 0 in
    layers that lack the part.
    """

    family: str
    parts: tuple[Part, ...]
    names: Mapping[str, str]
    outer: Mapping[str, str]
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    positions: Positions = Positions()
    stem: str = "model.layers."
    absent: tuple[str, ...] = ()
    paired: bool = False
    above_one: bool = False
    transposed: tuple[str, ...] = ()
    qkv_bias: bool = False
    turns_in_part: bool = False
    out_bias: bool = True
    mtp: bool = False
    numbered_mtp: bool = False
    tiled: bool = False
    latent: bool = False
    drafts: bool = False
    uneven: bool = False

    def reads(self, key: str) -> bool:
        return key in _READ or any(key in part.keys for part in self.parts)


def config_of(sizes: Sizes) -> dict[str, Any]:
    """The contents of config.json. Raises CheckpointError, naming file and key, for a bad value."""
    _refuse_keys(sizes)
    header, row = sizes.header, sizes.row
    found: dict[str, Any] = {
        "model_type": row.family,
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": HEAD not in header.entries,
        "dtype": _dtype(header),
        **special_ids(header),
        **row.settings,
    }
    for part in row.parts:
        found |= part.read(sizes)
    if sizes.is_mtp:
        found |= {"model_type": "outrider_mtp", "block_type": row.family}
    return found


def notes_of(sizes: Sizes) -> tuple[str, ...]:
    """A note that names the unknown keys of the architecture, if there are any."""
    known = _NEUTRAL.keys() | _SAME_AS.keys()
    unknown = sorted(
        f"{sizes.arch}.{key}"
        for key in sizes.own_keys()
        if key not in known and not sizes.row.reads(key)
    )
    if not unknown:
        return ()
    more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
    return (f"the file has settings that are not read: {', '.join(unknown[:_MAX_NAMED])}{more}",)


def _refuse_keys(sizes: Sizes) -> None:
    """Raise CheckpointError for an unread key that changes the logits."""
    for key, value in sizes.own_keys().items():
        if sizes.row.reads(key):
            continue
        neutral = (sizes.usual[_SAME_AS[key]],) if key in _SAME_AS else _NEUTRAL.get(key)
        if neutral is not None and not _is_neutral(key, value, neutral):
            raise unsupported(
                sizes.raw.where, f"{sizes.arch}.{key} {_shown(value)} is not supported"
            )


def _is_neutral(key: str, value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, Texts | str | list):
        return False
    if key == "attention.causal":
        return value is True
    return all(not one or one in neutral for one in np.ravel(np.asarray(value)).tolist())


def _shown(value: object) -> str:
    return f"of {len(value)} texts" if isinstance(value, Texts) else f"{value!r:.40}"


class Sizes:
    """A file's settings, read by the row `row` of its architecture `arch`."""

    def __init__(self, header: Header, arch: str, row: Architecture) -> None:
        self.header, self.arch, self.row = header, arch, row
        self.raw = JsonObject(str(header.path), header.metadata)
        self.hidden = self.integer("embedding_length")
        self.num_heads = self.integer("attention.head_count")
        usual = max(1, self.hidden // self.num_heads)
        size = "rope.dimension_count" if row.latent else "attention.key_length"
        self.head_dim = self.integer(size, usual)
        values = self.integer("attention.value_length", self.head_dim)
        if values != self.head_dim and not row.latent:
            raise unsupported(
                self.raw.where, "keys and values of different sizes are not supported"
            )
        self.num_blocks = self.integer("block_count")
        has_mtp = row.mtp or row.numbered_mtp
        predicted = self.integer("nextn_predict_layers", 0, least=0) if has_mtp else 0
        self.num_layers = self.num_blocks - predicted
        # llama.cpp's converter can write the MTP block of a model alone.
        alone = row.mtp and predicted > 0
        self.is_mtp = alone and "blk.0.attn_norm.weight" not in header.entries
        embedding = header.entries.get(EMBEDDING)
        if embedding is None and (row.drafts or self.is_mtp):
            # A drafter of a target whose table it reads; it has the target's tokens.
            tokens = self.raw.values.get("tokenizer.ggml.tokens")
            size = len(tokens) if isinstance(tokens, Texts) else None
            self.vocab_size = self.integer("vocab_size", size)
            return
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self.raw.where}: the matrix {EMBEDDING} is missing.",
                hint="is it the file of a whole language model?",
            )
        self.vocab_size = embedding.shape[0]

    @property
    def values(self) -> Values | None:
        """The value heads of recurrent layers; None without such layers."""
        if not self.is_set("ssm.time_step_rank") or not self.row.mtp:
            return None
        heads, groups = self.integer("ssm.time_step_rank"), self.integer("ssm.group_count")
        dim = self.integer("ssm.inner_size") // heads
        num_keys = 2 * groups * self.integer("ssm.state_size")
        return Values(groups, max(1, heads // groups), dim, num_keys, self.row.tiled)

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

    def own_keys(self) -> dict[str, object]:
        prefix = f"{self.arch}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.header.metadata.items()
            if key.startswith(prefix)
        }

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        full = f"{self.arch}.{key}"
        listed = self.raw.values.get(full)
        if key not in _BY_LAYER or not isinstance(listed, np.ndarray):
            return self.raw.integer(full, default, least=least)
        values: list[object] = listed.tolist()
        is_whole = len(values) == self.integer("block_count")
        values = [one for one in values if one or not self.row.uneven] or values
        if not is_whole or values.count(values[0]) < len(values):
            raise unsupported(
                self.raw.where,
                f"{full} has no one value for all layers, which is not supported: {values!r:.60}",
            )
        return JsonObject(self.raw.where, {full: values[0]}).integer(full, least=least)

    def by_layer(self, key: str) -> list[int]:
        """The setting `key` of every layer; one number holds for all."""
        listed = self.raw.values.get(f"{self.arch}.{key}")
        if not isinstance(listed, np.ndarray):
            return [self.integer(key, 0, least=0)] * self.num_layers
        return [int(one) for one in listed.tolist()][: self.num_layers]

    def number(self, key: str, default: float | None = None) -> float:
        return shortest(self.raw.number(f"{self.arch}.{key}", default))

    def has(self, key: str) -> bool:
        return self.raw.has(f"{self.arch}.{key}")

    def is_set(self, key: str) -> bool:
        """True if the file has the key with another value than 0."""
        return self.raw.values.get(f"{self.arch}.{key}") not in (None, 0)


def layered(sizes: Sizes) -> dict[str, Any]:
    """Sizes, biases and positions of a Llama."""
    entries = sizes.header.entries
    found: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.integer("feed_forward_length"),
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.integer("attention.head_count_kv", sizes.num_heads),
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.integer("context_length"),
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon", _layer_eps(sizes)),
        "rope_theta": sizes.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        # No key says which biases there are.
        "attention_bias": not sizes.row.qkv_bias and _has_bias(entries, "attn_"),
        "mlp_bias": _has_bias(entries, "ffn_"),
    }
    if sizes.turning != sizes.head_dim or sizes.row.turns_in_part:
        found["partial_rotary_factor"] = sizes.turning / sizes.head_dim
    return found | _positions(sizes, found["max_position_embeddings"], found["rope_theta"])


def _layer_eps(sizes: Sizes) -> float | None:
    """The epsilon of layer norms, in models without others; None if there is none."""
    key = "attention.layer_norm_epsilon"
    return sizes.number(key) if sizes.has(key) else None


def _has_bias(entries: Iterable[str], kind: str) -> bool:
    """True if attention (`attn_`) or FFN (`ffn_`) of a layer has a bias; not that of experts."""
    ends = tuple(f".{kind}{part}.bias" for part in ("q", "k", "v", "output", "gate", "up", "down"))
    return any(name.endswith(ends) for name in entries)


def _positions(sizes: Sizes, max_tokens: int, theta: float) -> dict[str, Any]:
    """Settings that stretch rotary positions, by kind of layer if the kinds differ."""
    ways = sizes.row.positions
    scaling = _Scaling(sizes, max_tokens, theta)
    whole = scaling.whole()
    if ways.by_kind and (sizes.is_set("attention.sliding_window") or not ways.in_windows):
        local = whole if ways.stretches_local else scaling.unstretched()
        local_theta = sizes.number("rope.freq_base_swa", ways.local_theta or theta)
        kinds = {
            "full_attention": {**whole, "rope_theta": theta},
            "sliding_attention": {**local, "rope_theta": local_theta},
        }
        return {"rope_parameters": kinds}
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
class _Scaling:
    """The scaling of positions. Raises CheckpointError for an unsupported one.

    Old keys are read as llama.cpp reads them: a factor without a type is linear, and
    `rope.scale_linear` is such a factor."""

    sizes: Sizes
    max_tokens: int
    theta: float

    @cached_property
    def kind(self) -> str:
        found = self.sizes.raw.text(f"{self.sizes.arch}.rope.scaling.type", "linear")
        if found not in ("none", "linear", "yarn", "longrope"):
            raise self._unsupported(found)
        return found

    @cached_property
    def factor(self) -> float:
        """The divisor of positions; 1 leaves them unchanged."""
        sizes = self.sizes
        key = "rope.scaling.factor" if sizes.has("rope.scaling.factor") else "rope.scale_linear"
        found = sizes.number(key) if sizes.is_set(key) else 1.0
        if self.kind != "none" or found == 1.0:
            return found
        ways = sizes.row.positions
        if ways.by_kind and ways.stretches_local:
            # llama.cpp then stretches the positions of sliding layers, and of no others.
            raise self._unsupported("none with a factor")
        return 1.0

    @cached_property
    def strength(self) -> float:
        """The factor of the tables of cos and sin."""
        return self._number("attn_factor", 1.0)

    def whole(self) -> dict[str, Any]:
        """The scaling of layers that see the whole text."""
        entries, ways = self.sizes.header.entries, self.sizes.row.positions
        is_linear = self.kind == "linear" and self.factor != 1.0
        if self.sizes.row.latent and (is_linear or self.strength != 1.0):
            # llama.cpp then scales scores as well, which no published file has.
            raise self._unsupported("linear, or a factor of attention,")
        entry = None if ways.ignores_factors else entries.get("rope_freqs.weight")
        if entry is not None:
            return self._by_factors(self._factors(entry))
        if (entry := entries.get("rope_factors_short.weight")) is not None:
            return self._long(entry)
        if self.kind == "longrope":
            raise self._unsupported("longrope without its factors")
        if self.kind == "yarn" and self.factor != 1.0:
            return self._yarn()
        if self.strength != 1.0 or (ways.has_factors and self.factor != 1.0):
            return self._everywhere([self.factor] * (self.sizes.turning // 2))
        if self.factor == 1.0:
            return {"rope_type": "default"} if ways.is_yarn or ways.is_silent else {}
        return {"rope_type": "linear", "factor": self.factor}

    def unstretched(self) -> dict[str, Any]:
        """The scaling of layers whose frequencies are not stretched."""
        if self.strength == 1.0:
            return {"rope_type": "default"}
        return self._everywhere([1.0] * (self.sizes.turning // 2))

    def _number(self, name: str, default: float) -> float:
        return self.sizes.number(f"rope.scaling.{name}", default)

    def _original(self) -> int:
        return self.sizes.integer("rope.scaling.original_context_length", self.max_tokens)

    def _unsupported(self, what: str) -> CheckpointError:
        return unsupported(
            self.sizes.raw.where, f"{self.sizes.arch}.rope.scaling.type {what!r} is not supported"
        )

    def _yarn(self) -> dict[str, Any]:
        sizes, ways = self.sizes, self.sizes.row.positions
        if ways.has_factors:
            raise self._unsupported("yarn")
        found: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self._original(),
        }
        if ways.log_factor and sizes.is_set(ways.log_factor):
            # Files have a tenth of it; llama.cpp, too, takes both scales for equal.
            scale = shortest(10 * sizes.number(ways.log_factor))
            found |= {"mscale": scale, "mscale_all_dim": scale}
        for name in ("beta_fast", "beta_slow"):
            if sizes.has(f"rope.scaling.yarn_{name}"):
                found[name] = self._number(f"yarn_{name}", 1.0)
        if sizes.has("rope.scaling.yarn_attn_factor") or self.strength != 1.0:
            usual = 0.1 * math.log(max(1.0, self.factor)) + 1.0
            found["attention_factor"] = self._number("yarn_attn_factor", usual) * self.strength
        return found | ({"truncate": False} if ways.is_yarn else {})

    def _long(self, short: Entry) -> dict[str, Any]:
        """Longrope: factors for short texts, and for long ones if the file has them."""
        long = self.sizes.header.entries.get("rope_factors_long.weight")
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
        self._refuse_both(self.sizes.header.entries["rope_freqs.weight"])
        found = None if self.factor * self.strength != 1.0 else self._llama3(factors)
        return found or self._everywhere(self._times(factors))

    def _llama3(self, factors: Sequence[float]) -> dict[str, Any] | None:
        import torch

        from outrider.models.rope import frequencies

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
            "original_max_position_embeddings": self.max_tokens,
            "attention_factor": self.strength,
        }

    def _times(self, factors: Sequence[float]) -> list[float]:
        return [shortest(factor * self.factor) for factor in factors]

    def _refuse_both(self, entry: Entry) -> None:
        if self.kind == "yarn" and self.factor != 1.0:
            raise self._unsupported(f"yarn with {entry.name}")

    def _factors(self, entry: Entry) -> list[float]:
        if len(entry.shape) != 1 or entry.num_values > _MAX_FACTORS or entry.kind.name != "F32":
            raise contradictory(self.sizes.header.path, f"{entry.name} is no short list of float32")
        with map_file(entry.path) as memory:
            raw = memory[entry.offset : entry.offset + entry.num_bytes]
        found: list[float] = np.frombuffer(raw, "<f4").tolist()
        if not all(0 < factor < 1e9 for factor in found):
            raise contradictory(
                self.sizes.header.path, f"{entry.name} has a factor that is not above 0"
            )
        return found
