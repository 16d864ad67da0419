"""Options under which a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.decoder import ModelCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load. `auto` means the checkpoint's own dtype, and the first available device of
    cuda, mps and cpu. `quantise` is none, int8 or int4 and applies to the matrices of linears;
    other weights keep their dtype. `kv_dtype`, of keys and values, is auto (as `dtype`) or int8."""

    capacity: ModelCapacity
    dtype: str = "auto"
    device: str = "auto"
    force_reference: bool = False
    threads: int = 0
    quantise: str = "none"
    kv_dtype: str = "auto"
