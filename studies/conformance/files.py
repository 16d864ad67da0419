"""Copies of llama.cpp's tiny models, with the keys and tensors that published files have.

`test-llama-archs -o FOLDER` writes a random model of every architecture. Its files have every key
that llama.cpp knows, and scales and biases that no published model of that kind has: they are left
out. The vocabulary becomes one of bytes, which both sides read. The package `gguf` of llama.cpp's
source reads and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_KEYS = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
]
_ROUTED = (
    "expert_shared_count", "leading_dense_block_count", "expert_weights_scale",
    "expert_weights_norm", "expert_gating_func",
)  # fmt: skip
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
_SCANS = (
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
)  # fmt: skip
_HYBRIDS = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")
_MORE_KEYS: Mapping[str, Iterable[str]] = {
    "gemma2": _CAPS,
    "cohere2": ("logit_scale",),
    "command-r": ("logit_scale",),
    "olmo": ("attention.clamp_kqv",),
    **dict.fromkeys(("granite", "granitemoe", "minicpm"), _SCALES),
    **dict.fromkeys(("deepseek", "dots1", "bailingmoe", "glm4moe", "exaone-moe", "hy_v3"), _ROUTED),
    "gptneox": ("use_parallel_residual",),
    "afmoe": (*_ROUTED, "attention.sliding_window_pattern"),
    "bailingmoe2": _ROUTED,
    "muse-glimmer": ("logit_scale", "final_logit_softcapping", "attention.sliding_window_pattern"),
    "granite_swa": (*_SCALES, "attention.sliding_window_pattern", "attention.rope_pattern"),
    "exaone-moe": (*_ROUTED, "attention.sliding_window_pattern"),
    "mistral3": ("attention.temperature_scale",),
    "minimax-m2": ("expert_gating_func",),
    **dict.fromkeys(
        ("deepseek2", "mistral4"),
        (
            *_ROUTED,
            "attention.kv_lora_rank",
            "attention.q_lora_rank",
            "attention.key_length_mla",
            "attention.value_length_mla",
        ),
    ),
    "ernie4_5-moe": (*_ROUTED, "interleave_moe_layer_step"),
    **dict.fromkeys(
        ("qwen35", "qwen35moe", "qwen3next"),
        (
            "rope.dimension_sections",
            "ssm.conv_kernel",
            "ssm.state_size",
            "ssm.group_count",
            "ssm.time_step_rank",
            "ssm.inner_size",
            "full_attention_interval",
            "attention.recurrent_layers",
        ),
    ),
    **dict.fromkeys(_HYBRIDS, (*_SCANS, *_ROUTED, "moe_latent_size")),
    "granitehybrid": (*_SCANS, *_SCALES, "rope.scaling.finetuned"),
    **dict.fromkeys(("lfm2", "lfm2moe"), (*_ROUTED, "shortconv.l_cache")),
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), ("rope.dimension_sections",)),
}
_QKV = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
# Ends of the names of biases that published models have.
_BIASES: Mapping[str, tuple[str, ...]] = {
    "gpt2": (".bias",),
    "gpt-oss": (".bias",),
    "qwen2": _QKV,
    "qwen2moe": _QKV,
    "qwen": ("attn_qkv.bias",),
    "qwen2vl": _QKV,
    "seed_oss": _QKV,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), ("ssm_dt.bias",)),
    **dict.fromkeys(_HYBRIDS, ("ssm_dt.bias", "ssm_conv1d.bias", "exp_probs_b.bias")),
    "lfm2moe": ("exp_probs_b.bias",),
    "nemotron": ("norm.bias",),
    "starcoder2": (".bias",),
    "orion": ("norm.bias",),
    "stablelm": ("norm.bias",),
    "pangu-embedded": (*_QKV, "attn_output.bias"),
    **dict.fromkeys(("phi2", "gptneox", "codeshell", "jais2"), (".bias",)),
    "falcon": ("norm.bias", "norm_2.bias"),
    "chatglm": _QKV,
    **dict.fromkeys(("exaone-moe", "hy_v3", "afmoe", "bailingmoe2"), ("exp_probs_b.bias",)),
    **dict.fromkeys(("glm4moe", "dots1", "minimax-m2", "deepseek2"), ("exp_probs_b.bias",)),
}
_SURPLUS = (
    ".scale",
    ".input_scale",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "cls.output.weight",
)


# Tensors that only some published models of an architecture have, and which are refused.
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "qwen3next": ("ssm_in.weight",),
    "stablelm": ("attn_q_norm.weight", "attn_k_norm.weight"),
    # Layers with experts have no other net.
    "hy_v3": ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
}
# Settings that are 0 in the file.
_ZEROS: Mapping[str, tuple[str, ...]] = {
    "qwen2vl": ("attention.layer_norm_rms_epsilon",),
    "gptneox": ("use_parallel_residual",),
}
# Settings that llama.cpp reads for models of one size only.
_UNREAD: Mapping[str, tuple[str, ...]] = {"exaone4": ("attention.sliding_window",)}


def load_gguf(source: Path) -> Any:
    """The package of llama.cpp's source."""
    sys.path.insert(0, str(source / "gguf-py"))
    import gguf  # type: ignore[import-not-found]

    return gguf


def copy(
    gguf: Any,
    path: Path,
    target: Path,
    more: Mapping[str, Any] | None = None,
    *,
    whole: bool = False,
) -> Path:
    """A cleaned copy, or a `whole` one; `more` are keys after the architecture's name."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    wanted = {f"{arch}.{key}" for key in (*_KEYS, *_MORE_KEYS.get(arch, ()))}
    added = {f"{arch}.{key}": value for key, value in (more or {}).items()}
    zeros = {f"{arch}.{key}" for key in _ZEROS.get(arch, ())}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in added:
            continue
        value = field.contents()
        unread = name.removeprefix(f"{arch}.") in _UNREAD.get(arch, ())
        if whole or (name in wanted and not unread and (_is_set(value) or name in zeros)):
            _add(gguf, writer, name, value, field.types)
    for name, value in added.items():
        kinds = gguf.GGUFValueType
        kind = kinds.FLOAT32 if isinstance(value, float) else kinds.get_type(value)
        kind = kinds.UINT32 if kind == kinds.INT32 else kind
        inner = [kinds.get_type(value[0])] if isinstance(value, list) else []
        _add(gguf, writer, name, value, [kind, *inner])
    if not whole:
        _bytes_vocabulary(
            writer, next(t.shape[1] for t in reader.tensors if "token_embd" in t.name)
        )
    biases = _BIASES.get(arch, ())
    others = _OTHERS.get(arch, ())
    for tensor in reader.tensors:
        surplus = tensor.name.endswith((*_SURPLUS, *others))
        unusual = ".bias" in tensor.name and not tensor.name.endswith(biases)
        if whole or not (surplus or unusual):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return target


def _is_set(value: object) -> bool:
    return any(value) if isinstance(value, list) else value not in (0, 0.0)


def _add(gguf: Any, writer: Any, name: str, value: object, types: list[Any]) -> None:
    more = {"sub_type": types[-1]} if types[0] == gguf.GGUFValueType.ARRAY else {}
    writer.add_key_value(name, value, types[0], **more)


def _bytes_vocabulary(writer: Any, size: int) -> None:
    """Letters from U+0100 on, which byte-level vocabularies have for bytes that do not show."""
    tokens = [chr(0x21 + i) if i < 94 else f"<{i}>" for i in range(int(size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens[:-1], "ab"])
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_add_bos_token(False)
