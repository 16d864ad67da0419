"""Model configs: `config.json` of GPT-2 and of the Llama line, whose rows are in family_table.py.

Defaults of absent keys are those of transformers. A setting that would change the logits and is not
implemented is refused by name, never ignored. If this decoder would compute other logits from some
position on, the window ends there, and a note says so. No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.core.errors import CheckpointError, ContractError, nearest
from outrider.core.plugins import install_command, plugin_modules
from outrider.core.spec import DecoderConfig
from outrider.models.checkpoint import (
    GENERATION,
    Checkpoint,
    config_document,
    open_checkpoint,
    scheme_of,
)
from outrider.models.configs import (
    LONG_FACTORS,
    Family,
    FamilyFile,
    GPT2Config,
    LayeredConfig,
    LlamaConfig,
)
from outrider.models.expert_kinds import check_experts, sparse_layers
from outrider.models.family_table import FAMILY_TABLE, WRAPPERS
from outrider.models.json_object import (
    MAX_LAYERS,
    JsonObject,
    bounded_window,
    contradictory,
    refuse_activation,
    stop_ids,
    stored_dtype,
    unsupported,
)
from outrider.models.layer_kinds import LayerKind
from outrider.models.rope_config import Rope, check_rotary

_DEFAULTS: Mapping[str, object] = {"eos_token_id": 50256}
# The only value of each switch that this decoder has, which is also the default.
_SWITCHES: Mapping[str, bool] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def parse_gpt2(raw: JsonObject, generation: JsonObject | None = None) -> GPT2Config:
    """Parse a config. Raises CheckpointError, naming file and key, for a bad or unknown value."""
    raw = JsonObject(raw.where, {**_DEFAULTS, **raw.values})
    refuse_activation(raw, "activation_function", ("gelu_new",))
    scheme_of(raw)
    for key, only in _SWITCHES.items():
        if raw.flag(key, default=only) is not only:
            raise unsupported(
                raw.where,
                f"{key} {str(not only).lower()} is not supported; this decoder has "
                f"{str(only).lower()}",
            )
    vocab_size, hidden_size = raw.integer("vocab_size"), raw.integer("n_embd")
    num_heads = raw.integer("n_head")
    config = GPT2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=raw.integer("n_inner", 4 * hidden_size),
        num_layers=raw.integer("n_layer", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_tokens=raw.integer("n_positions"),
        rms_norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=True),
        stop_ids=stop_ids(vocab_size, raw, generation),
        dtype=stored_dtype(raw),
    )
    _check_heads(raw.where, config)
    return config


def _check_heads(where: str, config: GPT2Config) -> None:
    if config.hidden_size % (2 * config.num_heads):
        raise contradictory(
            where,
            f"n_embd {config.hidden_size} does not divide into {config.num_heads} heads "
            "(n_head) of an even size",
        )


# A Qwen2 with MTP blocks, and the prefix of their names.
MIMO, MIMO_BLOCKS = "mimo", "model.mtp_layers."
# Families whose layers differ from a Llama's only in biases, norms of heads and windows.
LLAMA_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", MIMO)
# Families whose MTP blocks come after their layers: numbered on, or those of MiMo apart.
NUMBERED_MTP = (*LLAMA_FAMILIES, "deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm4_moe")


def _tables() -> tuple[Mapping[str, Family], Mapping[str, str]]:
    """Rows of families and names of models around them: ours, and those of plugins."""
    rows, wrappers = dict(FAMILY_TABLE), dict(WRAPPERS)
    for module in plugin_modules("families"):
        rows |= module.FAMILIES
        wrappers |= module.WRAPPERS
    return rows, wrappers


_ROWS, _WRAPPERS = _tables()


def row_of(family: str) -> Family:
    """The row of a family, which may be that of the text model in a model that also sees."""
    return _ROWS[_WRAPPERS.get(family, family)]


_NAMES = (*_ROWS, *_WRAPPERS)
DECODER_FAMILIES = tuple(name for name in _NAMES if row_of(name).recurrences is None)
# Hybrids whose files may have MTP blocks, and which share their tables with heads.
DELTA_FAMILIES = tuple(sorted(name for name in _NAMES if row_of(name).has_mtp))
FAMILIES = tuple(sorted((*_NAMES, "gpt2")))


def parse_llama(raw: JsonObject, generation: JsonObject | None = None) -> LlamaConfig:
    """Parse a config of the Llama line, or one that extends it. Raises CheckpointError, naming file
    and key, for a bad or unknown value."""
    config = parse_layered(raw, generation)
    if not isinstance(config, LlamaConfig):
        raise ContractError(f"{raw.where}: layers of {config.family} do not all attend")
    return config


def parse_layered(raw: JsonObject, generation: JsonObject | None = None) -> LayeredConfig:
    """Parse a config of a family with a row. Raises CheckpointError, naming file and key, for a bad
    or unknown value."""
    text, family = text_model(raw)
    return parse_text(raw, text, family, generation)


def parse_text(
    outer: JsonObject, text: JsonObject, family: Family, generation: JsonObject | None
) -> LayeredConfig:
    """Parse the settings `text` of a text model within `outer`, as `parse_layered` does."""
    fields = _layered(outer, text, family, generation)
    if family.config is None:
        config: LayeredConfig = LlamaConfig(**fields)
    else:
        config = family.config(FamilyFile(text, family, generation, fields))
    _check_layered(text.where, config)
    return config


def _layered(
    outer: JsonObject, raw: JsonObject, family: Family, generation: JsonObject | None
) -> dict[str, Any]:
    """Fields of LayeredConfig. `raw` has the settings of the text model within `outer`."""
    refuse_activation(raw, family.activation_key, family.activations)
    scheme_of(outer)
    num_heads = raw.integer("num_attention_heads")
    num_layers = raw.integer("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = raw.integer("hidden_size")
    vocab_size = raw.integer("vocab_size")
    layers = _layer_kinds(raw, family, num_layers)
    rope = next((kind.rope for kind in layers[::-1] if kind.rope is not None), Rope())
    max_tokens, notes = _window(raw, rope, family.reach(raw))
    traits = family.traits(raw)
    is_cut = bool(rope.long_factors or traits.query_growth)
    longest = bounded_window(raw.integer("max_position_embeddings"))[0] if is_cut else 0
    most = max(max_tokens, longest)
    # A window that hides nothing counts as no window.
    layers = tuple(
        LayerKind(kind.window if kind.window < most else 0, kind.rope) for kind in layers
    )
    all_biased = bool(family.bias_key) and raw.flag(family.bias_key, default=False)
    attention_bias = raw.flag(family.qkv_bias_key, default=all_biased)
    experts, latent = family.experts(raw), family.latent and family.latent(raw)
    # Files of a hybrid mixture have no other FFN than the experts.
    usual_ffn = experts.shared_ffn_size if family.recurrences and experts else None
    return {
        "family": outer.text("model_type"),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "ffn_size": raw.integer("intermediate_size", usual_ffn),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": 1 if latent else raw.integer("num_key_value_heads", num_heads),
        "head_dim": latent.row_size
        if latent
        else raw.integer("head_dim", max(1, hidden_size // num_heads)),
        "max_tokens": max_tokens,
        "rms_norm_eps": raw.number(family.norm_key, 1e-6),
        "rope": rope,
        "tie_word_embeddings": _tied(outer, raw),
        "qkv_bias": family.qkv_bias or attention_bias,
        "out_bias": raw.flag(
            "attention_out_bias",
            default=attention_bias and family.qkv_bias_key == "attention_bias",
        ),
        "mlp_bias": raw.flag("mlp_bias", default=all_biased),
        "qk_norm": family.qk_norm
        or (bool(family.qk_norm_key) and raw.flag(family.qk_norm_key, default=False)),
        "fused_tensors": family.fused_tensors,
        "layers": () if set(layers) == {LayerKind(rope=rope)} else layers,
        "traits": traits,
        "latent": latent,
        "experts": experts,
        "sparse_layers": sparse_layers(raw, num_layers) if experts else (),
        "longest_tokens": longest if longest > max_tokens else 0,
        "stop_ids": stop_ids(vocab_size, outer, raw, generation),
        "dtype": stored_dtype(outer) or stored_dtype(raw),
        "notes": (*_seeing(outer), *notes),
        "also_sees": outer.has("text_config"),
    }


def _layer_kinds(raw: JsonObject, family: Family, num_layers: int) -> tuple[LayerKind, ...]:
    """The kind of every layer. Raises CheckpointError, naming the key, for an unsupported value."""
    windows = family.windows(raw, num_layers)
    ropes = family.ropes(raw, family.rope, windows)
    return tuple(LayerKind(*pair) for pair in zip(windows, ropes, strict=True))


def text_model(raw: JsonObject) -> tuple[JsonObject, Family]:
    """The settings of the text model, with defaults, and its family."""
    outer = name = raw.text("model_type")
    if name in _WRAPPERS:
        raw = raw.child("text_config") or JsonObject(raw.where, {**raw.values, "model_type": None})
        name = raw.text("model_type", _WRAPPERS[name])
        name = _WRAPPERS.get(name, name)
        if name not in _ROWS or _ROWS[name].config is not row_of(outer).config:
            raise unsupported(raw.where, f"a text model of model_type {name!r} is not supported")
    family = _ROWS[name]
    values = {key: value for key, value in raw.values.items() if value is not None}
    # In other families null switches a feature off that is on by default.
    values = values if family.recurrences else raw.values
    named = {**family.defaults, **values, **family.fixed, "model_type": name}
    if family.derived is not None:
        named |= family.derived(JsonObject(raw.where, named))
    return JsonObject(raw.where, named), family


def _tied(outer: JsonObject, raw: JsonObject) -> bool:
    """True if the output head is the embedding; the key is at the top or in the text part."""
    own = raw.flag("tie_word_embeddings", default=False)
    key = "tie_word_embeddings"
    return outer.flag(key, default=own) if outer.has("text_config") else own


def _seeing(raw: JsonObject) -> tuple[str, ...]:
    parts = {"vision_config": "pictures", "audio_config": "sound"}
    found = " and ".join(name for key, name in parts.items() if raw.has(key))
    return (f"the model also takes {found}; Outrider runs its text part",) if found else ()


def _check_layered(where: str, config: LayeredConfig) -> None:
    if config.experts is not None:
        check_experts(where, config.experts)
    for index in range(config.num_layers):
        layer, rope = config.at(index), config.layer_kind(index).rope or Rope()
        if layer.num_heads % layer.num_kv_heads:
            raise contradictory(
                where,
                f"num_attention_heads {layer.num_heads} is not a multiple of "
                f"num_key_value_heads {layer.num_kv_heads}",
            )
        check_rotary(where, rope, layer.head_dim)


def _window(
    raw: JsonObject, rope: Rope, reach: tuple[int, str] | None
) -> tuple[int, tuple[str, ...]]:
    """The window in which this decoder computes the model's own logits; a note if it was cut."""
    max_tokens = raw.integer("max_position_embeddings")
    limits = [reach] if reach else []
    if rope.kind == "longrope":
        reason = f"{LONG_FACTORS} take a longer --context"
        limits.append((rope.original_tokens, reason))
    window, reason = min(limits, default=(max_tokens, ""))
    if window >= max_tokens:
        return bounded_window(max_tokens)
    return window, (f"{reason}: the window is {window} tokens, not {max_tokens}",)


_ENCODERS = frozenset((
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert",
    "mpnet", "roberta", "xlm-roberta",
))  # fmt: skip


def read_config(path: Path) -> DecoderConfig:
    """Read `config.json` and, if there is one, `generation_config.json` of a folder or GGUF file.

    A family without a decoder of ours is read by transformers, if it is installed. Raises
    CheckpointError, naming file and key, for a bad or unknown value.
    """
    checkpoint = open_checkpoint(path)
    family = model_type_of(checkpoint)
    if family in FAMILIES:
        return native_config_of(checkpoint)
    if family in _ENCODERS and not _config(checkpoint).flag("is_decoder", default=False):
        raise CheckpointError(
            f"{path}: a model of type {family} is an encoder: it reads a text and writes none.",
            hint="choose a model that writes, such as `outrider pull HuggingFaceTB/"
            "SmolLM2-135M-Instruct`",
        )
    # Imported here: only such a family needs torch, and transformers, to be read.
    from outrider.plugins.transformers.config import read_adapter_config

    return read_adapter_config(checkpoint)


def read_native_config(path: Path) -> LayeredConfig:
    """Read the config of a family that a decoder of ours runs, as `read_config` does."""
    return native_config_of(open_checkpoint(path))


def native_config_of(checkpoint: Checkpoint) -> LayeredConfig:
    """The config of a checkpoint that a decoder of ours runs. Raises CheckpointError."""
    config = parse_config(_config(checkpoint), _generation(checkpoint))
    return replace(config, notes=(*config.notes, *checkpoint.notes))


def model_type_of(checkpoint: Checkpoint) -> str:
    """The `model_type` of a checkpoint. Raises CheckpointError if its config has none."""
    return _config(checkpoint).text("model_type")


def parse_config(raw: JsonObject, generation: JsonObject | None = None) -> LayeredConfig:
    """Parse a config. Raises CheckpointError, naming file and key, for a bad or unknown value."""
    family = raw.text("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"{raw.where}: Outrider has no decoder for model_type {family!r}.",
            hint=nearest(
                family,
                FAMILIES,
                f"It has {known}; others run through transformers: {install_command('hf')}",
            ),
        )
    return (parse_gpt2 if family == "gpt2" else parse_layered)(raw, generation)


def _config(checkpoint: Checkpoint) -> JsonObject:
    return config_document(checkpoint, "is it a Hugging Face model folder?")


def _generation(checkpoint: Checkpoint) -> JsonObject | None:
    return checkpoint.document(GENERATION) if checkpoint.has(GENERATION) else None
