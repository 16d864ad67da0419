"""The quantised matrices among a folder's tensors, unpacked from each method's layout to `Codes`.

Several stored tensors stand for one matrix: `q_proj.qweight`, `.qzeros` and `.scales` for
`q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.published.codes import (
    BLOCK,
    FLOAT8_BLOCK,
    NVFP4_BLOCK,
    Codes,
    Stored,
    scales_in,
)
from outrider.models.published.layouts import (
    STATE,
    awq,
    bitsandbytes,
    floats_of_4_bits,
    gptq,
    mlx,
    mxfp4,
    packed,
    plain,
)
from outrider.models.published.scheme import Scheme

Layout = Callable[[Stored], Codes]
_PARTS: Mapping[Layout, tuple[str, ...]] = {
    packed: (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape",
             ".weight_g_idx"),
    plain: (".weight", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
    awq: (".qweight", ".qzeros", ".scales"),
    gptq: (".qweight", ".qzeros", ".scales", ".g_idx"),
    mxfp4: ("_blocks", "_scales"),
    floats_of_4_bits: (".weight_packed", ".weight", ".weight_scale", ".weight_scale_2",
                       ".weight_global_scale"),
    mlx: (".weight", ".scales", ".biases"),
    bitsandbytes: (".weight", ".SCB", ".weight_format", ".weight.absmax", ".weight.quant_map",
                   ".weight.nested_absmax", ".weight.nested_quant_map",
                   *(f".weight{STATE}{kind}" for kind in ("nf4", "fp4"))),
}  # fmt: skip
# Scales of activations, and of keys and values, which are not quantised here.
_RUNTIME_SCALES = (
    ".input_scale", ".input_zero_point", ".activation_scale", ".output_scale",
    ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point",
    ".input_global_scale",
)  # fmt: skip
# Bytes in memory for a byte of codes, by bits: a block adds 3 or 4 bytes to 16 of codes, or 2 to
# 32. Codes of 2 and 3 bits take 4.
_HELD = {2: 2 * 19 / 16, 4: 19 / 16, 8: 34 / 32}
_HELD_MLX = {2: 2 * 20 / 16, 3: 4 / 3 * 20 / 16, 4: 20 / 16}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix: the names of its stored tensors, and the layout that unpacks them."""

    layout: Layout
    stem: str
    names: tuple[str, ...]

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(name.removeprefix(self.stem) for name in self.names)


class Quantised:
    """The quantised matrices of a folder; none if `scheme` is None. `stored` are the names of the
    folder's tensors, and `read` returns a tensor by its name."""

    def __init__(
        self, scheme: Scheme | None, stored: Collection[str], read: Callable[[str], Tensor]
    ) -> None:
        self._scheme, self._stored, self._read = scheme, stored, read
        self._matrices = {} if scheme is None else _matrices(scheme, frozenset(stored))

    def __contains__(self, name: str) -> bool:
        return name in self._matrices

    @property
    def has_blocks(self) -> bool:
        return self._scheme is not None and self._scheme.has_blocks

    @property
    def values_a_byte(self) -> int:
        """The largest number of values that a byte of the folder's files may hold."""
        return 1 if self._scheme is None else -(-8 // min(self._scheme.bits))

    def held_bytes(self, look: Callable[[str], Tensor], width: int) -> int:
        """Bytes of all tensors in memory if kernels run on codes; 0 if they cannot. Codes then have
        a scale and a zero for every 32 (`Codes.blocks`) instead of a matrix's other parts. Matrices
        that no blocks can hold become numbers of `width` bytes. `look` maps a stored tensor."""
        scheme = self._scheme
        if scheme is None or not scheme.has_blocks:
            return 0
        matrices = self._matrices.values()
        parts = {name for matrix in matrices for name in matrix.names}
        plain = sum(look(name).nbytes for name in self._stored if name not in parts)
        return plain + sum(_held(scheme, matrix, look, width) for matrix in matrices)

    def files_of(self, stored: Mapping[str, Path]) -> dict[str, Path]:
        """The file of each tensor of a plain checkpoint; a matrix is in that of its codes."""
        parts = {part for matrix in self._matrices.values() for part in matrix.names}
        skipped = () if self._scheme is None else _RUNTIME_SCALES
        found = {
            name: path
            for name, path in stored.items()
            if name not in parts and not name.endswith(skipped)
        }
        return found | {name: stored[m.names[0]] for name, m in self._matrices.items()}

    def codes(self, name: str) -> Codes | None:
        """The codes of a matrix, None if it has none. Raises CheckpointError for bad parts."""
        matrix = self._matrices.get(name)
        if matrix is None or self._scheme is None:
            return None
        return matrix.layout(Stored(self._scheme, matrix.stem, matrix.parts, self._read))

    def is_no_bias(self, name: str) -> bool:
        """True for a bias of zeros; GPTQ's files may have one for every matrix without a bias."""
        stem = name.removesuffix(".bias")
        return stem != name and f"{stem}.weight" in self and not bool(self._read(name).any())


def _held(scheme: Scheme, matrix: Matrix, look: Callable[[str], Tensor], width: int) -> int:
    codes = look(matrix.names[0])
    if matrix.layout is mlx:
        return _held_mlx(scheme, matrix, look, width)
    if matrix.layout is floats_of_4_bits:
        whole = codes.shape[-1] * 2 % NVFP4_BLOCK == 0
        return codes.nbytes * 40 // 32 if whole else codes.nbytes * 2 * width
    bits = 8 if matrix.layout is plain else min(scheme.bits)
    others = {name.removeprefix(matrix.stem): look(name) for name in matrix.names[1:]}
    if codes.is_floating_point():
        return round(codes.nbytes * (_held_float8(scheme, codes, others) or width))
    if not all(_in_blocks(scheme, bits, part, tensor) for part, tensor in others.items()):
        return codes.nbytes * 8 // bits * width
    return round(codes.nbytes * _HELD[bits])


def _held_float8(scheme: Scheme, codes: Tensor, others: Mapping[str, Tensor]) -> float:
    """Bytes in memory for a float8 where blocks can hold them, else 0."""
    grouped = scheme.block is not None and scheme.block[1] % FLOAT8_BLOCK != 0
    scales = [one for name, one in others.items() if "scale" in name]
    fine = any(one.ndim == 2 and one.shape[1] > 1 and scheme.block is None for one in scales)
    zeros = any(name.endswith("zero_point") for name in others)
    if codes.shape[1] % FLOAT8_BLOCK or grouped or fine or zeros:
        return 0
    return 1 + 4 / FLOAT8_BLOCK


def _held_mlx(scheme: Scheme, matrix: Matrix, look: Callable[[str], Tensor], width: int) -> int:
    words, scales = look(matrix.names[0]), look(matrix.names[1])
    own = scheme.modules.get(matrix.stem) or scheme.modules[""]
    bits = words.shape[-1] * 32 // (scales.shape[-1] * own.group_size)
    if bits not in _HELD_MLX or (own.group_size % BLOCK and own.mode != "nvfp4"):
        return words.nbytes * 8 // bits * width
    return round(words.nbytes * _HELD_MLX[bits])


def _in_blocks(scheme: Scheme, bits: int, part: str, tensor: Tensor) -> bool:
    """True if blocks can hold this part of a matrix, of which it reads only a small part."""
    tensor = tensor.flatten()
    if part.endswith("g_idx"):
        return not bool((tensor.diff() < 0).any())
    if part in (".weight_zero_point", ".qzeros") and bits == 8:
        middle = 128 - scheme.zero_offset if tensor.dtype == torch.int32 else 0
        zeros = tensor.contiguous().view(torch.uint8) if middle else tensor.float()
        return bool((zeros == middle).all())
    return tensor.dtype != torch.float32 or scales_in(tensor) is not None


def _matrices(scheme: Scheme, have: frozenset[str]) -> dict[str, Matrix]:
    return {
        name: Matrix(
            layout, stem, tuple(stem + part for part in _PARTS[layout] if stem + part in have)
        )
        for name, stem, layout in _found(scheme, have)
    }


def _found(scheme: Scheme, have: frozenset[str]) -> list[tuple[str, str, Layout]]:
    if scheme.method == "mxfp4":
        stems = [name.removesuffix("_blocks") for name in have if name.endswith("_blocks")]
        return [(stem, stem, mxfp4) for stem in stems]
    if scheme.method in ("awq", "gptq"):
        layout = awq if scheme.method == "awq" else gptq
        stems = [name.removesuffix(".qweight") for name in have if name.endswith(".qweight")]
        return [(f"{stem}.weight", stem, layout) for stem in stems]
    if scheme.method == "mlx":
        stems = [name.removesuffix(".scales") for name in have if name.endswith(".scales")]
        return [(_mlx_name(stem), stem, mlx) for stem in stems if f"{stem}.weight" in have]
    if scheme.method == "bitsandbytes":
        stems = [name.partition(STATE)[0].removesuffix(".weight") for name in have if STATE in name]
        stems += [name.removesuffix(".SCB") for name in have if name.endswith(".SCB")]
        return [(f"{stem}.weight", stem, bitsandbytes) for stem in stems]
    floats = {
        name.removesuffix(part)
        for part in (".weight_global_scale", ".weight_scale_2")
        for name in have
        if name.endswith(part)
    }
    found: list[tuple[str, str, Layout]] = []
    for name in have:
        stem = name.removesuffix(".weight_packed")
        if stem != name:
            is_float = scheme.has_4_bit_floats and f"{stem}.weight_shape" not in have
            found.append((f"{stem}.weight", stem, floats_of_4_bits if is_float else packed))
    for scale in (".weight_scale", ".weight_scale_inv"):
        for stem in [name.removesuffix(scale) for name in have if name.endswith(scale)]:
            if f"{stem}.weight" in have:
                layout = floats_of_4_bits if stem in floats else plain
                found.append((f"{stem}.weight", stem, layout))
    return found


def _mlx_name(stem: str) -> str:
    """MLX calls a stack of experts `switch_mlp`."""
    return f"{stem.replace('.switch_mlp.', '.experts.')}.weight"
