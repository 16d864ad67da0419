"""Methods of quantisation, as `quantization_config` in a config.json names them. No tensors.

    compressed-tensors   integers of 4 or 8 bits, packed or not, and float8, by llm-compressor
    fp8, fbgemm_fp8      float8 with a scale for a tensor, an output, or a block of 128 x 128
    modelopt             float8, MXFP8 and NVFP4, by NVIDIA's optimiser
    awq, gptq            integers of 2, 4 or 8 bits in words of 32, with zeros
    mxfp4                4-bit floats, 32 of them with a power of two (gpt-oss)
    bitsandbytes         NF4 and FP4, 64 of them with a scale, and int8
    mlx                  integers of 2 to 8 bits with scales and offsets; MXFP4, MXFP8, NVFP4

compressed-tensors also names MXFP4, MXFP8 and NVFP4. In MX formats 32 numbers share a power of two;
in NVFP4 16 share a float8, and a matrix has one more factor.

Files may also quantise activations and the KV cache. These stay in floats here, which is closer to
the model before quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from outrider.core.errors import CheckpointError, given
from outrider.core.spec import Grouping, Scheme
from outrider.models.json_object import JsonObject

_FLOATS_OF_4_BITS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


# Inputs of a block that kernels run on.
_UNIT = 32


def _unnamed(raw: JsonObject) -> str:
    """The method of a config that names none: the oldest files of bitsandbytes do not."""
    named = any(raw.has(key) for key in ("load_in_4bit", "load_in_8bit"))
    return "bitsandbytes" if named else ""


def _unread(raw: JsonObject, how: str) -> CheckpointError:
    return CheckpointError(
        f"{raw.where}: the weights are quantised {how}, which is not supported.",
        hint="name the unquantised checkpoint, with --quantise int4 or int8 to make it as small, "
        f"or one of: {', '.join(_READERS)}",
    )


def _compressed(raw: JsonObject) -> Scheme:
    layout = raw.text("format", "dense")
    groups = list(_groups(raw))
    named = {group.text("format", layout) for group in groups} or {layout}
    unread = sorted(named - {"pack-quantized", "int-quantized", "float-quantized",
                             "naive-quantized", "mxfp8-quantized", *_FLOATS_OF_4_BITS})  # fmt: skip
    if unread:
        raise _unread(raw, f"as {unread[0]!r}")
    for part in ("sparsity_config", "transform_config"):
        child = raw.child(part)
        if child is not None and child.values and child.text("format", "") != "dense":
            raise _unread(raw, f"with a {part}")
    weights = [found for group in groups if (found := group.child("weights"))]
    if not weights:
        raise _unread(raw, "without a word of how (config_groups)")
    return Scheme(
        where=raw.where,
        method="compressed-tensors",
        bits=tuple(sorted({_compressed_bits(found) for found in weights})),
        block=_one_block(raw, weights),
        has_blocks=all(_has_blocks(found) for found in weights),
        has_4_bit_floats=any(
            found.text("type", "int") == "float" and found.integer("num_bits", 8) == 4
            for found in weights
        ),
    )


def _groups(raw: JsonObject) -> Iterator[JsonObject]:
    groups = raw.child("config_groups")
    for name in groups.values if groups else ():
        group = groups.child(name) if groups else None
        if group is not None:
            yield group


def _compressed_bits(weights: JsonObject) -> int:
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 4), ("float", 8)):
        raise _unread(weights, f"to {bits}-bit numbers of type {kind!r}")
    if weights.text("strategy", "tensor") == "token":
        raise _unread(weights, "by 'token', as weights cannot be")
    return bits


def _has_blocks(weights: JsonObject) -> bool:
    if weights.text("type", "int") != "int":
        return True
    if weights.text("actorder", "") == "group":
        return False
    return not weights.has("group_size") or _group_size(weights) % _UNIT == 0


def _one_block(raw: JsonObject, weights: list[JsonObject]) -> tuple[int, int] | None:
    blocks = {_block(found, "block_structure") for found in weights} - {None}
    if len(blocks) > 1:
        raise _unread(raw, "in blocks of several sizes")
    return next(iter(blocks), None)


def _block(raw: JsonObject, key: str) -> tuple[int, int] | None:
    if not raw.has(key):
        return None
    sizes = raw.integers(key)
    if len(sizes) != 2 or min(sizes) < 1:
        raise CheckpointError(f"{raw.where}: {key} must be two sizes of a block, got {sizes}.")
    return sizes[0], sizes[1]


def _fp8(raw: JsonObject) -> Scheme:
    kind = raw.text("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _unread(raw, f"to float8 of the kind {kind!r}")
    block = _block(raw, "weight_block_size")
    return Scheme(where=raw.where, method="fp8", bits=(8,), block=block, has_blocks=True)


def _modelopt(raw: JsonObject) -> Scheme:
    """Layers of a mixed precision have algorithms of their own, which their tensors show."""
    named = raw.text("quant_algo", "")
    layers = raw.child("quantized_layers")
    each = [layers.child(name) for name in layers.values] if layers else []
    for algorithm in [named, *(layer.text("quant_algo", "") for layer in each if layer)]:
        if algorithm.upper() not in _MODELOPT:
            raise _unread(raw, f"by modelopt as {algorithm!r}")
    return Scheme(
        where=raw.where,
        method="modelopt",
        bits=(8,) if named.upper() in _MODELOPT_8_BITS else (4, 8),
        block=(128, 128) if named.upper() == "FP8_PB_WO" else None,
        has_blocks=True,
    )


_MODELOPT_8_BITS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")


_MODELOPT = (*_MODELOPT_8_BITS, "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")


def _awq(raw: JsonObject) -> Scheme:
    version = raw.text("version", "gemm").lower()
    if version not in ("gemm", "exllama"):
        raise _unread(raw, f"by AWQ in the order of {version!r}, not 'gemm'")
    return Scheme(
        where=raw.where,
        method="awq",
        bits=(_bits(raw, "AWQ", (4,)),),
        group_size=_group_size(raw),
        has_blocks=_group_size(raw) % _UNIT == 0,
    )


def _gptq(raw: JsonObject) -> Scheme:
    layout = raw.text("checkpoint_format", "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise _unread(raw, f"by GPTQ in the layout {layout!r}")
    bits = _bits(raw, "GPTQ", (2, 4, 8))
    dynamic = raw.child("dynamic")
    for name in dynamic.values if dynamic else ():
        # Modules may differ from the rest; those whose names begin with - are not quantised.
        module = None if name.startswith("-") or dynamic is None else dynamic.child(name)
        if module is not None and module.integer("bits", bits) != bits:
            raise _unread(raw, "by GPTQ to several numbers of bits (dynamic)")
    return Scheme(
        where=raw.where,
        method="gptq",
        bits=(bits,),
        group_size=_group_size(raw),
        zero_offset=1 if layout == "gptq" else 0,
        has_blocks=not raw.flag("desc_act", default=False) and _group_size(raw) % _UNIT == 0,
    )


def _bits(raw: JsonObject, method: str, known: tuple[int, ...]) -> int:
    bits = raw.integer("bits", 4)
    if bits not in known:
        raise _unread(raw, f"by {method} to {bits} bits")
    return bits


def _group_size(raw: JsonObject) -> int:
    """The group size; 0 for all inputs, which is -1 in files."""
    return max(0, raw.integer("group_size", 128, least=-1))


def _bitsandbytes(raw: JsonObject) -> Scheme:
    is_4_bit = raw.flag("load_in_4bit", default=False) or raw.flag("_load_in_4bit", default=False)
    return Scheme(where=raw.where, method="bitsandbytes", bits=(4,) if is_4_bit else (8,))


def _mlx(raw: JsonObject) -> Scheme:
    """MLX: settings, and settings of single modules by their names, or false."""
    every = _grouping(raw, "affine")
    modules = {"": every}
    for name, own in raw.values.items():
        if isinstance(own, dict):
            modules[name] = _grouping(given(raw.child(name), "settings of a module"), every.mode)
    modes = {one.mode for one in modules.values()}
    return Scheme(
        where=raw.where,
        method="mlx",
        bits=(2, 3, 4, 5, 6, 8),
        has_blocks=modes != {"mxfp8"},
        modules=modules,
    )


def _grouping(raw: JsonObject, mode: str) -> Grouping:
    mode = raw.text("mode", mode)
    if mode not in _MLX_GROUPS:
        raise _unread(raw, f"by MLX in the mode {mode!r}")
    return Grouping(mode, raw.integer("group_size", _MLX_GROUPS[mode], least=1))


_MLX_GROUPS = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}


def _mxfp4(raw: JsonObject) -> Scheme:
    return Scheme(where=raw.where, method="mxfp4", bits=(4,), group_size=32, has_blocks=True)


_READERS: Mapping[str, Callable[[JsonObject], Scheme]] = {
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}


def read_method(raw: JsonObject, method: str = "") -> Scheme:
    """The scheme of settings, which name their method unless it is given.

    Raises CheckpointError for an unsupported method or setting.
    """
    if method == "mlx":
        return _mlx(raw)
    method = method or raw.text("quant_method", _unnamed(raw)).lower()
    reader = _READERS.get(method)
    if reader is None:
        raise _unread(raw, f"by {method!r}" if method else "and does not say how (quant_method)")
    return reader(raw)
